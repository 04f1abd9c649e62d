"""Rows of the embedding table, read from the weights file when a token asks for them.

Read, not mapped: mapped pages would count as the process's memory, whole neighbourhoods of each
row, and a file that is cut off would end the process.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiles.errors import FlashError
from runtime.plan import TensorRef
from runtime.weight_ranges import DTYPES

Array = np.ndarray[Any, Any]

KEPT_ROWS = 512
"""Rows that stay in memory, those used latest: a text says much the same tokens again."""
EMBEDDING_TENSORS = ("embed", "embed.scale", "embed.offset")
"""The table and, by its format, what its rows are scaled with."""
ZERO_POINT = 128


class EmbeddingFile:
    """Those of ``tensors`` that are the embedding's, in ``file``.

    Raises:
        FlashError: The file cannot be opened.
    """

    def __init__(self, file: Path, tensors: Iterable[TensorRef]) -> None:
        self._file = file
        by_name = {tensor.name: tensor for tensor in tensors}
        self._parts = [by_name[name] for name in EMBEDDING_TENSORS if name in by_name]
        self._kept: OrderedDict[int, Array] = OrderedDict()
        """Rows by token; the one used latest is last."""
        try:
            self._descriptor = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise FlashError("cannot open the weights", where=file, found=error.strerror) from error

    def rows(self, ids: Sequence[int]) -> Array:
        """Rows of the table, [n, hidden] float32.

        Raises:
            FlashError: They cannot be read, or the file has become too short.
        """
        return np.stack([self._row(token) for token in ids])

    def _row(self, token: int) -> Array:
        row = self._kept.get(token)
        if row is None:
            row = decoded_rows(*(self._read(part, token) for part in self._parts))[0]
            self._kept[token] = row
            if len(self._kept) > KEPT_ROWS:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(token)
        return row

    def _read(self, part: TensorRef, row: int) -> Array:
        """One row of a tensor, [1, ...]."""
        if not 0 <= row < part.shape[0]:
            raise IndexError(row)
        size = part.size_bytes // part.shape[0]
        try:
            data = os.pread(self._descriptor, size, part.offset_bytes + row * size)
        except OSError as error:
            found = error.strerror
            raise FlashError("reading weights failed", where=self._file, found=found) from error
        if len(data) < size:
            raise FlashError(
                "the weights were cut off",
                where=self._file,
                found=f"{os.fstat(self._descriptor).st_size} bytes",
                expected=f"at least {part.offset_bytes + part.size_bytes}",
                hint="copy the plan again",
            )
        return np.frombuffer(data, DTYPES[part.type]).reshape(1, *part.shape[1:])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def decoded_rows(rows: Array, scale: Array | None = None, offset: Array | None = None) -> Array:
    """[n, hidden] as stored -> float32; ``scale`` [n] or [n, blocks], ``offset`` [n, blocks]."""
    values = rows.astype(np.float32)
    if scale is None:
        return values
    scale = scale.reshape(len(rows), -1, 1)
    blocks = (values.reshape(*scale.shape[:2], -1) - np.float32(ZERO_POINT)) * scale
    if offset is not None:
        blocks += offset[..., None]
    return blocks.reshape(values.shape)
