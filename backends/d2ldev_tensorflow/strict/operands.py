"""Which inputs of TensorFlow's operations are operands, and where an operand is.

Shapes, axes, seeds and the like are read by the host: TensorFlow's GPU kernels want them in its
memory, and TensorFlow makes most of them there itself. They may be anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from d2ldev.operations.mixing import mismatch
from d2ldev_tensorflow.devices import TensorFlowDevices
from d2ldev_tensorflow.strict.calls import Call

EagerTensor: type = tf.__internal__.EagerTensor
HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
"""TensorFlow's name of the CPU."""

_CALLED = {"resource": "variable", "var": "variable"}
_ON_THE_HOST = frozenset(dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant))

# What every GPU kernel with an input of that name asks for in the host's memory, as TensorFlow's
# registry of kernels says; and what it computes from a seed, which is made where it is asked for.
_READ_BY_THE_HOST = re.compile(
    r"a_shape|alg|algorithm|axes|axis|base_dilations|begin|block_shape|broadcast_dims|buffer_size"
    r"|concat_dim|counter|crop_size|crops|dense_output_dim0|dense_shape|depth|dim|dimension|dims"
    r"|element_shape|end|fft_length|filter_sizes|image_size|index|input_shape|input_size"
    r"|input_sizes|k|key|ksize|leading_dims|lengths|lhs_dilation|limit|max_num_elements"
    r"|max_output_size|maxval|min_size|minval|multiples|nbins|new_shape|nrows|num_bits|num_cols"
    r"|num_elements|num_layers|num_lower|num_rows|num_samples|num_segments|num_units|num_upper"
    r"|orig_input_shape|output_dim0|output_index|output_shape|padding|padding_high"
    r"|padding_interior|padding_low|padding_value|paddings|perm|pre_nms_topn|rank"
    r"|reduction_indices|rhs_dilation|seed|seq_len_max|sequence_length|sequence_lengths|shape"
    r"|shape_to_prepend|shapes|shift|size|size_indices|size_splits|slice_sizes|split_dim|start"
    r"|strides|window_dilations|window_dimensions|window_strides"
)
# These make tensors of numbers, which may be 0-dim tensors of the CPU: it says nothing about where
# the new tensor belongs.
OF_NUMBERS = frozenset(
    {"BroadcastTo", "ExpandDims", "Fill", "LinSpace", "Pack", "Range", "Reshape", "Tile"}
)
# Writing values into a variable is a copy that the user wrote, as ``copy_`` is in torch; reading
# them is done where it is. Data sets and their iterators are the host's, whatever they are given.
_LEFT_ALONE = re.compile(r"AssignVariableOp|ReadVariableOp|\w*(Dataset|Iterator)\w*")

_ALIKE = {
    "AddV2": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "RealDiv": "divide",
    "MatMul": "matmul",
    "BatchMatMulV2": "matmul",
    "ConcatV2": "concat",
    "Pack": "stack",
    "GatherV2": "gather",
    "SelectV2": "where",
    "Conv2D": "conv2d",
    "Conv3D": "conv3d",
}


class Inputs(NamedTuple):
    """The inputs of an operation.

    Args:
        names: what each is called.
        several: whether each is a list of tensors.
        positions: which of them are operands.
    """

    names: tuple[str, ...]
    several: tuple[bool, ...]
    positions: tuple[int, ...]


class Definitions(dict[str, Inputs | None]):
    """Operation -> its inputs, as TensorFlow's registry has them; None for a function."""

    def __missing__(self, operation: str) -> Inputs | None:
        definition = op_def_registry.get(operation)
        found = None
        if definition is not None:
            each = list(definition.input_arg)
            names = tuple(_CALLED.get(one.name, one.name) for one in each)
            several = tuple(bool(one.number_attr or one.type_list_attr) for one in each)
            used = enumerate(names)
            positions = tuple(i for i, name in used if not _READ_BY_THE_HOST.fullmatch(name))
            found = Inputs(names, several, positions)
        self[operation] = found
        return found


class Positions(dict[str, tuple[int, ...] | None]):
    """Operation -> which of its inputs are operands; None for an operation that is left alone."""

    def __init__(self, definitions: Definitions) -> None:
        super().__init__()
        self._definitions = definitions

    def __missing__(self, operation: str) -> tuple[int, ...] | None:
        inputs = self._definitions[operation]
        left_alone = inputs is None or _LEFT_ALONE.fullmatch(operation)
        self[operation] = found = None if left_alone or inputs is None else inputs.positions
        return found


