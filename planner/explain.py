"""Why a plan is what it is: every decision with its rival and what would flip it."""

import math
import re

from planner.inspect.text import COLUMNS, columns, field
from planner.inspect.units import clean, three_digits
from runtime.plan import Candidate, Decision, ExecutionPlan, Forecast
from runtime.plan_cycles import DraftSource

_LABEL = 13
_OTHERS_SHOWN = 4
_NAME_LIMIT = 60
_CYCLE = re.compile(r"cycle\[(\d+)\]")


def explain_text(plan: ExecutionPlan) -> str:
    """Every decision in the plan's order, then what all of them rest on; 100 columns at most."""
    blocks = [_title(plan), *(_decision_block(plan, one) for one in plan.decisions)]
    if not plan.decisions:
        blocks.append("No decisions recorded.")
    if plan.assumptions:
        assumed = [field("-", clean(text), label_width=2) for text in plan.assumptions]
        blocks.append("\n".join(["Assumptions", *(line for lines in assumed for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def explain_data(plan: ExecutionPlan) -> dict[str, object]:
    """The same as plain data.

    Keys: ``model``, ``device``, ``assumptions`` and ``decisions``, each with ``name``,
    ``chosen``, ``objective`` (with its unit), ``value``, ``runner_up`` (``name``, ``value``;
    null without a rival), ``margin_percent`` (how far the choice is ahead of it; negative where
    the rival's objective is better; null without a rival or a ratio), ``solver``, ``gap``,
    ``candidates``, ``flips_when``, ``off_below_tokens`` (``off_below``) and ``note``.
    """
    return {
        "model": plan.model.name,
        "device": plan.device.name,
        "decisions": [_decision_data(plan, one) for one in plan.decisions],
        "assumptions": list(plan.assumptions),
    }


def runner_up(decision: Decision) -> Candidate | None:
    """The best candidate that was not chosen; None for a decision without a rival."""
    rivals = (rival for rival in decision.candidates if rival.name != decision.chosen)
    return next(rivals, None)


def margin_percent(decision: Decision, rival: Candidate) -> float | None:
    """How far the choice is ahead of a rival, in percent of the rival's objective.

    Candidates come best first, so their order says whether the objective is to be large or
    small. A rival listed before the choice has the better objective: the margin is negative.
    None where there is no ratio to speak of.
    """
    if not rival.value or not math.isfinite(rival.value) or not math.isfinite(decision.value):
        return None
    distance = 100 * abs(decision.value - rival.value) / abs(rival.value)
    names = [candidate.name for candidate in decision.candidates]
    behind = decision.chosen in names and names.index(rival.name) < names.index(decision.chosen)
    return -distance if behind and distance else distance


def off_below(plan: ExecutionPlan, decision: Decision) -> float | None:
    """Tokens per cycle below which plain decoding is faster than a bucket's draft, by its forecast.

    None for a decision that does not choose a draft. ``flips_when`` names the nearest rival, which
    may be another draft.
    """
    forecast = _drafting(plan, decision)
    return forecast.cycle_us / forecast.ar_us if forecast and forecast.ar_us else None


def _drafting(plan: ExecutionPlan, decision: Decision) -> Forecast | None:
    """What is forecast of the cycle that a decision chose, if it drafts."""
    match = _CYCLE.fullmatch(decision.name)
    if match is None or int(match[1]) >= len(plan.buckets):
        return None
    bucket = plan.buckets[int(match[1])]
    return None if bucket.cycle.draft is DraftSource.OFF else bucket.forecast


def _off_line(plan: ExecutionPlan, decision: Decision) -> str | None:
    forecast, tokens = _drafting(plan, decision), off_below(plan, decision)
    if forecast is None or tokens is None:
        return None
    return (
        f"a cycle commits fewer than {three_digits(tokens)} tokens; "
        f"{three_digits(forecast.tokens_per_cycle)} are forecast"
    )


def _title(plan: ExecutionPlan) -> str:
    model, device = clean(plan.model.name, 40), clean(plan.device.name, 40)
    return f"Why this plan: {model} on {device}, {plan.part_formats}"


def _decision_block(plan: ExecutionPlan, decision: Decision) -> str:
    pairs = [
        ("chose", clean(decision.chosen)),
        ("objective", f"{clean(decision.objective)}: {three_digits(decision.value)}"),
        ("runner-up", _runner_up_line(decision)),
        ("solver", f"{clean(decision.solver)}; {_gap_line(decision.gap)}"),
        ("flips when", clean(decision.flips_when) or "not known"),
    ]
    if off_line := _off_line(plan, decision):
        pairs.append(("off wins if", off_line))
    if decision.note:
        pairs.append(("note", clean(decision.note)))
    lines = [clean(decision.name, _NAME_LIMIT)]
    for label, text in pairs:
        lines.extend(field(label, text, label_width=_LABEL))
        if label == "runner-up":
            lines.extend(_others(decision))
    return "\n".join(lines)


def _runner_up_line(decision: Decision) -> str:
    rival = runner_up(decision)
    return "none" if rival is None else f"{clean(rival.name)}: {_rival_value(decision, rival)}"


def _rival_value(decision: Decision, rival: Candidate) -> str:
    return f"{three_digits(rival.value)} ({_margin_words(decision, rival)})"


def _margin_words(decision: Decision, rival: Candidate) -> str:
    margin = margin_percent(decision, rival)
    if margin is None:
        return "no ratio"
    if margin == 0:
        return "equal; the tie-break decided"
    if margin < 0:
        return f"better by {three_digits(-margin)} %, yet not chosen"
    return f"the choice is {three_digits(margin)} % better"


def _others(decision: Decision) -> list[str]:
    """The rivals after the runner-up, a line each."""
    rival = runner_up(decision)
    others = [
        other for other in decision.candidates if other.name != decision.chosen and other != rival
    ]
    if not others:
        return []
    indent = 2 + _LABEL
    room = COLUMNS - indent - 45
    rows = [
        (clean(other.name, room), three_digits(other.value), f"({_margin_words(decision, other)})")
        for other in others[:_OTHERS_SHOWN]
    ]
    lines = columns(rows, left=1, indent=indent)
    lines[0] = f"  {'others':<{_LABEL}}{lines[0].lstrip()}"
    hidden = len(others) - len(rows)
    return [*lines, f"{' ' * indent}and {hidden} more"] if hidden else lines


def _gap_line(gap: float | None) -> str:
    if gap is None:
        return "no bound known"
    return "optimal" if gap == 0 else f"within {three_digits(100 * gap)} % of the optimum"


def _decision_data(plan: ExecutionPlan, decision: Decision) -> dict[str, object]:
    rival = runner_up(decision)
    return {
        "name": decision.name,
        "chosen": decision.chosen,
        "objective": decision.objective,
        "value": decision.value,
        "runner_up": None if rival is None else {"name": rival.name, "value": rival.value},
        "margin_percent": None if rival is None else margin_percent(decision, rival),
        "solver": decision.solver,
        "gap": decision.gap,
        "candidates": [{"name": one.name, "value": one.value} for one in decision.candidates],
        "flips_when": decision.flips_when,
        "off_below_tokens": off_below(plan, decision),
        "note": decision.note,
    }
