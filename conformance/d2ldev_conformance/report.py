"""The report of a run: JSON with one line for each requirement, and a page."""

from __future__ import annotations

import platform
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import d2ldev
from d2ldev.bench.machine import list_cards
from d2ldev.framework import INTERFACE
from d2ldev.framework.testing import framework_of
from d2ldev.registry.discovery import distributions_of, find_backends
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.matrix import build_matrix
from d2ldev_conformance.origin import digest_suite, find_commit
from d2ldev_conformance.page import write_page
from d2ldev_conformance.progress import OUTCOMES, judge
from d2ldev_conformance.requirement import Requirement
from d2ldev_conformance.schema import REPORT, SCHEMA, ReportDocument

# A requirement may fail in a hundred tests, with an array in each message.
_MOST_ERRORS = 3
_LONGEST_ERROR = 2000
_NOT_RUN = "the run ended before"


class Report:
    """What happened to each requirement.

    Args:
        backend: the one under test.
        commit: the commit of d2ldev, where d2ldev itself does not know it.
    """

    def __init__(self, backend: d2ldev.Backend, commit: str = "") -> None:
        self._backend, self._commit = backend, commit
        self._outcomes: dict[Requirement, Counter[str]] = {}
        self._reasons: dict[Requirement, dict[str, None]] = {}
        self._errors: dict[Requirement, list[str]] = {}
        self._unbegun: dict[str, Counter[str]] = {}
        self._waiting: dict[str, Requirement] = {}

    def expect(self, requirement: Requirement, test: str) -> None:
        """Give a requirement its row, also if the run ends before its tests.

        Args:
            requirement: the one that the test checks.
            test: its id, which is new in this run.
        """
        self._waiting[test] = requirement
        self._make_row(requirement)

    def awaits(self, test: str) -> Requirement | None:
        """Return the requirement of a test that has not come to its end; None for any other."""
        return self._waiting.get(test)

    def _make_row(self, requirement: Requirement) -> None:
        self._outcomes.setdefault(requirement, Counter())
        self._reasons.setdefault(requirement, {})
        self._errors.setdefault(requirement, [])

    def add(
        self,
        requirement: Requirement,
        outcome: str,
        reason: str = "",
        error: str = "",
        test: str = "",
    ) -> None:
        """Count one test.

        Args:
            requirement: the one that the test checks.
            outcome: one of ``progress.OUTCOMES``.
            reason: in one line.
            error: the whole error of a failure. The report has the beginning of the first three.
            test: the id with which it was expected.
        """
        self._make_row(requirement)
        self._waiting.pop(test, None)
        if error and len(self._errors[requirement]) < _MOST_ERRORS:
            cut = " ..." if len(error) > _LONGEST_ERROR else ""
            self._errors[requirement].append(error[:_LONGEST_ERROR] + cut)
        self._outcomes[requirement][outcome] += 1
        if reason:
            self._reasons[requirement][reason] = None
        if outcome == "not begun":
            self._unbegun.setdefault(requirement.module, Counter())[reason] += 1

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each requirement, in the order of its id."""
        waiting = Counter(self._waiting.values())
        tests = {
            requirement: counts + Counter({"not run": waiting[requirement]})
            for requirement, counts in self._outcomes.items()
        }
        return [
            {
                "requirement": requirement.id,
                "module": requirement.module,
                "section": requirement.section,
                "outcome": judge(counts),
                "tests": dict(counts),
                "reasons": [*self._reasons[requirement], *[_NOT_RUN] * ("not run" in counts)],
                "errors": self._errors[requirement],
            }
            for requirement, counts in sorted(tests.items())
        ]

    def summary(self) -> dict[str, int]:
        """Return how many requirements have each outcome."""
        counts = Counter(row["outcome"] for row in self.rows())
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def next_steps(self) -> dict[str, str]:
        """Return what to write first in each module in which something is not begun."""
        return {module: next(iter(steps)) for module, steps in self._unbegun.items()}

    def list_causes(self) -> list[str]:
        """Return one line for each cause: what to write, and the requirements that are not met."""
        steps: Counter[str] = sum(self._unbegun.values(), Counter())
        lines = [f"not begun: {number} tests: {step}" for step, number in steps.items()]
        failed: dict[tuple[str, str], list[str]] = {}
        for row in self.rows():
            if row["outcome"] in ("failed", "known gap"):
                cause = row["outcome"], str(row["reasons"])
                failed.setdefault(cause, []).append(row["requirement"])
        for (outcome, reasons), requirements in failed.items():
            lines.append(f"{outcome}: {', '.join(requirements)}: {reasons}")
        if number := self.summary()["not run"]:
            lines.append(f"not run: {number} requirements: {_NOT_RUN}")
        return lines

    def document(self, exit_status: int) -> ReportDocument:
        """Return the whole report, as it is written to ``conformance.json``.

        ``schema.find_problems`` names what a document has to have. ``origin`` finds ``commit`` and
        ``suite``, and ``rows`` returns ``requirements``.

        Args:
            exit_status: the run's.
        """
        backend = self._backend
        document = {
            "schema": SCHEMA,
            "backend": backend.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(backend),
            "interface": INTERFACE,
            "commit": find_commit() or self._commit,
            "suite": digest_suite(),
            "machine": f"{platform.system()} {platform.machine()}",
            "devices": [
                {"device": device, "platform": name} for device, name in platforms(backend).items()
            ],
            "cards": list_cards(),
            "exit_status": exit_status,
            "summary": self.summary(),
            "requirements": self.rows(),
        }
        return ReportDocument(document)

    def write(self, folder: Path, exit_status: int) -> None:
        """Write ``conformance.json`` and ``conformance.html`` into a folder.

        Args:
            folder: it is made if needed.
            exit_status: the run's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        document = self.document(exit_status)
        (folder / REPORT).write_text(format_lines(document), encoding="utf-8")
        matrix = build_matrix({self._backend.name: document})
        write_page(matrix, (folder / REPORT).with_suffix(".html"))


def platforms(backend: d2ldev.Backend) -> dict[str, str]:
    """Return the platform of each device that a backend lists; ``'broken'`` where asking fails."""

    def platform_of(device: d2ldev.Device) -> str:
        try:
            return backend.platform(device)
        except Exception:  # the backend is under test: the requirements say what is wrong with it
            return "broken"

    return {str(device): platform_of(device) for device in backend.devices()}


def _versions(backend: d2ldev.Backend) -> dict[str, str]:
    versions = {"d2ldev": d2ldev.__version__, "python": sys.version.split()[0]}
    # The framework's first, and then that of the backend's own package.
    own = distributions_of(backend.name) if backend.name in find_backends() else []
    for name in [*framework_of(backend).distributions, *own]:
        if name in versions:
            continue
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
