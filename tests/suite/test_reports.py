"""A report is JSON in which each requirement has a line of its own."""

import doctest
import importlib
import json
import pkgutil

import d2ldev_conformance
import pytest
from d2ldev_conformance.lines import format_lines
from d2ldev_conformance.report import Report
from d2ldev_conformance.requirement import Requirement


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
