"""The public face of the runtime: load a plan, generate text, stream it, read the statistics."""

import os
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from profiles.errors import FulcrumError, IncompatibleError, InputError
from profiles.measure import cpu_description, usable_cores
from runtime.cycle import Decoding, commit_width
from runtime.graph_checks import check_graphs, reported_failures
from runtime.kv_cache import KvCache
from runtime.plan import TOKENIZER_FILE, Cycle, ExecutionPlan
from runtime.plan_folder import load_plan, map_tensors
from runtime.sampling import GREEDY, Sampling
from runtime.stats import Stats
from runtime.target import Array, Target
from runtime.tokens import StreamDecoder, Tokens

WIDEST_PASS = 1024
"""Slots that the cache may hold past the plan's context, for rows that are only padding."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    EOS = "eos"
    LENGTH = "length"
    """``max_new_tokens`` were produced."""
    CONTEXT = "context"
    """The plan's context is full."""


class Generation(msgspec.Struct, frozen=True):
    """A finished generation."""

    text: str
    token_ids: tuple[int, ...]
    """New tokens; a final EOS is included."""
    finish_reason: FinishReason
    stats: Stats


class Session:
    """A loaded plan on this machine. One generation runs at a time.

    ``emulate`` executes a plan of another device here: same cycles, widths and padding, the CPU
    standing in for every processor; ``stats.simulated_us`` is then the device's predicted time.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, emulate: bool = False, threads: int | None = None
    ) -> None:
        self.folder, self.plan = load_plan(path)
        if not emulate:
            check_device(self.plan, Path(path))
        check_graphs(self.folder, self.plan)
        plan = self.plan
        self.tokens = Tokens.from_files(self.folder / TOKENIZER_FILE, plan.model.tokenizer)
        self._target = Target(
            *(
                self.folder,
                plan.model,
                plan.graphs,
                map_tensors(self.folder, plan.weights, plan.tensors),
            ),
            threads=threads or min(plan.device.threads, usable_cores()),
        )
        limit = plan.context + WIDEST_PASS
        self._cache = KvCache(plan.model, plan.kv.growth_tokens, limit)
        self._held: list[int] = []
        """Tokens of the latest generation; the cache holds the rows of its first ``length``."""
        self._busy = self._closed = False
        self.last: Generation | None = None
        """The latest finished generation."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the sessions; a second call does nothing."""
        self._closed = True
        self._target.close()

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        chat: bool = False,
        system: str | None = None,
        sampling: Sampling = GREEDY,
        cycle: Cycle | None = None,
    ) -> Generation:
        """Complete ``prompt`` (or answer it, with ``chat``); ``cycle`` overrides the plan's."""
        ids = self.tokens.encode_prompt(prompt, chat=chat, system=system)
        for _ in self.stream_ids(
            ids, max_new_tokens=max_new_tokens, sampling=sampling, cycle=cycle
        ):
            pass
        return self.finished()

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        chat: bool = False,
        system: str | None = None,
        sampling: Sampling = GREEDY,
        cycle: Cycle | None = None,
    ) -> Iterator[str]:
        """Like ``generate``, piece by piece; ``last`` holds the whole when the stream ends."""
        ids = self.tokens.encode_prompt(prompt, chat=chat, system=system)
        decoder = StreamDecoder(self.tokens)
        for new in self.stream_ids(
            ids, max_new_tokens=max_new_tokens, sampling=sampling, cycle=cycle
        ):
            if piece := decoder.push(new):
                yield piece
        if piece := decoder.flush():
            yield piece

    def stream_ids(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        cycle: Cycle | None = None,
    ) -> Iterator[list[int]]:
        """New token ids, cycle by cycle."""
        self._check_request(prompt, max_new_tokens, cycle)
        self._busy = True
        try:
            with reported_failures(self.folder):
                yield from self._decode(prompt, max_new_tokens, sampling, cycle)
        finally:
            self._busy = False

    def logits_at(self, ids: Sequence[int]) -> Array:
        """Logits [vocab] of the token after ``ids``, as plain decoding computes them."""
        self._check_request(ids, 1)
        run = Decoding(self.plan, self._target, self._cache, ids, GREEDY)
        self._prefill(run)
        width = commit_width(self.plan.numerics, 1)
        last = self._target.run_chain([ids[-1]], len(ids) - 1, self._cache, width=width)
        return self._target.logits(last.hidden[:1])[0]

    def _decode(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, cycle: Cycle | None
    ) -> Iterator[list[int]]:
        self.last = None
        stats = Stats(prompt_tokens=len(prompt))
        run = Decoding(self.plan, self._target, self._cache, prompt, sampling, cycle)
        began = time.perf_counter()
        self._prefill(run)
        started = time.perf_counter()
        stats.prefill_us = 1e6 * (started - began)
        end = min(len(prompt) + max_new_tokens, self.plan.context)
        reason = (
            FinishReason.LENGTH if end == len(prompt) + max_new_tokens else FinishReason.CONTEXT
        )
        outside = 0.0
        while len(run.tokens) < end:
            before = len(run.tokens)
            done = run.step(end - before)
            stop = self.tokens.finish(run.tokens[before:])
            if stop is not None:
                run.keep(before + stop + 1)
                reason = FinishReason.EOS
                kept = stop + 1
                done = msgspec.structs.replace(
                    done, committed=kept, accepted=min(done.accepted, kept)
                )
            stats.add(done)
            stats.decode_us = 1e6 * (time.perf_counter() - started - outside)
            paused = time.perf_counter()
            yield run.tokens[before:]
            outside += time.perf_counter() - paused
            if stop is not None:
                break
        new = tuple(run.tokens[len(prompt) :])
        self.last = Generation(self.tokens.decode(new), new, reason, stats)

    def _prefill(self, run: Decoding) -> None:
        """Read the prompt, but for what it shares with the latest generation."""
        # Rows below the cursor belong to these tokens at every moment, also after an interrupt.
        held, self._held = self._held[: self._cache.length], run.tokens
        run.prefill(held)

    def finished(self) -> Generation:
        """The latest generation; ``FulcrumError`` when none was carried to its end."""
        if self.last is None:
            raise FulcrumError("the generation did not finish")
        return self.last

    def _check_request(
        self, prompt: Sequence[int], max_new_tokens: int, cycle: Cycle | None = None
    ) -> None:
        if self._closed:
            raise InputError("this session is closed", hint="load the plan again")
        vocab = self.plan.model.vocab
        unknown = next((token for token in prompt if not 0 <= token < vocab), None)
        if unknown is not None:
            raise InputError("no such token", found=unknown, expected=f"0 to {vocab - 1}")
        if cycle is not None and cycle.mask >= len(self.plan.masks):
            raise InputError(
                "the plan has no such skip mask",
                found=cycle.mask,
                expected=f"0 to {len(self.plan.masks) - 1}",
            )
        if self._busy:
            raise InputError(
                "this session is generating already",
                hint="finish or close that stream, or load the plan a second time",
            )
        if not prompt:
            raise InputError("the prompt has no tokens", hint="give some text, or use --chat")
        if max_new_tokens < 1:
            raise InputError(
                "nothing to generate", found=max_new_tokens, expected="1 token or more"
            )
        if len(prompt) >= self.plan.context:
            raise InputError(
                "the prompt does not fit",
                found=f"{len(prompt)} tokens",
                expected=f"fewer than {self.plan.context}",
                hint="shorten it or compile with a larger --context",
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
    path: str | os.PathLike[str], *, emulate: bool = False, threads: int | None = None
) -> Session:
    """Load the plan folder ``path``; see ``Session``."""
    return Session(path, emulate=emulate, threads=threads)
