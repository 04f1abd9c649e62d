"""All that drafts, in all shapes, over all residencies: the tokens of plain decoding in memory."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compiled_models import Recipe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import GQA, MHA, QWEN2, QWEN3, VOCAB, TinyShape

from profiles.words import AttentionKernel, Format, SubLayerId
from runtime.plan import Residency
from runtime.plan_cycles import OFF, Cycle, DraftShape, DraftSource, Growth, HeadOrder, TreeTemplate
from runtime.sampling import GREEDY, Sampling
from runtime.session import Session

EXACT = AttentionKernel.EXACT
FORMATS = (Format.W8A16, Format.W8A8)
SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(temperature=0.9, seed=11)}
PROMPTS = {
    # Drafts are often right, now and then, hardly ever
    "loop": [9, 40, 41, 42, 9, 40, 41, 42, 9, 40, 41, 42, 9, 40],
    "mixed": [200, 31, 7, 7, 90, 12, 200, 31, 7, 44, 3, 150, 61, 8, 19, 200, 31],
    "short": [77],
}
COUNT = 24

CHAINS = (1, 4, 8)


def comb(teeth: int, width: int) -> TreeTemplate:
    """A spine of first candidates; each of its nodes has all ``width`` candidates."""
    parents, spine = list[int](), 0
    for _ in range(teeth):
        first = len(parents) + 1
        parents += [spine] * width
        spine = first
    return TreeTemplate(tuple(parents), tuple(range(width)) * teeth)


def full(branch: int, nodes: int) -> TreeTemplate:
    """Level by level, every node with ``branch`` children."""
    return TreeTemplate(
        tuple(node // branch for node in range(nodes)),
        tuple(node % branch for node in range(nodes)),
    )


TREES = {
    "pair": comb(1, 2),
    "deep chain": comb(63, 1),
    "comb": comb(21, 3),
    "brush": comb(1, 63),
    "binary": full(2, 63),
    "bushy": full(4, 63),
    "lopsided": TreeTemplate((0, 0, 0, 3, 3, 5, 5, 7, 7), (0, 1, 2, 0, 1, 0, 1, 0, 1)),
}
GROWTHS = {
    # Siblings that share all that their parent has grow to the whole envelope
    "wide": Growth(63, 12, 4, 8, (0.0,), ((0.4,), (0.3,), (0.2,), (0.1,))),
    "deep": Growth(63, 63, 2, 1, (0.0, 0.5), ((0.97, 0.99), (0.02, 0.01))),
    "careful": Growth(16, 5, 3, 4, (0.0, 0.2, 0.6), ((0.2, 0.5, 0.9), (0.1, 0.2, 0.1))),
}
MASKS = ((2, 3), (1, 2, 5), tuple(range(6)))
"""Often right, now and then, hardly ever."""
SOURCES = {
    "model": {"draft": DraftSource.MODEL},
    "skip": {"draft": DraftSource.SKIP, "mask": 1},
    "ngram": {"draft": DraftSource.NGRAM, "ngram_min": 1, "ngram_max": 3},
}
SHAPES: dict[str, dict[str, Any]] = {
    **{f"chain of {length}": {"length": length} for length in CHAINS},
    **{
        name: {"length": len(tree.parents), "shape": DraftShape.STATIC, "tree": index}
        for index, (name, tree) in enumerate(TREES.items())
    },
    **{
        f"online, {name}": {"length": growth.max_nodes, "shape": DraftShape.ONLINE, "tree": index}
        for index, (name, growth) in enumerate(GROWTHS.items())
    },
}


def streamed(*numbers: int, slots: int = 2, read_bytes: int = 8192) -> Residency:
    return Residency(tuple(map(SubLayerId, numbers)), slots, read_bytes)


RESIDENCIES: dict[str, Residency | None] = {
    # Of ten sub-layers; which ones is as irregular as can be
    "in memory": None,
    "20 %": streamed(3, 8, slots=1),
    "40 %": streamed(0, 1, 6, 9, slots=1, read_bytes=4096),
    "60 %": streamed(1, 2, 4, 5, 7, 8),
    "80 %": streamed(0, 1, 2, 4, 5, 6, 8, 9, slots=3, read_bytes=1 << 20),
    "all streamed, one slot": streamed(*range(10), slots=1),
    "all streamed": streamed(*range(10), slots=5),
}
FIVE_LAYERS = TinyShape(layers=5)
PLAIN = Recipe(shape=FIVE_LAYERS, seed=1, faint=(2, 3), attention=EXACT)
RECIPE = msgspec.structs.replace(
    PLAIN,
    masks=MASKS,
    draft_seed=1,
    draft_format=Format.W4,
    trees=tuple(TREES.values()),
    growths=tuple(GROWTHS.values()),
    # Of many rows: nothing but the envelope limits a tree
    head_row_us=0.01,
)

Opened = Callable[..., Session]


def variant(recipe: Recipe = RECIPE, **changes: Any) -> Recipe:
    return msgspec.structs.replace(recipe, **changes)


def tokens(session: Session, prompt: Sequence[int], **options: Any) -> tuple[int, ...]:
    for _ in session.stream_ids(prompt, **{"max_new_tokens": COUNT, **options}):
        pass
    return session.finished().token_ids


class Plain:
    """What plain decoding of the fully resident plan of the same weights says."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._said: dict[object, tuple[int, ...]] = {}

    def __call__(
        self, recipe: Recipe, prompt: Sequence[int], sampling: Sampling, count: int = COUNT
    ) -> tuple[int, ...]:
        weights = variant(PLAIN, shape=recipe.shape, format=recipe.format, seed=recipe.seed)
        weights = variant(weights, context=recipe.context, eos_ids=recipe.eos_ids)
        key = weights, tuple(prompt), sampling, count
        if key not in self._said:
            session = self._opened(weights)
            self._said[key] = tokens(
                session, prompt, sampling=sampling, cycle=OFF, max_new_tokens=count
            )
        return self._said[key]


@pytest.fixture(scope="module")
def plain(opened: Opened) -> Plain:
    return Plain(opened)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("source", SOURCES)
def test_every_draft_in_every_shape_gives_the_tokens_of_plain_decoding(
    opened: Opened, plain: Plain, source: str, residency: str, fmt: Format
) -> None:
    recipe = variant(format=fmt, residency=RESIDENCIES[residency])
    session = opened(recipe)
    drafted = accepted = 0
    # The rest by turns: the other way round in the other format, one further in each residency
    rest = list(itertools.product(HeadOrder, SAMPLINGS.values(), PROMPTS.values()))
    offset = 6 * FORMATS.index(fmt) + list(RESIDENCIES).index(residency)
    for index, shape in enumerate(SHAPES):
        head, sampling, prompt = rest[(5 * index + offset) % len(rest)]
        cycle = Cycle(**SOURCES[source], **SHAPES[shape], head=head)
        found = tokens(session, prompt, sampling=sampling, cycle=cycle)
        assert found == plain(recipe, prompt, sampling), (cycle, sampling, prompt)
        drafted += session.finished().stats.drafted
        accepted += session.finished().stats.accepted
    assert drafted > accepted > 20, "drafts that are never right, or never wrong, prove little"
