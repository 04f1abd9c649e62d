"""The engines that ``baselines.py`` compares: llama.cpp, transformers and compiled plans.

Every engine takes the same token ids and hands out new ones as they come; what is timed is when
they arrive. The first arrival ends the prefill, and the rate of decoding is that of the tokens
after it. Libraries are imported late, in the process that needs them.
"""

import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from profiles.errors import InputError

LLAMA, TRANSFORMERS, OURS = "llama.cpp", "transformers", "fulcrum"
PACKAGES = {LLAMA: "llama_cpp", TRANSFORMERS: "transformers"}
MODES = {
    LLAMA: "ar, lookupN, draftN",
    TRANSFORMERS: "ar, lookupN, assisted",
    OURS: "the modes of `plan bench`",
}
_MODE = {
    LLAMA: re.compile(r"ar|(lookup|draft)[1-9]\d?"),
    TRANSFORMERS: re.compile(r"ar|lookup[1-9]\d?|assisted"),
    OURS: re.compile(r".+"),
}
_NEEDS_DRAFT = re.compile(r"draft\d+|assisted")


class Task(msgspec.Struct, frozen=True):
    """What an engine is asked for."""

    mode: str
    threads: int
    prompt: tuple[int, ...]
    new_tokens: int
    """At most."""


class Run(msgspec.Struct, frozen=True):
    """One prompt decoded once."""

    token_ids: tuple[int, ...]
    """New tokens, up to the end of the answer."""
    first_tokens: int
    """Tokens of the first arrival, which ends the prefill."""
    prefill_us: float
    decode_us: float
    """From the first arrival to the last."""


class Setup(msgspec.Struct, frozen=True):
    """What a worker needs to open its engine."""

    engine: str
    label: str
    """Name in the table."""
    path: Path
    """The GGUF, or the plan's folder."""
    draft: Path | None
    """GGUF of a smaller model with the same tokenizer."""
    context: int
    """Most tokens of prompt and answer together."""
    eos_ids: tuple[int, ...]


Put = Callable[[Sequence[int]], bool]
"""Takes new tokens as they arrive; whether there are enough now."""


class Engine(Protocol):
    """Decodes a task greedily."""

    def decode(self, task: Task, put: Put) -> None: ...


def parse_way(text: str, draft: Path | None) -> tuple[str, str]:
    """Engine and mode of ``engine:mode``; InputError for one that does not exist here."""
    engine, _, mode = text.strip().partition(":")
    if engine not in _MODE or not _MODE[engine].fullmatch(mode):
        raise InputError(
            "unknown way to decode",
            where="--modes",
            found=repr(text.strip()),
            expected="; ".join(f"{name}: then {modes}" for name, modes in MODES.items()),
        )
    if draft is None and engine != OURS and _NEEDS_DRAFT.fullmatch(mode):
        raise InputError("this mode needs a draft model", where=text, hint="give --draft GGUF")
    package = PACKAGES.get(engine)
    if package is not None and importlib.util.find_spec(package) is None:
        raise InputError(
            f"{engine} is not installed",
            expected=f"the Python package {package}",
            hint="pip install 'fulcrum-plan[bench]' (docs/benchmarks.md says how to build"
            " llama.cpp), or leave its modes out of --modes",
        )
    return engine, mode


def open_engine(setup: Setup) -> Engine:
    """The engine, its libraries imported."""
    kinds = {LLAMA: LlamaEngine, TRANSFORMERS: TransformersEngine, OURS: PlanEngine}
    return kinds[setup.engine](setup)


def measure(engine: Engine, task: Task, eos_ids: Sequence[int]) -> Run:
    """Decode ``task`` and take the time of every arrival."""
    ids: list[int] = []
    times: list[float] = []
    first = 0

    def put(piece: Sequence[int]) -> bool:
        nonlocal first
        if len(ids) < task.new_tokens and not (ids and ids[-1] in eos_ids):
            times.append(time.perf_counter())
            end = next((at for at, token in enumerate(piece) if token in eos_ids), len(piece))
            ids.extend(list(piece[: end + 1])[: task.new_tokens - len(ids)])
            first = first or len(ids)
        return len(ids) >= task.new_tokens or ids[-1] in eos_ids

    began = time.perf_counter()
    engine.decode(task, put)
    return Run(tuple(ids), first, 1e6 * (times[0] - began), 1e6 * (times[-1] - times[0]))


