"""``strict()``: operations refuse operands of different devices, and run where these are.

TensorFlow copies what is elsewhere without a word, and runs an operation on its default device
unless it is in a scope (https://github.com/tensorflow/tensorflow/issues/14133). All its eager
operations, the calls of its functions too, go through three functions of one module, as attributes
of it; they are what is replaced while a block is in force. A fourth makes tensors of NumPy arrays
and lists on the way.

- An operation whose operands agree runs where they are. A ``tf.device`` around it is the user's
  word on where it runs; operands of different devices are refused in one, too.
- Python numbers, NumPy arrays and lists are no operands, and 0-dim tensors of the CPU mix with
  everything, as in torch; so do shapes, axes and seeds (``operands.py``), strings, and handles of
  iterators and tables, which are the host's.
- A variable is an operand. ``assign`` copies into it, which is what the user wrote; ``assign_add``
  and optimizers compute, and refuse.
- A call of a ``tf.function`` is one operation, whose operands are its arguments and what it has
  captured. In one that is traced, tensors have no place that could be told: the call is refused
  when it runs, whatever the function does with its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python import pywrap_tfe
from tensorflow.python.framework.device_spec import DeviceSpecV2

from d2ldev.interface import Backend
from d2ldev_tensorflow.calls import Call
from d2ldev_tensorflow.operands import HOST, OF_NUMBERS, EagerTensor, Operands

_Function = Callable[..., Any]


def refuse_mixing(backend: Backend) -> Callable[[], None]:
    """Replace what all eager operations go through; returns what puts it back."""
    operands = Operands(backend)
    replacing = (
        (pywrap_tfe, "TFE_Py_FastPathExecute", _refusing),
        (pywrap_tfe, "TFE_Py_Execute", _refusing_flat),
        (pywrap_tfe, "TFE_Py_ExecuteCancelable", _refusing_flat),
    )
    replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in replacing]
    for owner, name, make in replacing:
        setattr(owner, name, make(backend, operands, getattr(owner, name)))

    def restore() -> None:
        for owner, name, function in replaced:
            setattr(owner, name, function)

    return restore


class _Specifications(dict[str, Any]):
    """TensorFlow's parsed device for a device's name."""

    def __missing__(self, name: str) -> Any:
        self[name] = found = DeviceSpecV2.from_string(name)
        return found


_specifications = _Specifications()


def _refusing(backend: Backend, operands: Operands, function: _Function) -> _Function:
    """For operations whose inputs are given as they are, before what is no tensor is converted."""
    in_force, positions = backend._strictness.in_force, operands.positions

    def run(ctx: Any, operation: str, name: Any, *inputs: Any) -> Any:
        if not in_force():
            return function(ctx, operation, name, *inputs)
        places = positions[operation]
        if places is None:
            return function(ctx, operation, name, *inputs)
        # In this loop almost all of the time is spent that strictness costs.
        home: str | None = None
        for index in places:
            value = inputs[index]
            if type(value) is not EagerTensor or (there := value.device) != home is not None:
                home = operands.home_of(operation, inputs)
                break
            home = there
        local = ctx._thread_local_data
        outer = local.device_name
        if outer:
            return function(ctx, operation, name, *inputs)
        if home is None or (home == HOST and operation in OF_NUMBERS):
            home = operands.home_of(operation, inputs) or Call(operands.place_of).home() or home
        if home is None or home == _default(ctx):
            return function(ctx, operation, name, *inputs)
        before = local.device_spec
        local.device_name, local.device_spec = home, _specifications[home]
        try:
            return function(ctx, operation, name, *inputs)
        finally:
            local.device_name, local.device_spec = outer, before

    return run


def _refusing_flat(backend: Backend, operands: Operands, function: _Function) -> _Function:
    """For operations whose inputs are all tensors, in one list, and for calls of functions."""
    in_force = backend._strictness.in_force

    def run(handle: Any, device: str, operation: Any, inputs: Any, *others: Any) -> Any:
        if in_force():
            name = operation.decode() if isinstance(operation, bytes) else operation
            home = operands.home_of_flat(name, inputs)
            if not device:
                device = home or Call(operands.place_of).home() or device
        return function(handle, device, operation, inputs, *others)

    return run


def _default(ctx: Any) -> str:
    """Where TensorFlow runs an operation that is in no scope."""
    devices: list[str] = ctx._context_devices
    return next((name for name in devices if "GPU" in name), devices[0])
