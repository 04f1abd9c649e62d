"""Memory that this process holds, as Linux counts it."""

from pathlib import Path

_FOLDER = Path("/proc/self")
_RESET_PEAK = "5"
"""What ``clear_refs`` takes for: let the peak begin anew with what is held now (proc(5))."""


def peak_rss_bytes() -> int | None:
    """Most resident memory since the process began, or since ``reset_peak``.

    Pages of mapped files count as far as they are in memory. None where the system does not say.
    """
    return _field("VmHWM")


def rss_bytes() -> int | None:
    """Resident memory now; None where the system does not say."""
    return _field("VmRSS")


def reset_peak() -> bool:
    """Let ``peak_rss_bytes`` count from now on; whether the system does that."""
    try:
        # no more than this one byte: other values would clear marks that others may use
        with open(_FOLDER / "clear_refs", "w", encoding="ascii") as stream:
            stream.write(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        text = (_FOLDER / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return 1024 * int(value.split()[0])
    return None
