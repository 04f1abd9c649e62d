"""llama.cpp with a mapped GGUF, decoding greedily: tokens a second for each prompt of a file.

    python benchmarks/memory_limit.py --evict 1.5b.gguf 500MiB -- \
        LLAMA_PYTHON benchmarks/flash_llama.py 1.5b.gguf --prompts humaneval.jsonl --limit 10

Run it with an interpreter that has llama-cpp-python; it needs nothing of this project. Under a
memory limit the system throws pages of the file out and reads them again in every pass, which is
how llama.cpp streams from flash. One JSON line for each prompt goes to stdout, then one with the
medians; ``read_mib`` is what came from storage while decoding.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MEBIBYTE = 1 << 20
_BATCH = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the lines; the exit code."""
    asked = _parser().parse_args(arguments)
    try:
        import llama_cpp
    except ImportError:
        print("error: this interpreter has no llama-cpp-python", file=sys.stderr)
        return 2
    try:
        prompts = list(itertools.islice(_prompts(asked.prompts), asked.limit))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: cannot read prompts from {asked.prompts}: {error}", file=sys.stderr)
        return 2
    if not asked.repack:
        _map_only(llama_cpp.llama_cpp)
    model = llama_cpp.Llama(
        asked.model,
        n_ctx=asked.context,
        n_threads=asked.threads,
        n_threads_batch=asked.threads,
        # room for the logits of so many rows is taken at once
        n_batch=_BATCH,
        n_ubatch=_BATCH,
        use_mmap=True,
        use_mlock=False,
        verbose=False,
    )
    rows: list[dict[str, Any]] = []
    for name, text in prompts:
        ids = model.tokenize(text.encode())[: asked.context - asked.new_tokens]
        rows.append({"id": name, **decode(model, ids, asked.new_tokens)})
        print(json.dumps(rows[-1]), flush=True)
    medians = {
        key: statistics.median(row[key] for row in rows)
        for key in ("tokens_per_s", "prefill_s", "read_mib_per_token")
    }
    print(json.dumps({"prompts": len(rows), **medians}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF")
    parser.add_argument("--prompts", required=True, type=Path, metavar="JSONL")
    parser.add_argument("--limit", type=int, help="prompts (default: all)")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--repack", action="store_true", help="let weights be copied into another layout"
    )
    return parser


def _map_only(library: Any) -> None:
    """What ``llama-cli --no-repack`` does: weights are used where the file is mapped.

    Copies in another layout are memory that cannot be thrown out, more than half of the file.
    """
    defaults = library.llama_model_default_params

    def params() -> Any:
        given = defaults()
        given.use_extra_bufts = False
        return given

    library.llama_model_default_params = params


def _prompts(file: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        if line.strip():
            record = json.loads(line)
            yield str(record.get("id", number)), record["prompt"]


def decode(model: Any, ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """Decode after ``ids``; the first token ends the prefill and is not counted."""
    model.reset()
    tokens = model.generate(list(ids), temp=0.0, top_k=1, repeat_penalty=1.0)
    began = time.perf_counter()
    next(tokens)
    started, before = time.perf_counter(), _read_bytes()
    count = sum(1 for _ in itertools.islice(tokens, new_tokens - 1))
    took_s, read = time.perf_counter() - started, _read_bytes() - before
    return {
        "prompt_tokens": len(ids),
        "tokens": count,
        "tokens_per_s": count / took_s,
        "prefill_s": started - began,
        "read_mib_per_token": read / count / MEBIBYTE,
    }


def _read_bytes() -> int:
    """What this process has read from storage so far, page faults included."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
