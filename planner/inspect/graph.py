"""A bucket's cycle as a graph: who hands what to whom, in bytes and predicted µs.

Nodes carry ``kind``, ``label``, ``processor`` (None where the plan leaves it open) and ``us``
(predicted, None where the plan has no number of its own); spans also ``first``, ``end``,
``format`` and ``skipped``; whatever belongs to a pass ``pass`` and ``width``. Edges carry
``role``, ``bytes`` and ``us``. Leaving out the feedback roles, the graph has no circle.
"""

from enum import StrEnum

import networkx as nx

from planner.inspect.figures import (
    HIDDEN_BYTES,
    TOKEN_BYTES,
    BucketFigures,
    attention_count,
    bucket_figures,
    cycle_label,
    format_of,
    kv_bytes,
    rows_bytes,
    runs,
    sub_layers_label,
)
from profiles.words import SubLayerId
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import DraftSource, NumericsClass
from runtime.plan_tables import PassKind, Placement, Span


class NodeKind(StrEnum):
    """What a node of the graph does."""

    SOURCE = "source"
    """Proposes tokens: a skip mask's passes or an n-gram lookup."""
    EMBED = "embed"
    SPAN = "span"
    """A run of sub-layers on one processor."""
    KV = "kv"
    """Keys and values of a numerics class."""
    HEAD = "head"
    SAMPLER = "sampler"
    ACCEPT = "accept"
    """Keeps the drafted tokens that the target would have sampled."""
    COMMIT = "commit"


class EdgeRole(StrEnum):
    """What travels along an edge."""

    TOKENS = "tokens"
    HIDDEN = "hidden"
    LOGITS = "logits"
    KV_READ = "kv_read"
    KV_WRITE = "kv_write"
    CURSOR = "cursor"
    """Rolls the KV back to the accepted path."""
    FEEDBACK = "feedback"
    """A token that starts the next pass or the next cycle."""


FEEDBACK_ROLES = frozenset({EdgeRole.FEEDBACK, EdgeRole.KV_WRITE, EdgeRole.CURSOR})
"""The roles whose edges lead to something that runs later."""


def plan_graphs(plan: ExecutionPlan) -> tuple["nx.DiGraph[str]", ...]:
    """The graph of each bucket, in the plan's order."""
    return tuple(_graph_of(plan, figures) for figures in bucket_figures(plan))


def bucket_graph(plan: ExecutionPlan, index: int) -> "nx.DiGraph[str]":
    """The graph of one bucket.

    Raises:
        IndexError: The plan has no such bucket.
    """
    return _graph_of(plan, bucket_figures(plan)[index])


def _graph_of(plan: ExecutionPlan, figures: BucketFigures) -> "nx.DiGraph[str]":
    bucket = figures.bucket
    graph: nx.DiGraph[str] = nx.DiGraph(
        bucket=figures.index, context_from=bucket.context_from, context_to=bucket.context_to
    )
    for number, numerics in _caches(plan):
        _add_node(
            graph, _kv_name(number), NodeKind.KV, _kv_label(numerics), numerics.processor, None
        )
    _add_node(graph, "commit", NodeKind.COMMIT, "commit", None, plan.tables.cycle_us)
    speculates = bucket.cycle.draft is not DraftSource.OFF
    if speculates:
        source_us = plan.tables.ngram_us if bucket.cycle.draft is DraftSource.NGRAM else None
        label = cycle_label(bucket.cycle, plan)
        _add_node(graph, "source", NodeKind.SOURCE, label, None, source_us)
        _add_node(graph, "accept", NodeKind.ACCEPT, "accept", None, None)
        _add_edge(graph, "accept", "commit", EdgeRole.TOKENS, TOKEN_BYTES)
        _add_edge(graph, "commit", "source", EdgeRole.FEEDBACK, TOKEN_BYTES)
    seen: dict[PassKind, int] = {}
    for placement in figures.cycle_passes:
        number = seen[placement.kind] = seen.get(placement.kind, 0) + 1
        name = placement.kind.value + (f"#{number}" if number > 1 else "")
        _add_pass(graph, plan, figures, placement, name)
        _join_pass(graph, placement, name, bucket.cycle.length)
    if not figures.cycle_passes and speculates:
        _add_edge(graph, "source", "accept", EdgeRole.TOKENS, TOKEN_BYTES * bucket.cycle.length)
    for number, _ in _caches(plan):
        _add_edge(graph, "commit", _kv_name(number), EdgeRole.CURSOR, 0)
    return graph


