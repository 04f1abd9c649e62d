"""Recipes and cycles of the test of losslessness: everything that drafts, over all residencies."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from compiled_models import Recipe
from tiny_models import TinyShape

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
    "deep": Growth(63, 24, 2, 1, (0.0, 0.5), ((0.97, 0.99), (0.02, 0.01))),
    "chain": Growth(8, 8, 1, 1, (0.0,), ((0.99,),)),
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
PAIR = msgspec.structs.replace(
    PLAIN,
    masks=MASKS,
    draft_seed=1,
    draft_format=Format.W4,
    trees=tuple(TREES.values()),
    growths=tuple(GROWTHS.values()),
    cheap_drafts=True,
)
"""A target and what drafts for it: itself in four bits, itself in part, or its own text."""
PERFECT = msgspec.structs.replace(PAIR, draft_format=Format.W8A16)
"""A target and its twin."""

Opened = Callable[..., Session]


def cycle_of(source: str, shape: str, head: HeadOrder = HeadOrder.BATCH) -> Cycle:
    return Cycle(**SOURCES[source], **SHAPES[shape], head=head)


def variant(recipe: Recipe = PAIR, **changes: Any) -> Recipe:
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
