"""The bundled real model through the whole compiler: lossless in every way it can draft."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from compiled_models import Recipe, compile_source

from lowering.source import open_model
from planner.commands.verify import choose_prompts
from planner.compile import Request, compile_plan
from planner.modes import parse_modes, reference
from planner.prompt_file import bundled_prompts
from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.plan import Residency
from runtime.plan_cycles import OFF, Cycle, DraftShape, DraftSource, Growth, HeadOrder, TreeTemplate
from runtime.sampling import GREEDY, Sampling
from runtime.session import Session

pytestmark = pytest.mark.slow


PROMPTS = {Format.W8A16: 1, Format.W4: 2}
"""By format: of so many prompts one is calibrated with."""


@pytest.fixture(scope="module", params=PROMPTS)
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    """SmolLM2 for the phone, calibrated on a handful of prompts, emulated here."""
    folder, fmt = tmp_path_factory.mktemp("smollm2"), request.param
    prompts = [p for p in bundled_prompts("calibration") if p.category in ("chat", "code")]
    asked = Request(
        *("smollm2-135m", "oneplus12", folder / "x.plan", fmt),
        context=512,
        prompts=tuple(prompts[:: PROMPTS[fmt]]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULCRUM_CACHE", str(folder / "cache"))
        compile_plan(asked, lambda *_: None)
    with Session(folder / "x.plan", emulate=True) as loaded:
        yield loaded


def test_the_format_keeps_the_model(session: Session) -> None:
    quality = session.plan.quality
    assert session.plan.target_format in PROMPTS
    assert quality.top1_agreement >= 0.95
    assert quality.perplexity == pytest.approx(quality.f32_perplexity, rel=0.05)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_p=0.95, seed=7)])
def test_every_draft_gives_the_tokens_of_plain_decoding(
    session: Session, sampling: Sampling
) -> None:
    # Where no mask could ever pay there is none in the plan
    skipping = ",skip3" if len(session.plan.masks) > 1 else ""
    modes = parse_modes(f"ar,spec,ngram5{skipping}", session.plan)
    for prompt in choose_prompts(None, None)[::6]:
        said = {
            mode.name: session.generate(
                prompt.prompt, chat=True, max_new_tokens=32, sampling=sampling, cycle=mode.cycle
            ).token_ids
            for mode in modes
        }
        for mode in modes:
            expected = said[reference(mode, session.plan)]
            assert said[mode.name] == expected, (prompt.id, mode.name)


SUB_LAYERS = 60
COMB = TreeTemplate((0, 0, 0, 1, 1, 4, 4, 6, 8), (0, 1, 2, 0, 1, 0, 1, 0, 0))
GROWN = Growth(24, 6, 3, 4, (0.0, 0.3, 0.7), ((0.2, 0.5, 0.9), (0.1, 0.2, 0.05)))
EXACT = Recipe(
    attention=AttentionKernel.EXACT,
    context=512,
    chunk=64,
    growth_tokens=64,
    masks=(tuple(range(21, 51, 3)),),
    draft_format=Format.W4,
    trees=(COMB,),
    growths=(GROWN,),
    cheap_drafts=True,
)
FORMS = {
    "chain": {"length": 5},
    "static": {"length": len(COMB.parents), "shape": DraftShape.STATIC},
    "online": {"length": GROWN.max_nodes, "shape": DraftShape.ONLINE},
}
BUDGETS = {
    # Share of the sub-layers that streams
    40: Residency(tuple(SubLayerId(i) for i in range(SUB_LAYERS) if i % 5 < 2), 2, 1 << 20),
    80: Residency(tuple(SubLayerId(i) for i in range(SUB_LAYERS) if i % 5), 2, 1 << 20),
}
PAIRS = [
    # Every two of source, form, residency, sampling and head order meet
    ("ngram", "chain", 40, "greedy", HeadOrder.PATH),
    ("ngram", "static", 80, "sampled", HeadOrder.BATCH),
    ("ngram", "online", 80, "greedy", HeadOrder.PATH),
    ("skip", "chain", 80, "sampled", HeadOrder.BATCH),
    ("skip", "static", 40, "greedy", HeadOrder.PATH),
    ("skip", "online", 40, "sampled", HeadOrder.BATCH),
    ("model", "chain", 80, "sampled", HeadOrder.PATH),
    ("model", "static", 80, "greedy", HeadOrder.BATCH),
    ("model", "online", 40, "sampled", HeadOrder.PATH),
]
DRAFTS = {
    "ngram": Cycle(DraftSource.NGRAM, 0, ngram_min=1, ngram_max=3),
    "skip": Cycle(DraftSource.SKIP, 0, mask=1),
    "model": Cycle(DraftSource.MODEL, 0),
}
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(temperature=0.8, top_p=0.95, seed=7)}
PROMPT = "Repeat after me: one two three four, one two three four, one two"


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The plan folder of which so many percent stream; SmolLM2 in four bits drafts for itself."""
    root, source = tmp_path_factory.mktemp("exact"), open_model("smollm2-135m")
    for share in (0, *BUDGETS):
        recipe = msgspec.structs.replace(EXACT, residency=BUDGETS.get(share))
        compile_source(recipe, source, source, root / f"{share}.plan")
    return lambda share: root / f"{share}.plan"


def test_trees_over_streamed_weights_give_the_tokens_of_plain_decoding_in_memory(
    exact: Callable[[int], Path],
) -> None:
    with Session(exact(0)) as session:
        expected = {
            name: session.generate(PROMPT, max_new_tokens=24, sampling=sampling, cycle=OFF)
            for name, sampling in SAMPLINGS.items()
        }
    accepted = dict.fromkeys(DRAFTS, 0)
    for share in BUDGETS:
        with Session(exact(share)) as session:
            for source, form, streamed, sampling, head in PAIRS:
                if streamed != share:
                    continue
                cycle = msgspec.structs.replace(DRAFTS[source], **FORMS[form], head=head)
                found = session.generate(
                    PROMPT, max_new_tokens=24, sampling=SAMPLINGS[sampling], cycle=cycle
                )
                assert found.token_ids == expected[sampling].token_ids, (source, form, share)
                accepted[source] += found.stats.accepted
    assert all(accepted.values()), accepted
