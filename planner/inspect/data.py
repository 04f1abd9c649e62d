"""A plan as plain data for ``--json``.

Keys:

- ``plan``: the content of ``plan.json``, untouched.
- ``buckets``: per bucket ``index``, ``context_from``, ``context_to`` (exclusive), ``draft``,
  ``length``, ``skipped_sub_layers``, ``tokens_per_cycle``, ``cycle_us``, ``ar_us``,
  ``tokens_per_s``, ``ar_tokens_per_s``, ``speedup_vs_ar`` (null where no time is predicted),
  ``parts`` (``name``, ``us``, ``repeats``; the cycle's time with every draft at full length),
  ``passes`` and ``graph``.
- ``passes`` (of a bucket): ``kind``, ``width``, ``context``, ``us`` (head included),
  ``layers_us``, ``head_us``, ``handover_bytes``, ``processors``.
- ``graph`` (of a bucket): ``nodes`` (``id`` and the attributes that ``planner.inspect.graph``
  describes) and ``edges`` (``from``, ``to``, ``role``, ``bytes``, ``us``).
- ``masks``: per mask ``id``, ``skipped``, ``attention_skipped``, ``mlp_skipped``.
- ``memory``: ``total_bytes``, ``budget_bytes``, ``headroom_bytes``.
- ``predicted``, ``measured``: paths of the numbers that are predictions and measurements.
"""

import msgspec

from planner.inspect.figures import (
    BucketFigures,
    bucket_figures,
    layers_us,
    mask_counts,
    pass_us,
)
from planner.inspect.graph import bucket_graph
from profiles.words import SubLayerId
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import DraftSource

PREDICTED = ("buckets[].*_us", "buckets[].*tokens_per_s", "plan.tables", "plan.memory")
MEASURED = ("plan.buckets[].forecast.acceptance", "plan.quality")


def plan_data(plan: ExecutionPlan) -> dict[str, object]:
    """The plan with its derived numbers, in types that ``json`` writes; keys as above."""
    need = plan.memory
    total_bytes = need.total_bytes
    return {
        "plan": msgspec.to_builtins(plan),
        "buckets": [_bucket_data(plan, figures) for figures in bucket_figures(plan)],
        "masks": [_mask_data(mask.id, frozenset(mask.skipped)) for mask in plan.masks],
        "memory": {
            "total_bytes": total_bytes,
            "budget_bytes": plan.device.memory_budget_bytes,
            "headroom_bytes": plan.device.memory_budget_bytes - total_bytes,
        },
        "predicted": list(PREDICTED),
        "measured": list(MEASURED),
    }


def _mask_data(mask_id: int, skipped: frozenset[SubLayerId]) -> dict[str, object]:
    attention, mlp = mask_counts(skipped)
    return {
        "id": mask_id,
        "skipped": len(skipped),
        "attention_skipped": attention,
        "mlp_skipped": mlp,
    }


def _bucket_data(plan: ExecutionPlan, figures: BucketFigures) -> dict[str, object]:
    bucket = figures.bucket
    return {
        "index": figures.index,
        "context_from": bucket.context_from,
        "context_to": bucket.context_to,
        "draft": bucket.cycle.draft.value,
        "length": 0 if bucket.cycle.draft is DraftSource.OFF else bucket.cycle.length,
        "skipped_sub_layers": len(figures.skipped),
        "tokens_per_cycle": bucket.forecast.tokens_per_cycle,
        "cycle_us": bucket.forecast.cycle_us,
        "ar_us": bucket.forecast.ar_us,
        "tokens_per_s": figures.tokens_per_s,
        "ar_tokens_per_s": figures.ar_tokens_per_s,
        "speedup_vs_ar": figures.speedup,
        "parts": [msgspec.to_builtins(part) for part in figures.parts],
        "passes": [
            {
                "kind": placement.kind.value,
                "width": placement.width,
                "context": placement.context,
                "us": pass_us(placement),
                "layers_us": layers_us(placement),
                "head_us": placement.head_us,
                "handover_bytes": placement.handover_bytes,
                "processors": sorted({span.processor for span in placement.spans}),
            }
            for placement in figures.passes
        ],
        "graph": _graph_data(plan, figures.index),
    }


def _graph_data(plan: ExecutionPlan, index: int) -> dict[str, object]:
    graph = bucket_graph(plan, index)
    return {
        "nodes": [{"id": name, **node} for name, node in graph.nodes(data=True)],
        "edges": [{"from": tail, "to": tip, **edge} for tail, tip, edge in graph.edges(data=True)],
    }
