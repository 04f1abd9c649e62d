"""From a model and a device to a plan: emit, calibrate, decide, write."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from lowering.draft_compatibility import check_draft
from lowering.draft_emission import emit_draft
from lowering.emission import (
    Emission,
    EmittedWeights,
    emit_graphs,
    emit_weights,
    head_tensors,
    layer_tensors,
    serialized,
)
from lowering.onnx_graphs import head_graph, layers_graph
from lowering.source import ModelSource, open_model
from planner.assemble import Decided, assemble
from planner.cache import cache_folder
from planner.calibrate import Calibration, Report, calibration_digest
from planner.cycles import MARGIN
from planner.draft_acceptance import DraftReading
from planner.host_profile import host_profile
from planner.memory import Model
from planner.model_drafts import ModelDrafts
from planner.placement import stored_wide
from planner.prompt_file import Prompt, bundled_prompts
from planner.quality import check_quality
from planner.search import BucketChoice, Search, mean_speed, plain_speed
from planner.variants import Models, Variant, Ways, ways
from profiles.errors import InputError, UnsupportedError
from profiles.measure import usable_cores
from profiles.profile import DeviceProfile, load_profile
from profiles.words import TARGET_FORMATS, AttentionKernel, Format
from runtime.draft_model import open_draft
from runtime.plan import (
    DRAFT_FOLDER,
    Artefact,
    DraftModel,
    ExecutionPlan,
    Formats,
    Graph,
    GraphKind,
    formats_of,
)
from runtime.plan_cycles import DraftSource
from runtime.plan_folder import PlanWriter, map_tensors
from runtime.target import Target
from runtime.tokens import Tokens

HOST = "host"
DEFAULT_CONTEXT = 4096
CALIBRATION_PREFIX = "calibration."
"""Of graphs that are gone when the plan is finished."""


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
    draft: str | None = None
    """A smaller model with the same tokens."""
    draft_format: Format | Formats = Format.W4


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
    check_formats(formats_of(request.draft_format))
    source = open_model(request.model)
    smaller = open_model(request.draft) if request.draft else None
    if smaller is not None:
        check_draft(source, smaller)
    context = choose_context(source, request.context)
    with PlanWriter(request.output) as writer:
        profile = find_profile(request.device, report)
        budget = request.dram_budget_bytes or int(profile.memory.default_budget_bytes.value)
        report("writing weights", 0, 1)
        files = emit_weights(source, formats, context, writer)
        draft = emit_draft(smaller, request.draft_format, context, writer) if smaller else None
        report("writing weights", 1, 1)
        target = Model(source.spec, files.tensors)
        stored = stored_wide(source.spec, files.tensors)
        models = Models(profile, target, formats, stored, draft, context, budget)
        # Before anything is measured: a budget that holds nothing is refused at once
        found = ways(models)
        with calibration_target(writer, source, formats, context, files) as exact:
            calibration = open_calibration(request, source, exact, context, report)
            quality = calibration.quality(source)
            check_quality(quality, formats)
            with opened_draft(writer.folder, draft, calibration, source) as drafts:
                decided = decide(models, found, calibration, drafts)
        chosen = decided.variant
        graphs = emit_graphs(
            *(source.spec, formats, context, chosen.times.machine.attention),
            *(files.tensors, writer, chosen.residency.streamed if chosen.residency else ()),
        )
        if draft is not None and not chosen.drafts:
            writer.discard(DRAFT_FOLDER)
        emission = Emission(graphs, *files)
        plan = assemble(source, emission, decided, calibration, quality)
        writer.commit(plan)
    return plan


@contextmanager
def opened_draft(
    folder: Path, draft: DraftModel | None, calibration: Calibration, source: ModelSource
) -> Generator[ModelDrafts | None]:
    """The draft model's sessions while acceptance is measured."""
    if draft is None:
        yield None
        return
    context, vocab = calibration.context, source.spec.vocab
    sessions = open_draft(folder, draft, usable_cores())
    try:
        reading = DraftReading(draft, sessions, context, vocab)
        yield ModelDrafts(calibration, reading, draft.model.name)
    finally:
        sessions.close()


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
    writer: PlanWriter, source: ModelSource, formats: Formats, context: int, files: EmittedWeights
) -> Generator[Target]:
    """The emitted model on this machine, with all its cores: numerics do not depend on them.

    With exact attention, so that many drafts share a pass; a plan's fused attention differs from it
    by rounding alone.
    """
    spec, exact = source.spec, AttentionKernel.EXACT
    layers, head = layer_tensors(files.tensors, exact), head_tensors(files.tensors)
    models = {
        GraphKind.LAYERS: (layers_graph(spec, formats, context, exact, layers), layers),
        GraphKind.HEAD: (head_graph(spec, formats, head), head),
    }
    graphs: list[Graph] = []
    for kind, (model, tensors) in models.items():
        # Beside the weights, where onnxruntime looks for them
        name = f"{CALIBRATION_PREFIX}{kind}.onnx"
        (writer.folder / name).write_bytes(serialized(model))
        names = tuple(tensor.name for tensor in tensors)
        graphs.append(Graph(kind, Artefact(name, 0, "0" * 64), names))
    target = Target(
        *(writer.folder, spec, graphs, map_tensors(writer.folder, files.weights, files.tensors)),
        threads=usable_cores(),
        attention=exact,
    )
    try:
        yield target
    finally:
        target.close()
        for graph in graphs:
            (writer.folder / graph.artefact.path).unlink()


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


