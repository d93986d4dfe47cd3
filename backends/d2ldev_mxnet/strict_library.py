"""The functions of MXNet's library that run operators, with a look at the operands before.

They are given handles in arrays of C, and the device of a handle is asked of the library: 0.2 us
each, where an operator of MXNet's costs 12.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from d2ldev.device import Device
from d2ldev.interface import Backend
from d2ldev.operations.strictness import mismatch
from d2ldev_mxnet.framework import mx

Replacement = tuple[Any, str, Any]
"""An object, the name of one of its functions, and what stands in for it."""

_library = mx.base._LIB
# An object of its own, which knows its arguments' types: a handle from an array is a number.
_get_context = _library["MXNDArrayGetContext"]
_get_context.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# They are for moving.
_COPIES = ("_copyto", "_npi_copyto", "_CrossDeviceCopy")
# Functions that MXNet gives to its library, by their modules' namespaces.
_CALLED_BACK = {
    "updater_handle": vars(mx.kvstore.kvstore),
    "forward_entry": vars(mx.operator),
    "backward_entry": vars(mx.operator),
}
_PREFIXES = ("_npi_", "_npx_", "_np_", "_contrib_", "_internal_", "_")


def guarded_library(backend: Backend) -> Iterator[Replacement]:
    """The library's functions as they are while strictness is in force somewhere."""
    guards = {
        "MXImperativeInvokeEx": _invoking,
        "MXAutogradBackwardEx": _backward,
        "MXAutogradBackward": _backward,
        "MXAutogradMarkVariables": _marking,
        "MXExecutorBindEX": _binding,
    }
    for name, guard in guards.items():
        # It is an attribute only after it was asked for once.
        yield _library, name, guard(backend, getattr(_library, name))


def _invoking(backend: Backend, function: Callable[..., int]) -> Callable[..., int]:
    copies = frozenset(map(_handle_of, _COPIES))

    def invoke(
        operator: Any, count: Any, inputs: Any, out_count: Any, outs: Any, *settings: Any
    ) -> int:
        n, m = count.value, out_count._obj.value
        if n + m > 1 and n:
            context, first = ctypes.c_int64(), None
            address = ctypes.addressof(context)
            handles = list(inputs) if not m else [*inputs, *outs._obj[:m]]
            for handle in handles:
                _get_context(handle, address, address + 4)
                if first is None:
                    first = context.value
                elif context.value != first:
                    is_allowed = operator.value in copies or _is_called_back()
                    if not is_allowed and backend._strictness.in_force():
                        _compare(backend, lambda: _description(operator, n), handles)
                    break
        return function(operator, count, inputs, out_count, outs, *settings)

    return invoke


