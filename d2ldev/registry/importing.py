"""What has to be done around the import of a framework, wherever a program imports it.

A backend whose framework cannot be imported as it is has a module ``importing`` in its package,
with a context manager of this name for the length of the import. From ``import d2ldev`` on it is
entered for an ``import`` of the user's, too. Only the four frameworks by their own names are looked
at, and nothing is imported before the framework is.

Held by ``tests/core/registry/test_importing.py``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from d2ldev.registry.discovery import (
    PREFERENCE,
    distributions_of,
    is_installed,
    known_backends,
)

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds what the others find, and enters what belongs around its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PREFERENCE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _wrap(spec.loader, name)
        return spec


def _wrap(loader: Any, name: str) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # what is imported has its loader as it was
        with _around(name):
            run(module)

    loader.exec_module = exec_module


def _around(name: str) -> AbstractContextManager[object]:
    if name not in known_backends() or len(distributions_of(name)) != 1:
        return nullcontext()
    package = known_backends()[name].module.partition(".")[0]
    if not is_installed(f"{package}.importing"):
        return nullcontext()
    around: AbstractContextManager[object] = importlib.import_module(
        f"{package}.importing"
    ).importing()
    return around


def install() -> None:
    """Look at each import from now on."""
    sys.meta_path.insert(0, _Finder())
