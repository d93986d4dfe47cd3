"""Two reports are compared: what changed, and whether something that passed does not pass now."""

import copy
import json

import pytest
from d2ldev_conformance.comparison import CHANGES, compare_reports, find_changes
from d2ldev_conformance.report import Report
from d2ldev_conformance.requirement import Requirement

import d2ldev


def make_report(reference, rows):
    """Return a report with an outcome and a reason for each requirement."""
    report = Report(reference)
    for name, (outcome, reason) in rows.items():
        report.add(Requirement(name, "6.7.2", "tensors"), outcome, reason)
    return report.document(exit_status=0)


@pytest.fixture
def keep(reference, tmp_path):
    """Return what writes a report into a file or a folder, with changes of its head."""

    def write(place, rows, **changes):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**make_report(reference, rows), **changes}), encoding="utf-8")
        return path

    return write


# The outcome and the reason before, those after, and what they make of a requirement.
PAIRS = {
    "a.same": (("passed", ""), ("passed", ""), None),
    "b.same": (("known gap", "no kernel"), ("known gap", "no kernel"), None),
    "c.new": (None, ("skipped", "needs 2 GPUs"), "new"),
    "d.reason": (("known gap", "no kernel"), ("known gap", "no memory"), "other reasons"),
    "e.reason": (("passed", ""), ("passed", "needs 2 GPUs"), "other reasons"),
    "f.other": (("skipped", "needs 2 GPUs"), ("cannot", "no threads"), "other outcome"),
    "g.other": (("failed", "E"), ("known gap", "no kernel"), "other outcome"),
    "h.begins": (("known gap", "no kernel"), ("passed", ""), "began to pass"),
    "i.begins": (("failed", "E"), ("passed", ""), "began to pass"),
    "j.gone": (("skipped", "needs 2 GPUs"), None, "gone"),
    "k.stops": (("passed", ""), ("skipped", "needs 2 GPUs"), "passes no more"),
    "l.stops": (("passed", ""), ("known gap", "no kernel"), "passes no more"),
    "m.fails": (("passed", ""), ("failed", "E"), "began to fail"),
    "n.fails": (("skipped", ""), ("not begun", "write Models.mlp"), "began to fail"),
    "o.fails": (None, ("failed", "E"), "began to fail"),
}


def list_rows(number):
    """Return the rows of one of the two reports."""
    return {name: pair[number] for name, pair in PAIRS.items() if pair[number]}


def test_each_change_is_named_the_worst_last(reference):
    old, new = (make_report(reference, list_rows(number)) for number in (0, 1))
    changes = list(find_changes(old, new))
    assert [(each.requirement, each.change) for each in changes] == [
        (name, change) for name, (*_, change) in PAIRS.items() if change
    ]
    assert [*dict.fromkeys(each.change for each in changes)] == [*CHANGES]
    told = {each.requirement: (each.old, each.new, each.reasons) for each in changes}
    assert told["o.fails"] == ("", "failed", "E")
    assert told["d.reason"][2] == "no memory; before: no kernel"
    assert told["e.reason"] == ("passed", "passed", "needs 2 GPUs; before: none")
    assert told["k.stops"] == ("passed", "skipped", "needs 2 GPUs")


def test_the_table_has_a_line_for_each_change_and_counts_them(keep):
    text, is_worse = compare_reports(keep("a.json", list_rows(0)), keep("b.json", list_rows(1)))
    lines = text.splitlines()
    for name, (*_, change) in PAIRS.items():
        assert sum(f" {name} " in line for line in lines) == bool(change)
    counts = "began to fail: 3, passes no more: 2, gone: 1, began to pass: 2, other outcome: 2"
    assert f"{counts}, other reasons: 2, new: 1, as before: 2" in lines
    assert lines[-1] == "worse than before: 5"
    assert is_worse


def test_reasons_in_another_order_are_no_change(reference):
    old = make_report(reference, {"a.b": ("skipped", "x")})
    new = copy.deepcopy(old)
    old["requirements"][0]["reasons"], new["requirements"][0]["reasons"] = ["x", "y"], ["y", "x"]
    assert list(find_changes(old, new)) == []


@pytest.mark.parametrize(
    ("before", "after", "is_worse"),
    [
        ("passed", "passed", False),
        ("failed", "failed", False),
        ("failed", "passed", False),
        ("failed", "not begun", False),
        ("skipped", "cannot", False),
        (None, "passed", False),
        ("failed", None, False),
        ("passed", "failed", True),
        ("passed", "not begun", True),
        ("passed", "skipped", True),
        ("passed", "cannot", True),
        ("passed", "known gap", True),
        ("passed", None, True),
        ("skipped", "failed", True),
        ("known gap", "not begun", True),
        (None, "failed", True),
    ],
)
def test_worse_is_what_passed_and_does_not_now_and_what_began_to_fail(
    keep, before, after, is_worse
):
    rows = [{"a.b": (each, "")} if each else {} for each in (before, after)]
    paths = [keep(f"{number}.json", each) for number, each in enumerate(rows)]
    assert compare_reports(*paths).is_worse == is_worse


