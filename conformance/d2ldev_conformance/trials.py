"""``d2ldev conformance NAME --mutants``: each mutant in a process of its own, and a table.

First the requirements that should catch mutants run without one: they have to pass. A mutant whose
own requirements are all skipped there is not tried. In the end each other requirement that caught
a mutant runs without one, too.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from d2ldev.errors import UnsupportedValueError
from d2ldev.framework.testing import MODULES
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.mutants import MUTANTS, Mutant
from d2ldev_conformance.progress import FAILED
from d2ldev_conformance.schema import REPORT, VERDICTS
from d2ldev_conformance.trial import FILE, NONE

Start = Callable[[Sequence[str], Path, float], int | None]
"""Runs the suite with further options of pytest, and a folder for its report and ``PRINTED``.

It returns the exit status; None if the process was ended after so many seconds.
"""
PRINTED = "printed.txt"
TIME_LIMIT = 1800.0
"""The seconds of a process, which may try all of the suite."""
OUTCOMES = ("caught", "not caught", "not judged", "not tried here", "does not apply")
"""What becomes of a mutant.

It is ``'not judged'`` if no requirement came to fail, and none could. It is ``'not tried here'`` if
the requirements that should catch it are skipped: a green run would not see it. It ``'does not
apply'`` if the framework says so, see ``Mutant.find_obstacle``.
"""
UNTRIED = ("not tried here", "does not apply")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Args:
        mutant: the mutant.
        outcome: one of ``OUTCOMES``.
        reason: the first line of the failure, or why there is none.
        requirement: the one that caught it.
        seconds: how long its process ran.
    """

    mutant: Mutant
    outcome: str
    reason: str = ""
    requirement: str = ""
    seconds: float = 0.0

    def as_row(self) -> dict[str, Any]:
        """Return it as a row of ``mutants.json``."""
        return {
            "mutant": self.mutant.name,
            "fault": self.mutant.fault,
            "outcome": self.outcome,
            "requirement": self.requirement,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
        }


