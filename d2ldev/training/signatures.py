"""What a function or a model calls its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def first_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the first parameter; None if there is none, or Python cannot tell."""
    return next((parameter.name for parameter in _parameters(function)), None)


def input_names(method: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a model is called with, in the order in which it is given.

    Args:
        method: bound to the model.

    Returns:
        The names; empty if the method takes ``*args``, or Python cannot tell.
    """
    parameters = _parameters(method)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in parameters if each.kind in by_position)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # what is written in C need not say
        return []
