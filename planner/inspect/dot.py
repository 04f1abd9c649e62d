"""A plan in Graphviz's language: a cluster per bucket and, inside it, one per processor."""

import networkx as nx

from planner.inspect.figures import BucketFigures, bucket_figures, context_label
from planner.inspect.graph import FEEDBACK_ROLES, EdgeRole, NodeKind, bucket_graph
from planner.inspect.units import bytes_label, clean, rate_label, ratio_label, time_label
from runtime.plan import ExecutionPlan

_SHAPES = {
    NodeKind.SOURCE: "note",
    NodeKind.KV: "cylinder",
    NodeKind.ACCEPT: "diamond",
    NodeKind.COMMIT: "box",
}
_STYLES = {
    EdgeRole.FEEDBACK: "dashed",
    EdgeRole.CURSOR: "dotted",
    EdgeRole.KV_READ: "dotted",
    EdgeRole.KV_WRITE: "dotted",
}
_PREAMBLE = (
    "  rankdir=LR;",
    '  node [shape=box, fontname="sans-serif", fontsize=11];',
    '  edge [fontname="sans-serif", fontsize=9];',
    '  fontname="sans-serif";',
)
_NAME_LIMIT = 60


def plan_dot(plan: ExecutionPlan) -> str:
    """The graph of every bucket as one ``digraph``; the same plan gives the same text."""
    title = (
        f"{clean(plan.model.name, _NAME_LIMIT)} on {clean(plan.device.name, _NAME_LIMIT)}, "
        f"{plan.part_formats}; times are predictions"
    )
    lines = ["digraph plan {", *_PREAMBLE, f"  label={_quoted(title)};"]
    for figures in bucket_figures(plan):
        lines.extend(_bucket_lines(figures, bucket_graph(plan, figures.index)))
    return "\n".join([*lines, "}", ""])


def _bucket_lines(figures: BucketFigures, graph: "nx.DiGraph[str]") -> list[str]:
    prefix = f"b{figures.index}"
    label = (
        f"context {context_label(figures.bucket)}: {rate_label(figures.tokens_per_s)}, "
        f"{ratio_label(figures.speedup)} AR"
    )
    lines = [f"  subgraph cluster_{prefix} {{", f"    label={_quoted(label)};"]
    processors = sorted(
        {node["processor"] for _, node in graph.nodes(data=True) if node["processor"] is not None}
    )
    for number, processor in enumerate(processors):
        lines.append(f"    subgraph cluster_{prefix}_p{number} {{")
        lines.append(f"      label={_quoted(clean(processor, _NAME_LIMIT))};")
        lines.extend(_node_lines(graph, prefix, processor, indent=6))
        lines.append("    }")
    lines.extend(_node_lines(graph, prefix, None, indent=4))
    for tail, tip, edge in graph.edges(data=True):
        style = _STYLES.get(edge["role"], "solid")
        # what leads to a later pass must not pull its end to the right
        loose = ", constraint=false" if edge["role"] in FEEDBACK_ROLES else ""
        lines.append(
            f"    {_quoted(f'{prefix}.{tail}')} -> {_quoted(f'{prefix}.{tip}')} "
            f"[label={_quoted(_edge_label(edge['role'], edge['bytes'], edge['us']))}, "
            f"style={style}{loose}];"
        )
    return [*lines, "  }"]


def _node_lines(
    graph: "nx.DiGraph[str]", prefix: str, processor: str | None, *, indent: int
) -> list[str]:
    lines: list[str] = []
    for name, node in graph.nodes(data=True):
        if node["processor"] == processor:
            label = _quoted(*_node_label(node))
            shape = _SHAPES.get(node["kind"], "box")
            declared = f"{_quoted(f'{prefix}.{name}')} [label={label}, shape={shape}];"
            lines.append(" " * indent + declared)
    return lines


def _node_label(node: dict[str, object]) -> list[str]:
    """The lines of a node's label: pass and part, what it computes, predicted time."""
    pass_name = node.get("pass")
    label = [f"{pass_name}: {node['label']}" if pass_name else str(node["label"])]
    if node["kind"] == NodeKind.SPAN:
        skipped = f", {node['skipped']} left out" if node["skipped"] else ""
        label.append(f"{node['format']}, width {node['width']}{skipped}")
    us = node["us"]
    if isinstance(us, float | int):
        label.append(time_label(us))
    return label


def _edge_label(role: str, size_bytes: int, us: float | None) -> str:
    if role == EdgeRole.CURSOR:
        return role
    time = f", {time_label(us)}" if us else ""
    return f"{role.replace('_', ' ')}: {bytes_label(size_bytes)}{time}"


def _quoted(*lines: str) -> str:
    """A Graphviz string; backslashes would start its escapes."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'