def _number(mode: str) -> int:
    return int(re.sub(r"\D", "", mode))


class LlamaEngine:
    """llama.cpp through llama-cpp-python; the Python loop of that package is part of the time."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._models: dict[str, Any] = {}

    def decode(self, task: Task, put: Put) -> None:
        """Plainly, or with a draft that the package's own loop verifies."""
        model = self._model("plain" if task.mode == "ar" else "verify", task.threads)
        model.draft_model = self._draft(task)
        model.reset()
        for token in _greedy(model, task.prompt):
            if put([token]):
                return

    def _model(self, kind: str, threads: int) -> Any:
        import llama_cpp

        if kind not in self._models:
            path = self._setup.draft if kind == "draft" else self._setup.path
            # A verify pass needs the logits of every row
            self._models[kind] = llama_cpp.Llama(
                str(path), n_ctx=self._setup.context, logits_all=kind == "verify", verbose=False
            )
        model = self._models[kind]
        llama_cpp.llama_set_n_threads(model.ctx, threads, threads)
        return model

    def _draft(self, task: Task) -> Any:
        if task.mode == "ar":
            return None
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        length = _number(task.mode)
        if task.mode.startswith("lookup"):
            return LlamaPromptLookupDecoding(num_pred_tokens=length)
        return _drafting(self._model("draft", task.threads), task.prompt, length)


def _greedy(model: Any, ids: Sequence[int]) -> Any:
    return model.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0)


def _drafting(model: Any, prompt: Sequence[int], length: int) -> Callable[..., Any]:
    """A draft model in the shape that llama-cpp-python calls: ids so far -> ids that may follow.

    The package ships none. Its ``generate`` keeps the rows of what the ids share with the call
    before, so that a call computes what is new and ``length`` tokens. The prompt is read here, as
    part of the prefill.
    """
    import numpy as np

    model.reset()
    next(_greedy(model, prompt))

    def propose(ids: Any, /, **_: Any) -> Any:
        told = _greedy(model, ids.tolist())
        return np.array([next(told) for _ in range(length)], np.intc)

    return propose


class TransformersEngine:
    """transformers in float32, the weights read from the same GGUF."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model = self._open(setup.path)
        self._assistant = None if setup.draft is None else self._open(setup.draft)

    def _open(self, path: Path) -> Any:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder, name = str(path.parent), path.name
        loader = transformers.AutoModelForCausalLM
        return loader.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()

    def decode(self, task: Task, put: Put) -> None:
        """Plainly, or with one of the drafts of ``generate``."""
        import torch

        torch.set_num_threads(task.threads)
        prompt = torch.tensor([task.prompt])
        how: dict[str, Any] = {}
        if task.mode == "assisted":
            how = {"assistant_model": self._assistant}
        elif task.mode != "ar":
            how = {"prompt_lookup_num_tokens": _number(task.mode)}
        with torch.inference_mode():
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=task.new_tokens,
                eos_token_id=list(self._setup.eos_ids) or None,
                pad_token_id=next(iter(self._setup.eos_ids), 0),
                streamer=_Streamer(put),
                **how,
            )


class _Streamer:
    """What ``generate`` calls with the prompt first and then with new tokens."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._told = False

    def put(self, value: Any) -> None:
        if self._told:
            self._put(value.flatten().tolist())
        self._told = True

    def end(self) -> None:
        """Nothing is left to do."""


class PlanEngine:
    """A compiled plan, one session for each number of threads."""

    def __init__(self, setup: Setup) -> None:
        self._folder = setup.path
        self._sessions: dict[int, Any] = {}

    def decode(self, task: Task, put: Put) -> None:
        """In a mode of ``plan bench``."""
        from planner.modes import parse_mode
        from runtime import load

        if task.threads not in self._sessions:
            self._sessions[task.threads] = load(self._folder, threads=task.threads)
        session = self._sessions[task.threads]
        cycle = parse_mode(task.mode, session.plan).cycle
        for ids in session.stream_ids(task.prompt, max_new_tokens=task.new_tokens, cycle=cycle):
            put(ids)
