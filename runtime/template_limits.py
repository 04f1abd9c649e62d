"""What one rendering of a chat template may use: steps, time, and sizes of what it makes.

A sandbox keeps a template from the rest of the program, but not from looping for hours or filling
the memory. So every loop, call and value of a template passes here. Whatever makes much out of
little (a repetition, a wide format) is judged before it is made.
"""

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

MAX_STEPS = 100_000
"""Rounds of loops and calls in one rendering."""
MAX_SECONDS = 3.0
"""Of one thread's processor time."""
MAX_VALUE = 1 << 22
"""Characters of one value, with all that it holds, as often as it holds it."""
MAX_MADE = 1 << 26
"""Characters of all values made in one rendering."""
_ELEMENT = 8
"""Characters that an element of a list or dictionary counts as."""
_MAX_INTEGER_BITS = 4096
_MAX_EXPONENT = 64

_WIDE = re.compile(r"[0-9]{4}|\{[^{}]*\{|\*")
"""In a format: a width that could be large, or one that is only known later."""
_AMPLIFYING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format_map", "encode"}
)
"""Methods of text that chat templates have no use for and that make much of little."""


class Budget:
    """What is left to one rendering; each method raises ValueError when it is too little."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._made = MAX_MADE
        self._end = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """One round of a loop, or one call."""
        self._steps -= 1
        if self._steps < 0:
            raise ValueError(f"it takes more than {MAX_STEPS} steps")
        self._check_time()

    def each(self, values: Iterable[Any]) -> Iterator[Any]:
        """``values``, counted as a loop takes them."""
        for value in values:
            self.step()
            yield value

    def range(self, *bounds: int) -> range:
        """Python's ``range``, of limited length."""
        steps = range(*bounds)
        if len(steps) > MAX_STEPS:
            raise ValueError(f"it counts through more than {MAX_STEPS} numbers")
        return steps

    def made(self, value: Any) -> Any:
        """``value``, once it is known to be small enough; counts towards all that is made."""
        self.weigh(value)
        if isinstance(value, (list, tuple, dict)):
            self.spend(_ELEMENT * len(cast("list[Any]", value)))
        else:
            self.spend(len(value) if isinstance(value, str) else 1)
        return value

    def spend(self, size: int) -> None:
        """Takes ``size`` from what may be made."""
        if size > MAX_VALUE:
            raise ValueError(f"a value exceeds {MAX_VALUE} characters")
        self._made -= size
        if self._made < 0:
            raise ValueError(f"it makes more than {MAX_MADE} characters")

    def weigh(self, value: Any) -> int:
        """Characters of ``value`` and its elements, shared parts as often as they occur."""
        weight = 0
        # One counts what is written out: a list of lists of lists may share all its parts
        stack: list[Any] = [value]
        while stack:
            part = stack.pop()
            if isinstance(part, str):
                weight += len(part)
            elif isinstance(part, (list, tuple)):
                stack.extend(cast("Iterable[Any]", part))
            elif isinstance(part, dict):
                items = cast("dict[Any, Any]", part)
                stack.extend(items.keys())
                stack.extend(items.values())
            elif isinstance(part, int) and part.bit_length() > _MAX_INTEGER_BITS:
                raise ValueError(f"a number has more than {_MAX_INTEGER_BITS} bits")
            weight += _ELEMENT
            if weight + len(stack) > MAX_VALUE:
                raise ValueError(f"a value exceeds {MAX_VALUE} characters")
            if not len(stack) & 0x3FF:
                self._check_time()
        return weight

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Judges ``left operator right`` before it is computed."""
        if operator == "**" and not abs(right) <= _MAX_EXPONENT:
            raise ValueError(f"exponent {right} exceeds {_MAX_EXPONENT}")
        if operator == "%" and isinstance(left, str):
            self.check_format(left)
        if operator == "*":
            for repeated, count in ((left, right), (right, left)):
                if isinstance(repeated, (str, list, tuple)) and isinstance(count, int):
                    self.spend(max(0, len(cast("str", repeated)) * count))

    def check_method(self, method: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Judges a call of a value's own method before it is made; the arguments to make it with.

        What a join takes one by one is taken here, since it has to be judged whole.
        """
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and arguments:
                arguments = ([*self.each(arguments[0])], *arguments[1:])
            self._check_text_method(owner, name, arguments)
        elif isinstance(owner, (int, float, complex, bytes, bytearray)):
            raise ValueError(f"the method {name!r} is not offered to templates")
        return arguments

    def _check_text_method(self, text: str, name: str, arguments: tuple[Any, ...]) -> None:
        if name in _AMPLIFYING:
            raise ValueError(f"the method {name!r} is not offered to templates")
        if name == "replace" and len(arguments) >= 2:
            self.check_replacement(text, *arguments[:2])
        if name == "join" and arguments:
            self.check_join(text, arguments[0])

    def check_format(self, pattern: str) -> None:
        """Refuses widths of four digits, and those that are arguments themselves."""
        if _WIDE.search(pattern):
            raise ValueError("a format asks for a width that is too large")

    def check_replacement(self, text: Any, old: Any, new: Any) -> None:
        """Judges the length of ``text`` with ``old`` replaced by ``new``."""
        text, old, new = str(text), str(old), str(new)
        self.spend(len(text) + text.count(old) * len(new))

    def check_join(self, separator: Any, parts: Iterable[Any]) -> None:
        """Judges the length of a join."""
        self.spend(sum(self.weigh(part) + len(str(separator)) for part in parts))

    def concatenated(self, parts: Iterable[Any]) -> str:
        """The texts of ``parts`` one after the other: the operator ``~``."""
        made = list(parts)
        self.spend(self.weigh(made))
        return "".join(map(str, made))

    def shown(self, value: Any) -> Any:
        """What ``{{ }}`` puts out; it may be collected, so it counts as made."""
        self.spend(self.weigh(value))
        return value

    def _check_time(self) -> None:
        if time.thread_time() > self._end:
            raise ValueError(f"it takes more than {MAX_SECONDS:g} s")