def _is_called_back() -> bool:
    """Whether the library itself called what runs the operator, and does not say where things are.

    A KVStore takes its weight from the host to its gradient's GPU before it is updated, but not to
    a context of the CPU, which a virtual GPU is, and loses an error. Source:
    https://github.com/apache/mxnet/blob/1.9.1/src/kvstore/kvstore_local.h, ``PushImpl``. And what
    a ``CustomOp`` is given says ``cpu(0)`` in all contexts of the CPU.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _CALLED_BACK.get(frame.f_code.co_name) is frame.f_globals:
            return True
        frame = frame.f_back
    return False


def _backward(backend: Backend, function: Callable[..., int]) -> Callable[..., int]:
    def backward(count: Any, heads: Any, gradients: Any, *settings: Any) -> int:
        if isinstance(gradients, ctypes.Array) and backend._strictness.in_force():
            for pair in zip(_listed(count, heads), gradients, strict=True):
                _compare(backend, lambda: ("backward", ("head", "head_grad")), pair)
        return function(count, heads, gradients, *settings)

    return backward


def _marking(backend: Backend, function: Callable[..., int]) -> Callable[..., int]:
    def mark(count: Any, variables: Any, requests: Any, gradients: Any) -> int:
        if backend._strictness.in_force():
            listed = _listed(count, variables), _listed(count, gradients)
            for pair in zip(*listed, strict=True):
                _compare(backend, lambda: ("mark_variables", ("variable", "gradient")), pair)
        return function(count, variables, requests, gradients)

    return mark


def _binding(backend: Backend, function: Callable[..., int]) -> Callable[..., int]:
    def bind(symbol: Any, kind: Any, index: Any, groups: Any, *settings: Any) -> int:
        # With groups of contexts, it is for moving between them.
        if not groups.value and backend._strictness.in_force():
            *_, arguments, gradients, _requests, _count, auxiliary, _shared, _out = settings
            lists = {"args": arguments, "args_grad": gradients, "aux_states": auxiliary}
            named = [
                (f"{name}[{i}]", handle)
                for name, handles in lists.items()
                for i, handle in enumerate(handles or ())
            ]
            names, handles = zip(*named, strict=True) if named else ((), ())
            context = mx.Context(mx.Context.devtype2str[kind.value], index.value)
            _compare(backend, lambda: ("bind", ("ctx", *names)), handles, (context,))
        return function(symbol, kind, index, groups, *settings)

    return bind


def _listed(count: Any, handles: Any) -> list[int | None]:
    """The handles that an array of C holds, or what a pointer points to."""
    found: list[int | None] = handles[: getattr(count, "value", count)]
    return found


def _compare(
    backend: Backend,
    describe: Callable[[], tuple[str, Iterable[str]]],
    handles: Iterable[int | None],
    contexts: Iterable[Any] = (),
) -> None:
    """Raise if arrays are on different devices, of which some contexts of MXNet's are one."""
    devices = [
        *map(backend._from_native, contexts),
        *(_device_of(backend, handle) for handle in handles),
    ]
    if len({device for device in devices if device is not None}) > 1:
        operation, names = describe()
        operands = zip(_numbered(names, len(devices)), devices, strict=True)
        raise mismatch(operation, [(name, at) for name, at in operands if at is not None])


def _device_of(backend: Backend, handle: int | None) -> Device | None:
    """The device of an array; None for none, or one that has no memory yet."""
    kind, index = ctypes.c_int(), ctypes.c_int()
    if not handle:
        return None
    _get_context(handle, ctypes.addressof(kind), ctypes.addressof(index))
    known = mx.Context.devtype2str.get(kind.value)
    return known and backend._from_native(mx.Context(known, index.value))


def _numbered(names: Iterable[str], count: int) -> list[str]:
    """As many names as there are operands: the last one stands for all that follow."""
    listed = list(names)
    return listed[:count] + [f"operand_{i}" for i in range(len(listed), count)]


def _handle_of(name: str) -> int | None:
    handle = mx.base.OpHandle()
    mx.base.check_call(_library.NNGetOpHandle(mx.base.c_str(name), ctypes.byref(handle)))
    return handle.value


def _description(operator: Any, inputs: int) -> tuple[str, list[str]]:
    """The name of an operator and those of its operands: its inputs, and ``out``."""
    name, text, variable, returned = (ctypes.c_char_p() for _ in range(4))
    count = mx.base.mx_uint()
    names, types, texts = (ctypes.POINTER(ctypes.c_char_p)() for _ in range(3))
    arguments = (name, text, count, names, types, texts, variable, returned)
    mx.base.check_call(
        _library.MXSymbolGetAtomicSymbolInfo(operator, *map(ctypes.byref, arguments))
    )
    found: list[str] = []
    for i in range(count.value):
        kind = types[i].decode()
        if kind.startswith(("NDArray", "Symbol")):
            many = kind.endswith("[]")
            each = names[i].decode()
            found += [f"{each}[{k}]" for k in range(inputs)] if many else [each]
    found = [*found[:inputs], *(f"operand_{k}" for k in range(len(found), inputs)), "out"]
    operation = (name.value or b"operator").decode()
    for prefix in _PREFIXES:
        if operation.startswith(prefix):
            return operation.removeprefix(prefix), found
    return operation, found
