"""Strict: raise array-api-strict's refusals at the operation, in d2ldev's words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict as xp

from d2ldev.framework import Framework, Strict, mismatch, operands_of, replace

_ARRAY: Any = type(xp.zeros(0))
# A move does not mix devices, and a function that makes an array has no operands.
_NOT_OPERATIONS = ("asarray", "from_dlpack", "to_device", "__array__", "__dlpack__", "__new__")


class ReferenceStrict(Strict):
    """The operations of array-api-strict that take arrays."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        return replace(
            (owner, name, self._wrap(name.strip("_"), vars(owner)[name], in_force))
            for owner, name in list(_operations())
        )

    def _wrap(
        self, name: str, function: Callable[..., Any], in_force: Callable[[], bool]
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if in_force():
                operands = operands_of(self._framework, args, kwargs)
                if len({device for _, device in operands}) > 1:
                    raise mismatch(name, operands, framework=self._framework)
            return function(*args, **kwargs)

        return run


def _operations() -> Iterator[tuple[Any, str]]:
    for owner in (xp, _ARRAY, xp.linalg, xp.fft):
        for name, value in vars(owner).items():
            is_public = not name.startswith("_") or (owner is _ARRAY and name.startswith("__"))
            if is_public and name not in _NOT_OPERATIONS and type(value) is type(_operations):
                yield owner, name
