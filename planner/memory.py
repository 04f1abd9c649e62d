"""What a plan needs in DRAM, part by part, and whether the budget allows it."""

from planner.roofline import WEIGHT_BYTES
from profiles.errors import InfeasibleError
from runtime.model_spec import ModelSpec
from runtime.plan import Formats, MemoryNeed

F32_BYTES = 4
INTERPRETER_BYTES = 128 << 20
"""Python, numpy, ONNX Runtime and its buffers; on x86-64 Linux about 100 MiB were measured."""
COPIES = 2
"""ONNX Runtime packs constant matrices into a second copy; the mapped file is the first."""
MEBIBYTE = 1 << 20


def memory_need(
    spec: ModelSpec, formats: Formats, context: int, stored_bytes: int | None = None
) -> MemoryNeed:
    """Predicted peak of a resident plan with a full context.

    ``stored_bytes`` are those of the weights file; where it is not written yet they are estimated.
    """
    if stored_bytes is None:
        attention = 2 * spec.hidden * (spec.heads * spec.head_dim + spec.kv_dim)
        layer = attention * WEIGHT_BYTES[formats.attention]
        layer += 3 * spec.hidden * spec.intermediate * WEIGHT_BYTES[formats.mlp]
        tables = 2 * spec.hidden * spec.vocab * WEIGHT_BYTES[formats.head]
        stored_bytes = round(spec.layers * layer + tables)
    return MemoryNeed(
        weights_bytes=COPIES * stored_bytes,
        kv_bytes=context * kv_bytes_per_token(spec),
        interpreter_bytes=INTERPRETER_BYTES,
    )


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """One key and one value row per layer, float32."""
    return 2 * F32_BYTES * spec.layers * spec.kv_dim


def check_budget(need: MemoryNeed, budget_bytes: int) -> None:
    """``InfeasibleError`` that says the smallest budget that works."""
    total = need.weights_bytes + need.kv_bytes + need.interpreter_bytes
    if total <= budget_bytes:
        return
    parts = (
        f"weights {need.weights_bytes // MEBIBYTE} MiB, keys and values"
        f" {need.kv_bytes // MEBIBYTE} MiB, interpreter {need.interpreter_bytes // MEBIBYTE} MiB"
    )
    raise InfeasibleError(
        "the plan does not fit into memory",
        found=f"{-(-total // MEBIBYTE)} MiB: {parts}",
        expected=f"at most {budget_bytes // MEBIBYTE} MiB",
        hint=f"the smallest budget that works is --dram-budget {-(-total // MEBIBYTE)}MiB;"
        " a shorter --context or a smaller --target-format needs less",
    )
