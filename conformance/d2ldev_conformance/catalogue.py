"""All requirements of the suite, explained: the list from which the documentation is written."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

from d2ldev.framework.testing import MODULES
from d2ldev_conformance.explanation import Explanation, explain
from d2ldev_conformance.requirement import SUITE, Requirement


@cache
def list_explanations() -> tuple[Explanation, ...]:
    """Return one explanation for each test of the suite, in the order of modules and files."""
    found = [explain(test) for test in _list_tests()]
    return tuple(
        sorted((each for each in found if each), key=lambda each: MODULES.index(each.file.module))
    )


@cache
def find_requirements() -> dict[tuple[str, str], Requirement]:
    """Return the file and the name of each test of the suite -> the requirement that it checks."""
    found = {(test.__module__.rpartition(".")[2], test.__name__): test for test in _list_tests()}
    return {
        key: Requirement(each.id, each.section, each.file.module)
        for key, test in found.items()
        if (each := explain(test))
    }


def find_nearest(name: str) -> str:
    """Return the id of a requirement that a name is most like; empty if it is an id itself."""
    ids = sorted({each.id for each in list_explanations()})
    return "" if name in ids else get_close_matches(name, ids, n=1, cutoff=0)[0]


def _list_tests() -> Iterator[Callable[..., Any]]:
    # By its folder: the suite imports the plugin, which writes reports with these texts.
    names = [
        module.name
        for module in pkgutil.walk_packages([str(SUITE)], f"{__package__}.suite.")
        if module.name.rpartition(".")[2].startswith("test_")
    ]
    for name in names:
        for function in vars(importlib.import_module(name)).values():
            if inspect.isfunction(function) and function.__module__ == name:
                yield function
