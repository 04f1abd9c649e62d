"""Sizes of memory as people write them, ``512MB``, ``2GiB``, ``1.5G``, and rates: ``500MB/s``."""

import re

from profiles.errors import InputError

_UNITS = {"": 1, "b": 1} | {
    prefix + ending: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*([a-z]*)")
_MAX_BYTES = 1 << 48


def parse_size(text: str) -> int:
    """Bytes; KB, MB, GB, TB are powers of 1000, KiB (or K) and so on powers of 1024.

    Raises:
        InputError: Not a size, or none between 1 byte and 256 TiB.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    size = round(float(match[1]) * unit) if match and unit else 0
    if not 1 <= size <= _MAX_BYTES:
        raise InputError("not a size", found=repr(text), expected="such as 512MB, 2GiB or 1.5G")
    return size


def parse_rate(text: str) -> int:
    """Bytes per second, written as a size and ``/s``.

    Raises:
        InputError: Not a rate.
    """
    size, slash, second = text.strip().lower().rpartition("/")
    if not slash or second.strip() != "s":
        raise InputError("not a rate", found=repr(text), expected="such as 500MB/s or 1.5GB/s")
    return parse_size(size)
