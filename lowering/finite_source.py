"""A model whose every number is looked at as it is read: NaN and infinities are refused."""

import numpy as np
from numpy.typing import NDArray

from lowering.source import ModelSource, PackedTensor
from profiles.errors import InputError
from runtime.model_spec import ModelSpec


class FiniteSource:
    """The ModelSource ``source``; ``InputError`` from a read that meets a number out of range."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, tokens and digests."""
        return self._source.spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A fresh, contiguous float32 copy of a tensor."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._checked(name, self._source.tensor(name))

    def rows(self, name: str, first: int, end: int) -> NDArray[np.float32]:
        """Rows ``first`` to ``end`` of a matrix."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._checked(name, self._source.rows(name, first, end), first)

    def packed(self, name: str) -> PackedTensor | None:
        """The tensor's own blocks, unchecked: its scales are numbers only once they are read."""
        return self._source.packed(name)

    def tokenizer_json(self) -> str:
        """Text of the tokenizer."""
        return self._source.tokenizer_json()

    def _checked(
        self, name: str, array: NDArray[np.float32], first: int = 0
    ) -> NDArray[np.float32]:
        # The sum is not finite if a number is not, and reading once is half the work
        suspicious = not np.isfinite(array.sum())
        if suspicious and not (finite := np.isfinite(array)).all():
            place = tuple(int(index) for index in np.argwhere(~finite)[0])
            value = array[place]
            raise InputError(
                f"tensor {name} holds a number that is not finite",
                where=self.spec.name,
                found=f"{value} at {[place[0] + first, *place[1:]]},"
                f" {array.size - finite.sum()} such here",
                expected="finite numbers",
                hint="the file is damaged, or its conversion overflowed; get or convert it again",
            )
        return array
