"""The simulator against Lever's Table 6 (arXiv 2605.16786): tokens a second by share in DRAM.

Per model and data set two constants are fitted to six numbers: the tokens of a cycle, and what a
cycle computes besides the pass that Table 1 prices (drafting, the head, the pass being wide). All
else is given: layers, the I/O and the compute of a one-token pass on a OnePlus 12 (Table 1), the
flash rate of the profile ``oneplus12``, the first x % of the layers in memory. Layers stream whole.

The paper does not say how far its reader runs ahead, so three readers are compared: ``double``
holds the layer that computes and the next one; ``ahead`` reads on while the draft runs, as far as
time allows; ``slowed`` does so too and slows computing down meanwhile, by one share for all rows,
which makes a ninth constant for 24 numbers.

    python benchmarks/lever_table6.py
"""

import argparse
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from markdown_table import table

from planner.lanes import CycleWork, Flash, Role, Stage, Task
from planner.residency import fastest, read_sizes
from planner.simulate import simulate
from profiles.profile import load_profile
from profiles.words import SubLayerId

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the target's layers in DRAM."""


class Model(NamedTuple):
    """A target of Lever's Table 1 on the OnePlus 12."""

    layers: int
    compute_us: float
    io_us: float


class Row(NamedTuple):
    """A row of Lever's Table 6."""

    model: str
    data: str
    tokens_per_s: tuple[float, ...]
    """By ``SHARES``."""


class Reader(NamedTuple):
    """How far the flash reads ahead, and what that costs."""

    name: str
    slots: int
    slows_compute: float


class Fit(NamedTuple):
    """The two constants of a row and what follows from them."""

    tokens: float
    other_us: float
    tokens_per_s: tuple[float, ...]
    error: float
    """Mean over the shares of the relative distance from the paper."""


MODELS = {
    "Llama-3.1-8B": Model(32, 93.2e3, 990.6e3),
    "Qwen3-8B": Model(36, 96.6e3, 953.4e3),
}
TABLE_6 = (
    Row("Qwen3-8B", "MBPP", (1.753, 2.010, 2.473, 2.812, 3.120, 3.401)),
    Row("Llama-3.1-8B", "MBPP", (2.918, 3.704, 4.214, 4.619, 4.922, 5.494)),
    Row("Qwen3-8B", "GSM8K", (1.741, 1.996, 2.453, 2.791, 3.099, 3.377)),
    Row("Llama-3.1-8B", "GSM8K", (2.225, 2.821, 3.203, 3.508, 3.736, 4.194)),
)
DOUBLE, AHEAD = Reader("double", 2, 0.0), Reader("ahead", 36, 0.0)
OTHER_US = range(0, 2_000_000, 20_000)
SLOWS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


@cache
def flash_bytes_per_s() -> float:
    """Of the phone that Table 6 was measured on."""
    return fastest(read_sizes(load_profile("oneplus12"))).bytes_per_s


def cycle_us(model: Model, share: float, other_us: float, reader: Reader) -> float:
    """The steady cycle with ``share`` of the layers in memory, simulated."""
    rate = flash_bytes_per_s()
    layer_bytes = round(model.io_us * rate / 1e6 / model.layers)
    pinned = round(share * model.layers)
    stages = tuple(
        Stage(
            SubLayerId(2 * layer + 1),
            *("npu", model.compute_us / model.layers, 0.0),
            0 if layer < pinned else layer_bytes,
        )
        for layer in range(model.layers)
    )
    draft = Task("cpu", other_us, Role.DRAFT)
    flash = Flash(rate, reader.slows_compute)
    return simulate(CycleWork((draft,), stages, ()), reader.slots, flash).cycle_us


def fitted(row: Row, reader: Reader, others_us: Sequence[float]) -> Fit:
    """The constants of least mean relative error; the tokens are exact at one share."""
    paper = np.array(row.tokens_per_s)
    best: Fit | None = None
    for other_us in others_us:
        seconds = np.array(
            [cycle_us(MODELS[row.model], x, float(other_us), reader) / 1e6 for x in SHARES]
        )
        for tokens in paper * seconds:
            speeds = tokens / seconds
            error = float(np.mean(np.abs(speeds / paper - 1)))
            if best is None or error < best.error:
                best = Fit(float(tokens), float(other_us), tuple(map(float, speeds)), error)
    if best is None:
        raise ValueError("nothing to try")
    return best


def report(reader: Reader, fits: Sequence[Fit]) -> str:
    """Paper, simulation and error of each number."""
    header = ["row", "tokens/cycle", "other ms", *(f"{share:.0%}" for share in SHARES), "mean"]
    lines: list[list[str]] = []
    for row, fit in zip(TABLE_6, fits, strict=True):
        cells = [
            f"{paper:.2f} / {ours:.2f} ({ours / paper - 1:+.0%})"
            for paper, ours in zip(row.tokens_per_s, fit.tokens_per_s, strict=True)
        ]
        constants = [f"{fit.tokens:.2f}", f"{fit.other_us / 1e3:.0f}"]
        lines.append([f"{row.model} {row.data}", *constants, *cells, f"{fit.error:.1%}"])
    return f"**{title(reader, fits)}**\n\n{table(header, lines)}"


def title(reader: Reader, fits: Sequence[Fit]) -> str:
    """The reader with its mean and its largest error."""
    largest = max(
        abs(ours / paper - 1)
        for row, fit in zip(TABLE_6, fits, strict=True)
        for paper, ours in zip(row.tokens_per_s, fit.tokens_per_s, strict=True)
    )
    mean = sum(fit.error for fit in fits) / len(fits)
    slows = f", computing {reader.slows_compute:.0%} slower" * bool(reader.slows_compute)
    return f"{reader.name}{slows}: mean error {mean:.1%}, largest {largest:.1%}"


def main() -> None:
    """Fit all rows with all readers and print the tables."""
    argparse.ArgumentParser(description="Fits the simulator to Lever's Table 6.").parse_args()
    for reader in (DOUBLE, AHEAD):
        print(report(reader, [fitted(row, reader, OTHER_US) for row in TABLE_6]), end="\n\n")
    tried: list[tuple[float, Reader, list[Fit]]] = []
    for slows in SLOWS:
        reader = Reader("slowed", AHEAD.slots, slows)
        fits = [fitted(row, reader, OTHER_US) for row in TABLE_6]
        tried.append((sum(fit.error for fit in fits), reader, fits))
    _, reader, fits = min(tried)
    print(report(reader, fits))


if __name__ == "__main__":
    main()
