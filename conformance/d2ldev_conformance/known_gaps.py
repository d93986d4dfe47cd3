"""The known gaps, which are data: ``known_gaps.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple


class Gap(NamedTuple):
    """A known gap of one backend; the file says what each field means."""

    backend: str
    requirement: str
    reason: str
    link: str
    case: str = ""
    platform: str = ""

    def covers(self, backend: str, requirement: str, test_name: str, platforms: set[str]) -> bool:
        """Tell whether a test is one that is known to fail."""
        return (
            (self.backend, self.requirement) == (backend, requirement)
            and self.case in test_name
            and (not self.platform or self.platform in platforms)
        )


def read_known_gaps() -> list[Gap]:
    """Return the rows of ``known_gaps.toml``."""
    with Path(__file__).with_name("known_gaps.toml").open("rb") as file:
        return [Gap(**row) for row in tomllib.load(file).get("gap", [])]
