"""All requirements of the suite, explained: the list from which the documentation is written."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache

from d2ldev.framework.testing import MODULES
from d2ldev_conformance.explanation import Explanation, explain
from d2ldev_conformance.requirement import SUITE


@cache
def list_explanations() -> tuple[Explanation, ...]:
    """Return one explanation for each test of the suite, in the order of modules and files."""
    # By its folder: the suite imports the plugin, which writes reports with these texts.
    names = [
        module.name
        for module in pkgutil.walk_packages([str(SUITE)], f"{__package__}.suite.")
        if module.name.rpartition(".")[2].startswith("test_")
    ]
    found = [each for name in names for each in _explain_all(name)]
    return tuple(sorted(found, key=lambda each: MODULES.index(each.file.module)))


def _explain_all(name: str) -> Iterator[Explanation]:
    for function in vars(importlib.import_module(name)).values():
        if inspect.isfunction(function) and function.__module__ == name:
            explanation = explain(function)
            if explanation is not None:
                yield explanation
