"""``plan compile``: makes a plan and says in a few lines what it decided."""

import os
import re
from pathlib import Path

import msgspec

from planner.commands.devices import HOST, check_device
from planner.inspect.figures import BucketFigures, bucket_figures, context_label, cycle_label
from planner.inspect.text import columns
from planner.inspect.units import (
    bytes_label,
    percent_label,
    rate_label,
    ratio_label,
    three_digits,
)
from planner.modes import speculates
from planner.prompt_file import Prompt, load_prompts
from planner.terminal import Terminal
from profiles.errors import InputError, nearest
from profiles.words import TARGET_FORMATS, Format
from runtime.plan import ExecutionPlan, Formats

PARTS = ("attention", "mlp", "head")


def compile_model(
    terminal: Terminal,
    model: str,
    device: str,
    *,
    output: Path | None,
    context: int | None,
    target_format: str,
    draft: str | None,
    draft_format: str,
    dram_budget_bytes: int | None,
    prompts: Path | None,
    as_json: bool,
) -> None:
    """Compile ``model`` for ``device``; without ``output`` into the current folder."""
    formats = parse_formats(target_format)
    check_device(device)
    chosen = None if prompts is None else tuple[Prompt, ...](load_prompts(prompts))
    target = output or default_output(model, device)
    # Late: it loads torch
    from planner.compile import Request, compile_plan

    request = Request(
        model=model,
        device=device,
        output=target,
        target_format=formats,
        context=context,
        dram_budget_bytes=dram_budget_bytes,
        prompts=chosen,
        draft=draft,
        draft_format=parse_formats(draft_format),
    )
    plan = compile_plan(request, terminal.report)
    if as_json:
        terminal.result_json({"output": str(target), **compiled_data(plan)})
    else:
        terminal.result(compiled_text(plan, target))


def parse_formats(text: str) -> Formats:
    """``w8a16``, or with other formats for parts: ``w8a16,mlp=w4,head=w8a8``.

    Parts that are not named are as the format without a name, or ``w8a16``; order does not matter.
    InputError for an unknown format or part, with the nearest name, and for one given twice.
    """
    given: dict[str, Format] = {}
    for entry in text.lower().split(","):
        part, is_part, name = (word.strip() for word in entry.rpartition("="))
        if is_part and part not in PARTS:
            hint, expected = nearest(part, PARTS), ", ".join(PARTS)
            raise InputError("unknown part", found=repr(part), expected=expected, hint=hint)
        if part in given:
            what = f"the format of {part or 'all parts'} is given twice"
            raise InputError(what, where="--target-format", found=repr(text))
        given[part] = _format(name)
    rest = given.pop("", Format.W8A16)
    return msgspec.structs.replace(Formats(rest, rest, rest), **given)


def _format(name: str) -> Format:
    known = [fmt.value for fmt in TARGET_FORMATS]
    if name not in known:
        raise InputError("unknown format", found=repr(name), hint=nearest(name, known))
    return Format(name)


def default_output(model: str, device: str) -> Path:
    """``<model>-<device>.plan`` in the current folder."""
    return Path(f"{_short_name(model)}-{_short_name(device)}.plan")


def _short_name(name: str) -> str:
    # pathlib's own raises for a user that does not exist
    path = Path(os.path.expanduser(name))
    last = path.resolve().name if path.exists() else path.name
    for ending in (".gguf", ".toml"):
        last = last.removesuffix(ending)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-.") or "model"


def plan_bytes(plan: ExecutionPlan) -> int:
    """Size of the plan's artefacts."""
    graphs = sum(graph.artefact.bytes for graph in plan.graphs)
    return graphs + plan.weights.bytes + plan.tokenizer.bytes


def compiled_data(plan: ExecutionPlan) -> dict[str, object]:
    """What ``plan compile --json`` says of a plan."""
    need = plan.memory
    return {
        "model": plan.model.name,
        "device": plan.device.name,
        "target_format": str(plan.part_formats),
        "context": plan.context,
        "bytes": plan_bytes(plan),
        "memory_bytes": need.weights_bytes + need.kv_bytes + need.interpreter_bytes,
        "memory_budget_bytes": plan.device.memory_budget_bytes,
        "quality": msgspec.to_builtins(plan.quality),
        "speculates": speculates(plan),
        "buckets": [_bucket_data(figures) for figures in bucket_figures(plan)],
    }


def _bucket_data(figures: BucketFigures) -> dict[str, object]:
    bucket = figures.bucket
    return {
        "context_from": bucket.context_from,
        "context_to": bucket.context_to,
        "cycle": msgspec.to_builtins(bucket.cycle),
        "predicted_tokens_per_s": figures.tokens_per_s,
        "predicted_ar_tokens_per_s": figures.ar_tokens_per_s,
        "predicted_speedup_vs_ar": figures.speedup,
    }


def compiled_text(plan: ExecutionPlan, output: Path) -> str:
    """A short summary for people."""
    quality = plan.quality
    header = ("context", "cycle", "predicted", "plain", "speedup")
    rows: list[tuple[str, ...]] = [header]
    for figures in bucket_figures(plan):
        rate, plain = rate_label(figures.tokens_per_s), rate_label(figures.ar_tokens_per_s)
        label = context_label(figures.bucket), cycle_label(figures.bucket.cycle, plan)
        rows.append((*label, rate, plain, ratio_label(figures.speedup)))
    lines = [
        f"{output}: {plan.model.name} for {plan.device.name}, {plan.part_formats}, "
        f"{bytes_label(plan_bytes(plan))}",
        f"  quality: {percent_label(quality.top1_agreement)} of {quality.positions} tokens as in "
        f"f32, perplexity {three_digits(quality.perplexity)} "
        f"(f32: {three_digits(quality.f32_perplexity)})",
        *columns(rows, left=2),
    ]
    if not speculates(plan):
        lines.append("  the plan does not speculate: plain decoding is predicted to be faster")
    emulate = "" if plan.device.name == HOST else " --emulate"
    lines += [
        "Next:",
        f'  plan run {output}{emulate} --prompt "..."',
        f"  plan explain {output}",
    ]
    return "\n".join(lines)
