"""Strict: operations refuse operands on different devices, and run on their operands' device.

TensorFlow silently copies operands from other devices. Outside of a scope it runs an operation on
its default device (https://github.com/tensorflow/tensorflow/issues/14133). All eager operations and
calls of its functions go through three functions of one module, as attributes of the module. While
a block is in force, d2ldev replaces them and the functions that make tensors from arrays.

- An operation runs where its operands are, also in ``backend.on``, which says where tensors are
  made. In a user's ``tf.device`` the operation runs there, and mixing is refused, too.
- Python numbers, NumPy arrays and lists are not operands. 0-dim tensors of the CPU mix with every
  device, as in torch. So do shapes, axes, seeds and strings, and handles of iterators and tables,
  which belong to the host.
- Many functions of TensorFlow and Keras make tensors internally: a window, a first state, zeros
  for a gradient. In the block and outside of every scope, an operation without operands therefore
    makes an unplaced tensor. It mixes with every device. Results that are computed from unplaced
    tensors alone are unplaced, too.
- A variable is an operand. ``assign`` copies into it, as the user asked. ``assign_add`` and
  optimizers compute, and refuse mixing.
- A call of a ``tf.function`` is one operation. Its operands are its arguments and what it captured.
  The call is refused, whatever the function does with them. Tensors have no device while it is
  traced. A call of ``tf.vectorized_map`` is also one operation, and includes what its function
  captures.

``docs/explanation/differences.md`` lists what ``strict()`` does not see. It permits mixing in the
loops of Keras models if Keras was imported before the block. A ``tf.py_function`` has its operands
on the CPU. In an eager call, TensorFlow raises an ``UnknownError`` that quotes the error inside the
function.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context
from tensorflow.python.framework import constant_op, op_def_registry

from d2ldev.framework import Scopes, Strict, mismatch, replace
from d2ldev_tensorflow.devices import (
    OF_THE_HOST,
    DefaultDevice,
    TensorFlowDevices,
    default_specification,
    is_default_only,
    own_task,
)

if TYPE_CHECKING:
    from d2ldev.framework import Watch

_Function = Callable[..., Any]
_may_mix: Scopes[bool] = Scopes("tensorflow_may_mix")
_EagerTensor = tf.__internal__.EagerTensor
# The end of TensorFlow's name of the CPU. Among several processes, the process comes before it.
_HOST = "/device:CPU:0"
_OF_THE_HOST = frozenset(dtype.as_datatype_enum for dtype in OF_THE_HOST)
# Every GPU kernel reads inputs with these names from the host's memory, by TensorFlow's registry of
# kernels. A seed is not an operand either: its result is made on the device of the scope.
_READ_BY_THE_HOST = re.compile(
    r"(\w+_)?(shapes?|k?sizes?|dims?|dim\d|dimensions?|axis|axes|dilations?|strides|seed)"
    r"|num_\w+|paddings?(_\w+)?|shape_to_prepend|size_splits|size_indices|output_index|limit"
    r"|reduction_indices|max_num_elements|pre_nms_topn|fft_length|lengths|sequence_lengths?"
    r"|seq_len_max|alg|algorithm|begin|counter|crops|depth|end|index|k|key|maxval|minval|multiples"
    r"|nbins|nrows|perm|rank|shift|start"
)
# Writing values into a variable is a copy that the user wrote, as ``copy_`` is in torch. Reading
# happens on the variable's device. Datasets and their iterators belong to the host.
_LEFT_ALONE = re.compile(r"AssignVariableOp|ReadVariableOp|\w*(Dataset|Iterator)\w*")
# In a scope it copies, as the user asked.
_IDENTITY = "Identity"
# The methods of Keras that bring arrays to the model by themselves.
_LOOPS = {"fit", "evaluate", "predict"}
# The attribute that marks an unplaced tensor.
_UNPLACED = "_d2ldev_unplaced"


class TensorFlowStrict(Strict):
    """Replacements of the functions that all eager operations go through."""

    def __init__(self, devices: TensorFlowDevices) -> None:
        self._devices = devices

    def refuse_mixing(self, in_force: Callable[[], bool]) -> Callable[[], None]:
        replacing: tuple[tuple[Any, str, Callable[..., _Function]], ...] = (
            (pywrap_tfe, "TFE_Py_FastPathExecute", self._wrap),
            (pywrap_tfe, "TFE_Py_Execute", self._wrap_flat),
            (pywrap_tfe, "TFE_Py_ExecuteCancelable", self._wrap_flat),
            (constant_op, "convert_to_eager_tensor", _wrap_conversion),
            (tf.GradientTape, "gradient", _at_target),
            (tf.GradientTape, "jacobian", _free_at_target),
            (tf.GradientTape, "batch_jacobian", _free_at_target),
            *_loops_of_keras(),
        )
        return replace(
            (owner, name, make(in_force, vars(owner)[name])) for owner, name, make in replacing
        )

    def follow(self, watch: Watch) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        from d2ldev_tensorflow.leaks import Follower  # only a search for leaks needs it

        return Follower(watch, self._devices, operands_of, title_of, allow_mixing).follow()

    def scope(self, *, everywhere: bool) -> AbstractContextManager[Any]:
        # Private. The cached zeros for gradients have a device, and could not mix.
        context().zeros_cache().flush()
        return nullcontext()

    # -- the device of operands -------------------------------------------------------------------

    def _home_of(self, operation: str, inputs: Inputs, values: Sequence[Any]) -> str | None:
        """Return TensorFlow's name of the device of all operands; None without operands.

        Raises:
            DeviceMismatchError: if the operands are on several devices.
        """
        named: list[tuple[str | int | tuple[int, int], Any]] = []
        for index in inputs.operands:
            value = values[index]
            if isinstance(value, (list, tuple)):
                named += [((index, i), item) for i, item in enumerate(value)]
            else:
                named.append((index, value))
        return self._find_common_device(operation, named)

    def _home_of_flat(self, operation: str, values: Sequence[Any]) -> str | None:
        """Return the device of inputs in one flat list, as in a call of a function."""
        inputs = inputs_of(operation)
        if inputs is None or len(inputs.names) != len(values):
            return self._find_common_device(
                operation, [(_name(i, x), x) for i, x in enumerate(values)]
            )
        return self._home_of(operation, inputs, values)

    def _find_common_device(
        self, operation: str, named: Sequence[tuple[str | int | tuple[int, int], Any]]
    ) -> str | None:
        places = [(name, there) for name, value in named if (there := _place_of(value)) is not None]
        homes = {there for _, there in places}
        if len(homes) == 1:
            return homes.pop()
        if not homes or _may_mix.is_in_force():
            return None
        located = [(name, self._devices.from_native(there)) for name, there in places]
        error = mismatch(title_of(operation), [(x, device) for x, device in located if device])
        # These marks keep the error. Without them a Keras layer would raise a RuntimeError that
        # adds its arguments. AutoGraph would raise an error that adds the user's line.
        vars(error).update(_keras_call_info_injected=True, ag_pass_through=True)
        raise error

    # -- functions that run operations ------------------------------------------------------------

    def _wrap(self, in_force: _Function, function: _Function) -> _Function:
        """Wrap a function that runs operations on their inputs before any conversion."""

        def run(ctx: Any, operation: str, name: Any, *inputs: Any) -> Any:
            if not in_force():
                return function(ctx, operation, name, *inputs)
            known = inputs_of(operation)
            if known is None or known is _NOT_LOOKED_AT:
                return function(ctx, operation, name, *inputs)
            # Only the code from here on makes an operation slower under ``strict()``.
            default = _default_of(ctx)
            home: str | None = None
            for index in known.operands:
                value = inputs[index]
                if type(value) is not _EagerTensor or (there := value.device) != home is not None:
                    home = None
                    break
                home = there
            if home is None or (
                (home == default or home.endswith(_HOST)) and _may_be_unplaced(known, inputs)
            ):
                home = self._home_of(operation, known, inputs)
            local = ctx._thread_local_data
            outer, before = local.device_name, local.device_spec
            if home is None and not outer:
                return _strip_places(function(ctx, operation, name, *inputs))
            if home is None or _runs_there(operation, home, default, outer, before):
                return function(ctx, operation, name, *inputs)
            # ``tf.device`` does the same, in ten times the time.
            local.device_name, local.device_spec = home, default_specification(home)
            try:
                return function(ctx, operation, name, *inputs)
            finally:
                local.device_name, local.device_spec = outer, before

        return run

    def _wrap_flat(self, in_force: _Function, function: _Function) -> _Function:
        """Wrap a function that runs functions and operations on one list of tensors."""

        def run(handle: Any, device: str, operation: Any, inputs: Any, *others: Any) -> Any:
            name = operation.decode() if isinstance(operation, bytes) else operation
            if not in_force() or inputs_of(name) is _NOT_LOOKED_AT:
                return function(handle, device, operation, inputs, *others)
            home = self._home_of_flat(name, inputs)
            ctx = context()
            if home is None and not device:
                return _strip_places(function(handle, device, operation, inputs, *others))
            if home and not _runs_there(name, home, _default_of(ctx), device, ctx.device_spec):
                device = home
            return function(handle, device, operation, inputs, *others)

        return run


# -- operands -------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """The names of an operation's inputs, and the indexes of the inputs that are operands."""

    names: tuple[str, ...]
    operands: tuple[int, ...]


