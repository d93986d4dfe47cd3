"""What a function or a model calls its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect


def first_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the first parameter; None if there is none, or Python cannot tell.

    Of a module, whose ``__call__`` takes ``*args``, that of its ``forward``.
    """
    parameters = _parameters(function)
    for name in ("forward", "hybrid_forward"):
        if not parameters or parameters[0].kind is parameters[0].VAR_POSITIONAL:
            parameters = _parameters(getattr(function, name, None))
    names = [parameter.name for parameter in parameters]
    return next(iter(names[1:] if names[:1] == ["F"] else names), None)


def input_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of what a model is called with, in the order in which it is given.

    Args:
        method: bound to the model.

    Returns:
        The names; empty if the method takes ``*args``, or Python cannot tell.
    """
    parameters = _parameters(method)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return ()
    return tuple(
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    )


def _parameters(function: Any) -> list[inspect.Parameter]:
    # A fifth of the time that ``import d2ldev`` takes, and only training asks.
    import inspect

    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # what is written in C need not say
        return []
