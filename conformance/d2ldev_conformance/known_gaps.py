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

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from d2ldev.framework import Framework
from d2ldev_conformance.catalogue import find_nearest

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
            Also if no requirement has its id.
    """
    for cls in type(framework).__mro__:
        package = sys.modules[cls.__module__.partition(".")[0]]
        for folder in getattr(package, "__path__", ()):
            if (path := Path(folder) / FILE).exists():
                return _read(path)
    return []


def _read(path: Path) -> list[Gap]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        gaps = [Gap(**row) for row in tables.pop("gap", [])]
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{path} cannot be read: {error}") from error
    if tables:
        raise pytest.UsageError(f"{path} has {', '.join(tables)}, and the name of a row is [[gap]]")
    for gap in gaps:
        if near := find_nearest(gap.requirement):
            raise pytest.UsageError(
                f"{path} has {gap.requirement!r}, the id of no requirement; the nearest is {near}"
            )
    return gaps


def check_cases(gaps: Iterable[Gap], tests: Mapping[str, Iterable[str]], found: set[str]) -> None:
    """Check that the case of each gap is one of a test.

    Args:
        gaps: the known gaps.
        tests: the id of each requirement -> the names of all its tests.
        found: the platforms of this machine.

    Raises:
        pytest.UsageError: if it is the case of none.
    """
    for gap in gaps:
        names = [*tests.get(gap.requirement, ())]
        # How many GPUs there are decides which of them some tests take.
        case, *known = (re.sub(r"gpu\d", "gpu", name) for name in (gap.case, *names))
        is_here = not gap.platform or gap.platform in found
        if is_here and known and not any(case in name for name in known):
            raise pytest.UsageError(
                f"{FILE} has the case {gap.case!r} of {gap.requirement}, which is in the name of "
                f"no test of it: {', '.join(names)}"
            )
