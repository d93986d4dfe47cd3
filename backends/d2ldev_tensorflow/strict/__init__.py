"""``strict()``: operations refuse operands of different devices, and run where these are.

TensorFlow copies what is elsewhere without a word, and runs an operation on its default device
unless it is in a scope (https://github.com/tensorflow/tensorflow/issues/14133). All its eager
operations, and the calls of its functions, go through three functions of one module, as attributes
of it; they are what is replaced while a block is in force, and what makes tensors of arrays.

- An operation whose operands agree runs where they are, also in ``backend.on``, which says where
  tensors are made. A ``tf.device`` around it is the user's word on where it runs; operands of
  different devices are refused in one, too.
- Python numbers, NumPy arrays and lists are no operands, and 0-dim tensors of the CPU mix with
  everything, as in torch; so do shapes, axes and seeds (``operands.py``), strings, and handles of
  iterators and tables, which are the host's.
- What TensorFlow or Keras makes on its way is no reason to refuse, where the operands of the call
  agree that the user wrote (``calls.py``): layers, ``fit`` with NumPy arrays, ``tape.gradient``.
- A variable is an operand. ``assign`` copies into it, which is what the user wrote; ``assign_add``
  and optimizers compute, and refuse.
- A call of a ``tf.function`` is one operation. Its operands are its arguments and what it captured;
  it is refused when it is called, whatever it does with them. While it is traced, tensors have no
  place that could be told. So is one of ``tf.vectorized_map``, with what its function closes over.

What it does not see:

- ``tape.jacobian``, which computes all rows by one function that TensorFlow makes of the whole
  tape, also where that leads from device to device: a ``tf.custom_gradient`` that mixes there. In
  ``tape.gradient``, and with ``experimental_use_pfor=False``, it is refused.
- ``tf.numpy_function`` that is called eagerly. It is no operation then: each of its operands is
  copied to the host, as by ``numpy()``, and the function is called with the arrays.
- What the function of a ``tf.py_function`` does in a ``tf.function``: it runs in a thread of
  TensorFlow's, which is not in the block (it is, under ``D2LDEV_STRICT=1``). Called eagerly, the
  error in it comes as TensorFlow's ``UnknownError`` that quotes it. It has its operands on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context
from tensorflow.python.framework import constant_op
from tensorflow.python.framework.device_spec import DeviceSpecV2

from d2ldev.framework import Strict
from d2ldev.operations.mixing import replace
from d2ldev_tensorflow.devices import TensorFlowDevices, is_default_only
from d2ldev_tensorflow.strict.calls import Call
from d2ldev_tensorflow.strict.operands import HOST, OF_NUMBERS, EagerTensor, Operands

_Function = Callable[..., Any]
# In a scope it copies, which is what the user wrote.
_IDENTITY = "Identity"


class TensorFlowStrict(Strict):
    """What all eager operations go through.

    Args:
        devices: the room of devices.
    """

    def __init__(self, devices: TensorFlowDevices) -> None:
        self._devices = devices

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        operands = Operands(self._devices)
        replacing: tuple[tuple[Any, str, Callable[..., _Function]], ...] = (
            (pywrap_tfe, "TFE_Py_FastPathExecute", _refusing),
            (pywrap_tfe, "TFE_Py_Execute", _refusing_flat),
            (pywrap_tfe, "TFE_Py_ExecuteCancelable", _refusing_flat),
            (constant_op, "convert_to_eager_tensor", _converting),
        )
        return replace(
            (owner, name, make(in_force, operands, vars(owner)[name]))
            for owner, name, make in replacing
        )


class _Specifications(dict[str, Any]):
    """TensorFlow's parsed device for a device's name."""

    def __missing__(self, name: str) -> Any:
        self[name] = found = DeviceSpecV2.from_string(name)
        return found


_specifications = _Specifications()


def _refusing(in_force: _Function, operands: Operands, function: _Function) -> _Function:
    """For operations whose inputs are given as they are, before what is no tensor is converted."""
    positions = operands.positions

    def run(ctx: Any, operation: str, name: Any, *inputs: Any) -> Any:
        if not in_force():
            return function(ctx, operation, name, *inputs)
        places = positions[operation]
        if places is None:
            return function(ctx, operation, name, *inputs)
        # From here on it is what strictness costs an operation.
        home: str | None = None
        for index in places:
            value = inputs[index]
            if type(value) is not EagerTensor or (there := value.device) != home is not None:
                home = operands.home_of(operation, inputs)
                break
            home = there
        local = ctx._thread_local_data
        outer, before = local.device_name, local.device_spec
        if home is None or (home == HOST and operation in OF_NUMBERS):
            home = operands.home_of(operation, inputs)
            if home is None and not outer:
                home = Call(operands.place_of).home()
        if home is None or _runs_there(ctx, operation, home, outer, before):
            return function(ctx, operation, name, *inputs)
        # As ``tf.device`` does it, at a tenth of the time.
        local.device_name, local.device_spec = home, _specifications[home]
        try:
            return function(ctx, operation, name, *inputs)
        finally:
            local.device_name, local.device_spec = outer, before

    return run


def _refusing_flat(in_force: _Function, operands: Operands, function: _Function) -> _Function:
    """For operations whose inputs are all tensors, in one list, and for calls of functions."""

    def run(handle: Any, device: str, operation: Any, inputs: Any, *others: Any) -> Any:
        if in_force():
            name = operation.decode() if isinstance(operation, bytes) else operation
            home = operands.home_of_flat(name, inputs)
            if home is None and not device:
                home = Call(operands.place_of).home()
            ctx = context()
            if home is not None and not _runs_there(ctx, name, home, device, ctx.device_spec):
                device = home
        return function(handle, device, operation, inputs, *others)

    return run


def _converting(in_force: _Function, operands: Operands, function: _Function) -> _Function:
    """For the tensors that TensorFlow and Keras make of NumPy arrays that they are given."""

    def convert(value: Any, ctx: Any, dtype: Any = None) -> Any:
        # TensorFlow's own are axes, which may be anywhere.
        is_given = isinstance(value, np.ndarray) and (dtype is not None or value.dtype != np.int32)
        if is_given and in_force():
            home = None if ctx.device_name else Call(operands.place_of).home()
            if home is not None:
                with tf.device(home):
                    return function(value, ctx, dtype)
        return function(value, ctx, dtype)

    return convert


def _runs_there(ctx: Any, operation: str, home: str, outer: str, specification: Any) -> bool:
    """Whether an operation runs on its operands' device by itself, or elsewhere by the user's word.

    Args:
        ctx: TensorFlow's context.
        operation: its name.
        home: the device of its operands.
        outer: that of the innermost scope, empty if there is none.
        specification: the same, parsed.
    """
    if outer:
        return home == outer or operation == _IDENTITY or not is_default_only(specification)
    return home == _default_of(ctx)


@lru_cache(1)
def _default_of(ctx: Any) -> str:
    """Where TensorFlow, which has started, runs an operation that is in no scope."""
    devices: list[str] = ctx._context_devices
    return next((name for name in devices if "GPU" in name), devices[0])