_NOT_LOOKED_AT = Inputs((), ())


@lru_cache(4096)
def inputs_of(operation: str) -> Inputs | None:
    """Return the inputs of an operation from TensorFlow's registry; None for a function."""
    if _LEFT_ALONE.fullmatch(operation):
        return _NOT_LOOKED_AT
    definition = op_def_registry.get(operation)
    if definition is None:
        return None
    names = [each.name for each in definition.input_arg]
    return Inputs(
        tuple("variable" if name in ("resource", "var") else name for name in names),
        tuple(i for i, name in enumerate(names) if not _READ_BY_THE_HOST.fullmatch(name)),
    )


def operands_of(operation: str, inputs: Sequence[Any]) -> list[Any]:
    """Return the tensors among the inputs of an operation, and the handles of variables.

    Inputs that the host reads, such as shapes, are left out.
    """
    known = inputs_of(operation)
    if known is not None and known.operands and len(inputs) >= len(known.names):
        inputs = [inputs[i] for i in known.operands]
    values = [
        each
        for value in inputs
        for each in (value if isinstance(value, (list, tuple)) else (value,))
    ]
    return [x for value in values if (x := tensor_of(value)) is not None]


def _place_of(value: Any) -> str | None:
    """Return TensorFlow's name of the device where an operand is.

    Return None for a value that mixes: a number, a string, a handle, a 0-dim CPU tensor, an
    unplaced tensor.
    """
    value = tensor_of(value)
    if value is None:
        return None
    # The device of the operation that made it. The bytes may be in the host's memory, where
    # TensorFlow keeps int32, shapes, and handles of variables.
    there: str = value.device
    if value._datatype_enum() in _OF_THE_HOST:
        # A variable's handle knows the shape of the variable; an iterator's handle knows none.
        data = getattr(value, "_handle_data", None)
        if data is None or not data.is_set:
            return None
        shape = data.shape_and_type[0].shape
        rank = -1 if shape.unknown_rank else len(shape.dim)
    elif _UNPLACED in value.__dict__:
        return None
    else:
        rank = value._rank()
    return None if not rank and there.endswith(_HOST) else there


