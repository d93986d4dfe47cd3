"""A report is JSON in which each requirement has a line of its own."""

import doctest
import importlib
import json
import pkgutil
from types import SimpleNamespace

import d2ldev_conformance
import pytest
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.outcomes import Outcomes
from d2ldev_conformance.report import Report
from d2ldev_conformance.requirement import SUITE, Requirement, requirement


def test_a_report_has_one_line_for_each_requirement(reference, tmp_path):
    report = Report(reference)
    names = ["copy.makes-new-memory", "mlp.seeds"]
    for name in names:
        report.add(Requirement(name, "6.7.2", "tensors"), "skipped", "two\nlines")
    report.write(tmp_path, exit_status=0)
    text = (tmp_path / "conformance.json").read_text(encoding="utf-8")
    assert [row["requirement"] for row in json.loads(text)["requirements"]] == names
    for name in names:
        (line,) = (line for line in text.splitlines() if name in line)
        assert json.loads(line.strip(" ,"))["reasons"] == ["two\nlines"]


def raise_another():
    with pytest.raises(ValueError, match="copy=False"):
        raise ValueError("it shares no memory\nfix: none")


def look_for_another():
    try:
        raise ValueError("it shares no memory")
    except ValueError as error:
        assert "copy=False" in str(error), "no such text"  # noqa: PT017


def fail_elsewhere():
    stderr = "Traceback (most recent call last):\n  File x\nValueError: it shares no memory\n"
    raise AssertionError(f"{stderr}\nassert 1 == 0")


HIDING = {
    raise_another: "Regex pattern did not match; it was ValueError: it shares no memory",
    look_for_another: "no such text; it was ValueError: it shares no memory",
    fail_elsewhere: "ValueError: it shares no memory",
}


@pytest.mark.parametrize(("test", "told"), HIDING.items(), ids=["raises", "assert", "process"])
def test_a_failure_tells_the_error_that_the_test_did_not_expect(reference, test, told):
    """``pytest.raises(match=...)`` tells of the text that it wants, and hides the cause."""
    report = Report(reference)
    outcomes = Outcomes(reference, "d2ldev_reference", report)
    mark = requirement("query.dlpack-without-a-copy", section="6.7.2").mark
    item = SimpleNamespace(
        get_closest_marker={"requirement": mark}.get, path=SUITE / "tensors" / "test_it.py"
    )
    call = pytest.CallInfo.from_call(test, when="call")
    result = pytest.TestReport("test_it", ("", 1, ""), {}, "failed", "its text", "call")
    notes = outcomes.pytest_runtest_makereport(item, call)
    next(notes)
    with pytest.raises(StopIteration):
        notes.send(result)
    outcomes.pytest_runtest_logreport(result)
    (row,) = report.rows()
    assert row["reasons"] == [f"call: AssertionError: {told}"]
    assert "it shares no memory" in row["errors"][0]


def test_a_document_comes_back_as_it_was():
    document = {
        "a": [],
        "b": {},
        "c": [1, 2],
        "d": [{"e": [1]}, []],
        "f": {"g": [{}]},
        "h": "\u00e4",
    }
    text = format_lines(document)
    assert json.loads(text) == document
    assert list(json.loads(text)) == list(document)
    assert len(text.splitlines()) == 2 + len(document) + 3 + 2


MODULES = [each.name for each in pkgutil.iter_modules(d2ldev_conformance.__path__)]


@pytest.mark.parametrize("name", sorted({*MODULES} - {"suite"}))
def test_the_examples_of_a_module_are_true(name):
    found = doctest.testmod(importlib.import_module(f"d2ldev_conformance.{name}"))
    assert found.failed == 0
