"""``plan inspect`` and ``plan explain``: a plan in views for people and for programs."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from planner.terminal import Terminal, write_file
from profiles.errors import InputError, nearest
from runtime.plan import ExecutionPlan
from runtime.plan_folder import read_plan


class View(StrEnum):
    """Views of ``plan inspect``."""

    TEXT = "text"
    JSON = "json"
    DOT = "dot"
    SVG = "svg"


def parse_view(name: str) -> View:
    """A view by name; ``InputError`` with the nearest one."""
    known = [view.value for view in View]
    if name.lower() not in known:
        raise InputError("unknown view", found=repr(name), hint=nearest(name.lower(), known))
    return View(name.lower())


def inspect_plan(terminal: Terminal, path: Path, view: str, output: Path | None) -> None:
    """Show the plan in the folder ``path``, or write the view to a file."""
    render = renderer(parse_view(view))
    _deliver(terminal, render(read_plan(path)), output)


def explain_plan(terminal: Terminal, path: Path, output: Path | None, as_json: bool) -> None:
    """Show why the plan is what it is."""
    from planner.explain import explain_data, explain_text

    plan = read_plan(path)
    text = _json_text(explain_data(plan)) if as_json else explain_text(plan)
    _deliver(terminal, text, output)


def renderer(view: View) -> Callable[[ExecutionPlan], str]:
    """The function that draws a view; modules are loaded for the one that is asked for."""
    match view:
        case View.TEXT:
            from planner.inspect.text import plan_text

            return plan_text
        case View.JSON:
            from planner.inspect.data import plan_data

            return lambda plan: _json_text(plan_data(plan))
        case View.DOT:
            from planner.inspect.dot import plan_dot

            return plan_dot
        case View.SVG:
            from planner.inspect.svg import plan_svg

            return plan_svg
        case _:
            assert_never(view)


def _json_text(data: object) -> str:
    import json

    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _deliver(terminal: Terminal, text: str, output: Path | None) -> None:
    if output is None:
        terminal.result(text)
    else:
        write_file(output, text)
        terminal.remark(f"wrote {output}")
