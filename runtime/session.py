"""The public face of the runtime: load a plan, generate text, stream it, read the statistics."""

import math
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, get_ident
from types import TracebackType
from typing import NamedTuple, Self, Unpack

import msgspec

from profiles.errors import FlashError, FulcrumError, IncompatibleError, InputError
from profiles.measure import cpu_description, usable_cores
from runtime.cycle import Decoding, commit_width, head_rows
from runtime.draft_model import DraftRows, open_draft
from runtime.ending import Ending, FinishReason
from runtime.flash import FlashCounters
from runtime.graph_checks import check_graphs, reported_failures
from runtime.kv_cache import KvCache
from runtime.plan import TOKENIZER_FILE, ExecutionPlan
from runtime.plan_folder import load_plan
from runtime.plan_types import WIDEST_PASS
from runtime.request import Options, Progress, Request, check_request, request_of
from runtime.sampling import GREEDY
from runtime.stats import Stats
from runtime.target import Array, Target, open_target
from runtime.tokens import Prompt, Tokens


class Generation(msgspec.Struct, frozen=True):
    """A finished generation."""

    text: str
    """Without control tokens, a final EOS, and a stop string and what follows it."""
    token_ids: tuple[int, ...]
    """New tokens, up to the EOS or the token that completes a stop string, included."""
    finish_reason: FinishReason
    stats: Stats


class _Step(NamedTuple):
    """What one cycle added to a generation."""

    ids: list[int]
    text: str


