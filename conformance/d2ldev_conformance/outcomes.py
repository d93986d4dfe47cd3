"""Note the outcome of each test, and collapse the failures that have one cause."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from d2ldev.contract.abilities import describe_inability
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.catalogue import find_requirements
from d2ldev_conformance.explanation import describe
from d2ldev_conformance.known_gaps import FILE
from d2ldev_conformance.provision import NotProvidedError
from d2ldev_conformance.requirement import SUITE, Requirement, requirement_of
from d2ldev_conformance.unbegun import (
    find_unbegun_default,
    find_unbegun_method,
    list_causes,
    page_of,
)

if TYPE_CHECKING:
    from d2ldev import Backend
    from d2ldev_conformance.report import Report

_PROPERTY = "d2ldev outcome"
# pytest's words for a test that passes where a known gap says that it fails.
_CLOSED = "[XPASS(strict)] "


class _Note(NamedTuple):
    """What one phase of a test tells about its requirement, as text: workers send it.

    Args:
        id: the requirement's.
        section: the requirement's.
        module: the requirement's.
        outcome: one of ``progress.OUTCOMES``.
        reason: in one line.
        cause: the place and the text of the error of a failure; empty otherwise.
    """

    id: str
    section: str
    module: str
    outcome: str
    reason: str
    cause: str


class Outcomes:
    """A plugin that notes the outcomes, also of tests that ran in the workers of pytest-xdist.

    Args:
        backend: the backend under test.
        package: its package.
        report: counts the outcomes.
    """

    def __init__(self, backend: Backend, package: str, report: Report) -> None:
        self._backend, self._package, self._report = backend, package, report
        self._is_collected = False
        self._causes: set[str] = set()
        self._repeated: set[int] = set()
        # An ``id`` is another object's as soon as the object is gone.
        self._kept: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the outcome of a test in its report, which goes from worker to controller."""
        result = yield
        requirement = requirement_of(item)
        if requirement is None or not item.path.is_relative_to(SUITE):
            return result
        text = result.longrepr
        if isinstance(text, str) and text.startswith(_CLOSED):
            gap = f"known gap {requirement.id} is closed: remove its entry from {FILE}"
            result.longrepr = f"{gap}; it was: {text.removeprefix(_CLOSED)}"
        outcome, reason = _outcome(result), _reason(result, call)
        if call.excinfo is not None and outcome == "failed":
            outcome, reason = self._judge(call.excinfo.value, requirement.module) or (
                outcome,
                reason,
            )
        if outcome in ("cannot", "not begun"):
            result.outcome = "skipped"
            result.longrepr = (str(item.path), 0, f"Skipped: {reason}")
        if outcome == "failed" and isinstance(item, pytest.Function):
            result.sections.append((requirement.id, describe(item.function)))
        if outcome:
            cause = _cause_of(call) if outcome == "failed" else ""
            note = _Note(*requirement, outcome, reason, cause)
            result.user_properties.append((_PROPERTY, list(note)))
        return result

    def _judge(self, error: BaseException, module: str) -> tuple[str, str] | None:
        """Return the outcome and the reason of an error; None for a failure."""
        framework = framework_of(self._backend)
        declared = {describe_inability(framework, ability) for ability in framework.cannot}
        for each in list_causes(error):
            problem = getattr(each, "problem", None)
            if isinstance(each, NotProvidedError) or problem in declared:
                return "cannot", str(problem)
        method = find_unbegun_method(error, self._package)
        if method := method or find_unbegun_default(framework, module):
            return "not begun", f"write {method} ({page_of(method, module)})"
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of a phase of a test."""
        note = _note_of(report)
        if note is None:
            self._note_crash(report)
            return
        requirement = Requirement(note.id, note.section, note.module)
        error = f"{report.nodeid}\n{note.cause or note.reason}" if note.outcome == "failed" else ""
        self._report.add(requirement, note.outcome, note.reason, error, report.nodeid)
        if note.cause in self._causes:
            self._repeated.add(id(report))
            self._kept.append(report)
        elif note.cause:
            self._causes.add(note.cause)

    def _note_crash(self, report: pytest.TestReport) -> None:
        """Count a test whose worker died: it has a report of pytest-xdist's own, without a note."""
        requirement = self._report.awaits(report.nodeid)
        if requirement is not None and report.failed:
            text = str(report.longrepr)
            error = f"{report.nodeid}\n{text}"
            self._report.add(requirement, "failed", text.split("\n")[0], error, report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Expect the tests of a worker of pytest-xdist: the controller collects none itself."""
        if self._is_collected:  # another worker, or one in the place of one that died
            return
        self._is_collected = True
        known = find_requirements()
        for test in ids:
            file, _, name = test.partition("::")
            if requirement := known.get((Path(file).stem, name.partition("[")[0])):
                self._report.expect(requirement, test)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Name what is not begun, and a failure whose cause pytest has printed already."""
        note = _note_of(report)
        if note is not None and note.outcome == "not begun":
            return "not begun", "n", "NOT BEGUN"
        if id(report) in self._repeated:
            return "failed of the same cause", "F", "FAILED"
        return None


def _note_of(report: Any) -> _Note | None:
    """Return the note in a report; None for a test outside of the suite."""
    for kind, noted in getattr(report, "user_properties", ()):
        if kind == _PROPERTY:
            return _Note(*map(str, noted))
    return None


def _outcome(result: pytest.TestReport) -> str:
    """Return what a phase of a test says about its requirement; empty if nothing."""
    if result.skipped:
        return "known gap" if hasattr(result, "wasxfail") else "skipped"
    if result.failed:
        return "failed"
    return "passed" if result.when == "call" else ""


def _reason(result: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if hasattr(result, "wasxfail"):
        return str(result.wasxfail)
    if result.skipped and isinstance(result.longrepr, tuple):
        return str(result.longrepr[2]).removeprefix("Skipped: ")
    if result.failed:
        raised = call.excinfo
        text = raised.exconly() if raised else result.longreprtext
        told = f"{result.when}: {_find_line(text)}"
        hidden = _tell_hidden(raised.value) if raised else ""
        return f"{told.removesuffix('.')}; {hidden}" if hidden else told
    return ""


def _find_line(text: str) -> str:
    r"""Return the first line of an error; the last line of a traceback of another process.

    >>> _find_line("E: Traceback (most recent call last):\n  File x\nOSError: no\nassert 1")
    'E: OSError: no'
    >>> _find_line("AssertionError: \nNot equal\n")  # of NumPy
    'AssertionError: Not equal'
    """
    first, *lines = text.split("\n")
    if first.endswith(": "):
        return first + next(filter(str.strip, lines), "")
    if first.endswith("Traceback (most recent call last):"):
        # Other lines of a traceback are indented. pytest's own begins with "assert".
        last = next((line for line in lines if line[:1].strip() and line != first), "")
        return f"{first.partition('Traceback (')[0]}{last}"
    return first


def _tell_hidden(error: BaseException) -> str:
    """Return what was raised where the suite expects another error, in one line; empty otherwise.

    An assertion about an error, as ``pytest.raises(match=...)`` makes, says little of the error.
    """
    _, *hidden = list_causes(error)
    is_judgement = isinstance(error, (AssertionError, pytest.fail.Exception))
    if not (hidden and is_judgement):
        return ""
    first = str(hidden[0]).split("\n")[0]
    return f"it was {type(hidden[0]).__name__}: {first}"


def _cause_of(call: pytest.CallInfo[None]) -> str:
    """Return the line that raised and the text of its error; empty if nothing was raised."""
    if call.excinfo is None:
        return ""
    last = call.excinfo.traceback[-1]
    # The end of the path names the file on every machine.
    place = "/".join(Path(last.path).parts[-3:])
    told = [f"{place}:{last.lineno + 1}: {call.excinfo.exconly()}"]
    return "\n".join([*told, *filter(None, [_tell_hidden(call.excinfo.value)])])
