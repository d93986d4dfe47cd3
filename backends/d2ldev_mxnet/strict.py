"""Strict: refuse mixed operands at the operation, where MXNet accepts them or has other errors.

MXNet compares only the kinds of devices, and not in every operation. So it mixes two GPUs, and the
CPU's contexts, which are the virtual GPUs. Every operator runs through one of three functions,
which MXNet looks up by name for each call. d2ldev replaces these. It also checks indexing, which
moves its indices, and calls of a Gluon block, which raise another error.

- Python numbers and NumPy's arrays have no device. A 0-dim array on the host is an operand, because
  MXNet refuses to mix it with a GPU's arrays.
- Copies that MXNet's own code makes for its caller are allowed: ``set_data``, a KVStore's sums,
  ``mx.np.array(x, ctx=...)``. Assignment into an array is an explicit copy, as in PyTorch.
- Not checked are copies to the host as by ``x.asnumpy()``, in MXNet's metrics and in functions that
  call NumPy. Nor are operations in MXNet's own threads (a ``CustomOp``, the backward pass of an
  ``autograd.Function``), and the executors of symbols.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from d2ldev import Device, DeviceMismatchError, UnsupportedValueError
from d2ldev.framework import Framework, Operand, Strict, mismatch, operands_of, replace
from d2ldev_mxnet.framework import mx

Function = Callable[..., Any]
InForce = Callable[[], bool]

COPIES = ("_copyto", "_npi_copyto", "_CrossDeviceCopy")
"""The operators that move arrays."""

_NDArray = mx.nd.NDArray
_FFI = mx._ffi.function._FunctionBase
_MAY_HOLD_ARRAYS = (_NDArray, tuple, list)
# Functions of MXNet's that its library calls.
_CALLED_BACK = {"updater_handle", "forward_entry", "backward_entry"}

_library = mx.base._LIB
# A separate function object with argument types, because a handle from an array is a number.
_get_context = _library["MXNDArrayGetContext"]
_get_context.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class MXNetStrict(Strict):
    """MXNet's operators, indexing, and calls of blocks."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def refuse_mixing(self, in_force: InForce) -> Callable[[], None]:
        if mx.nd._internal._imperative_invoke.__module__ != "mxnet._ctypes.ndarray":
            raise UnsupportedValueError(
                "put mxnet under strict()",
                "this MXNet runs its operators from compiled Cython modules, past Python",
                "MXNET_ENABLE_CYTHON=0, before anything imports mxnet",
            )
        return replace(self.replacements(in_force))

    def replacements(self, in_force: InForce) -> Iterator[tuple[Any, str, Function]]:
        """Yield what is replaced in a strict block: the owner, the name, and the replacement."""
        # The library's functions are attributes only after they were asked for once.
        invoke = _library.MXImperativeInvokeEx
        yield _library, "MXImperativeInvokeEx", self._wrap_invoke(invoke, in_force)
        for name in ("MXAutogradBackward", "MXAutogradBackwardEx"):
            yield _library, name, self._backward(getattr(_library, name), in_force)
        yield _FFI, "__call__", self._wrap_ffi(vars(_FFI)["__call__"], in_force)
        for owner in (_NDArray, mx.np.ndarray):
            for name in ("__getitem__", "__setitem__"):
                yield owner, name, self._wrap_indexing(vars(owner)[name], in_force)
        call = vars(mx.gluon.Block)["__call__"]
        yield mx.gluon.Block, "__call__", self._wrap_block(call, in_force)

    def _check(self, operation: str, operands: Sequence[Operand]) -> None:
        """Raise if operands are on different devices."""
        if len({device for _, device in operands}) > 1 and not _is_called_back():
            raise mismatch(operation, operands, framework=self._framework)

    def _locate(self, handles: Iterable[int | None]) -> list[Operand]:
        """Return the devices of the arrays of some handles."""
        devices = enumerate(map(self._device_of, handles))
        return [(i, device) for i, device in devices if device is not None]

    def _device_of(self, handle: int | None) -> Device | None:
        """Return the device of an array; None without one, or before the array has memory."""
        kind, index = ctypes.c_int(), ctypes.c_int()
        if not handle:
            return None
        _get_context(handle, ctypes.addressof(kind), ctypes.addressof(index))
        known = mx.Context.devtype2str.get(kind.value)
        return known and self._framework.devices.from_native(mx.Context(known, index.value))

    # -- operators --------------------------------------------------------------------------------

    def _wrap_invoke(self, function: Function, in_force: InForce) -> Function:
        copies = frozenset(map(_operator_named, COPIES))

        def invoke(
            operator: Any, count: Any, inputs: Any, out_count: Any, outs: Any, *settings: Any
        ) -> Any:
            n, m = count.value, out_count._obj.value
            if n + m > 1 and n:
                context, first = ctypes.c_int64(), None
                address = ctypes.addressof(context)
                handles = list(inputs) if not m else [*inputs, *outs._obj[:m]]
                # Asking the library takes 0.2 us for each, where an operator takes 12.
                for handle in handles:
                    _get_context(handle, address, address + 4)
                    if first is None:
                        first = context.value
                    elif context.value != first:
                        if operator.value not in copies and in_force():
                            self._check(_name_of(operator), self._locate(handles))
                        break
            return function(operator, count, inputs, out_count, outs, *settings)

        return invoke

    def _backward(self, function: Function, in_force: InForce) -> Function:
        def backward(count: Any, heads: Any, gradients: Any, *settings: Any) -> Any:
            if isinstance(gradients, ctypes.Array) and in_force():
                listed = heads[: getattr(count, "value", count)]
                for pair in zip(listed, gradients, strict=True):
                    self._check("backward", self._locate(pair))
            return function(count, heads, gradients, *settings)

        return backward

    def _wrap_ffi(self, function: Function, in_force: InForce) -> Function:
        def call(self_: Any, *args: Any) -> Any:
            arrays = [x for x in args if isinstance(x, _NDArray)]
            if len(arrays) > 1 and in_force():
                self._check(self_.__name__, operands_of(self._framework, arrays))
            return function(self_, *args)

        return call

    # -- functions in Python ----------------------------------------------------------------------

    def _wrap_indexing(self, function: Function, in_force: InForce) -> Function:
        @functools.wraps(function)
        def index(x: Any, key: Any, *value: Any) -> Any:
            if isinstance(key, _MAY_HOLD_ARRAYS) and in_force():
                operands = operands_of(self._framework, (), {"x": x, "index": key})
                self._check(function.__name__, operands)
            return function(x, key, *value)

        return index

    def _wrap_block(self, function: Function, in_force: InForce) -> Function:
        @functools.wraps(function)
        def call(block: Any, *args: Any) -> Any:
            try:
                return function(block, *args)
            except DeviceMismatchError:
                raise
            except Exception as error:
                operands = self._operands_of_block(block, args) if in_force() else []
                if len({device for _, device in operands}) > 1:
                    raise mismatch(
                        type(block).__name__, operands, framework=self._framework
                    ) from error
                raise

        return call

    def _operands_of_block(self, block: Any, args: tuple[Any, ...]) -> list[Operand]:
        """Return the inputs of a block, and before them a parameter that is elsewhere.

        A ``HybridBlock`` computes in one context, and a hybridized one all that is in it.
        """
        if not isinstance(block, mx.gluon.HybridBlock):
            return []
        inputs = operands_of(self._framework, args)
        there = {device for _, device in inputs}
        parameters = block.collect_params() if block._active else block._reg_params
        for parameter in parameters.values():
            devices = [self._framework.tensors.device_of(x) for x in parameter._data or ()]
            if devices and there.isdisjoint(devices):
                return [(parameter.name, devices[0]), *inputs]
        return inputs


def _is_called_back() -> bool:
    """Return whether MXNet's library itself called the code that runs the operation.

    Before an update, a KVStore moves its weight from the host to the gradient's GPU. It does not
    move it to a context of the CPU, such as a virtual GPU, and it loses errors. Source:
    https://github.com/apache/mxnet/blob/1.9.1/src/kvstore/kvstore_local.h, ``PushImpl``. In a
    ``CustomOp`` and in the backward pass of a ``Function``, the CPU's contexts are all ``cpu(0)``.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name in _CALLED_BACK and module.startswith("mxnet."):
            return True
        frame = frame.f_back
    return False


def _operator_named(name: str) -> int | None:
    handle = mx.base.OpHandle()
    mx.base.check_call(_library.NNGetOpHandle(mx.base.c_str(name), ctypes.byref(handle)))
    return handle.value


def _name_of(operator: Any) -> str:
    """Return the name of an operator, without MXNet's prefixes: ``add`` for ``_npi_add``."""
    name = ctypes.c_char_p()
    mx.base.check_call(_library.MXSymbolGetAtomicSymbolName(operator, ctypes.byref(name)))
    found = (name.value or b"operator").decode()
    return re.sub("^_((npi|npx|np|contrib|internal)_)?", "", found)
