"""Which token a row of logits gives: greedy, or sampled with noise that is keyed by position.

A sampled token is ``argmax(logits / temperature + Gumbel noise)`` over the tokens that top-k and
top-p keep. The noise of a position is a function of (seed, position) alone, so the token is a pure
function of (logits row, seed, position, settings): the draft and the target agree often, and a
speculative decode gives the very tokens that plain decoding gives.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from profiles.errors import IncompatibleError, InputError

GENERATOR = "philox4x64-10"
"""Generator of the noise: key (seed, position), counter from 0, draw i belongs to token i.

Raw 64-bit draws are used because numpy keeps them stable over its versions, unlike its floats.
"""

MIN_TEMPERATURE = 1e-3
MAX_TEMPERATURE = 1e3
_SEEDS = 1 << 64
COLUMNS_OF = 64
"""Elements of a column in the search for a row's largest."""

_Floats: TypeAlias = NDArray[np.float32]
_Draws: TypeAlias = NDArray[np.uint64]
_Indices: TypeAlias = NDArray[np.int64]


class Sampling(msgspec.Struct, frozen=True):
    """How to choose tokens; InputError for a value out of range."""

    temperature: float = 0.0
    """0 is greedy, and then nothing else matters."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 is off."""
    top_p: float = 1.0
    """Of those, keep the fewest most probable that hold this share of the mass; 1 is off."""
    seed: int = 0

    def __post_init__(self) -> None:
        temperature = self.temperature
        if not (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
            expected = f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
            raise _out_of_range("temperature", temperature, expected)
        if self.top_k < 0:
            raise _out_of_range("top_k", self.top_k, "0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise _out_of_range("top_p", self.top_p, "above 0, at most 1 (off)")
        if not 0 <= self.seed < _SEEDS:
            raise _out_of_range("seed", self.seed, "0 to 2^64 - 1")


GREEDY = Sampling()


class Candidates(NamedTuple):
    """What a draft holds for the next token, the likeliest first."""

    ids: tuple[int, ...]
    """All different."""
    probabilities: tuple[float, ...]
    """The draft's, over all tokens; so they sum to 1 at most."""


def choose(logits: _Floats, positions: Sequence[int], sampling: Sampling) -> _Indices:
    """The token that each row gives.

    Args:
        logits: [n, vocab] f32; -inf excludes a token.
        positions: [n], for each row the absolute position of the token that it chooses.
        sampling: Equal logits rank by token id, lowest first.

    Returns:
        [n] token ids. A row's id does not depend on which rows share the call.

    Raises:
        IncompatibleError: A row has a NaN, an infinity or nothing but -inf; names the position.
    """
    if logits.ndim != 2 or len(logits) != len(positions):
        raise ValueError(f"logits {logits.shape} do not match {len(positions)} positions")
    # argmax takes the first of equals, and a NaN for larger than all else
    best = logits.argmax(axis=1).astype(np.int64, copy=False)
    for row, token, position in zip(logits, best, positions, strict=True):
        _check_finite(row[token], position)
    if sampling.temperature == 0:
        return best
    # A spread of logits beyond f32 becomes -inf, which means what it should
    with np.errstate(over="ignore"):
        tokens = [_sample(r, p, sampling) for r, p in zip(logits, positions, strict=True)]
    return np.array(tokens, dtype=np.int64)


def ranked(logits: _Floats, position: int, sampling: Sampling, count: int) -> Candidates:
    """The ``count`` tokens that ``choose`` comes closest to choosing from one row [vocab].

    Greedy ranks by logit. Sampled, the target's own noise of ``position`` is added first: a token
    that the draft holds for likely but that the noise speaks against is no use. Probabilities are
    the softmax of what is ranked. Rank 0 is the very token of ``choose``; excluded tokens do not
    appear, so there may be fewer than ``count``. Errors as for ``choose``.
    """
    _check_finite(logits[int(logits.argmax())], position)
    if sampling.temperature == 0:
        return _best(logits, None, 0.0, count)
    with np.errstate(over="ignore", divide="ignore"):
        kept = kept_tokens(logits, sampling)
        last = len(logits) - 1 if kept is None else int(kept[-1])
        draws = _generator(sampling, position).random_raw(last + 1)
        if kept is not None:
            logits, draws = logits[kept], draws[kept]
        left, rest = _contenders(logits, draws, sampling.temperature, count)
        scores = _scores(logits, draws, left, sampling.temperature)
    return _best(scores, left if kept is None else kept[left], rest, count)


def _best(
    scores: _Floats | NDArray[np.float64], ids: _Indices | None, rest: float, count: int
) -> Candidates:
    """Ranked by score, of equals the first; ``ids`` of None are the places themselves.

    ``rest`` is the sum of exp(score) over tokens that are not listed.
    """
    found = _largest(scores, count)
    found = found[np.argsort(-scores[found], kind="stable")]
    found = found[scores[found] > -np.inf]
    peak = scores[found[0]]
    total = np.exp(scores - peak).sum(dtype=np.float64) + rest * np.exp(-np.float64(peak))
    shares = np.exp(scores[found] - peak) / total
    tokens = found if ids is None else ids[found]
    return Candidates(tuple(tokens.tolist()), tuple(shares.tolist()))


def _contenders(
    logits: _Floats, draws: _Draws, temperature: float, count: int
) -> tuple[_Indices, float]:
    """Tokens that may be among the ``count`` best, ascending, and the sum of exp(score) over all
    others. Who cannot beat the worst of the ``count`` most probable is out, as in ``_race``."""
    floor = _scores(logits, draws, _largest(logits, count), temperature).min()
    # Further down weights vanish in f32, and would not tell apart who may still win
    if floor < -50:
        return np.arange(len(logits), dtype=np.int64), 0.0
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    uniform = _upper_halves(draws)
    left = np.flatnonzero(uniform <= weights * np.float32(1.001 * np.exp(-floor)))
    rest = weights / -np.log1p(-uniform)
    rest[left] = 0
    return left, float(rest.sum(dtype=np.float64))


def kept_tokens(logits: _Floats, sampling: Sampling) -> _Indices | None:
    """The ids that top-k, then top-p leave of one row [vocab], ascending; None if both are off.

    Top-k keeps exactly k. Top-p looks at probabilities at the temperature, among what top-k left.
    Needs a temperature above 0.
    """
    kept: _Indices | None = None
    if 0 < sampling.top_k < len(logits):
        kept = _largest(logits, sampling.top_k)
    if sampling.top_p < 1:
        ranked = logits if kept is None else logits[kept]
        nucleus = _nucleus(ranked, sampling.temperature, sampling.top_p)
        kept = nucleus if kept is None else kept[nucleus]
    return kept


def _sample(row: _Floats, position: int, sampling: Sampling) -> int:
    generator = _generator(sampling, position)
    kept = kept_tokens(row, sampling)
    if kept is None:
        return _race(row, generator.random_raw(len(row)), sampling.temperature)
    draws = generator.random_raw(int(kept[-1]) + 1)[kept]
    return int(kept[_race(row[kept], draws, sampling.temperature)])


def _generator(sampling: Sampling, position: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([sampling.seed, position], dtype=np.uint64))


def _race(logits: _Floats, draws: _Draws, temperature: float) -> int:
    """Index of the largest ``logits / temperature - log(E)``, E being exponential in the draws.

    ``-log(E)`` is Gumbel noise. With w = exp((logit - largest logit) / temperature) the winner has
    the least E / w, and E is never below the uniform u that it is made from: a token whose u
    exceeds w times the E of the most probable token has lost, and costs no logarithm.
    """
    best = int(logits.argmax())
    weights = np.exp((logits - logits[best]) / np.float32(temperature))
    # 1e-3 is far more than the rounding of u and w
    to_beat = np.float32(1.001 * _exponential(draws[best : best + 1])[0])
    left = np.flatnonzero(_upper_halves(draws) <= weights * to_beat)
    return int(left[_scores(logits, draws, left, temperature).argmax()])


def _scores(
    logits: _Floats, draws: _Draws, at: _Indices, temperature: float
) -> NDArray[np.float64]:
    """``(logit - largest logit) / temperature`` with noise added, of the tokens ``at``."""
    offsets = logits[at].astype(np.float64) - np.float64(logits.max())
    return offsets / temperature - np.log(_exponential(draws[at]))


def _upper_halves(draws: _Draws) -> _Floats:
    """Uniform variates, never above those of the whole draws, and ten times as fast."""
    return (draws >> np.uint64(32)).astype(np.uint32).astype(np.float32) * np.float32(2.0**-32)


def _exponential(draws: _Draws) -> NDArray[np.float64]:
    """Exponential variates; small ones, which win, are the finest."""
    uniform = draws.astype(np.float64) * 2.0**-64 + 2.0**-65
    return -np.log1p(-np.minimum(uniform, 1 - 2.0**-53))


def _largest(logits: _Floats | NDArray[np.float64], count: int) -> _Indices:
    """Ascending indices of the ``count`` largest; of equals the first."""
    if count >= len(logits):
        return np.arange(len(logits), dtype=np.int64)
    near = _near_largest(logits, count)
    if len(near) < len(logits):
        return near[_largest(logits[near], count)]
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int64, copy=False)


def _near_largest(logits: _Floats | NDArray[np.float64], count: int) -> _Indices:
    """Ascending indices that hold the ``count`` largest and their equals, most often few more.

    The rows of a table of ``COLUMNS_OF`` are compared at once: ``count`` columns whose largest is
    no less than x say that so many elements are. Half the time of a partition of a vocabulary.
    """
    columns = len(logits) // COLUMNS_OF
    if count >= columns:
        return np.arange(len(logits), dtype=np.int64)
    tops = logits[: columns * COLUMNS_OF].reshape(COLUMNS_OF, columns).max(axis=0)
    floor = np.partition(tops, columns - count)[columns - count]
    return np.flatnonzero(logits >= floor).astype(np.int64, copy=False)


def _nucleus(logits: _Floats, temperature: float, share: float) -> _Indices:
    """Ascending indices of the fewest largest that hold ``share`` of the mass."""
    peak, scale = logits.max(), np.float32(temperature)
    target = share * np.exp((logits - peak) / scale).sum(dtype=np.float64)
    # Most often a few tokens hold the share; sorting a whole vocabulary takes milliseconds
    for size in (512, len(logits)):
        first = max(len(logits) - size, 0)
        ranked = np.sort(np.partition(logits, first)[first:])[::-1]
        mass = np.cumsum(np.exp((ranked - peak) / scale), dtype=np.float64)
        if mass[-1] >= target:
            break
    return _largest(logits, int(np.searchsorted(mass, target)) + 1)


def _check_finite(largest: np.float32, position: int) -> None:
    if not np.isfinite(largest):
        raise IncompatibleError(
            "cannot choose a token",
            where=f"position {position}",
            found=f"logit {largest}",
            expected="finite logits",
            hint="the weights are damaged or overflow; compile again from another copy",
        )


def _out_of_range(name: str, found: object, expected: str) -> InputError:
    return InputError("out of range", where=name, found=found, expected=expected)