def tensor_of(value: Any) -> Any:
    """Return a tensor, or the handle of a variable; None for any other value."""
    if type(value) is _EagerTensor:
        return value
    # A Keras variable contains one of TensorFlow's.
    variable = value if isinstance(value, tf.Variable) else getattr(value, "_value", None)
    handle = getattr(variable, "handle", None) if isinstance(variable, tf.Variable) else None
    return handle if type(handle) is _EagerTensor else None


def _may_be_unplaced(inputs: Inputs, values: Sequence[Any]) -> bool:
    """Return whether an operand may be unplaced, by a fast check."""
    for index in inputs.operands:
        value = values[index]
        if _UNPLACED in value.__dict__ or not value._rank():
            return True
    return False


def _strip_places(result: Any) -> Any:
    """Mark the results of an operation as unplaced, and return them."""
    for x in result if isinstance(result, (list, tuple)) else (result,):
        if type(x) is _EagerTensor:
            x.__dict__[_UNPLACED] = True
    return result


def _name(index: int, value: Any) -> str | int:
    """Return the name of a function's input: a variable's own name, or its index."""
    name = getattr(value, "_name", None)  # the handle of a variable has one
    return name.partition(":")[0] if isinstance(name, str) else index


def title_of(operation: str) -> str:
    """Return a short name: 'add' for the operation ``'AddV2'``, 'f' for ``'__inference_f_12'``."""
    if operation.startswith("__"):
        return operation.removeprefix("__").partition("_")[2].rpartition("_")[0]
    return re.sub(r"(V\d+|VariableOp)$", "", operation).lower()


