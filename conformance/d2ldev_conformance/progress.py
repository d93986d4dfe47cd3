"""The progress of a backend, by module, and whether a run did what it was asked to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from d2ldev_conformance.requirement import ROOMS

OUTCOMES = ("passed", "failed", "not begun", "known gap", "cannot", "skipped")
"""What may happen to a requirement, in the order of the columns."""
_TESTED = ("passed", "failed", "known gap")
_UNDONE = ("failed", "not begun")


def count_by_room(rows: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Return how many requirements of each module have each outcome, in the modules' order.

    Args:
        rows: as ``Report.rows`` returns them.
    """
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["room"], Counter())[row["outcome"]] += 1
    return {room: found[room] for room in ROOMS if room in found}


def format_counts(counts: Mapping[str, Counter[str]]) -> list[str]:
    r"""Return a table: a line for each module, and a column for each outcome that there is.

    >>> print(*format_counts({"tensors": Counter({"passed": 60, "not begun": 1})}), sep="\n")
              passed  not begun
    tensors       60          1
    """
    columns = [each for each in OUTCOMES if any(count[each] for count in counts.values())]
    width = max(map(len, counts), default=0)
    lines = [" " * width + "".join(f"  {each:>6}" for each in columns)]
    for room, count in counts.items():
        cells = (f"  {count[each]:>{max(6, len(each))}}" for each in columns)
        lines.append(room.ljust(width) + "".join(cells))
    return lines


def tell_progress(counts: Mapping[str, Counter[str]], next_steps: Mapping[str, str]) -> str:
    """Return one sentence: the last module that is done, and the next one.

    Args:
        counts: as ``count_by_room`` returns them, of whole modules.
        next_steps: what is left to write in a module.

    >>> done, empty = Counter({"passed": 9}), Counter({"not begun": 4})
    >>> tell_progress({"tensors": done, "models": empty}, {"models": "write Models.mlp"})
    'tensors done, 2 of 7: next, models: write Models.mlp'
    """
    done = ""
    for room, count in counts.items():
        if not is_done(count):
            step = next_steps.get(room) or f"{count['failed']} failed"
            return f"{done}next, {room}: {step}"
        number = ROOMS.index(room) + 1
        done = f"{room} done, {number} of {len(ROOMS)}: "
    return done + _name_next(list(counts))


def _name_next(rooms: Sequence[str]) -> str:
    """Return the module after the last one, in words."""
    number = ROOMS.index(rooms[-1]) + 1 if rooms else 0
    return f"next, {ROOMS[number]}" if number < len(ROOMS) else "nothing is left"


def is_done(count: Counter[str]) -> bool:
    """Return whether requirements of a module passed, and none failed or is not begun."""
    return count["passed"] > 0 and not any(count[each] for each in _UNDONE)


def was_tested(counts: Mapping[str, Counter[str]]) -> bool:
    """Return whether a run tested a requirement at all."""
    return any(count[each] for count in counts.values() for each in _TESTED)


def find_undone_rooms(counts: Mapping[str, Counter[str]], asked: Sequence[str]) -> list[str]:
    """Return the modules that are not done, in their order.

    Args:
        counts: as ``count_by_room`` returns them.
        asked: the modules that were named. Of the others, those in which something is not begun or
            failed are undone. A selection of tests may leave a module without one that passes.
    """
    return [
        room
        for room in ROOMS
        if (room in asked and not is_done(counts.get(room, Counter())))
        or any(counts.get(room, Counter())[each] for each in _UNDONE)
    ]