class Session:
    """A loaded plan on this machine. One generation runs at a time.

    ``emulate`` executes a plan of another device here: same cycles, widths and padding, the CPU
    standing in for every processor; ``stats.simulated_us`` is then the device's predicted time.
    ``flash_rate`` slows the streaming of weights down to so many bytes a second.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        emulate: bool = False,
        threads: int | None = None,
        flash_rate: float | None = None,
    ) -> None:
        check_threads(threads)
        check_flash_rate(flash_rate)
        self.folder, self.plan = load_plan(path)
        if not emulate:
            check_device(self.plan, Path(path))
        check_graphs(self.folder, self.plan)
        plan = self.plan
        self.tokens = Tokens.from_files(self.folder / TOKENIZER_FILE, plan.model.tokenizer)
        limit = plan.context + WIDEST_PASS
        self._cache = KvCache(plan.model, plan.kv.growth_tokens, limit)
        self._latest: Decoding | None = None
        """The latest generation, whose rows the cache holds."""
        self._busy = self._closed = False
        self._computing = Lock()
        self._computer: int | None = None
        """The thread that holds the lock."""
        self.last: Generation | None = None
        """The latest finished generation."""
        used = threads or min(plan.device.threads, usable_cores())
        self._draft = self._open_draft(used)
        self._target = open_target(self.folder, plan, used, flash_rate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_draft(self, threads: int) -> tuple[Target, DraftRows] | None:
        """The draft model's sessions and its keys and values, if the plan has one."""
        draft = self.plan.draft
        if draft is None:
            return None
        return open_draft(self.folder, draft, threads), DraftRows(draft, self.plan.context)

    def close(self) -> None:
        """Release the sessions and join the reader; a second call does nothing.

        From another thread it ends a generation with an error, once the pass is over.
        """
        self._closed = True
        self._target.stop()
        # What a pass uses is released when that is over
        if self._computer != get_ident():
            with self._computing:
                self._release()

    def _release(self) -> None:
        self._target.close()
        if self._draft is not None:
            self._draft[0].close()

    @property
    def flash(self) -> FlashCounters | None:
        """What was streamed since the plan was loaded; None where all of it stays in memory."""
        return self._target.flash if self.plan.residency else None

    @contextmanager
    def _compute(self) -> Generator[None]:
        """Around passes: holds off ``close``."""
        with self._computing:
            self._check_open()
            self._computer = get_ident()
            try:
                yield
            except FlashError:
                self._check_open()
                raise
            finally:
                self._computer = None
                if self._closed:
                    self._release()

    def generate(
        self,
        prompt: Prompt,
        *,
        chat: bool = False,
        system: str | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Complete a text, answer it (``chat``), or answer a conversation (a list of messages).

        Rows of the prompt's beginning that the latest generation left behind are not computed
        again, so a conversation's next turn reads only what is new. ``options``: see ``Options``.
        """
        for _ in self.stream(prompt, chat=chat, system=system, **options):
            pass
        return self.finished()

    def stream(
        self,
        prompt: Prompt,
        *,
        chat: bool = False,
        system: str | None = None,
        **options: Unpack[Options],
    ) -> Generator[str]:
        """Like ``generate``, piece by piece; ``last`` holds the whole when the stream ends.

        What may turn out to be a stop string, or half a character, is held back.
        """
        ids = self.tokens.encode_prompt(prompt, chat=chat, system=system)
        for step in self._steps(ids, request_of(options)):
            if step.text:
                yield step.text

    def stream_ids(self, prompt: Sequence[int], **options: Unpack[Options]) -> Generator[list[int]]:
        """New token ids, cycle by cycle."""
        for step in self._steps(prompt, request_of(options)):
            yield step.ids

    def logits_at(self, ids: Sequence[int]) -> Array:
        """Logits [vocab] of the token after ``ids``, as plain decoding beside drafts has them."""
        self._check_free()
        check_request(self.plan, ids, Request())
        run = Decoding(self.plan, self._target, self._cache, ids, GREEDY)
        with self._compute():
            self._prefill(run)
            width = commit_width(self.plan.numerics, 1)
            last = self._target.run_chain([ids[-1]], len(ids) - 1, self._cache, width=width)
            return self._target.logits(last.hidden[: head_rows(self.plan, 1)])[0]

    def _steps(self, prompt: Sequence[int], request: Request) -> Generator[_Step]:
        self._check_free()
        check_request(self.plan, prompt, request)
        self._busy = True
        try:
            with reported_failures(self.folder):
                yield from self._decode(prompt, request)
        finally:
            self._busy = False

    def _decode(self, prompt: Sequence[int], request: Request) -> Generator[_Step]:
        self.last = None
        stats = Stats(prompt_tokens=len(prompt))
        run = Decoding(
            *(self.plan, self._target, self._cache, prompt),
            *(request.sampling, request.cycle, self._draft),
        )
        began = time.perf_counter()
        with self._compute():
            stats.reused_tokens = self._prefill(run, request.progress)
        started = time.perf_counter()
        stats.prefill_us = 1e6 * (started - began)
        end, at_end = request.limit(len(prompt), self.plan.context)
        ending = Ending(self.tokens, request.stop, ignore_eos=request.ignore_eos)
        texts: list[str] = []
        reason: FinishReason | None = None
        outside = 0.0
        while reason is None:
            before = len(run.tokens)
            with self._compute():
                done = run.step(end - before)
            kept, text, reason = ending.read(run.tokens[before:])
            run.keep(before + kept)
            if reason is None and len(run.tokens) == end:
                reason = at_end
            texts.append(text if reason is None else text + ending.rest())
            stats.add(done.cut(kept))
            stats.decode_us = 1e6 * (time.perf_counter() - started - outside)
            paused = time.perf_counter()
            yield _Step(run.tokens[before:], texts[-1])
            outside += time.perf_counter() - paused
        new = tuple(run.tokens[len(prompt) :])
        self.last = Generation("".join(texts), new, reason, stats)

    def _prefill(self, run: Decoding, progress: Progress | None = None) -> int:
        """Read the prompt, but for what it shares with the latest generation: so many tokens."""
        # Rows below the cursor belong to the latest run at every moment, also at an interrupt
        reused = run.reuse(self._latest.reusable() if self._latest else [])
        self._latest = run
        run.prefill(progress)
        return reused

    def finished(self) -> Generation:
        """The latest generation; ``FulcrumError`` when none was carried to its end."""
        if self.last is None:
            raise FulcrumError("the generation did not finish")
        return self.last

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("this session is closed", hint="load the plan again")

    def _check_free(self) -> None:
        self._check_open()
        if self._busy:
            raise InputError(
                "this session is generating already",
                hint="finish or close that stream, or load the plan a second time",
            )


def check_threads(threads: int | None) -> None:
    """``InputError`` for more threads than cores: they would wait for each other, spinning."""
    if threads is not None and not 1 <= threads <= usable_cores():
        raise InputError(
            "this machine cannot run so many threads",
            found=threads,
            expected=f"1 to {usable_cores()}, the cores that this process may use",
        )


def check_flash_rate(bytes_per_s: float | None) -> None:
    """``InputError`` for a rate that nothing could be read at."""
    if bytes_per_s is not None and not 1e6 <= bytes_per_s < math.inf:
        raise InputError(
            "no rate to read at", found=bytes_per_s, expected="at least 1e6 bytes a second"
        )


def check_device(plan: ExecutionPlan, where: Path) -> None:
    """``IncompatibleError`` unless this machine has the chip that the plan was made for."""
    here = cpu_description()
    if plan.device.soc != here:
        raise IncompatibleError(
            f"the plan is for another device, {plan.device.name}",
            where=where,
            found=here,
            expected=plan.device.soc,
            hint="add --emulate to execute it here with simulated device time",
        )


def load(
    path: str | os.PathLike[str],
    *,
    emulate: bool = False,
    threads: int | None = None,
    flash_rate: float | None = None,
) -> Session:
    """Load the plan folder ``path``; see ``Session``."""
    return Session(path, emulate=emulate, threads=threads, flash_rate=flash_rate)