class Operands:
    """Where the operands of operations are.

    Args:
        devices: the room of devices.
    """

    def __init__(self, devices: TensorFlowDevices) -> None:
        self._devices = devices
        self._definitions = Definitions()
        self.positions = Positions(self._definitions)

    def home_of(self, operation: str, values: Sequence[Any]) -> str | None:
        """TensorFlow's name of the device where all operands are; None if there are none.

        Args:
            operation: its name in TensorFlow's registry.
            values: its inputs, those that are lists as lists; what follows is not looked at.

        Raises:
            DeviceMismatchError: if they are on several.
        """
        inputs = self._definitions[operation]
        positions = self.positions[operation]
        if inputs is None or positions is None:
            return None
        named: list[tuple[str, Any]] = []
        for index in positions:
            name, value = inputs.names[index], values[index]
            if isinstance(value, (list, tuple)):
                named += [(f"{name}[{i}]", item) for i, item in enumerate(value)]
            else:
                named.append((name, value))
        return self._agreed(operation, named)

    def home_of_flat(self, operation: str, values: Sequence[Any]) -> str | None:
        """As ``home_of``, of inputs in one flat list; also of a call of a function."""
        inputs = self._definitions[operation]
        if inputs is None or sum(inputs.several) > 1:
            return self._agreed(operation, [(_name(i, x), x) for i, x in enumerate(values)])
        if not any(inputs.several):
            return self.home_of(operation, values)
        left, length = iter(values), len(values) - len(inputs.names) + 1
        nested = [list(islice(left, length)) if each else next(left) for each in inputs.several]
        return self.home_of(operation, nested)

    def _agreed(self, operation: str, named: list[tuple[str, Any]]) -> str | None:
        home: str | None = None
        for _, value in named:
            there = self.place_of(value)
            if there is not None and there != home:
                if home is not None:
                    return self._agreed_by_the_call(operation, named)
                home = there
        return home

    def _agreed_by_the_call(self, operation: str, named: list[tuple[str, Any]]) -> str:
        """What TensorFlow made on the way, for operands that agree, is not the user's."""
        home = Call(self.place_of).only_home(self._definitions[operation] is None)
        if home is not None:
            return home
        places = [(name, self.place_of(value)) for name, value in named]
        error = mismatch(
            title_of(operation),
            [(name, self._devices.from_native(there)) for name, there in places if there is not None],
        )
        # Otherwise a layer of Keras makes a RuntimeError of it, to add what it was called with, and
        # AutoGraph an error of its own, to add a line of the user's.
        vars(error).update(_keras_call_info_injected=True, ag_pass_through=True)
        raise error

    def place_of(self, value: Any) -> str | None:
        """TensorFlow's name of the device where an operand is.

        None for what is no operand: a 0-dim tensor of the CPU, a string, a handle, a number.
        """
        if type(value) is not EagerTensor:
            if not isinstance(value, tf.Variable):
                value = getattr(value, "_value", None)  # of Keras' variable
                if not isinstance(value, tf.Variable):
                    return None
            value = getattr(value, "handle", None)
            if type(value) is not EagerTensor:
                return None
        # Where the operation ran that made it. The bytes are elsewhere only where TensorFlow keeps
        # them in the host's memory, as it does int32, shapes, and handles of variables.
        there: str = value.device
        if value._datatype_enum() in _ON_THE_HOST:
            # A variable's handle knows the shape of what it leads to; an iterator's does not.
            data = getattr(value, "_handle_data", None)
            if data is None or not data.is_set:
                return None
            shape = data.shape_and_type[0].shape
            rank = -1 if shape.unknown_rank else len(shape.dim)
        else:
            rank = value._rank()
        return None if there == HOST and not rank else there


def _name(index: int, value: Any) -> str:
    """What an input of a function is called: a variable by its name."""
    name = getattr(value, "_name", None)  # of a variable's handle
    return name.partition(":")[0] if isinstance(name, str) else f"operand_{index}"


def title_of(operation: str) -> str:
    """What a user calls an operation: ``'AddV2'`` is ``tf.add``, ``'__inference_f_12'`` is f."""
    if operation in _ALIKE:
        return _ALIKE[operation]
    if operation.startswith("__"):
        return operation.removeprefix("__").partition("_")[2].rpartition("_")[0]
    operation = operation.removesuffix("VariableOp")
    plain = operation.rstrip("0123456789").removesuffix("V") or operation
    return "".join(
        f"_{letter.lower()}"
        if letter.isupper() and index and plain[index - 1].islower()
        else letter.lower()
        for index, letter in enumerate(plain)
    )
