"""The examples in the docstrings of the core are true."""

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

import d2ldev
from d2ldev import settings

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
def test_the_examples_of_a_module_are_true(reference, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "_chosen_virtual_gpus", None)  # an example sets it
    module = importlib.import_module(name)
    names = {each: getattr(d2ldev, each) for each in d2ldev.__all__}
    with d2ldev.use_backend(reference):
        found = doctest.testmod(
            module,
            # A reader has imported these.
            extraglobs={**names, "backend": reference, "np": np, "d2ldev": d2ldev},
            optionflags=doctest.ELLIPSIS,
        )
    assert found.attempted
    assert found.failed == 0
