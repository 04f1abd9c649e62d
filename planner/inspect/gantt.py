"""A cycle on its lanes as text: one line for each lane, one character for a stretch of time."""

from collections.abc import Sequence

from planner.lanes import FLASH, Event, Role
from planner.simulate import Timeline

WIDTH = 80
"""Characters of a lane."""
MARKS = {
    Role.DRAFT: "d",
    Role.TRANSFER: ">",
    Role.VERIFY: "v",
    Role.HEAD: "h",
    Role.CONSTANT: "c",
    Role.IDLE: " ",
    Role.WAIT: ".",
    Role.READ: "r",
}
LEGEND = "d draft, v target, > handover, h head, c constant, . waits for flash, r reads"
_RING_LEVELS = "0123456789"


def gantt(timeline: Timeline) -> list[str]:
    """Lanes of the steady cycle, the processors first; with a reader its lane and the ring.

    Each character shows what takes most of its stretch of time; the ring's say how full it is, 9
    being all of its slots.
    """
    events = timeline.events
    end_us = max((event.end_us for event in events), default=0.0)
    if not end_us:
        return []
    names = list(dict.fromkeys(e.lane for e in events if e.lane != FLASH))
    if any(event.lane == FLASH for event in events):
        names.append(FLASH)
    most = max((held.slots for held in timeline.ring), default=0)
    rows = {name: _lane([e for e in events if e.lane == name], end_us) for name in names}
    if most:
        rows["ring"] = _ring(timeline, end_us, most)
    # What a lane does for less than a character of time is not seen
    seen = {name: row for name, row in rows.items() if row.strip()}
    label = max(map(len, seen), default=0)
    return [f"{name:<{label}} |{row}|" for name, row in seen.items()]


def _lane(events: Sequence[Event], end_us: float) -> str:
    cell_us = end_us / WIDTH
    cells: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    for event in events:
        first = min(WIDTH - 1, int(event.start_us / cell_us))
        last = min(WIDTH - 1, int(event.end_us / cell_us))
        for cell in range(first, last + 1):
            inside = min(event.end_us, (cell + 1) * cell_us) - max(event.start_us, cell * cell_us)
            mark = MARKS[event.role]
            cells[cell][mark] = cells[cell].get(mark, 0.0) + max(0.0, inside)
    return "".join(_most(cell, cell_us) for cell in cells)


def _most(cell: dict[str, float], cell_us: float) -> str:
    """The mark of most time; a blank where the lane idles for longer than it does anything."""
    idle = cell_us - sum(cell.values())
    mark = max(cell, key=lambda mark: cell[mark], default=" ")
    return mark if cell and cell[mark] >= idle else " "


def _ring(timeline: Timeline, end_us: float, most: int) -> str:
    held, marks = 0, ""
    moments = list(timeline.ring)
    for cell in range(WIDTH):
        while moments and moments[0].us <= (cell + 0.5) * end_us / WIDTH:
            held = moments.pop(0).slots
        marks += _RING_LEVELS[9 * held // most]
    return marks
