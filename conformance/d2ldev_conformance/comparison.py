"""What changed from the reports of one day to those of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d2ldev.display import format_text_table, make_printable
from d2ldev_conformance.matrix import name_sources
from d2ldev_conformance.progress import FAILED
from d2ldev_conformance.runs import Run, name_gpus
from d2ldev_conformance.schema import read_reports

CHANGES = (
    *("new", "other reasons", "other outcome", "began to pass"),
    *("gone", "passes no more", "began to fail"),
)
"""What may happen to a requirement, the worst last: it is what stays in sight in a terminal."""
_LONGEST = 120
_EMPTY: Run = {"requirements": []}


class Change(NamedTuple):
    """A requirement that changed.

    Args:
        change: one of ``CHANGES``.
        requirement: its id.
        old, new: its outcome in each report; empty where the report does not have it.
        reasons: why, in one line.
    """

    change: str
    requirement: str
    old: str
    new: str
    reasons: str


class Comparison(NamedTuple):
    """What ``compare_reports`` found.

    Args:
        text: for a terminal.
        is_worse: whether a requirement that passed does not pass any more, or one began to fail.
    """

    text: str
    is_worse: bool


def compare_reports(old: Path, new: Path) -> Comparison:
    """Return what changed.

    One report is compared with one as they are. Of several, those of a backend on the same number
    of GPUs are compared: on each side the newest.

    Args:
        old, new: files or folders, see ``schema.read_reports``.

    Raises:
        UnsupportedValueError: if a place has no report, or a file is not a report.
    """
    sides = [read_reports([place]) for place in (old, new)]
    paths = [path for side in sides for path in side]
    names = dict(zip(paths, name_sources(paths), strict=True))
    before, after = (_name_runs({names[path]: side[path] for path in side}) for side in sides)
    if len(before) == len(after) == 1:
        both = " -> ".join({**before, **after})  # once, if it is the same
        before, after = ({both: run} for side in (before, after) for run in side.values())
    blocks, worse = [], 0
    for name in sorted({**before, **after}):
        first, second = before.get(name), after.get(name)
        changes = list(find_changes(first or _EMPTY, second or _EMPTY))
        worse += sum(map(_is_worse, changes))
        if first and second:
            blocks.append("\n".join([name, *_tell_heads(first, second), *_tell(changes, second)]))
        else:
            counts = (first or second or {})["summary"]
            failed = sum(counts.get(each, 0) for each in FAILED)
            told = f"{counts.get('passed', 0)} passed" + (f" and {failed} failed" if failed else "")
            there, other = ("old", "new") if first else ("new", "old")
            blocks.append(f"{name}\nno {other} report; {told} in the {there} one")
    blocks.append(f"worse than before: {worse}")
    return Comparison("\n\n".join(blocks), worse > 0)


def find_changes(old: Run, new: Run) -> Iterator[Change]:
    """Yield the requirements that changed, in the order of ``CHANGES`` and of their ids.

    Args:
        old, new: reports.
    """
    rows = [{row["requirement"]: row for row in run["requirements"]} for run in (old, new)]
    found = []
    for name in sorted({**rows[0], **rows[1]}):
        first, second = (side.get(name) or {"outcome": "", "reasons": []} for side in rows)
        outcomes = first["outcome"], second["outcome"]
        came = [each for each in second["reasons"] if each not in first["reasons"]]
        went = [each for each in first["reasons"] if each not in second["reasons"]]
        if change := _name_change(*outcomes, is_other=bool(came or went)):
            reasons = _shorten(second["reasons"])
            if change == "other reasons":
                reasons = f"{_shorten(came) or 'none'}; before: {_shorten(went) or 'none'}"
            found.append(Change(change, name, *outcomes, reasons))
    yield from sorted(found, key=lambda each: CHANGES.index(each.change))


def _name_change(old: str, new: str, *, is_other: bool) -> str:
    """Return one of ``CHANGES``; empty for a requirement that is as it was."""
    if old == new:
        return "other reasons" if is_other else ""
    if new in FAILED and old not in FAILED:
        return "began to fail"
    if not old or not new:
        return "gone" if old else "new"
    if "passed" in (old, new):
        return "began to pass" if new == "passed" else "passes no more"
    return "other outcome"


def _is_worse(change: Change) -> bool:
    return change.change == "began to fail" or change.old == "passed" != change.new


def _shorten(reasons: Sequence[str]) -> str:
    text = make_printable("; ".join(reasons))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _name_runs(reports: Mapping[str, Run]) -> dict[str, Run]:
    """Return the newest report of each backend on each number of GPUs, with its name."""
    runs = [{"report": name, **report} for name, report in reports.items()]
    return {
        make_printable(f"{run['backend']} on {name_gpus(run)}"): run
        for run in sorted(runs, key=lambda run: run["date"])
    }


def _tell_heads(old: Run, new: Run) -> Iterator[str]:
    """Yield the lines of what differs between the heads of two reports."""
    facts = [_list_facts(run) for run in (old, new)]
    rows = [
        [make_printable(f"{side.get(name, '')}") or "unknown" for side in facts]
        for name in {**facts[0], **facts[1]}
    ]
    names = map(make_printable, {**facts[0], **facts[1]})
    told = [(name, *row) for name, row in zip(names, rows, strict=True) if row[0] != row[1]]
    if told:
        yield format_text_table(("", "old", "new"), told)


def _list_facts(run: Run) -> dict[str, Any]:
    """Return what the head of a report says, by name."""
    keys = ("report", "date", "backend", "interface", "suite", "commit", "machine", "exit_status")
    facts = {key.replace("_", " "): "" if run.get(key) is None else run[key] for key in keys}
    return {**facts, "GPUs": name_gpus(run), "cards": ", ".join(run["cards"]), **run["versions"]}


def _tell(changes: Sequence[Change], new: Run) -> Iterator[str]:
    """Yield the table of the changes of a run, and a line that counts them."""
    if changes:
        yield ""
        yield format_text_table(Change._fields, map(_make_row, changes))
        yield ""
    counts = Counter(change.change for change in changes)
    counts["as before"] = sum(new["summary"].values()) - sum(bool(each.new) for each in changes)
    names = (*reversed(CHANGES), "as before")
    yield ", ".join(f"{name}: {counts[name]}" for name in names if counts[name])


def _make_row(change: Change) -> list[str]:
    return [make_printable(each) for each in change]
