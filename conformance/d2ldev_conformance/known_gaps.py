"""The known gaps of a backend, which are data: ``known_gaps.toml`` in its package.

Each row is strict: if the gap has closed, the run fails until the row is deleted. ::

    [[gap]]
    requirement = "copy.to-keeps-values"  # the id
    case = "float8_e4m3fn"                # optional: only tests whose parameters contain this
    platform = "mps"                      # optional: only where gpu(0) is on this platform
    reason = "what the framework does instead"
    link = "https://github.com/..."
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from d2ldev.framework import Framework

FILE = "known_gaps.toml"


class Gap(NamedTuple):
    """A known gap of one backend; the module says what each field means."""

    requirement: str
    reason: str
    link: str
    case: str = ""
    platform: str = ""

    def covers(self, requirement: str, test_name: str, platforms: set[str]) -> bool:
        """Tell whether a test is one that is known to fail."""
        return (
            self.requirement == requirement
            and self.case in test_name
            and (not self.platform or self.platform in platforms)
        )


def read_known_gaps(framework: Framework) -> list[Gap]:
    """Return the rows of the file in the package of a framework's class, or of a base class.

    Raises:
        pytest.UsageError: if the file cannot be read, or a row lacks a field or has another one.
    """
    for cls in type(framework).__mro__:
        package = sys.modules[cls.__module__.partition(".")[0]]
        for folder in getattr(package, "__path__", ()):
            if (path := Path(folder) / FILE).exists():
                return _read(path)
    return []


def _read(path: Path) -> list[Gap]:
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("gap", [])
        return [Gap(**row) for row in rows]
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{path} cannot be read: {error}") from error
