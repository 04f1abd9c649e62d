"""Peak memory of writing a model's weights and graphs, beside the size of what is written.

    .venv/bin/python benchmarks/emit_memory.py MODEL [w8a16]

Counts anonymous memory of the whole process, interpreter and libraries included, every 5 ms
(``RssAnon`` of ``/proc/self/status``): pages of mapped files, which the model's own file is, can
be given up at any time and do not count.
"""

import argparse
import re
import tempfile
import threading
import time
from pathlib import Path

from lowering.emission import emit
from lowering.source import open_model
from profiles.words import Format
from runtime.plan_writer import PlanWriter

MEBIBYTE = 1 << 20


class Watch(threading.Thread):
    """Keeps the largest anonymous memory seen so far, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0

    def run(self) -> None:
        """Look, until the process ends."""
        while True:
            status = Path("/proc/self/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+) kB", status)
            self.peak_bytes = max(self.peak_bytes, int(found[1]) * 1024 if found else 0)
            time.sleep(0.005)


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("format", nargs="?", default="w8a16", type=Format)
    parser.add_argument("--context", default=4096, type=int)
    asked = parser.parse_args()
    watch = Watch()
    watch.start()
    source = open_model(asked.model)
    opened = watch.peak_bytes
    with tempfile.TemporaryDirectory() as folder, PlanWriter(Path(folder) / "x.plan") as writer:
        size = emit(source, asked.format, asked.context, writer).weights.bytes
    peak = watch.peak_bytes
    print(
        f"{asked.model} {asked.format}: opening {opened / MEBIBYTE:.0f} MiB, writing"
        f" {peak / MEBIBYTE:.0f} MiB, weights {size / MEBIBYTE:.0f} MiB: {peak / size:.2f}"
    )


if __name__ == "__main__":
    main()
