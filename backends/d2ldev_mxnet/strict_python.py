"""The Python functions of MXNet's that move an operand, or take it to NumPy, without being asked.

Indexing moves indices and values to the array, what MXNet leaves to NumPy is computed on the
host, and so are metrics.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from d2ldev.interface import Backend
from d2ldev.strictness import mismatch, operands_of
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_library import Replacement

_NDArray, _NumPyArray = mx.nd.NDArray, mx.np.ndarray
_MAY_HOLD = (_NDArray, tuple, list)


def guarded_functions(backend: Backend) -> Iterator[Replacement]:
    """The functions as they are while strictness is in force somewhere."""
    for owner in (_NDArray, *_below(_NDArray)):
        for name, guard in (("__getitem__", _getting), ("__setitem__", _setting)):
            if name in vars(owner):
                yield owner, name, guard(backend, vars(owner)[name])
    for name in ("__array_function__", "__array_ufunc__"):
        yield _NumPyArray, name, staticmethod(_in_numpy(backend, vars(_NumPyArray)[name].__func__))
    for owner in _below(mx.metric.EvalMetric):
        if "update" in vars(owner):
            yield owner, "update", _updating(backend, vars(owner)["update"])
    calling = vars(mx._ffi.function._FunctionBase)["__call__"]
    yield mx._ffi.function._FunctionBase, "__call__", _calling(backend, calling)


def _below(owner: type) -> Iterator[type]:
    """All subclasses, each once."""
    seen: dict[type, None] = {}
    queue = owner.__subclasses__()
    while queue:
        cls = queue.pop()
        seen[cls] = None
        queue += [each for each in cls.__subclasses__() if each not in seen]
    return iter(seen)


def _is_asked(backend: Backend) -> bool:
    """Whether the caller's caller is in a strict block, and no code of MXNet's."""
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module.partition(".")[0] != "mxnet" and backend._strictness.in_force()


def _compare(
    backend: Backend,
    operation: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> None:
    operands = operands_of(backend, arguments, keywords)
    if len({device for _, device in operands}) > 1:
        raise mismatch(operation, operands)


def _getting(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def get(self: Any, key: Any) -> Any:
        if isinstance(key, _MAY_HOLD) and _is_asked(backend):
            _compare(backend, "__getitem__", (), {"x": self, "index": key})
        return function(self, key)

    return get


def _setting(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def put(self: Any, key: Any, value: Any) -> None:
        may_hold = isinstance(value, _MAY_HOLD) or isinstance(key, _MAY_HOLD)
        if may_hold and _is_asked(backend):
            _compare(backend, "__setitem__", (), {"x": self, "index": key, "value": value})
        function(self, key, value)

    return put


def _in_numpy(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(self: Any, called: Any, how: Any, *args: Any, **kwargs: Any) -> Any:
        if backend._strictness.in_force():
            # ``__array_function__`` has the arguments packed, ``__array_ufunc__`` has not.
            is_packed = how != "__call__" and len(args) == 2 and not kwargs
            arguments, keywords = args if is_packed else (args, kwargs)
            _compare(backend, called.__name__, arguments, keywords)
        return function(self, called, how, *args, **kwargs)

    return run


def _updating(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def update(self: Any, labels: Any, preds: Any) -> Any:
        if _is_asked(backend):
            if isinstance(labels, (list, tuple)) and isinstance(preds, (list, tuple)):
                # One pair for each device, as models are trained on several.
                pairs = list(zip(labels, preds, strict=False))
            else:
                pairs = [(labels, preds)]
            for label, pred in pairs:
                operation = f"{type(self).__name__}.update"
                _compare(backend, operation, (), {"labels": label, "preds": pred})
        return function(self, labels, preds)

    return update


def _calling(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        if backend._strictness.in_force():
            _compare(backend, self.__name__, args, {})
        return function(self, *args)

    return call
