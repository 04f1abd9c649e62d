"""Units and limits of the fields of ``plan.json``."""

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 48)]
WIDEST_PASS = 1024
"""Rows; also the slots of the cache past the plan's context, for rows that are only padding."""
Width = Annotated[int, Meta(ge=1, le=WIDEST_PASS)]
Microseconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Document(msgspec.Struct, frozen=True):
    """Base of every struct in ``plan.json``; fields of newer minor versions are ignored."""
