"""Strict: tinygrad refuses mixed devices when it computes, which may be long after the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from d2ldev.framework import Framework, Strict, mismatch, operands_of, replace
from tinygrad import Tensor
from tinygrad.tensor import _METADATA

# Most operations on tensors go through the first, and ``assign`` writes into a tensor. The last two
# take tensors in a list, or an index.
_METHODS = ("_apply_uop", "assign", "stack", "__getitem__")
_OPERANDS = (Tensor, list, tuple)


class TinygradStrict(Strict):
    """The operations of tinygrad."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        return replace([(Tensor, name, self._watch(name, in_force)) for name in _METHODS])

    def _watch(self, name: str, in_force: Callable[[], bool]) -> Callable[..., Any]:
        method = vars(Tensor)[name]

        @functools.wraps(method)
        def call(x: Tensor, *others: Any, **options: Any) -> Any:
            if in_force():
                operands = (x, *(each for each in others if isinstance(each, _OPERANDS)))
                found = operands_of(self._framework, operands)
                if len({device for _, device in found}) > 1:
                    # tinygrad keeps the name of the call, and would keep it after an error.
                    outer = _METADATA.set(None)
                    raise mismatch(outer.name.strip("_") if outer else name, found)
            return method(x, *others, **options)

        return call
