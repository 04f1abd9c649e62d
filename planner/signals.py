"""Signals that ask a command to end: each becomes an exception, so that all is cleaned up."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_ASKING = ("SIGINT", "SIGTERM", "SIGHUP")
"""Not every system has all of them."""


@contextmanager
def noted_signals() -> Generator[list[int]]:
    """Numbers of the signals that interrupted the block; each raises KeyboardInterrupt.

    A signal that whoever started the program had ignored stays ignored, and in other threads than
    the main one nothing changes: they cannot hear signals.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    numbers = [getattr(signal, name) for name in _ASKING if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    # None is a handler that was not installed from Python; it could not be put back
    heard = [n for n in numbers if before[n] not in (signal.SIG_IGN, None)]
    for number in heard:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number in heard:
            signal.signal(number, before[number])
