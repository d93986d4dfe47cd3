"""The examples in the docstrings of the core are true."""

import doctest
import importlib
from pathlib import Path

import pytest

import d2ldev

ROOT = Path(d2ldev.__file__).parent


def has_examples(path):
    """Return whether a file has an example that doctest does not skip."""
    found = doctest.DocTestParser().get_examples(path.read_text(encoding="utf-8"))
    return not all(each.options.get(doctest.SKIP) for each in found)


MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if has_examples(path)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(reference, name):
    with d2ldev.use_backend(reference):
        found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert found.failed == 0
