"""Times the passes of a compiled plan by width and context, beside what the plan predicts.

    .venv/bin/python benchmarks/pass_widths.py smollm2-135m-host.plan

Widths are interleaved and repeated; a cell is the median in milliseconds, without the LM head, and
then the plan's prediction. The last lines give the head, a pass with every sub-layer switched off
(what the call itself costs) and a draft under the plan's first skip mask.
"""

import argparse
import statistics
import time
from collections.abc import Callable

from runtime.cycle import commit_width
from runtime.kv_cache import KvCache
from runtime.plan_tables import PassKind
from runtime.pricing import PriceList
from runtime.session import Session

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1024)


def median_ms(runs: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median time of each of ``runs``, taken in turns."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeat + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn > 1:
                samples[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with Session(args.plan, threads=args.threads) as session:
        plan, target = session.plan, session._target
        prices = PriceList(plan.tables)
        for context in CONTEXTS:
            cache = KvCache(plan.model, plan.kv.growth_tokens, 1 << 16)
            cache.reserve(context + max(WIDTHS))
            runs: dict[str, Callable[[], object]] = {}
            for width in WIDTHS:
                ids = [1] * width
                runs[str(width)] = lambda ids=ids, context=context, cache=cache: target.run_chain(
                    ids, context, cache, width=commit_width(plan.numerics, len(ids))
                )
            for name, ms in median_ms(runs, args.repeat).items():
                width = commit_width(plan.numerics, int(name))
                told = prices.pass_us(PassKind.VERIFY, 0, width, context) / 1e3
                print(f"context {context:5d} width {name:>2}: {ms:7.2f} ms, predicted {told:7.2f}")
        hidden = target.embed([1])
        cache = KvCache(plan.model, plan.kv.growth_tokens, 1 << 16)
        cache.reserve(CONTEXTS[0] + 1)
        off = target.active(range(plan.model.sub_layers))
        others: dict[str, Callable[[], object]] = {
            "head, 1 row": lambda: target.logits(hidden),
            "all switched off": lambda: target.run_chain([1], CONTEXTS[0], cache, off),
        }
        if len(plan.masks) > 1:
            skip = target.active(plan.masks[1].skipped)
            others["skip mask 1"] = lambda: target.run_chain([1], CONTEXTS[0], cache, skip)
        for name, ms in median_ms(others, args.repeat).items():
            print(f"{name}: {ms:.3f} ms")


if __name__ == "__main__":
    main()
