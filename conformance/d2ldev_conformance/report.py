"""The report of a run: JSON with one line for each requirement."""

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
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.progress import OUTCOMES
from d2ldev_conformance.requirement import Requirement

# A requirement has the worst outcome of its tests, except for skipping. If it passed on the CPU,
# and was skipped without a GPU, it has passed. The counts show the skipped tests.
_WORST_FIRST = ("failed", "not begun", "known gap", "cannot", "passed", "skipped")


class Report:
    """What happened to each requirement.

    Args:
        backend: the one under test.
    """

    def __init__(self, backend: d2ldev.Backend) -> None:
        self._backend = backend
        self._outcomes: dict[Requirement, Counter[str]] = {}
        self._reasons: dict[Requirement, dict[str, None]] = {}
        self._unbegun: dict[str, Counter[str]] = {}

    def expect(self, requirement: Requirement) -> None:
        """Give a requirement its row, also if none of its tests comes to an end."""
        self._outcomes.setdefault(requirement, Counter())
        self._reasons.setdefault(requirement, {})

    def add(self, requirement: Requirement, outcome: str, reason: str = "") -> None:
        """Count one test, by its outcome: one of ``progress.OUTCOMES``."""
        self.expect(requirement)
        self._outcomes[requirement][outcome] += 1
        if reason:
            self._reasons[requirement][reason] = None
        if outcome == "not begun":
            self._unbegun.setdefault(requirement.room, Counter())[reason] += 1

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each requirement, in the order of its id."""
        return [
            {
                "requirement": requirement.id,
                "room": requirement.room,
                "section": requirement.section,
                "outcome": next((o for o in _WORST_FIRST if counts[o]), "failed"),
                "tests": dict(counts),
                "reasons": list(self._reasons[requirement]),
            }
            for requirement, counts in sorted(self._outcomes.items())
        ]

    def summary(self) -> dict[str, int]:
        """Return how many requirements have each outcome."""
        counts = Counter(row["outcome"] for row in self.rows())
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def next_steps(self) -> dict[str, str]:
        """Return what to write first in each module in which something is not begun."""
        return {room: next(iter(steps)) for room, steps in self._unbegun.items()}

    def list_causes(self) -> list[str]:
        """Return one line for each cause: what to write, and the requirements that are not met."""
        steps: Counter[str] = sum(self._unbegun.values(), Counter())
        lines = [f"not begun: {number} tests: {step}" for step, number in steps.items()]
        failed: dict[tuple[str, str], list[str]] = {}
        for row in self.rows():
            if row["outcome"] in ("failed", "known gap"):
                cause = row["outcome"], str(row["reasons"] or "no test came to its end")
                failed.setdefault(cause, []).append(row["requirement"])
        for (outcome, reasons), requirements in failed.items():
            lines.append(f"{outcome}: {', '.join(requirements)}: {reasons}")
        return lines

    def document(self) -> dict[str, Any]:
        """Return the whole report, as it is written to ``conformance.json``.

        ``backend``, ``date`` (UTC), ``versions`` (distribution -> version), ``devices`` (name,
        platform, the card's name), ``driver``, ``summary`` and ``requirements`` (``rows()``).
        """
        backend = self._backend
        return {
            "backend": backend.name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(backend),
            "machine": f"{platform.system()} {platform.machine()}",
            "devices": [
                {"device": device, "platform": name} for device, name in platforms(backend).items()
            ],
            "cards": list_cards(),
            "summary": self.summary(),
            "requirements": self.rows(),
        }

    def write(self, folder: Path) -> None:
        """Write ``conformance.json`` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        text = format_lines(self.document())
        (folder / "conformance.json").write_text(text, encoding="utf-8")


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
    for name in backend.distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