# -- functions that are replaced ------------------------------------------------------------------


def _wrap_conversion(in_force: _Function, function: _Function) -> _Function:
    """Wrap the function that makes tensors from numbers and NumPy arrays, also for Keras."""

    def convert(value: Any, ctx: Any, dtype: Any = None) -> Any:
        made = function(value, ctx, dtype)
        is_new = type(value) is not _EagerTensor and not ctx.device_name
        return _strip_places(made) if is_new and in_force() else made

    return convert


def _at_target(in_force: _Function, function: _Function) -> _Function:
    """Wrap ``tape.gradient`` to begin with ones on the device of its target."""

    def differentiate(tape: Any, target: Any, *arguments: Any, **named: Any) -> Any:
        is_free = in_force() and tf.executing_eagerly() and not context().device_name
        places = map(_place_of, tf.nest.flatten(target)) if is_free else ()
        home = next(filter(None, places), None)
        with DefaultDevice(home) if home else nullcontext():
            return function(tape, target, *arguments, **named)

    return differentiate


@contextmanager
def allow_mixing() -> Iterator[None]:
    """Permit mixing in a block, for code that computes on several devices."""
    entry = _may_mix.enter(True)
    try:
        yield
    finally:
        _may_mix.leave(entry)


def _free_to_mix(_: _Function, function: _Function) -> _Function:
    """Wrap a function to permit mixing in it."""

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with allow_mixing():
            return function(*arguments, **named)

    return run


def _free_at_target(in_force: _Function, function: _Function) -> _Function:
    """Wrap ``tape.jacobian``, which computes with one function made from the whole tape."""
    return _at_target(in_force, _free_to_mix(in_force, function))


def _loops_of_keras() -> Iterator[tuple[Any, str, Callable[..., _Function]]]:
    keras: Any = sys.modules.get("keras")
    for owner in keras.Model.__mro__ if hasattr(keras, "Model") else ():
        for name in vars(owner).keys() & _LOOPS:
            yield owner, name, _free_to_mix


def _runs_there(operation: str, home: str, default: str, outer: str, specification: Any) -> bool:
    """Return whether an operation would run at its operands anyway, or where the user said.

    ``outer`` is the device of the innermost scope, or empty. ``specification`` is ``outer`` as
    TensorFlow's parsed device. ``default`` is the device of operations outside of every scope.
    """
    if outer:
        return home == outer or operation == _IDENTITY or not is_default_only(specification)
    return home == default


@lru_cache(1)
def _default_of(ctx: Any) -> str:
    """Return the device of operations outside of every scope. TensorFlow has started."""
    devices = [name for name in ctx._context_devices if name.startswith(own_task())]
    return next((name for name in devices if "GPU" in name), devices[0])