def test_the_heads_are_compared(keep):
    changes = {
        "versions": {"d2ldev": "0.2.0", "python": "3.13.0"},
        "interface": 7,
        "commit": "6fa6297",
        "suite": "c690af49",
        "machine": "abacus",
        "devices": [{"device": "cpu", "platform": "cpu"}],
        "cards": ["a card"],
        "exit_status": 2,
    }
    text, is_worse = compare_reports(keep("a.json", {}), keep("b.json", {}, **changes))
    (table,) = [block for block in text.split("\n\n") if "report" in block]
    rows = {line.split("  ")[0].strip(): line.split()[-1] for line in table.splitlines()[2:-1]}
    for name, told in {
        "report": "b",
        "d2ldev": "0.2.0",
        "python": "3.13.0",
        "array-api-strict": "unknown",
        "interface": "7",
        "commit": "6fa6297",
        "suite": "c690af49",
        "machine": "abacus",
        "GPUs": "cpu",
        "cards": "card",
        "exit status": "2",
    }.items():
        assert rows[name] == told
    assert "backend" not in rows  # it is the same
    assert not is_worse


def test_of_several_reports_those_of_the_same_gpus_are_compared_the_newest(keep):
    cpu = {"devices": [{"device": "cpu", "platform": "cpu"}]}
    passed, failed = {"a.b": ("passed", "")}, {"a.b": ("failed", "E")}
    for date, rows in (("2026-11-27", passed), ("2026-11-26", failed)):
        keep(f"old/{date}.json", rows, date=f"{date}T00:00:00+00:00", **cpu)
    keep("old/virtual.json", passed)
    keep("new/cpu.json", failed, **cpu)
    new = keep("new/virtual.json", passed)
    text, is_worse = compare_reports(new.parents[1] / "old", new.parent)
    virtual, on_cpu = text.split("reference on cpu\n")
    assert virtual.startswith("reference on 2 virtual\n")
    assert "began to fail  a.b" in on_cpu
    assert "2026-11-27 " in on_cpu
    assert text.count("began to fail: 1") == text.count("as before: 1") == 1
    assert is_worse


def test_two_reports_of_different_backends_are_both_named(keep):
    old, new = (keep(f"{name}/a.json", {}, backend=name) for name in ("torch", "jax"))
    text, _ = compare_reports(old.parent, new.parent)
    assert text.startswith("torch on 2 virtual -> jax on 2 virtual\n")


def test_a_run_that_is_gone_does_not_pass(keep):
    old = keep("old/virtual.json", {"a.b": ("passed", "")})
    cpu = {"devices": [{"device": "cpu", "platform": "cpu"}]}
    new = keep("old/cpu.json", {"a.b": ("passed", "")}, **cpu)
    text, is_worse = compare_reports(old.parent, new)
    assert "reference on 2 virtual\nno new report; 1 passed in the old one" in text
    assert is_worse
    text, is_worse = compare_reports(new, old.parent)
    assert "reference on 2 virtual\nno old report; 1 passed in the new one" in text
    assert not is_worse
    keep("old/virtual.json", {"a.b": ("failed", "")})
    text, is_worse = compare_reports(new, old.parent)
    assert "no old report; 0 passed and 1 failed in the new one" in text
    assert is_worse


def test_no_character_of_a_report_reaches_the_terminal_unseen(keep):
    hostile = "\x1b[2J\nx\u202e"
    head = {"commit": hostile, "machine": hostile, "versions": {hostile: hostile}}
    rows = {hostile: ("failed", hostile)}
    text, _ = compare_reports(keep("a.json", {}), keep("b.json", rows, **head))
    assert all(each.isprintable() or each == "\n" for each in text)
    assert "?[2J x?" in text


def test_what_became_of_mutants_may_lie_beside_a_report(keep):
    path = keep("out/conformance.json", {})
    (path.parent / "mutants.json").write_text('{"backend": "reference", "mutants": []}')
    assert not compare_reports(path, path.parent).is_worse


def test_a_place_without_a_report_is_refused(keep, tmp_path):
    path = keep("a.json", {})
    (tmp_path / "none").mkdir()
    with pytest.raises(d2ldev.UnsupportedValueError, match="the folder has no report"):
        compare_reports(path, tmp_path / "none")
    with pytest.raises(d2ldev.UnsupportedValueError, match=r"cannot read the report .*gone"):
        compare_reports(tmp_path / "gone.json", path)
