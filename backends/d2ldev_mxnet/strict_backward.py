"""The backward pass of a user's ``autograd.Function``, in the strict blocks of its forward pass.

MXNet runs it in a thread of its own, after the call that asked for it. Its error is printed by
MXNet, and raised from whatever waits for the result, as an ``MXNetError`` that does not say
which. The gradients that it is given say ``cpu(0)`` wherever they are in the CPU's contexts:
``NDArray::Chunk`` makes one context of all of them, and so they are taken to their outputs'.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from typing import Any

from d2ldev.errors import DeviceMismatchError
from d2ldev.interface import Backend
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_library import Replacement

# What the last backward pass failed with, if it was refused and is not raised yet.
_refused: deque[DeviceMismatchError] = deque(maxlen=1)


def guarded_backward(backend: Backend) -> Iterator[Replacement]:
    """Calling a ``Function``, as it is while strictness is in force somewhere."""
    function = vars(mx.autograd.Function)["__call__"]
    yield mx.autograd.Function, "__call__", _recording(backend, function)


def refused(error: BaseException) -> DeviceMismatchError | None:
    """Why the backward pass was refused, if it is what an error of MXNet's speaks of."""
    is_meant = isinstance(error, mx.base.MXNetError) and "CustomFunctionBwdFunc" in str(error)
    return _refused.pop() if is_meant and _refused else None


def _recording(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *inputs: Any) -> Any:
        outputs = function(self, *inputs)
        if backend._strictness.in_force():
            listed = [outputs] if isinstance(outputs, mx.nd.NDArray) else outputs
            contexts = [x.ctx for x in listed]
            self.backward = functools.partial(_run_in, copy_context(), self.backward, contexts)
        return outputs

    return call


def _run_in(
    context: Context, backward: Callable[..., Any], contexts: list[Any], *gradients: Any
) -> Any:
    there = [x.as_in_context(at) for x, at in zip(gradients, contexts, strict=True)]
    try:
        # A copy, because one context cannot be entered by two threads.
        return context.copy().run(backward, *there)
    except DeviceMismatchError as error:
        _refused.append(error)
        raise
    except BaseException:
        _refused.clear()
        raise
