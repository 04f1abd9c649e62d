"""Shapes and text of an SVG picture, with an estimate of how wide a text is."""

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

INK = "#1f2933"
MUTED = "#616e7c"
LINE = "#8a97a6"
RULE = "#d5dbe1"
BAND = "#f5f7f9"
WHITE = "#ffffff"

FONT = "Helvetica Neue, Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"
LINE_HEIGHT = 1.35

_NARROW = frozenset(" .,:;'|!ijlftrI()[]/-·")
_BROAD = frozenset("mwMW%@—")
_ARROWS = (
    f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    f'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
    f'<path d="M0 0.8 L8 4 L0 7.2 z" fill="{LINE}"/></marker>'
    f'<marker id="tail" viewBox="0 0 8 8" refX="1" refY="4" markerWidth="7" '
    f'markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
    f'<path d="M8 0.8 L0 4 L8 7.2 z" fill="{LINE}"/></marker></defs>'
)


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Approximate width in pixels, on the generous side for common sans-serif fonts."""
    ems = 0.0
    for char in text:
        if char in _NARROW:
            ems += 0.34
        elif char in _BROAD:
            ems += 0.9
        elif char.isupper():
            ems += 0.7
        else:
            # East Asian and other wide scripts fill a whole em
            ems += 0.58 if ord(char) < 0x2E80 else 1.0
    return ems * size * (1.08 if bold else 1.0)


def fitting(text: str, room: float, size: float, *, bold: bool = False) -> str:
    """``text``, or its longest start with an ellipsis that fits; empty where nothing does."""
    if text_width(text, size, bold=bold) <= room:
        return text
    for length in range(len(text) - 1, 0, -1):
        start = text[:length].rstrip() + "…"
        if text_width(start, size, bold=bold) <= room:
            return start
    return ""


def first_fitting(texts: Sequence[str], room: float, size: float) -> str:
    """The first of ``texts`` that fits; empty where none does."""
    return next((text for text in texts if text_width(text, size) <= room), "")


class Canvas:
    """The elements of a picture, in painting order."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = WHITE,
        stroke: str = "none",
        radius: float = 0,
        role: str = "",
        tooltip: str = "",
    ) -> None:
        """A rectangle; ``role`` becomes its class, ``tooltip`` shows in a browser."""
        head = (
            f'<rect x="{_px(x)}" y="{_px(y)}" width="{_px(max(0.0, width))}" '
            f'height="{_px(height)}" fill="{fill}"'
        )
        if stroke != "none":
            head += f' stroke="{stroke}"'
        if radius:
            head += f' rx="{_px(radius)}"'
        if role:
            head += f" class={quoteattr(role)}"
        title = f"><title>{escape(tooltip)}</title></rect>" if tooltip else "/>"
        self._elements.append(head + title)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        then: str = "",
    ) -> None:
        """A line of text with its baseline at ``y``; nothing when empty.

        ``then`` follows in the opposite weight, muted after bold.
        """
        if not text:
            return
        weight = ' font-weight="600"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        more = ""
        if then:
            look = f'font-weight="400" fill="{MUTED}"' if bold else 'font-weight="600"'
            more = f'<tspan dx="{_px(size / 2)}" {look}>{escape(then)}</tspan>'
        self._elements.append(
            f'<text x="{_px(x)}" y="{_px(y)}" font-size="{_px(size)}" fill="{fill}"'
            f"{place}{weight}>{escape(text)}{more}</text>"
        )

    def line(
        self,
        *points: tuple[float, float],
        color: str = LINE,
        width: float = 1.2,
        dash: str = "",
        tip: bool = False,
        tail: bool = False,
    ) -> None:
        """A polyline with rounded joins, with an arrowhead at its end (tip) or start (tail)."""
        path = " L".join(f"{_px(x)} {_px(y)}" for x, y in points)
        extras = f' stroke-dasharray="{dash}"' if dash else ""
        extras += ' marker-end="url(#tip)"' if tip else ""
        extras += ' marker-start="url(#tail)"' if tail else ""
        self._elements.append(
            f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{_px(width)}" '
            f'stroke-linejoin="round"{extras}/>'
        )

    def mark(self, x: float, y: float, color: str) -> None:
        """A small triangle that points down at (x, y)."""
        points = f"{_px(x)},{_px(y)} {_px(x - 4.5)},{_px(y - 7)} {_px(x + 4.5)},{_px(y - 7)}"
        self._elements.append(f'<polygon points="{points}" fill="{color}"/>')

    def chip(self, x: float, y: float, lines: Sequence[str], *, size: float = 10) -> None:
        """Lines of text centred on a point, on white so that a line behind does not disturb."""
        step = size * LINE_HEIGHT
        width = max(text_width(line, size) for line in lines) + 6
        height = step * len(lines) + 2
        self.rect(x - width / 2, y - height / 2, width, height, radius=3)
        first = y - height / 2 + size * 1.1 + 1
        for number, line in enumerate(lines):
            self.text(x, first + number * step, line, size=size, fill=MUTED, anchor="middle")

    def document(self, width: float, height: float, title: str, description: str) -> str:
        """The whole picture as an SVG file."""
        return "\n".join(
            [
                '<?xml version="1.0" encoding="UTF-8"?>',
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" '
                f'height="{_px(height)}" viewBox="0 0 {_px(width)} {_px(height)}" '
                f'font-family="{FONT}" role="img">',
                f"<title>{escape(title)}</title>",
                f"<desc>{escape(description)}</desc>",
                _ARROWS,
                f'<rect width="{_px(width)}" height="{_px(height)}" fill="{WHITE}"/>',
                *self._elements,
                "</svg>",
                "",
            ]
        )


def _px(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") or "0"