def try_mutants(
    start: Start, areas: Sequence[str], tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """Try the mutants on a backend, two at once; return the verdicts in their order.

    Args:
        start: runs the suite.
        areas: the areas whose mutants to try; empty for all.
        tell: is told each verdict as it comes.

    Raises:
        UnsupportedValueError: if the backend fails a requirement without a mutant.
    """
    chosen = [each for each in MUTANTS.values() if not areas or each.area in areas]
    with TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        likely = dict.fromkeys(each for mutant in chosen for each in mutant.likely)
        # Here, too, only a thread of the pool runs processes: no signal comes between.
        rows = pool.submit(_run_sound, start, folder / NONE, likely).result()
        if failed := [name for name, row in rows.items() if row["outcome"] in FAILED]:
            raise _refusal(f"without a mutant the backend fails {', '.join(failed)}")
        obstacles = json.loads((folder / NONE / FILE).read_text(encoding="utf-8"))["obstacles"]

        def judge(mutant: Mutant) -> Verdict:
            if obstacle := obstacles[mutant.name]:
                verdict = Verdict(mutant, "does not apply", obstacle)
            elif skip := _find_skip(mutant, rows):
                verdict = Verdict(mutant, "not tried here", skip)
            else:
                verdict = _run_mutant(start, folder / mutant.name, mutant, rows)
            tell(verdict)
            return verdict

        try:
            verdicts = list(pool.map(judge, chosen))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        others = sorted({each.requirement for each in verdicts if each.requirement} - {*rows})
        if others:
            rows |= pool.submit(_run_sound, start, folder / "others", others).result()
    return [_check_catcher(each, rows) for each in verdicts]


def _check_catcher(verdict: Verdict, rows: dict[str, Any]) -> Verdict:
    """Return a verdict, or "not judged" if its requirement fails without the mutant, too."""
    row = rows.get(verdict.requirement)
    if row is None or row["outcome"] not in FAILED:
        return verdict
    problem = f"{verdict.requirement} fails without the mutant, too"
    return replace(verdict, outcome="not judged", reason=problem, requirement="")


def format_verdicts(verdicts: Sequence[Verdict], seconds: float) -> list[str]:
    """Return the table of a run as lines: three for each mutant, and the count.

    Args:
        verdicts: of the mutants.
        seconds: how long all of it took.
    """
    lines = []
    for verdict in verdicts:
        told = verdict.requirement if verdict.outcome == "caught" else verdict.outcome
        took = f"{verdict.seconds:.0f} s" if verdict.seconds else ""
        lines.append(f"{verdict.mutant.name:44}{told:44}{took:>6}".rstrip())
        lines += [f"    {each}" for each in (verdict.mutant.fault, verdict.reason) if each]
    counts = Counter(each.outcome for each in verdicts)
    applied = len(verdicts) - counts["does not apply"]
    told = f"{counts['caught']} of {applied} mutants that apply are caught"
    if untried := counts["not tried here"]:
        told += f", {untried} not tried here"
    lines.append(f"{told}, in {seconds / 60:.1f} minutes")
    return lines


def write_verdicts(backend: str, verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write ``mutants.json`` into a folder: a line for each mutant.

    Args:
        backend: its name.
        verdicts: of the mutants.
        folder: it exists.
    """
    document = {"backend": backend, "mutants": [each.as_row() for each in verdicts]}
    (folder / VERDICTS).write_text(format_lines(document), encoding="utf-8")


def _run_sound(start: Start, folder: Path, wanted: Iterable[str]) -> dict[str, Any]:
    """Run requirements without a mutant; return the rows of the report by requirement.

    Raises:
        UnsupportedValueError: if the process does not come to its end.
    """
    options = [f"--d2ldev-requirement={each}" for each in wanted]
    status = start([f"--d2ldev-mutant={NONE}", *options], folder, TIME_LIMIT)
    if status not in (0, 1):
        raise _refusal(_tell_end(status, folder))
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    return {row["requirement"]: row for row in report["requirements"]}


def _find_skip(mutant: Mutant, rows: dict[str, Any]) -> str:
    """Return why none of the requirements that should catch a mutant passes; empty if one does."""
    found = [rows[each] for each in mutant.likely if each in rows]
    if any(row["tests"].get("passed") for row in found):
        return ""
    return "; ".join(dict.fromkeys(reason for row in found for reason in row["reasons"]))


def _run_mutant(start: Start, folder: Path, mutant: Mutant, rows: dict[str, Any]) -> Verdict:
    """Run the suite with a mutant until a requirement fails: first where one should, then all."""
    begin = time.monotonic()
    first = {mutant.area, *(rows[each]["module"] for each in mutant.likely if each in rows)}
    for areas in (first, {*MODULES} - first):
        outcome, reason, requirement = _run_areas(start, folder / str(len(areas)), mutant, areas)
        if outcome != "not caught":
            break
    return Verdict(mutant, outcome, reason, requirement, time.monotonic() - begin)


def _run_areas(
    start: Start, folder: Path, mutant: Mutant, areas: Iterable[str]
) -> tuple[str, str, str]:
    """Run some areas with a mutant; return the outcome, the reason and the requirement."""
    options = [f"--d2ldev-mutant={mutant.name}", "-x", *(f"--d2ldev-only={x}" for x in areas)]
    status = start(options, folder, TIME_LIMIT)
    if not (folder / FILE).exists():
        return "not judged", _tell_end(status, folder), ""
    found = json.loads((folder / FILE).read_text(encoding="utf-8"))["failure"]
    if found and found["is_own"]:
        return "not judged", f"the mutant itself fails here: {found['problem']}", ""
    if found:
        return "caught", found["problem"], found["requirement"]
    # Status 1 is that of an area in which nothing passes, such as one that the framework lacks.
    is_whole = status in (0, 1)
    return ("not caught", "", "") if is_whole else ("not judged", _tell_end(status, folder), "")


def _tell_end(status: int | None, folder: Path) -> str:
    """Return how a process ended, with its last error, or else the last line that it printed."""
    text = (folder / PRINTED).read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    # The lines after an error tell how to mend it.
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or [""])[-1]
    if status is None:
        return f"no end after {TIME_LIMIT:.0f} seconds: {last}"
    return f"the run ended with exit status {status}: {last}"


def _refusal(problem: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "try mutants", problem, "d2ldev conformance NAME: mutants need a backend that passes it"
    )
