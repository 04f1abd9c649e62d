"""Where results that took long to compute are kept between runs."""

import functools
import logging
import os
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """A folder that exists and takes new files.

    ``$FULCRUM_CACHE``, else ``$XDG_CACHE_HOME/fulcrum``, else ``~/.cache/fulcrum``. Where that
    cannot be written, or there is no home, a folder among the temporary files serves instead and
    the log says so once.
    """
    folder = _chosen()
    if folder is None:
        return _temporary("there is no home folder")
    try:
        return _writable(folder)
    except OSError as error:
        return _temporary(f"{folder}: {error.strerror or error}")


def _chosen() -> Path | None:
    """The first place that is named; None without any."""
    if chosen := os.environ.get("FULCRUM_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # the XDG specification has relative paths ignored
    if base and Path(base).is_absolute():
        return Path(base) / "fulcrum"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "fulcrum" if os.path.isabs(home) else None


def _writable(folder: Path) -> Path:
    """``folder``, made if need be; an OSError when it cannot be had or takes no files."""
    folder.mkdir(parents=True, exist_ok=True)
    # permission bits do not tell of read-only mounts or full quotas
    with tempfile.TemporaryFile(dir=folder):
        return folder


@functools.cache
def _temporary(reason: str) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"fulcrum-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # in a shared folder anybody could have made it, to plant files or to read them
        if folder.is_symlink() or folder.stat().st_uid != user or folder.stat().st_mode & 0o022:
            raise OSError("belongs to somebody else")
        _writable(folder)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="fulcrum-"))
    _log.warning("no cache folder (%s); using %s", reason, folder)
    return folder
