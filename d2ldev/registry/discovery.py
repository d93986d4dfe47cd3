"""Which backends there are, and whether what they need is installed; nothing is imported for it.

Backends are found through the entry-point group ``d2ldev.backends``, the built-in ones like
anyone else's. An entry point names a subclass of ``Framework``; the package that holds it
imports no framework until that class is made, and says which modules it needs in a
``requires`` tuple (default: none), so that "is it installed?" is answered without importing.

Held by ``tests/core/registry/test_registry.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "d2ldev.backends"
ALIASES = {"pytorch": "torch", "tf": "tensorflow"}
PREFERENCE = ("torch", "jax", "tensorflow", "mxnet")
FALLBACK = "reference"
# What a third party's module or class may raise when it is imported or made. A module that wants
# the process to end is a broken one, too.
BROKEN = (Exception, SystemExit)

_entry_points: dict[str, EntryPoint] | None = None


def known_backends(*, refresh: bool = False) -> dict[str, EntryPoint]:
    """Return every backend that an installed distribution announces, by name.

    Args:
        refresh: look again, for what was installed since.
    """
    global _entry_points
    if _entry_points is None or refresh:
        from importlib.metadata import MetadataPathFinder, entry_points

        # Python 3.11 leaves these out of ``importlib.invalidate_caches``, as an instance's method.
        MetadataPathFinder().invalidate_caches()
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=GROUP):
            found.setdefault(point.name.lower(), point)
        _entry_points = found
    return _entry_points


def missing_modules(name: str) -> list[str]:
    """Return the missing modules that a known backend needs, without importing any module.

    Raises:
        Exception: whatever importing a broken third-party package raises.
    """
    return [module for module in required_modules(name) if not _is_installed(module)]


def required_modules(name: str) -> tuple[str, ...]:
    """Return what a known backend needs, as its package says; see ``missing_modules``."""
    package = importlib.import_module(known_backends()[name].module.partition(".")[0])
    requires = getattr(package, "requires", ())
    return (requires,) if isinstance(requires, str) else tuple(requires)


def available_backends() -> list[str]:
    """Return the names of the backends whose framework is installed, in the order of preference.

    No framework is imported. A third-party backend whose package cannot be imported is left
    out; ``get_backend`` says why.
    """
    names = sorted(known_backends(), key=rank)
    return [name for name in names if _is_available(name)]


def rank(name: str) -> tuple[int, str]:
    """Return the order of preference, as a key to sort names by."""
    if name in PREFERENCE:
        return PREFERENCE.index(name), name
    return len(PREFERENCE) + (name == FALLBACK), name


def _is_available(name: str) -> bool:
    try:
        return not missing_modules(name)
    except BROKEN:
        return False


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    spec = importlib.util.find_spec(module)
    # A folder that happens to have the name is a namespace package, which has no origin.
    return spec is not None and spec.origin is not None


def canonical_name(name: str) -> str:
    """Return a backend's name without regard to case, white space and aliases."""
    name = name.strip().lower()
    return ALIASES.get(name, name)


def choices() -> str:
    """Return what is known and what is installed, for messages."""
    known = ", ".join(sorted(known_backends(), key=rank))
    return f"known: {known}; installed: {', '.join(available_backends())}"
