"""Objects of another backend than the one that was asked: the error that names both.

Held by ``tests/together/test_other_backends.py`` and the requirement ``errors.name-the-backend``.
"""

from __future__ import annotations

from typing import Any

from d2ldev.errors import D2LDevError, UnsupportedValueError, describe
from d2ldev.framework import Framework
from d2ldev.nesting.kinds import REFUSED, UNKNOWN, Kind
from d2ldev.nesting.walk import leaves
from d2ldev.registry.selection import other_backend_of


def of_another_backend(
    framework: Framework, attempted: str, x: Any, name: str = "", *, fix: str = ""
) -> UnsupportedValueError | None:
    """Return the error of an object that another backend knows; None if no other does.

    Args:
        framework: the one that was asked.
        attempted: what the caller is doing.
        x: what it does not know, or a container, whose first leaf of this sort counts.
        name: its name in a nesting; empty is the whole.
        fix: what helps besides the other backend.
    """
    name, x = _unknown(framework, x, name)
    reason, remedy = framework.models.elsewhere(x) or ("", "")
    other = "" if remedy else other_backend_of(framework, x)
    if not other and not reason:
        return None
    whose = "no backend"
    if other:
        whose = f"the {other} backend, and this is the {framework.name} backend"
    where = f" at {name}" if name else ""
    because = f": {reason}" if reason else ""
    another = f"D2LDEV_BACKEND={other}, or backend = d2ldev.get_backend({other!r})"
    return UnsupportedValueError(
        attempted,
        f"{describe(x)}{where} is of {whose}{because}",
        "; or ".join(each for each in (another if other else "", remedy, fix) if each),
    )


def _unknown(framework: Framework, x: Any, name: str) -> tuple[str, Any]:
    """Return the first leaf of a container that a framework does not know, with its name."""
    if not isinstance(framework.kinds[type(x)], Kind):
        try:
            for path, leaf, kind in leaves(x, framework.kinds, name):
                if kind in (UNKNOWN, REFUSED):
                    return path, leaf
        except D2LDevError:  # a container that cannot be walked is an error of its own
            pass
    return name, x
