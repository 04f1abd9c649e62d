"""The bundled real model through the whole compiler: lossless in every way it can draft."""

from collections.abc import Iterator

import pytest

from planner.commands.verify import choose_prompts
from planner.compile import Request, compile_plan
from planner.modes import parse_modes, reference
from planner.prompt_file import bundled_prompts
from profiles.words import Format
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
    modes = parse_modes("ar,spec,chain3,ngram5", session.plan)
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
