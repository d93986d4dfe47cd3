"""Import the packages that extras of d2ldev bring, where a call needs them.

``pip install d2ldev`` brings NumPy alone.

Held by ``tests/core/package/test_dependencies.py``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from d2ldev.errors import PackageNotInstalledError, text_of


def import_optional(
    module: str, attempted: str, *, extra: str = "", install: str = ""
) -> ModuleType:
    """Import a module that not everyone has, and return it.

    Args:
        module: its full name.
        attempted: what needs it, for the message.
        extra: the extra of d2ldev that brings it.
        install: the line that installs it; empty is the line of the extra.

    Raises:
        PackageNotInstalledError: if it is missing, or fails to import.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        problem = f"{package} cannot be imported: {text_of(error)}"
        fix = install or f"pip install 'd2ldev[{extra}]'"
        raise PackageNotInstalledError(attempted, problem, fix) from error
