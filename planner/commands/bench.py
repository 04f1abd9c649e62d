"""``plan bench``: measures ways to decode against each other on this machine."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from planner.bench import Contender, contenders, measure
from planner.bench_figures import bench_data
from planner.commands.bench_text import bench_text
from planner.commands.verify import choose_prompts
from planner.modes import AR, parse_mode, parse_modes, sources
from planner.prompt_file import Prompt
from planner.terminal import Terminal
from profiles.errors import IncompatibleError, InputError
from profiles.measure import cpu_description
from runtime.plan import ExecutionPlan
from runtime.plan_cycles import DraftSource
from runtime.session import Session, load

__all__ = ["bench_plan", "choose_prompts"]


class Rival(msgspec.Struct, frozen=True):
    """Another plan of the same model, and one of its modes."""

    path: Path
    mode: str


class Loading(msgspec.Struct, frozen=True):
    """How all plans of a measurement are loaded."""

    emulate: bool = False
    threads: int | None = None
    flash_rate: int | None = None
    """Most bytes per second that a reader may read; None: as the disk gives them."""

    def open(self, path: Path) -> Session:
        """The loaded plan."""
        return load(path, emulate=self.emulate, threads=self.threads, flash_rate=self.flash_rate)


def parse_rival(text: str) -> Rival:
    """``PLAN`` (plain decoding) or ``PLAN:mode``."""
    path, colon, mode = text.rpartition(":")
    # A folder may have a colon in its name
    if not colon or Path(text).exists() or "/" in mode:
        return Rival(Path(text), AR)
    return Rival(Path(path), mode.strip().lower())


def default_modes(plan: ExecutionPlan) -> str:
    """Plain decoding, the plan's cycles, and a long chain where somebody can draft one."""
    return "ar,spec" if sources(plan) == (DraftSource.NGRAM,) else "ar,spec,chain8"


def bench_plan(
    terminal: Terminal,
    path: Path,
    prompts: Sequence[Prompt],
    *,
    modes: str | None,
    rivals: Sequence[str] = (),
    repeat: int,
    max_new_tokens: int,
    loading: Loading,
    as_json: bool,
) -> None:
    """Measure and show; ``modes`` None takes the usual ones."""
    known = [parse_rival(text) for text in rivals]
    with ExitStack() as stack:
        session = stack.enter_context(loading.open(path))
        plan = session.plan
        if loading.flash_rate is not None and plan.residency is None:
            raise InputError("the plan streams nothing that could be slowed", where="--flash-rate")
        wanted = parse_modes(default_modes(plan) if modes is None else modes, plan)
        ways = contenders(session, wanted)
        for rival in known:
            other = stack.enter_context(loading.open(rival.path))
            ways.append(contender(rival, other, plan, [way.name for way in ways]))
        samples = measure(
            *(ways, prompts), rounds=repeat, max_new_tokens=max_new_tokens, report=terminal.report
        )
    names = [way.name for way in ways[len(wanted) :]]
    comparable = plan.device.soc == cpu_description()
    data = bench_data(samples, plan, comparable, names, loading.flash_rate)
    if as_json:
        terminal.result_json(data)
    else:
        terminal.result(bench_text(data))


def contender(
    rival: Rival, session: Session, plan: ExecutionPlan, taken: Sequence[str]
) -> Contender:
    """A rival that is loaded, under a name that is not ``taken``.

    Raises:
        IncompatibleError: It is another model's plan, whose answers take other work.
    """
    other = session.plan
    if msgspec.structs.replace(other.model, name=plan.model.name) != plan.model:
        raise IncompatibleError(
            "a rival has to be a plan of the same model",
            where=rival.path,
            found=other.model.name,
            expected=plan.model.name,
            hint="compile both from the same file",
        )
    mode = parse_mode(rival.mode, other)
    name = f"{rival.path.resolve().name}:{mode.name}"
    again = sum(one == name or one.startswith(f"{name} #") for one in taken)
    return Contender(session, mode, f"{name} #{again + 1}" if again else name)
