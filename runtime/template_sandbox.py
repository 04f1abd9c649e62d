"""The sandbox that chat templates run in: jinja2's own, and everything counted.

A template's syntax tree is changed before it is compiled, so that its loops and literals pass by
``template_limits``; calls, operators and filters do through the sandbox's hooks. Filters that chat
templates have no use for are not offered.
"""

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from runtime.template_limits import Budget

_MAX_INDENT = 32
_MAX_SEPARATORS = 8
_MAX_PATTERN_CHARS = 64

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim"),
    *("truncate", "unique", "upper", "urlencode", "wordcount"),
)
"""Of jinja2's filters those that are offered as they are."""


def sandbox() -> "Sandbox":
    """A sandbox for one rendering, with a budget of its own."""
    return Sandbox(Budget())


class _Generation(Extension):
    """``{% generation %}`` marks what to train on; here it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Opaque(Namespace):
    """``namespace()``; as text it does not tell what it holds, which could be without end."""

    def __repr__(self) -> str:
        return "namespace"


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox for data that cannot be changed, with every operation counted."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            # Folding constants would compute them before anything is counted
            optimized=False,
            finalize=budget.shown,
        )
        self._budget = budget
        self.globals: dict[str, Any] = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "range": budget.range,
            "dict": dict,
            "namespace": _Opaque,
        }
        self.filters: dict[str, Any] = _filters(self.filters, budget)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counting(self).visit(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``."""
        self._budget.check_operator(operator, left, right)
        return self._budget.made(super().call_binop(context, operator, left, right))

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        self._budget.step()
        args = self._budget.check_method(__obj, args)
        return self._budget.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """What stands for the method ``format`` of a text."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str):
            self._budget.check_format(owner)
        return super().wrap_str_format(value)


def _filters(plain: dict[str, Any], budget: Budget) -> dict[str, Callable[..., Any]]:
    """The filters that are offered; what they return counts as made."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        # Keeps the mark that says whether it takes the context
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return budget.made(function(*args, **kwargs))

        return call

    offered = {name: plain[name] for name in _FILTERS} | _own_filters(plain["indent"], budget)
    hidden = {"_each": budget.each, "_made": budget.made, "_concat": budget.concatenated}
    return {**{name: counted(function) for name, function in offered.items()}, **hidden}


def _own_filters(plain_indent: Callable[..., str], budget: Budget) -> dict[str, Callable[..., Any]]:
    """Filters that make much out of little, judged before they do."""

    def join(value: Any, d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            raise ValueError("join takes no attribute here; use map first")
        parts = [*budget.each(value)]
        budget.check_join(d, parts)
        return str(d).join(map(str, parts))

    def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
        budget.check_replacement(value, old, new)
        return str(value).replace(str(old), str(new), -1 if count is None else count)

    def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = len(width) if isinstance(width, str) else width
        if not size <= _MAX_INDENT:
            raise ValueError(f"indents by more than {_MAX_INDENT}")
        budget.spend(size * (1 + str(value).count("\n")))
        return plain_indent(value, width, first, blank)

    def to_json(value: Any, *args: Any, **kwargs: Any) -> str:
        budget.spend(budget.weigh(value))
        return _to_json(value, *args, **kwargs)

    return {"join": join, "replace": replace, "indent": indent, "tojson": to_json}


class _Counting(NodeTransformer):
    """Leads loops, literals, slices, joined text and plain text past the budget."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def _through(self, node: nodes.Expr, name: str) -> nodes.Filter:
        wrapped = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        wrapped.set_environment(self._environment)
        return wrapped

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """A loop takes its values one by one from the budget."""
        self.generic_visit(node)
        if node.recursive:
            raise ValueError("recursive loops are not offered to templates")
        if isinstance(node.iter, nodes.Expr):
            node.iter = self._through(node.iter, "_each")
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """Plain text becomes a value, which is counted each time that it is put out."""
        return self._through(nodes.Const(node.data, lineno=node.lineno), "_made")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """The operator ``~``."""
        self.generic_visit(node)
        return self._through(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """A slice is a copy."""
        self.generic_visit(node)
        return self._through(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        """``[a, b]``."""
        self.generic_visit(node)
        return self._through(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """``{a: b}``."""
        self.generic_visit(node)
        return self._through(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """``(a, b)``, but not where it is assigned to."""
        self.generic_visit(node)
        return self._through(node, "_made") if node.ctx == "load" else node


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not 0 <= indent <= _MAX_INDENT:
        raise ValueError(f"indents by more than {_MAX_INDENT}")
    if separators is not None and len("".join(separators)) > _MAX_SEPARATORS:
        raise ValueError(f"separators have more than {_MAX_SEPARATORS} characters")
    # jinja2's own filter escapes for HTML
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_CHARS or any(character.isdigit() for character in pattern):
        raise ValueError("strftime_now takes a short pattern without widths")
    return datetime.datetime.now().strftime(pattern)
