"""A model whose numbers are looked at as they are read: a plan of infinite ones says nothing."""

import numpy as np
from numpy.typing import NDArray

from lowering.source import ModelSource, PackedTensor
from profiles.errors import InputError
from runtime.model_spec import ModelSpec


class FiniteSource:
    """A ModelSource over another one; reading a tensor that is not finite is an ``InputError``."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @property
    def spec(self) -> ModelSpec:
        """Dimensions, tokens and digests."""
        return self._source.spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor that is known to hold finite numbers alone."""
        with np.errstate(over="ignore", invalid="ignore"):
            array = self._source.tensor(name)
            # The sum is not finite if a number is not, and is quicker to take
            suspicious = not np.isfinite(array.sum())
        if suspicious and not (finite := np.isfinite(array)).all():
            place = tuple(int(index) for index in np.argwhere(~finite)[0])
            raise InputError(
                f"tensor {name} holds a number that is not finite",
                where=self.spec.name,
                found=f"{array[place]} at {list(place)}, {array.size - finite.sum()} such in all",
                expected="finite numbers",
                hint="the file is damaged, or its conversion overflowed; get or convert it again",
            )
        return array

    def packed(self, name: str) -> PackedTensor | None:
        """As the other source has it."""
        return self._source.packed(name)

    def tokenizer_json(self) -> str:
        """As the other source has it."""
        return self._source.tokenizer_json()
