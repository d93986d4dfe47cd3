"""The Python functions of MXNet's that move an operand, or take it to NumPy, without being asked.

Indexing moves indices and values to the array, what MXNet leaves to NumPy is computed on the
host, and so are metrics; and a few functions treat their operands one after the other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from d2ldev.device import CPU, Device
from d2ldev.interface import Backend
from d2ldev.operations.strictness import mismatch, operands_of
from d2ldev_mxnet.framework import mx
from d2ldev_mxnet.strict_library import Replacement

_NDArray, _NumPyArray = mx.nd.NDArray, mx.np.ndarray
_MAY_HOLD = (_NDArray, tuple, list)
_OF_MXNET = mx.np.multiarray._NUMPY_ARRAY_FUNCTION_DICT
# What treats its operands one after the other, by a function that it gives all of them to.
_COMPOSED = (
    (mx.np.stride_tricks, "_broadcast_shape", "broadcast_arrays"),  # of ``meshgrid``, too
    (_NDArray, "broadcast_like", "broadcast_like"),
)
# It assigns its operands to slices of the result.
_CONCATENATE = mx.nd.concatenate.__code__


def guarded_functions(backend: Backend) -> Iterator[Replacement]:
    """The functions as they are while strictness is in force somewhere."""
    for owner in (_NDArray, *_below(_NDArray)):
        for name, guard in (("__getitem__", _getting), ("__setitem__", _setting)):
            if name in vars(owner):
                yield owner, name, guard(backend, vars(owner)[name])
    for name, protocol in (("__array_function__", _in_numpy), ("__array_ufunc__", _in_ufunc)):
        yield _NumPyArray, name, staticmethod(protocol(backend, vars(_NumPyArray)[name].__func__))
    for owner, name, operation in _COMPOSED:
        yield owner, name, _composing(backend, operation, vars(owner)[name])
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
    """Whether the caller's caller is in a strict block, and no code of MXNet's that copies."""
    caller = sys._getframe(2)
    copies = caller.f_globals.get("__name__", "").partition(".")[0] == "mxnet"
    return (not copies or caller.f_code is _CONCATENATE) and backend._strictness.in_force()


def _compare(
    backend: Backend, operation: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Device:
    """Raise if the arrays among the arguments are on different devices; return the one."""
    operands = operands_of(backend, arguments, keywords)
    devices = {device for _, device in operands}
    if len(devices) > 1:
        raise mismatch(operation, operands)
    return devices.pop() if devices else CPU


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


def _at(backend: Backend, device: Device, result: Any) -> Any:
    """What NumPy computed, where its operands are: MXNet leaves several results on the host."""
    if isinstance(result, (list, tuple)):
        return type(result)([_at(backend, device, each) for each in result])
    return result.as_in_ctx(backend._native(device)) if isinstance(result, _NumPyArray) else result


def _in_numpy(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(self: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # What MXNet has itself is checked where it runs; some of it only asks for dtypes.
        if called not in _OF_MXNET and backend._strictness.in_force():
            device = _compare(backend, called.__name__, args, kwargs)
            return _at(backend, device, function(self, called, types, args, kwargs))
        return function(self, called, types, args, kwargs)

    return run


def _in_ufunc(backend: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(self: Any, called: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if backend._strictness.in_force():
            device = _compare(backend, called.__name__, args, kwargs)
            return _at(backend, device, function(self, called, method, *args, **kwargs))
        return function(self, called, method, *args, **kwargs)

    return run


def _composing(
    backend: Backend, operation: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if backend._strictness.in_force():
            _compare(backend, operation, args, kwargs)
        return function(*args, **kwargs)

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
        arrays = [x for x in args if isinstance(x, _NDArray)]
        if len(arrays) > 1 and backend._strictness.in_force():
            _compare(backend, self.__name__, arrays, {})
        return function(self, *args)

    return call
