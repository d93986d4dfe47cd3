"""The pytest plugin of one mutant: what its process tries, in which order, and what caught it."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType

import pytest

from d2ldev.framework import Framework
from d2ldev_conformance import mutants
from d2ldev_conformance.mutants import MUTANTS
from d2ldev_conformance.requirement import SUITE, module_of, requirement_of
from d2ldev_conformance.unbegun import list_causes

NONE = "none"
"""In the place of a mutant's name: change nothing, and note which mutants do not apply."""
FILE = "mutant.json"
"""What a process leaves in the folder of its report."""


class Trial:
    """Put a mutant into a framework, and note the first requirement that fails.

    The requirements that should catch it come first, then those of its area, then the others. The
    processes that a test starts do not have the mutant, so the tests about processes are left out.
    Without a mutant each method that one of them would replace is passed on to.

    Args:
        name: of the mutant, or ``NONE``.
        framework: the framework under test.
        package: its package.
        folder: where to write ``FILE``.
    """

    def __init__(self, name: str, framework: Framework, package: str, folder: Path) -> None:
        if name not in (*MUTANTS, NONE):
            raise pytest.UsageError(f"no such mutant: {name}; there are {', '.join(MUTANTS)}")
        self._mutant = MUTANTS.get(name)
        self._package, self._folder = package, folder
        self._failure: dict[str, object] = {}
        self._obstacles: dict[str, str] = {}
        if self._mutant is not None:
            self._mutant.apply(framework)
            return
        # So nothing fails only because there is one more function in between.
        for each in MUTANTS.values():
            self._obstacles[each.name] = each.find_obstacle(framework)
            each.pass_on(framework)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None]:
        """Leave the tests that a mutant may fail, in their order."""
        yield
        if self._mutant is None:
            return
        kept = sorted(
            (item for item in items if self._stage(item) is not None),
            key=lambda item: self._stage(item) or 0,
        )
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def _stage(self, item: pytest.Item) -> int | None:
        """Return the position of a test in the order; None for one that is left out."""
        requirement = requirement_of(item)
        if self._mutant is None or requirement is None or not item.path.is_relative_to(SUITE):
            return None
        is_of_processes = requirement.id.startswith("processes.") or "killed" in requirement.id
        # A mutant makes tensors on a line of its own. A known gap that closes is a failure, too.
        names_lines = requirement.id.startswith(("leaks.", "memory.live-tensors-"))
        if is_of_processes or names_lines or item.get_closest_marker("xfail"):
            return None
        likely = self._mutant.likely
        if requirement.id in likely:
            return likely.index(requirement.id)
        return len(likely) + (module_of(item.path) != self._mutant.area)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the first failure."""
        result = yield
        requirement = requirement_of(item)
        if result.failed and requirement is not None and not self._failure:
            text = call.excinfo.exconly() if call.excinfo else result.longreprtext
            error = call.excinfo.value if call.excinfo else None
            self._failure = {
                "requirement": requirement.id,
                "problem": text.partition("\n")[0],
                "is_own": any(self._is_own(each) for each in list_causes(error)),
            }
        return result

    def _is_own(self, error: BaseException) -> bool:
        """Return whether an error is the mutant's own, as it came to neither d2ldev nor a backend.

        Such a mutant does not fit the framework, and nothing caught it.
        """
        files = [*_walk(error.__traceback__)]
        if mutants.__name__ not in files:
            return False
        after = files[len(files) - files[::-1].index(mutants.__name__) :]
        return not {each.partition(".")[0] for each in after} & {"d2ldev", self._package}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note tests that cannot be collected with a mutant: no requirement has caught it."""
        if report.failed and not self._failure:
            problem = report.longreprtext.strip().rpartition("\n")[2]
            self._failure = {"requirement": "", "problem": problem, "is_own": True}

    def pytest_sessionfinish(self) -> None:
        """Leave what was found."""
        found = {"obstacles": self._obstacles, "failure": self._failure}
        (self._folder / FILE).write_text(json.dumps(found), encoding="utf-8")


def _walk(traceback: TracebackType | None) -> Iterator[str]:
    """Yield the modules that an error went through, the outermost first."""
    while traceback is not None:
        yield str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
