"""Keys and values of the committed positions, plus scratch rows behind the cursor."""

from typing import Any

import numpy as np

from profiles.errors import FulcrumError, InputError
from runtime.model_spec import ModelSpec

Array = np.ndarray[Any, Any]


class KvCache:
    """Rows per layer, [layers, kv_heads, capacity, head_dim] float32, and a cursor.

    ``length`` positions are committed. Rows behind it are scratch: a draft may write there, the
    next verify pass does not look at them, a commit overwrites them. Rolling back is moving the
    cursor. Capacity grows by whole steps, so that attention pays for the context it has; rows that
    were never written are zero, since a masked NaN would still poison a sum. With growth 0 it has
    all of ``limit`` at once, of which the system gives the pages that are written to.
    """

    def __init__(self, spec: ModelSpec, growth_tokens: int, limit: int) -> None:
        self._shape = (spec.layers, spec.kv_heads, spec.head_dim)
        self._growth = growth_tokens or limit
        self.limit = limit
        """Most slots that the cache may hold."""
        self.length = 0
        self.keys, self.values = self._zeros(self._growth), self._zeros(self._growth)

    def _zeros(self, capacity: int) -> Array:
        layers, heads, width = self._shape
        return np.zeros((layers, heads, capacity, width), np.float32)

    @property
    def capacity(self) -> int:
        """Slots that a pass attends over (masked behind the cursor)."""
        return self.keys.shape[2]

    def reserve(self, slots: int) -> None:
        """Make room for ``slots`` positions; ``InputError`` beyond the limit."""
        if slots > self.limit:
            raise InputError(
                "the context is full",
                found=f"{slots} positions",
                expected=f"at most {self.limit}",
                hint="shorten the prompt or compile with a larger --context",
            )
        if slots <= self.capacity:
            return
        capacity = -(-slots // self._growth) * self._growth
        keys, values = self._zeros(capacity), self._zeros(capacity)
        keys[:, :, : self.length] = self.keys[:, :, : self.length]
        values[:, :, : self.length] = self.values[:, :, : self.length]
        # Both at once, lest an interrupt leave two capacities. Keys first would save nothing: what
        # is bound to the old ones lives until the next pass
        self.keys, self.values = keys, values

    def trim(self, slots: int) -> None:
        """Give back capacity beyond ``slots``, so that a short text pays for no long one before."""
        capacity = max(1, -(-max(slots, self.length) // self._growth)) * self._growth
        if capacity < self.capacity:
            keys, values = self.keys[:, :, :capacity].copy(), self.values[:, :, :capacity].copy()
            self.keys, self.values = keys, values

    def write(
        self, slot: int, keys: Array | None, values: Array | None, rows: slice | Array
    ) -> None:
        """Put ``rows`` of a pass's new rows [layers, kv_heads, w, head_dim] at ``slot`` onwards.

        None: the pass has written them already.
        """
        if keys is None or values is None:
            return
        picked = keys[:, :, rows], values[:, :, rows]
        end = slot + picked[0].shape[2]
        if not 0 <= slot <= end <= self.capacity:
            raise FulcrumError(
                "key-value rows outside the cache",
                found=f"slots {slot} to {end}",
                expected=f"within {self.capacity}",
            )
        self.keys[:, :, slot:end], self.values[:, :, slot:end] = picked

    def commit(self, keys: Array | None, values: Array | None, rows: slice | Array) -> None:
        """Write ``rows`` at the cursor and move it past them.

        Where a pass has written its rows itself they are in place if it began at the cursor, and
        ``rows`` are its first ones.
        """
        before = self.length
        self.write(before, keys, values, rows)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        self.length = before + count

    def truncate(self, length: int) -> None:
        """Roll back to ``length`` committed positions."""
        if not 0 <= length <= self.length:
            raise FulcrumError(
                "cannot roll the cache forward", found=length, expected=f"0 to {self.length}"
            )
        self.length = length
