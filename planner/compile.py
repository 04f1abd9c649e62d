"""From a model and a device to a plan: emit, calibrate, decide, write."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from lowering.emission import Emission, emit, layer_tensors, serialized
from lowering.onnx_graphs import layers_graph
from lowering.source import ModelSource, open_model
from planner.assemble import Decided, assemble
from planner.cache import cache_folder
from planner.calibrate import Calibration, Report, calibration_digest
from planner.cycles import MARGIN
from planner.host_profile import host_profile
from planner.memory import check_budget, memory_need
from planner.pass_tables import PassTimes
from planner.placement import Assignment, Machine, Work, fits, place, stored_wide
from planner.prompt_file import Prompt, bundled_prompts
from planner.quality import check_quality
from planner.search import BucketChoice, Search, mean_speed, plain_speed
from profiles.errors import InputError, UnsupportedError
from profiles.measure import usable_cores
from profiles.profile import DeviceProfile, load_profile
from profiles.words import TARGET_FORMATS, AttentionKernel, Format, SubLayerId
from runtime.plan import Artefact, ExecutionPlan, Formats, Graph, GraphKind, formats_of
from runtime.plan_folder import PlanWriter, map_tensors
from runtime.target import Target
from runtime.tokens import Tokens

HOST = "host"
DEFAULT_CONTEXT = 4096
PLACEMENT_WIDTHS = (1, 4, 8, 32)
"""Widths whose fastest placements are candidates for the target's."""
PLACEMENT_CONTEXT = 256
CALIBRATION_FILE = "calibration.onnx"
"""A graph that is gone when the plan is finished."""


class Request(msgspec.Struct, frozen=True):
    """What the user asks for."""

    model: str
    device: str
    output: Path
    target_format: Format | Formats = Format.W8A16
    """Of all parts, or of each."""
    context: int | None = None
    """Positions; None takes the model's, up to ``DEFAULT_CONTEXT``."""
    dram_budget_bytes: int | None = None
    """None takes the profile's default."""
    prompts: tuple[Prompt, ...] | None = None
    """None takes the bundled ones."""


def find_profile(device: str, report: Report) -> DeviceProfile:
    """A shipped profile, a TOML file, or this machine (measured on first use)."""
    if device != HOST:
        return load_profile(device)
    return host_profile(progress=lambda done, total: report("measuring this machine", done, total))


def compile_plan(request: Request, report: Report) -> ExecutionPlan:
    """Write the plan folder ``request.output`` and return what is in it.

    Nothing is left behind when it fails or is interrupted, except measurements in the cache.
    """
    formats = formats_of(request.target_format)
    check_formats(formats)
    source = open_model(request.model)
    context = choose_context(source, request.context)
    with PlanWriter(request.output) as writer:
        profile = find_profile(request.device, report)
        budget = request.dram_budget_bytes or int(profile.memory.default_budget_bytes.value)
        need = memory_need(source.spec, formats, context)
        check_budget(need, budget)
        report("writing weights and graphs", 0, 1)
        emission = emit(source, formats, context, writer)
        report("writing weights and graphs", 1, 1)
        need = memory_need(source.spec, formats, context, emission.weights.bytes)
        check_budget(need, budget)
        with calibration_target(writer, source, formats, context, emission) as target:
            calibration = open_calibration(request, source, target, context, report)
            quality = calibration.quality(source)
            check_quality(quality, formats)
            stored = stored_wide(source.spec, emission.tensors)
            machine = Machine(profile, source.spec, formats, stored)
            decided = decide(machine, calibration, context)
        plan = assemble(source, emission, decided, calibration, quality, need, budget, context)
        writer.commit(plan)
    return plan


def check_formats(formats: Formats) -> None:
    """``UnsupportedError`` for formats that no graph can be made of."""
    for fmt in msgspec.structs.astuple(formats):
        if fmt not in TARGET_FORMATS:
            raise UnsupportedError(
                f"{fmt} is not a target format", expected=", ".join(TARGET_FORMATS)
            )


def choose_context(source: ModelSource, asked: int | None) -> int:
    """Positions that the plan serves; ``InputError`` beyond the model's."""
    most = source.spec.max_context
    if asked is None:
        return min(most, DEFAULT_CONTEXT)
    if not 16 <= asked <= most:
        raise InputError(
            "the model does not serve such a context",
            where=source.spec.name,
            found=asked,
            expected=f"16 to {most}",
        )
    return asked


