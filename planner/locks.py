"""One process at a time in a folder of the cache; a lock ends with the process that holds it."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

_log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path, waiting_for: str) -> Generator[bool]:
    """Hold the lock of ``folder``, which is a folder's own, so that no file is left behind.

    Yields whether it had to wait, which it logs with the reason ``waiting_for``. Where there are
    no locks it goes on without.
    """
    if fcntl is None:
        yield False
        return
    waited = False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            _log.warning("waiting for %s", waiting_for)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            _log.info("no lock on %s: %s", folder, error)
        yield waited
    finally:
        os.close(descriptor)