def decide(
    models: Models,
    found: Ways,
    calibration: Calibration,
    drafts: ModelDrafts | None,
) -> Decided:
    """The cycles of every variant; the variant whose cycles are fastest."""
    resident = models.machine(AttentionKernel.FUSED)
    search = Search(resident, calibration, models.context, drafts)
    # Those with a draft model first: what they reach, a self-draft has to beat to be measured
    order = sorted(found.variants, key=lambda way: not way.drafts)
    tried = [Tried(way, search.run(way.times)) for way in order]
    # A draft model that no bucket drafts with would take memory and give nothing
    idle = [each for each in tried if each.way.drafts and not each.drafts]
    tried = [each for each in tried if each not in idle] or tried
    # One that decodes plainly more slowly has to promise more than the error of prices
    plainest = max(plain_speed(each.choices) for each in tried)
    tried.sort(
        key=lambda each: (
            -each.speed * (1.0 if plain_speed(each.choices) < plainest else 1 + MARGIN),
            each.name,
        )
    )
    best = tried[0]
    plain = [
        min((each.choices[index].off for each in tried), key=lambda option: option.us)
        for index in range(len(best.choices))
    ]
    reported = [search.reported(best.way.times, choice) for choice in best.choices]
    return Decided(
        models,
        best.way,
        tuple(best.choices),
        tuple(reported),
        tuple(plain),
        tuple((each.name, each.speed) for each in tried),
        (*found.refused, *map(_idle, idle)),
    )


class Tried(NamedTuple):
    """A variant with its cycles."""

    way: Variant
    choices: list[BucketChoice]

    @property
    def name(self) -> str:
        """What it is called in the plan's decisions."""
        return f"{self.way.name}; {self.way.assignment}"

    @property
    def drafts(self) -> bool:
        """Whether the draft model is used."""
        return any(choice.ranked[0].cycle.draft is DraftSource.MODEL for choice in self.choices)

    @property
    def speed(self) -> float:
        """Tokens per second over all contexts."""
        return mean_speed(self.choices)


def _idle(tried: Tried) -> str:
    """By how much drafting with the model lost where it lost least."""
    losses = [
        1 - option.tokens_per_s / choice.ranked[0].tokens_per_s
        for choice in tried.choices
        for option in choice.ranked
        if option.cycle.draft is DraftSource.MODEL
    ]
    by = f", at best {min(losses):.1%} slower" if losses else ""
    return f"{tried.name}: no bucket drafts with the model{by}"
