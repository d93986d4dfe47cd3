"""Objects of another backend than the one that was asked: the error that names both.

Held by ``tests/together/test_other_backends.py`` and the requirement ``errors.name-the-backend``.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

from d2ldev.contract import Framework
from d2ldev.errors import D2LDevError, UnsupportedValueError, describe
from d2ldev.nesting.keras import keras_elsewhere
from d2ldev.nesting.kinds import REFUSED, UNKNOWN, Kind
from d2ldev.nesting.walk import leaves
from d2ldev.operations import keras
from d2ldev.registry.selection import other_backend_of


def of_another_backend(
    framework: Framework, attempted: str, x: Any, name: str = "", *, fix: str = ""
) -> UnsupportedValueError | None:
    """Return the error of an object that another backend knows; None if no other does.

    Args:
        framework: the one that was asked.
        attempted: the current operation, for messages.
        x: a value that it does not know, or a container, whose first unknown leaf counts.
        name: its name in a nesting; empty is the whole.
        fix: what helps besides the other backend.
    """
    name, x = _unknown(framework, x, name)
    whose, other, remedy = _whose(framework, x)
    if not whose:
        return None
    where = f" at {name}" if name else ""
    another = f"D2LDEV_BACKEND={other}, or backend = d2ldev.get_backend({other!r})"
    return UnsupportedValueError(
        attempted,
        f"{describe(x)}{where} {whose}",
        "; or ".join(each for each in (another if other else "", remedy, fix) if each),
    )


def function_of_another_backend(
    framework: Framework, attempted: str, function: Any, *, fix: str
) -> UnsupportedValueError | None:
    """Return the error of a loss or a metric that another framework computes; None for any other.

    Args:
        framework, attempted: see ``of_another_backend``.
        function: what can be called.
        fix: what helps besides the other backend.
    """
    computes = keras.backend_of_function(function)
    if not computes:
        return of_another_backend(framework, attempted, function, fix=fix)
    if computes == framework.name:
        return None
    return UnsupportedValueError(
        attempted,
        f"Keras computes {describe(function)} with {computes} in this process, and this is the "
        f"{framework.name} backend",
        fix,
    )


def _whose(framework: Framework, x: Any) -> tuple[str, str, str]:
    """Return a clause that names the framework of an object, its backend, and what helps instead.

    All are empty if no other backend knows the object.
    """
    reason, remedy = keras_elsewhere(x, framework.name)
    other = "" if remedy else other_backend_of(framework, x)
    if not other and not reason:
        return "", "", ""
    whose = "no backend"
    if other:
        whose = f"the {other} backend, and this is the {framework.name} backend"
    return f"is of {whose}{f': {reason}' if reason else ''}", other, remedy


# Of a class, because a model is looked through again and again; see ``Kinds``.
_known: dict[tuple[str, type], str] = {}
_MOST_KNOWN = 4096


def whose_object(framework: Framework, x: Any) -> str:
    """Return a clause that names the framework of an object in a model; empty if it is of no other.

    Args:
        framework: the one that does not know it.
        x: the object. Classes, functions and modules are not framework's to move.
    """
    cls = type(x)
    key = framework.name, cls
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        is_thing = not issubclass(cls, (type, FunctionType, ModuleType))
        found = _known[key] = _whose(framework, x)[0] if is_thing else ""
    return found


def _unknown(framework: Framework, x: Any, name: str) -> tuple[str, Any]:
    """Return the first leaf of a container that a framework does not know, with its name."""
    if not isinstance(framework.state.kinds[type(x)], Kind):
        try:
            for path, leaf, kind in leaves(x, framework.state.kinds, name):
                if kind in (UNKNOWN, REFUSED):
                    return path, leaf
        except D2LDevError:  # a container that cannot be walked is an error of its own
            pass
    return name, x
