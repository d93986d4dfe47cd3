"""The table of methods: each requirement is about methods that its tests use."""

import ast
import importlib
import re
from types import FunctionType

import pytest
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.methods import METHODS, Verdict, find_methods, judge_methods, list_methods
from d2ldev_conformance.requirement import SUITE

import d2ldev

REQUIREMENTS = sorted({each.id for each in list_explanations()})
PUBLIC = [
    name
    for name, value in vars(d2ldev.Backend).items()
    if isinstance(value, FunctionType) and not name.startswith("_")
]


def words_of(node):
    """Return the names in a piece of a program, and the words in its texts."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found |= {*re.findall(r"\w+", each.value)}
    return found


def read_definitions(path):
    """Return name -> the words of each function, class and constant of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if ast.get_docstring(node):
                del node.body[0]
            found[node.name] = words_of(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(dict.fromkeys((ast.unparse(each) for each in targets), words_of(node)))
    return found


HELPERS = {
    key: words
    for path in sorted(SUITE.rglob("*.py"))
    if not path.name.startswith("test_")
    for key, words in read_definitions(path).items()
}


def find_words():
    """Return requirement -> the words of its tests, and of all that these use in the suite."""
    found = {}
    for path in sorted(SUITE.rglob("test_*.py")):
        definitions = HELPERS | read_definitions(path)
        name = ".".join(["d2ldev_conformance", *path.relative_to(SUITE.parent).parts])
        module = importlib.import_module(name.removesuffix(".py"))
        for key, value in vars(module).items():
            marks = [m for m in getattr(value, "pytestmark", ()) if m.name == "requirement"]
            seen, waiting = set(), [key] if marks else []
            while waiting:
                name = waiting.pop()
                if name not in seen and name in definitions:
                    seen.add(name)
                    waiting += definitions[name]
                    found.setdefault(marks[0].args[0], set()).update(definitions[name])
    return found


def test_each_method_of_the_backend_has_a_requirement():
    assert sorted({*PUBLIC} - {*list_methods(REQUIREMENTS)}) == []


def test_each_entry_names_what_is_there():
    for name in {name for names in METHODS.values() for name in names}:
        owner, _, method = name.rpartition(".")
        cls = getattr(d2ldev, owner) if owner else d2ldev.Backend
        assert hasattr(cls, method) or hasattr(d2ldev, name), name


def test_each_requirement_has_an_entry_and_each_entry_a_requirement():
    used = {
        max((each for each in METHODS if name.startswith(each)), key=len) for name in REQUIREMENTS
    }
    assert sorted({*METHODS} - used) == []


def test_the_tests_of_a_requirement_use_the_methods_that_it_is_about():
    words = find_words()
    wrong = {
        (name, method)
        for name in REQUIREMENTS
        for method in find_methods(name)
        if method.rpartition(".")[2] not in words[name]
    }
    assert wrong == set()


def test_a_requirement_without_an_entry_is_an_error():
    with pytest.raises(KeyError, match="nothing of this kind"):
        find_methods("nothing of this kind")


def report(**outcomes):
    rows = [
        {"requirement": name.replace("_", "."), "outcome": outcome, "reasons": ["because"]}
        for name, outcome in outcomes.items()
    ]
    return {"requirements": rows}


WAITS = ["sync.one", "sync.two"]


def test_the_reason_of_a_skipped_test_is_not_one_of_a_limit():
    document = report(sync_one="cannot", sync_two="skipped")
    document["requirements"][0]["reasons"] = ["needs 2 GPUs", "has no queue"]
    document["requirements"][1]["reasons"] = ["needs 2 GPUs"]
    verdict = dict(judge_methods(document, WAITS))["is_idle"]
    assert verdict.reasons == (("cannot", "sync.one", "has no queue"),)


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({"sync_one": "passed", "sync_two": "passed"}, Verdict("passed", 2, 2, ())),
        ({"sync_one": "passed", "sync_two": "skipped"}, Verdict("passed", 1, 2, ())),
        ({"sync_one": "skipped"}, Verdict("not run", 0, 2, ())),
        ({}, Verdict("not run", 0, 2, ())),
        (
            {"sync_one": "passed", "sync_two": "known gap"},
            Verdict("known gap", 1, 2, (("known gap", "sync.two", "because"),)),
        ),
        (
            {"sync_one": "failed", "sync_two": "cannot"},
            Verdict(
                "failed",
                0,
                2,
                (("failed", "sync.one", "because"), ("cannot", "sync.two", "because")),
            ),
        ),
    ],
)
def test_the_verdict_of_a_method_is_its_worst_outcome(outcomes, verdict):
    assert dict(judge_methods(report(**outcomes), WAITS)) == {
        "synchronize": verdict,
        "is_idle": verdict,
    }