def _add_pass(
    graph: "nx.DiGraph[str]",
    plan: ExecutionPlan,
    figures: BucketFigures,
    placement: Placement,
    name: str,
) -> None:
    """Embedding, spans, head and sampler of a pass, and the hidden rows between them."""

    def add(part: str, kind: NodeKind, processor: str | None, us: float | None) -> str:
        node = f"{name}.{part}"
        _add_node(graph, node, kind, part, processor, us)
        graph.nodes[node].update({"pass": name, "width": placement.width})
        return node

    skipped = figures.skipped if placement.kind is PassKind.DRAFT else frozenset[SubLayerId]()
    before = add("embed", NodeKind.EMBED, None, None)
    hidden_bytes = rows_bytes(plan, placement.width)
    for number, span in enumerate(placement.spans):
        node = add(f"span{number}", NodeKind.SPAN, span.processor, span.compute_us)
        graph.nodes[node].update(
            label=f"sub-layers {sub_layers_label(span.first, span.end)}",
            first=int(span.first),
            end=int(span.end),
            format=format_of(plan, span),
            skipped=span.end - span.first - runs(span, skipped),
        )
        _add_edge(graph, before, node, EdgeRole.HIDDEN, hidden_bytes, span.transfer_us)
        _join_kv(graph, plan, placement, node, _attention(span, skipped))
        before = node
    head = add("head", NodeKind.HEAD, placement.head_processor, placement.head_us)
    _add_edge(graph, before, head, EdgeRole.HIDDEN, rows_bytes(plan, placement.head_rows))
    sampler = add("sampler", NodeKind.SAMPLER, None, None)
    logits_bytes = placement.head_rows * plan.model.vocab * HIDDEN_BYTES
    _add_edge(graph, head, sampler, EdgeRole.LOGITS, logits_bytes)


def _join_pass(graph: "nx.DiGraph[str]", placement: Placement, name: str, length: int) -> None:
    """The tokens that go into and come out of a pass."""
    embed, sampler = f"{name}.embed", f"{name}.sampler"
    tokens_bytes = TOKEN_BYTES * placement.width
    if placement.kind is PassKind.AR:
        _add_edge(graph, sampler, "commit", EdgeRole.TOKENS, TOKEN_BYTES)
        _add_edge(graph, "commit", embed, EdgeRole.FEEDBACK, TOKEN_BYTES)
    elif placement.kind is PassKind.DRAFT:
        _add_edge(graph, "source", embed, EdgeRole.TOKENS, tokens_bytes)
        _add_edge(graph, sampler, "source", EdgeRole.FEEDBACK, TOKEN_BYTES)
    else:
        _add_edge(graph, "source", embed, EdgeRole.TOKENS, tokens_bytes)
        _add_edge(graph, sampler, "accept", EdgeRole.TOKENS, TOKEN_BYTES * (length + 1))


def _join_kv(
    graph: "nx.DiGraph[str]",
    plan: ExecutionPlan,
    placement: Placement,
    node: str,
    attention: tuple[int, ...],
) -> None:
    """Reads of the whole context and writes of the pass's own rows, per numerics class."""
    for number, numerics in _caches(plan):
        layers = sum(numerics.first <= sub_layer < numerics.end for sub_layer in attention)
        if layers:
            kv = _kv_name(number)
            read_bytes = kv_bytes(plan, layers, placement.context)
            _add_edge(graph, kv, node, EdgeRole.KV_READ, read_bytes)
            written_bytes = kv_bytes(plan, layers, placement.width)
            _add_edge(graph, node, kv, EdgeRole.KV_WRITE, written_bytes)


def _caches(plan: ExecutionPlan) -> tuple[tuple[int, NumericsClass], ...]:
    """The numerics classes that hold attention, each with its number."""
    return tuple(
        (number, numerics)
        for number, numerics in enumerate(plan.numerics)
        if attention_count(numerics.first, numerics.end)
    )


def _attention(span: Span, skipped: frozenset[SubLayerId]) -> tuple[int, ...]:
    """The attention sub-layers that a span runs."""
    return tuple(
        sub_layer
        for sub_layer in range(span.first, span.end)
        if sub_layer % 2 == 0 and sub_layer not in skipped
    )


def _add_node(
    graph: "nx.DiGraph[str]",
    name: str,
    kind: NodeKind,
    label: str,
    processor: str | None,
    us: float | None,
) -> None:
    graph.add_node(name, kind=kind.value, label=label, processor=processor, us=us)


def _add_edge(
    graph: "nx.DiGraph[str]",
    tail: str,
    tip: str,
    role: EdgeRole,
    size_bytes: int,
    us: float | None = None,
) -> None:
    graph.add_edge(tail, tip, role=role.value, bytes=size_bytes, us=us)


def _kv_name(number: int) -> str:
    return f"kv{number}"


def _kv_label(numerics: NumericsClass) -> str:
    return f"KV of {sub_layers_label(numerics.first, numerics.end)}"
