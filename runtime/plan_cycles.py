"""The part of the plan that says how to decode: cycles, token trees, numerics classes."""

from collections.abc import Sequence
from enum import StrEnum

from profiles.words import AttentionKernel, Format, ProcessorKind, SubLayerId
from runtime.plan_types import Count, Document, Share, Width


class NumericsClass(Document, frozen=True):
    """How a range of target sub-layers computes in every pass whose state is committed.

    Two passes agree bit by bit exactly if they run in the same class.
    """

    first: SubLayerId
    end: SubLayerId
    """One past the last sub-layer."""
    processor: str
    processor_kind: ProcessorKind
    format: Format
    min_width: Width
    """Narrowest pass; narrower ones are padded to it."""
    width_step: Width
    """Pass widths are padded to a multiple of this on the device."""
    attention: AttentionKernel = AttentionKernel.EXACT


class DraftSource(StrEnum):
    """Who proposes tokens in a cycle."""

    OFF = "off"
    """Nobody: the cycle is one step of plain autoregressive decoding."""
    SKIP = "skip"
    """The target under a skip mask (KnapSpec)."""
    NGRAM = "ngram"
    """The continuation of the latest earlier occurrence of the context's last tokens."""
    MODEL = "model"
    """A smaller model that stays in memory (Lever's setting)."""


class DraftShape(StrEnum):
    """What a cycle's draft looks like."""

    CHAIN = "chain"
    """One token after the other."""
    STATIC = "static"
    """A token tree of a fixed template (``ExecutionPlan.trees``)."""
    ONLINE = "online"
    """A token tree grown as the draft's probabilities say (Lever, Alg. 1), within an envelope
    (``ExecutionPlan.growths``)."""


class HeadOrder(StrEnum):
    """Over which rows of a verify pass the LM head runs."""

    BATCH = "batch"
    """All of them at once."""
    PATH = "path"
    """One after the other along the accepted path: root first (Lever)."""


class Cycle(Document, frozen=True):
    """Draft, verify, commit."""

    draft: DraftSource
    length: Count
    """Most drafted tokens: those of a chain, or the nodes of a tree without its root; 0 when
    OFF."""
    mask: Count = 0
    """Skip mask of the drafting passes, for SKIP."""
    ngram_min: Count = 0
    ngram_max: Count = 0
    """Shortest and longest context suffix that is looked up, for NGRAM."""
    lone: bool = False
    """For OFF: the one row runs alone, in faster kernels whose sums are in another order. Rows that
    were computed so never meet a draft: a plan decodes alone in every bucket or in none."""
    shape: DraftShape = DraftShape.CHAIN
    tree: Count = 0
    """Index of the template (STATIC) or of the envelope (ONLINE)."""
    head: HeadOrder = HeadOrder.BATCH


OFF = Cycle(draft=DraftSource.OFF, length=0)
"""Plain decoding as a cycle, in passes whose rows agree with those of any draft's verify pass."""
ALONE = Cycle(draft=DraftSource.OFF, length=0, lone=True)
"""Plain decoding at its fastest, for plans that never draft."""


class TreeTemplate(Document, frozen=True):
    """A static token tree. Node 0, the root, is the last committed token; node i + 1 is described
    by entry i. A parent comes before its children."""

    parents: tuple[Count, ...]
    ranks: tuple[Count, ...]
    """The node is its parent's successor of this rank by the draft's probability, 0 the likeliest.
    A node of rank r has siblings of all ranks below."""


class Growth(Document, frozen=True):
    """Envelope and probabilities of online growth (Lever, Alg. 1)."""

    max_nodes: Count
    """Without the root."""
    max_depth: Count
    branch: Count
    """Candidates of an expanded node."""
    batch: Count
    """Most nodes that one drafting pass expands."""
    bands: tuple[Share, ...]
    """Lower edges of the bands of draft probability, ascending from 0."""
    hits: tuple[tuple[Share, ...], ...]
    """Measured acceptance by rank of the candidate, then by band; ranks beyond repeat the last."""


def misused_lone(cycle: Cycle, classes: Sequence[NumericsClass]) -> str | None:
    """Why ``cycle`` may not be lone in a plan of these numerics; None if it may, or is not."""
    if cycle.lone and cycle.draft is not DraftSource.OFF:
        return "a draft is verified in a pass of several rows"
    if cycle.lone and not runs_alone(classes):
        return "the plan has no pass of a single row"
    return None


def runs_alone(classes: Sequence[NumericsClass]) -> bool:
    """Whether one row can be decoded unpadded (``Cycle.lone``): the CPU runs all sub-layers."""
    return all(
        entry.processor_kind is ProcessorKind.CPU
        and entry.width_step == 1
        and entry.attention is AttentionKernel.FUSED
        for entry in classes
    )
