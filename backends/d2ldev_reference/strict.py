"""What array-api-strict refuses by itself is refused here in d2ldev's words, at the operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict as xp

from d2ldev.interface import Backend
from d2ldev.operations.strictness import mismatch, operands_of, replace

_ARRAY: Any = type(xp.zeros(0))
# Moving is no mixing, and what only makes an array has no operands.
_NOT_OPERATIONS = ("asarray", "from_dlpack", "to_device", "__array__", "__dlpack__", "__new__")


def refuse_mixing(backend: Backend) -> Callable[[], None]:
    """Replace the operations of array-api-strict that take arrays; returns what puts them back."""
    return replace(
        (owner, name, _refusing(backend, name.strip("_"), vars(owner)[name]))
        for owner, name in list(_operations())
    )


def _operations() -> Iterator[tuple[Any, str]]:
    for owner in (xp, _ARRAY, xp.linalg, xp.fft):
        for name, value in vars(owner).items():
            is_public = not name.startswith("_") or (owner is _ARRAY and name.startswith("__"))
            if is_public and name not in _NOT_OPERATIONS and type(value) is type(_operations):
                yield owner, name


def _refusing(backend: Backend, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if backend._strictness.in_force():
            operands = operands_of(backend, args, kwargs)
            if len({device for _, device in operands}) > 1:
                raise mismatch(name, operands)
        return function(*args, **kwargs)

    return run