@contextmanager
def calibration_target(
    writer: PlanWriter, source: ModelSource, formats: Formats, context: int, emission: Emission
) -> Generator[Target]:
    """The emitted model on this machine, with all its cores: numerics do not depend on them.

    With exact attention, so that many drafts share a pass; a plan's fused attention differs from it
    by rounding alone.
    """
    tensors = layer_tensors(emission.tensors, AttentionKernel.EXACT)
    model = layers_graph(source.spec, formats, context, AttentionKernel.EXACT, tensors)
    # Beside the weights, where onnxruntime looks for them
    file = writer.folder / CALIBRATION_FILE
    file.write_bytes(serialized(model))
    layers = Graph(
        GraphKind.LAYERS,
        Artefact(CALIBRATION_FILE, file.stat().st_size, "0" * 64),
        tuple(tensor.name for tensor in tensors),
    )
    head = [graph for graph in emission.graphs if graph.kind is GraphKind.HEAD]
    target = Target(
        *(writer.folder, source.spec, (layers, *head)),
        map_tensors(writer.folder, emission.weights, emission.tensors),
        threads=usable_cores(),
        attention=AttentionKernel.EXACT,
    )
    try:
        yield target
    finally:
        target.close()
        file.unlink()


def open_calibration(
    request: Request, source: ModelSource, target: Target, context: int, report: Report
) -> Calibration:
    """Measurements of this model, format and prompts, as far as they were made before."""
    prompts = request.prompts or tuple(bundled_prompts("calibration"))
    digest = calibration_digest(source, formats_of(request.target_format), prompts, context)
    tokens = Tokens.from_files(source.tokenizer_json(), source.spec.tokenizer)
    folder = cache_folder() / "calibration"
    return Calibration(
        *(target, tokens, prompts), context=context, digest=digest, folder=folder, report=report
    )


def target_assignments(machine: Machine) -> list[tuple[str, Assignment]]:
    """Candidates for where the target runs, by name: fastest per width, and each processor."""
    stages = tuple(SubLayerId(i) for i in range(machine.spec.sub_layers))
    found: dict[Assignment, str] = {}
    for width in PLACEMENT_WIDTHS:
        best = place(machine, Work(stages, width, width, PLACEMENT_CONTEXT))
        found.setdefault(best, f"fastest at width {width}: {describe(best)}")
    for processor in machine.profile.processors:
        uniform = Assignment((processor.id,) * len(stages), processor.id)
        work = Work(stages, 1, 1, PLACEMENT_CONTEXT)
        runs = all(machine.stage_us(processor.id, s, work) is not None for s in (*stages[:2], None))
        if runs and fits(machine, (*uniform.sub_layers, uniform.head), work):
            found.setdefault(uniform, f"all on {processor.id}")
    return [(name, assignment) for assignment, name in found.items()]


def describe(assignment: Assignment) -> str:
    """Processors with the number of sub-layers on each."""
    counts: dict[str, int] = {}
    for name in assignment.sub_layers:
        counts[name] = counts.get(name, 0) + 1
    layers = " + ".join(f"{count} on {name}" for name, count in counts.items())
    return f"{layers}, head on {assignment.head}"


def decide(machine: Machine, calibration: Calibration, context: int) -> Decided:
    """Cycles under every candidate assignment; the assignment whose cycles are fastest."""
    search = Search(machine, calibration, context)
    tried: list[tuple[float, str, PassTimes, list[BucketChoice]]] = []
    for name, assignment in target_assignments(machine):
        times = PassTimes(machine, assignment)
        choices = search.run(times)
        tried.append((mean_speed(choices), name, times, choices))
    # An assignment that decodes plainly more slowly has to promise more than the error of prices
    plainest = max(plain_speed(choices) for *_, choices in tried)
    tried.sort(
        key=lambda entry: (
            -entry[0] * (1.0 if plain_speed(entry[3]) < plainest else 1 + MARGIN),
            entry[1],
        )
    )
    _, _, times, choices = tried[0]
    plain = [
        min((others[index].off for *_, others in tried), key=lambda option: option.us)
        for index in range(len(choices))
    ]
    reported = [search.reported(times, choice) for choice in choices]
    ranking: Sequence[tuple[str, float]] = [(name, speed) for speed, name, *_ in tried]
    return Decided(machine, times, tuple(choices), tuple(reported), tuple(plain), tuple(ranking))
