"""Follow the tensors that functions of TensorFlow create, move and read, to find leaks of devices.

Outside of every ``tf.device``, TensorFlow creates on its default device. That is the inputs' device
here. TensorFlow copies operands of other devices by itself. So a library leaks where it names a
device: in a ``tf.device``, or by ``x.cpu()``. Such a tensor is a leak where ``strict()`` refuses it
beside an input. The search names the line, permits the mixing, and runs the operation again.

- All eager operations go through the functions that ``strict()`` replaces.
- A call of a ``tf.function`` is one operation. Tensors have no device while it is traced.
- A tensor of unknown origin may mix. Most often it is on TensorFlow's default device, as a constant
  of a module is. What an iterator of ``tf.data`` returns on the host is brought to the inputs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context
from tensorflow.python.framework import constant_op

from d2ldev import DeviceMismatchError
from d2ldev.framework import CPU, Stray, Watch, replace
from d2ldev_tensorflow.devices import (
    OF_THE_HOST,
    DefaultDevice,
    TensorFlowDevices,
)

_EagerTensor = tf.__internal__.EagerTensor
# Where the methods of eager tensors are that Python has written.
_Tensor = _EagerTensor.__mro__[1]
_READS = (
    *("numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
    *("__format__", "__repr__", "__str__"),
)
_FROM_DATA = frozenset(("IteratorGetNext", "IteratorGetNextSync"))
_VARIABLE = "VarHandleOp"
# Stands for ``x.cpu()``, which calls none of the functions that run operations.
_COPY = "_copy"
# Their results may be elsewhere, without any scope.
_SEEN = _FROM_DATA | {_COPY}
# Operations that look at a tensor, or copy it, and compute nothing.
_LOOKS = frozenset(
    (
        *("Identity", "IdentityN", "Snapshot", "DeepCopy", "Cast", "Shape", "Size", "Rank"),
        *("Reshape", "ExpandDims", "Squeeze", "ReadVariableOp", "AssignVariableOp"),
        *(_VARIABLE, _COPY),
    )
)


class Follower:
    """Shows a watch the tensors that functions of TensorFlow create, move and read.

    Args:
        watch: what is known of the tensors.
        devices: the devices of the framework.
        operands_of: returns the tensors among the inputs of an operation: those of ``strict()``.
        title_of: returns a short name of an operation.
        allow_mixing: permits operands of several devices in a block.
    """

    def __init__(
        self,
        watch: Watch,
        devices: TensorFlowDevices,
        operands_of: Callable[[str, Sequence[Any]], list[Any]],
        title_of: Callable[[str], str],
        allow_mixing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._watch, self._frames = watch, watch.frames
        self._devices, self._native = devices, devices.native(watch.device)
        self._operands_of, self._title_of = operands_of, title_of
        self._allow_mixing = allow_mixing
        # TensorFlow's full name of the inputs' device.
        self._there = ""

    @contextmanager
    def follow(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Follow what is done with tensors, in ``strict()`` and with the device as the default.

        The block gets a function that moves inputs that were made before.
        """
        with ExitStack() as entered:
            entered.enter_context(self._watch.be_strict())
            entered.enter_context(DefaultDevice(self._native))
            self._there = context().device_name
            # ``strict()`` has replaced some of them already.
            replacing: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
                (pywrap_tfe, "TFE_Py_FastPathExecute", self._follow_operation),
                (pywrap_tfe, "TFE_Py_Execute", self._follow_call),
                (pywrap_tfe, "TFE_Py_ExecuteCancelable", self._follow_call),
                (constant_op, "convert_to_eager_tensor", self._follow_conversion),
                (_Tensor, "_copy_nograd", self._follow_copy),
                *((_Tensor, name, self._follow_read) for name in _READS),
                # NumPy reads a tensor's memory past ``__array__``.
                *((np, name, self._follow_read) for name in ("array", "asarray", "asanyarray")),
            ]
            made = [(owner, name, make(vars(owner)[name])) for owner, name, make in replacing]
            entered.callback(replace(made))
            yield self.place

    def place(self, values: dict[str, Any]) -> None:
        """Move the tensors among the values of a dict to the device.

        So are tensors in lists, tuples and dicts. A variable stays, and mixes with the inputs. A
        tensor that a library has left elsewhere stays, too.
        """
        self._watch.note_toolboxes(values.values())
        for name, value in list(values.items()):
            if type(value) in (_EagerTensor, list, tuple, dict) and name != "__builtins__":
                values[name] = tf.nest.map_structure(self._move, value)

    def _move(self, x: Any) -> Any:
        if type(x) is not _EagerTensor or x.dtype in OF_THE_HOST or self._watch.is_left(x):
            return x
        self._watch.has_inputs = True
        with DefaultDevice(self._native):
            return tf.identity(x)

    # -- operations -------------------------------------------------------------------------------

    def _follow_operation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Follow operations on their inputs before any conversion."""

        def run(ctx: Any, operation: str, name: Any, *inputs: Any) -> Any:
            call = functools.partial(function, ctx, operation, name)
            return self._run(call, operation, inputs, sys._getframe(1))

        return run

    def _follow_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Follow functions and operations on one list of tensors."""

        def run(handle: Any, _: Any, operation: Any, inputs: Any, *others: Any) -> Any:
            def call(*inputs: Any) -> Any:
                return function(handle, context().device_name, operation, list(inputs), *others)

            name = operation.decode() if isinstance(operation, bytes) else operation
            return self._run(call, name, inputs, sys._getframe(1))

        return run

    def _follow_conversion(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Follow the function that makes tensors from numbers and NumPy arrays."""

        def convert(value: Any, ctx: Any, dtype: Any = None) -> Any:
            if type(value) is _EagerTensor:
                return function(value, ctx, dtype)
            return self._run(lambda: function(value, ctx, dtype), "Const", (), sys._getframe(1))

        return convert

    def _follow_copy(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Follow ``x.cpu()`` and ``x.gpu()``."""

        @functools.wraps(function)
        def copy(x: Any, *options: Any, **named: Any) -> Any:
            call = functools.partial(function, x, *options, **named)
            return self._run(lambda _: call(), _COPY, (x,), sys._getframe(1))

        return copy

    def _run(
        self,
        call: Callable[..., Any],
        operation: str,
        inputs: Sequence[Any],
        caller: FrameType,
    ) -> Any:
        """Run an operation, also beside an operand of the library that is elsewhere."""
        watch, scope = self._watch, context().device_name
        if not watch.has_inputs:
            watch.has_inputs = any(
                x.device == self._there for x in self._operands_of(operation, inputs)
            )
        try:
            if scope == self._there and not watch.strays and operation not in _SEEN:
                return call(*inputs)  # most calls
        except DeviceMismatchError:
            pass
        frame = self._frames.nearest(caller)
        is_test = frame is None or self._frames.is_test(frame)
        operands = self._operands_of(operation, inputs)
        found = [stray for x in operands if (stray := watch.find_stray(x)) is not None]
        title = self._title_of(operation)
        if found and is_test:
            watch.report_results(found, title)
        try:
            if self._makes_input(scope, frame, operands, caller):
                with tf.device(self._there):
                    return call(*inputs)
            results = call(*inputs)
        except DeviceMismatchError:
            if all(x.device != self._there for x in operands):
                raise
            known = [x for x in operands if x.device != self._there and watch.find_stray(x)]
            watch.report_operands(known, title, frame)
            with self._allow_mixing():
                return call(*inputs)
        if operation in _FROM_DATA:
            return [self._move(x) for x in results]
        if not is_test and frame is not None:
            self._note(operation, operands, found, _list(results), frame)
        return results

    def _makes_input(
        self,
        scope: str,
        frame: FrameType | None,
        operands: Sequence[Any],
        caller: FrameType,
    ) -> bool:
        """Return whether what an operation makes on the host is an input of the test."""
        if frame is None or scope == self._there:
            return False
        if scope and self._devices.from_native(scope) is not CPU:
            return False
        if not self._frames.is_test(frame):
            return not operands and self._watch.is_input(frame) and not self._watch.is_kept(frame)
        outer: FrameType | None = caller
        while outer is not frame and outer is not None:  # d2ldev checks where its tensors are
            if str(outer.f_globals.get("__name__")).startswith("d2ldev_tensorflow."):
                return False
            outer = outer.f_back
        return True

    def _note(
        self,
        operation: str,
        operands: Sequence[Any],
        found: Sequence[Stray],
        results: Iterable[Any],
        frame: FrameType,
    ) -> None:
        """Remember what an operation of the library has made elsewhere."""
        watch, title = self._watch, self._title_of(operation)
        made = [x for x in results if type(x) is _EagerTensor]
        if found and any(x.device == self._there for x in made):
            for stray in found:
                x = stray.tensor()
                if x is not None and stray.operation:
                    place = self._devices.from_native(x.device)
                    watch.report("move", stray, place, stray.operation, None)
        is_variable = operation == _VARIABLE
        made = [x for x in made if is_variable or x.dtype not in OF_THE_HOST]
        elsewhere = [x for x in made if x.device != self._there]
        is_move = any(x.device == self._there for x in operands)
        if elsewhere and not found and (is_move or not operands):
            is_kept = not is_move and watch.is_kept(frame)
            if not (is_move or is_kept or watch.is_own(frame)):
                return
            for x in elsewhere:
                action = "moves" if is_move else "creates"
                watch.note_stray(x, frame, action, is_suspect=is_kept)
            found = [known for x in elsewhere if (known := watch.find_stray(x)) is not None]
        if elsewhere and found:
            watch.pass_on(found, elsewhere, title, frame, computes=operation not in _LOOKS)

    # -- read -------------------------------------------------------------------------------------

    def _follow_read(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")

        @functools.wraps(function)
        def read(x: Any, *args: Any, **kwargs: Any) -> Any:
            if type(x) is not _EagerTensor:
                return function(x, *args, **kwargs)
            caller = sys._getframe(1)
            if str(caller.f_globals.get("__name__")).partition(".")[0] != "tensorflow":
                self._watch.note_read(x, name, self._frames.nearest(caller))
            return function(x, *args, **kwargs)

        return read


def _list(results: Any) -> Sequence[Any]:
    return results if isinstance(results, (list, tuple)) else [results]
