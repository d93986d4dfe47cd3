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
import threading

from d2ldev.registry.discovery import (
    PREFERENCE,
    distributions_of,
    is_installed,
    known_backends,
)

# Not from ``typing``: its import takes as long as all the rest of ``import d2ldev``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _Finder:
    """Finds what the others find, and has what belongs around its import entered.

    A framework whose backend has nothing to do around its import is left to the others.
    """

    def __init__(self) -> None:
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Another finder may ask all, as this one does.
        if name not in PREFERENCE or getattr(self._asking, "others", False):
            return None
        around = _around(name)
        if around is None:
            return None
        self._asking.others = True
        try:
            spec = self._found(name, path, target)
        finally:
            self._asking.others = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            loader: Any = _Loader(spec.loader, around)
            spec.loader = loader
        return spec

    def _found(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            # Python passes over finders of before 3.4, which have no such method, too.
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    return spec
        return None


class _Loader:
    """Loads with another loader, inside of what belongs around the import.

    Args:
        loader: the framework's own. What is imported has it as its loader.
        around: the module with the context manager.
    """

    def __init__(self, loader: Any, around: str) -> None:
        self._loader = loader
        self._around = around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with importlib.import_module(self._around).importing():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks of every object, before it has a loader
            raise AttributeError(name)
        return getattr(self._loader, name)


def _around(name: str) -> str | None:
    """Return the module of what belongs around the import of a framework, if there is any."""
    if name not in known_backends() or len(distributions_of(name)) != 1:
        return None
    module = f"{known_backends()[name].module.partition('.')[0]}.importing"
    return module if is_installed(module) else None


def install() -> None:
    """Look at each import from now on, once: also where d2ldev itself is imported again."""
    # Imported again, the class is another one of the same name.
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if (type(finder).__module__, type(finder).__name__) != (__name__, _Finder.__name__)
    ]
    sys.meta_path.insert(0, _Finder())
