"""One process for each engine, of which one computes at a time.

Libraries that bring their own threads do not meet in one process, and one that crashes ends its
own process only.
"""

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

from baseline_engines import LLAMA, Run, Setup, Task, measure, open_engine

from profiles.errors import FulcrumError


class Worker:
    """An engine behind a pipe."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(setup, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, task: Task) -> Run:
        """Wait for ``task``; FulcrumError when the engine fails or its process ends."""
        try:
            self._pipe.send(task)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise FulcrumError(
                f"the process of {self.setup.label} ended",
                found=f"exit code {self._process.exitcode}",
                hint="docs/benchmarks.md says how to build llama.cpp without AMX"
                if self.setup.engine == LLAMA
                else None,
            ) from error
        if isinstance(answer, str):
            raise FulcrumError(f"{self.setup.label} failed in mode {task.mode}: {answer}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()


def serve(setup: Setup, pipe: Connection) -> None:
    """Answer tasks until the other end is closed: a ``Run``, or what went wrong."""
    os.environ["TQDM_DISABLE"] = "1"
    engine = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            engine = engine or open_engine(setup)
            pipe.send(measure(engine, task, setup.eos_ids))
        except Exception as error:  # whatever a library raises
            reason = " ".join(str(error).split())
            pipe.send(f"{type(error).__name__}: {reason}")


def close_all(workers: Sequence[Worker]) -> None:
    """End the processes."""
    for worker in workers:
        worker.close()
