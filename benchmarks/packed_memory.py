"""Memory of an opened target before and after mapped pages of packed weights are given back.

    .venv/bin/python benchmarks/packed_memory.py MODEL [--format w8a16] [--streamed 0.5]

The model is written by another process, whose libraries do not count. ``--streamed`` is the share
of sub-layers that stream from flash, spread evenly. Prints MiB of ``/proc/self/status``.
"""

import argparse
import multiprocessing
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from profiles.words import AttentionKernel, Format, SubLayerId
from runtime import target as runtime_target
from runtime.embedding import EmbeddingFile
from runtime.kv_cache import KvCache
from runtime.plan import Artefact, Residency
from runtime.plan_folder import give_back_pages, map_tensors
from runtime.streamed import open_reader

CONTEXT = 1024
EXACT = AttentionKernel.EXACT


def resident() -> str:
    """Anonymous and file pages that this process has in memory."""
    status = Path("/proc/self/status").read_text()
    found = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("RssAnon", "RssFile"))
    anonymous, file = (int(match[1]) // 1024 if match else 0 for match in found)
    return f"anonymous {anonymous} MiB, file {file} MiB"


def write(model: str, fmt: Format, share: float, folder: Path) -> Any:
    """Weights and graphs; returns what the plan would say of them."""
    from lowering.emission import emit_graphs
    from lowering.flash_image import write_weights
    from lowering.source import open_model
    from runtime.plan_writer import WeightsWriter

    class Sink:
        def write(self, relative: str, data: bytes) -> Artefact:
            (folder / relative).write_bytes(data)
            return Artefact(relative, len(data), "0" * 64)

    source = open_model(model)
    count = source.spec.sub_layers
    chosen = [i for i in range(count) if int((i + 1) * share) > int(i * share)]
    streamed = tuple(map(SubLayerId, chosen))
    with WeightsWriter(folder / "weights.bin") as writer:
        tensors = tuple(write_weights(source, fmt, CONTEXT, writer))
    graphs = emit_graphs(source.spec, fmt, CONTEXT, EXACT, tensors, Sink(), streamed)
    return source.spec, writer.artefact(), tensors, graphs, streamed


def main() -> None:
    """Print four lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--format", default="w8a16", type=Format)
    parser.add_argument("--streamed", default=0.0, type=float)
    asked = parser.parse_args()

    def give_back(arrays: Iterable[Any]) -> None:
        print("packed:", resident())
        give_back_pages(arrays)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            spec, weights, refs, graphs, streamed = pool.apply(
                write, (asked.model, asked.format, asked.streamed, folder)
            )
        print(f"weights {weights.bytes >> 20} MiB, {len(streamed)} sub-layers streamed")
        print("before:", resident())
        tensors = map_tensors(folder, weights, refs)
        reader = None
        if streamed:
            reader = open_reader(folder / weights.path, refs, Residency(streamed, 2, 1 << 20))
        runtime_target.give_back_pages = give_back
        table = EmbeddingFile(folder / weights.path, refs)
        target = runtime_target.Target(folder, spec, graphs, tensors, 1, EXACT, reader, table)
        print("given back:", resident())
        target.run_chain([1, 2], 0, KvCache(spec, 256, 2048))
        print("after a pass:", resident())
        target.close()


if __name__ == "__main__":
    main()
