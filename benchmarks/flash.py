"""Budgets for ``flash.sh``, and its tables out of what ``plan bench --json`` measured.

    .venv/bin/python benchmarks/flash.py budgets memory.plan 0 20 40 60 80 100
    .venv/bin/python benchmarks/flash.py sweep OUT/sweep-*.plan

A plan's measurements lie beside it: ``sweep-20.plan`` and ``sweep-20.json``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_table import table

from planner.inspect.units import bytes_label, rate_label, ratio_label, three_digits, time_label
from profiles.errors import FulcrumError
from profiles.words import SubLayerId, SubLayerKind, kind_of
from runtime.plan import ExecutionPlan
from runtime.plan_folder import read_plan
from runtime.weight_ranges import SubLayerBytes, aligned, sub_layer_bytes

LEAST_SLOTS = 2
"""Of the ring, for each kind of sub-layer: one is computed with while the next is read."""
CHAINS = "ar,chain4,chain8,chain12"
GOALS = {"code": (6.0, 1.3), "mix": (3.5, 1.1)}
"""Over plain decoding from flash, and over a chain of 8, by set of prompts."""


def budget_bytes(plan: ExecutionPlan, resident: float) -> int:
    """``--dram-budget`` under which about the share ``resident`` of the layers can stay in memory.

    ``plan`` is the same model compiled into memory, with or without a draft model.
    """
    ranges = sub_layer_bytes(plan.tensors)
    layers = sum(aligned(part.bytes) for part in ranges.values())
    if resident >= 1:
        return plan.memory.total_bytes
    ring = LEAST_SLOTS * sum(_largest(ranges, kind) for kind in SubLayerKind)
    return plan.memory.total_bytes - round((1 - resident) * layers) + ring


def _largest(ranges: Mapping[SubLayerId, SubLayerBytes], kind: SubLayerKind) -> int:
    return max(aligned(part.bytes) for index, part in ranges.items() if kind_of(index) is kind)


def without_draft_bytes(plan: ExecutionPlan) -> int:
    """What ``plan`` takes but for its draft model: a rival with the same share of the target."""
    draft_kv = plan.draft.kv.bytes_per_token * plan.context if plan.draft else 0
    return plan.memory.total_bytes - plan.memory.draft_bytes - draft_kv


def modes(plan: ExecutionPlan) -> str:
    """What to measure of a plan with a draft model: chains, its trees, its own choice."""
    trees = ["tree"] if plan.trees else []
    online = ["online"] if plan.growths else []
    return ",".join([CHAINS, *trees, *online, "spec"])


def streamed_share(plan: ExecutionPlan) -> float:
    """Of the bytes of the layers, those that are read in every pass."""
    ranges = sub_layer_bytes(plan.tensors)
    streamed = plan.residency.streamed if plan.residency else ()
    return sum(ranges[i].bytes for i in streamed) / sum(part.bytes for part in ranges.values())


def sweep_table(entries: Sequence[tuple[ExecutionPlan, dict[str, Any]]]) -> str:
    """Plain decoding by how much stays in memory, measured beside simulated."""
    titles = ["budget", "peak memory", "resident", "flash a token", "flash"]
    titles += ["measured", "simulated", "ratio"]
    rows: list[list[str]] = []
    for plan, found in entries:
        ar = found["modes"]["ar"]
        rows.append(
            [
                bytes_label(plan.device.memory_budget_bytes),
                bytes_label(ar["decode_peak_bytes"] or found["peak_rss_bytes"]),
                f"{100 * (1 - streamed_share(plan)):.0f} %",
                bytes_label(round(ar["flash_bytes_per_token"])),
                f"{bytes_label(round(ar['flash_bytes_per_s']))}/s",
                rate_label(ar["tokens_per_s"]),
                rate_label(ar["predicted_tokens_per_s"]),
                ratio_label(ar["measured_over_predicted"]),
            ]
        )
    return table(titles, rows)


def pair_table(found: dict[str, Any]) -> str:
    """All modes of a pair and its rivals: rates, ratios to each rival, what a cycle spent."""
    rivals = list(found["rivals"])
    titles = ["", "tok/s", "vs ar", *(f"vs {name}" for name in rivals), "accepted", "drafted"]
    titles += ["draft", "verify", "exposed I/O", "expected", "flash a token", "simulated"]
    rows: list[list[str]] = []
    for name, mode in (found["modes"] | found["rivals"]).items():
        cycle, versus = mode["per_cycle"], mode["speedup_vs_rivals"]
        rows.append(
            [
                name,
                three_digits(mode["tokens_per_s"]),
                _ratio(mode["speedup_vs_ar"], mode["speedup_quartiles"]),
                *(_ratio(versus[r]["speedup"], versus[r]["quartiles"]) for r in rivals),
                three_digits(mode["mean_accepted"]),
                three_digits(mode["mean_drafted"]),
                time_label(cycle["draft_us"]),
                time_label(cycle["verify_us"]),
                time_label(cycle["exposed_io_us"]),
                time_label(cycle["expected_exposed_io_us"]),
                bytes_label(round(mode["flash_bytes_per_token"])),
                three_digits(mode["predicted_tokens_per_s"]),
            ]
        )
    return table(titles, rows)


def _ratio(median: float, quartiles: Sequence[float]) -> str:
    low, high = quartiles
    return f"{ratio_label(median)} ({low:.2f}-{high:.2f})"


def goals_table(found: dict[str, Any], prompts: str) -> str:
    """What was asked of a pair beside what it did, on the prompts ``code`` or ``mix``."""
    flash_goal, chain_goal = GOALS[prompts]
    spec, measured = found["modes"]["spec"], found["modes"]
    chains = {name: m["tokens_per_s"] for name, m in measured.items() if name.startswith("chain")}
    rows = [
        (f"over plain decoding, {name}", f"{flash_goal}x", ratio_label(versus["speedup"]))
        for name, versus in spec["speedup_vs_rivals"].items()
    ]
    if "chain8" in chains:
        over = spec["tokens_per_s"] / chains["chain8"]
        rows.append(("over a chain of 8", f"{chain_goal}x", ratio_label(over)))
    if chains:
        best = max(chains, key=lambda name: chains[name])
        over = spec["tokens_per_s"] / chains[best]
        rows.append((f"over the best chain, {best}", "1.00x", ratio_label(over)))
    rows.append(("over what is simulated", "0.95x", ratio_label(spec["measured_over_predicted"])))
    forecast, total = found["forecast_speedup_vs_ar"], spec["total_speedup_vs_ar"]
    rows.append(("over ar in all", f"forecast {ratio_label(forecast)}", ratio_label(total)))
    exposed = ratio_label(spec["exposed_over_expected"])
    rows.append(("exposed over expected I/O", "0.9-1.1x", exposed))
    rows.append(("token-exact", "yes", "yes" if spec["token_exact"] else "no"))
    return table((f"{found['prompts']} prompts, spec", "goal", "found"), rows)


def measurements(plan: Path) -> dict[str, Any]:
    """What lies beside a plan."""
    return json.loads(plan.with_suffix(".json").read_bytes())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    budgets = actions.add_parser("budgets", help="percent resident and budget, a line each")
    budgets.add_argument("plan", type=Path)
    budgets.add_argument("percent", type=int, nargs="+")
    for name in ("without-draft", "modes"):
        actions.add_parser(name).add_argument("plan", type=Path)
    actions.add_parser("sweep").add_argument("plans", type=Path, nargs="+")
    pair = actions.add_parser("pair")
    pair.add_argument("json", type=Path)
    pair.add_argument("prompts", choices=GOALS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is asked for; the exit code."""
    asked = _parser().parse_args(arguments)
    actions: dict[str, Callable[[argparse.Namespace], str]] = {
        "budgets": _budgets,
        "without-draft": lambda a: str(without_draft_bytes(read_plan(a.plan))),
        "modes": lambda a: modes(read_plan(a.plan)),
        "sweep": lambda a: sweep_table([(read_plan(p), measurements(p)) for p in a.plans]),
        "pair": _pair,
    }
    try:
        print(actions[asked.action](asked))
    except FulcrumError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _budgets(asked: argparse.Namespace) -> str:
    plan = read_plan(asked.plan)
    return "\n".join(f"{p} {budget_bytes(plan, p / 100)}" for p in asked.percent)


def _pair(asked: argparse.Namespace) -> str:
    found = json.loads(asked.json.read_bytes())
    return f"{pair_table(found)}\n\n{goals_table(found, asked.prompts)}"


if __name__ == "__main__":
    raise SystemExit(main())
