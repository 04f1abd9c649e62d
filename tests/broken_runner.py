"""Reads broken inputs one after the other in a process with little memory and little time.

``python broken_runner.py CASES.json`` writes one line of JSON for each case: what came of it.
"""

import faulthandler
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiles.errors import FulcrumError

LIMIT_S = int(os.environ.get("BROKEN_LIMIT_S", "10"))
LIMIT_BYTES = 2 * 2**30


def read_model(path: Path, out: Path) -> None:
    """As far as ``plan compile`` goes with a model's files alone."""
    from lowering.emission import emit
    from lowering.source import open_model
    from planner.compile import choose_context
    from profiles.words import Format
    from runtime.plan_writer import PlanWriter

    source = open_model(str(path))
    context = min(64, choose_context(source, None))
    with PlanWriter(out / "x.plan") as writer:
        emit(source, Format.W8A16, context, writer)
    from runtime.tokens import Tokens

    Tokens.from_files(source.tokenizer_json(), source.spec.tokenizer).encode_prompt("the end\n")


def read_plan(path: Path, _: Path) -> None:
    """Load and run."""
    from runtime.session import Session

    with Session(path, emulate=True) as session:
        session.generate("the end of the", max_new_tokens=3)


def read_profile(path: Path, _: Path) -> None:
    """A device profile."""
    from profiles.profile import load_profile

    load_profile(str(path))


def read_prompts(path: Path, _: Path) -> None:
    """A prompt file."""
    from planner.prompt_file import load_prompts

    load_prompts(path)


def hang(_: Path, __: Path) -> None:
    """To see whether the time limit works."""
    time.sleep(60)


def eat(_: Path, __: Path) -> None:
    """To see whether the memory limit works."""
    bytearray(2 * LIMIT_BYTES)


def die(_: Path, __: Path) -> None:
    """To see whether the end of the process is noticed."""
    os.abort()


READERS: dict[str, Callable[[Path, Path], None]] = {
    "gguf": read_model,
    "folder": read_model,
    "plan": read_plan,
    "profile": read_profile,
    "prompts": read_prompts,
    "_hangs": hang,
    "_eats": eat,
    "_dies": die,
}


def outcome(kind: str, path: Path) -> dict[str, Any]:
    """What reading ``path`` leads to."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            READERS[kind](path, Path(out))
            found: dict[str, Any] = {"code": 0, "error": ""}
        except FulcrumError as error:
            found = {"code": error.exit_code, "error": str(error), "hint": error.hint}
        except BaseException as error:
            found = {"code": 1, "error": f"{type(error).__name__}: {error}"[:300]}
        faulthandler.cancel_dump_traceback_later()
        left = os.listdir(out)
    return {**found, "left": left, "seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    """Everything heavy is loaded before the memory is limited."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    import planner.compile  # noqa: F401

    # Libraries print to stdout
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for kind, path in cases:
        print(json.dumps(outcome(kind, Path(path))), file=results, flush=True)


if __name__ == "__main__":
    main()
