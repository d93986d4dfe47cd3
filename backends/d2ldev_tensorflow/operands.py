"""Which inputs of TensorFlow's operations are operands, and where an operand is.

Shapes, axes, seeds and the like are read by the host: TensorFlow's GPU kernels want them in its
memory, and TensorFlow makes most of them there itself. They may be anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from d2ldev.device import CPU
from d2ldev.interface import Backend
from d2ldev.strictness import mismatch

EagerTensor: type = tf.__internal__.EagerTensor
_VARIABLE = {"resource": "variable", "var": "variable"}
_ON_THE_HOST = (tf.string, tf.resource, tf.variant)

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
# These make tensors of numbers, which the host reads.
_CREATES = frozenset({"Fill", "LinSpace", "Range"})
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


class Positions(dict[str, tuple[int, ...] | None]):
    """Operation -> which of its inputs, in the order of its definition, are operands.

    None for an operation that is left alone.
    """

    def __missing__(self, operation: str) -> tuple[int, ...] | None:
        found: tuple[int, ...] | None = None
        if not _LEFT_ALONE.fullmatch(operation):
            definition = op_def_registry.get(operation)
            inputs = () if definition is None else definition.input_arg
            found = tuple(
                index
                for index, each in enumerate(inputs)
                if not _READ_BY_THE_HOST.fullmatch(each.name) and operation not in _CREATES
            )
        self[operation] = found
        return found


class Operands:
    """Where the operands of operations are.

    Args:
        backend: whose devices they are on.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.positions = Positions()

    def home_of(self, operation: str, inputs: Sequence[Any]) -> str | None:
        """TensorFlow's name of the device where all operands are; None if there are none.

        Args:
            operation: its name in TensorFlow's registry, or a function's.
            inputs: in the order of its definition, those that are lists as lists; what follows
                them is not looked at.

        Raises:
            DeviceMismatchError: if they are on several.
        """
        definition = op_def_registry.get(operation)
        if definition is None:
            return self._agreed(operation, _numbered(inputs))
        named: list[tuple[str, Any]] = []
        for index in self.positions[operation] or ():
            name, value = definition.input_arg[index].name, inputs[index]
            if isinstance(value, (list, tuple)):
                named += [(f"{name}[{i}]", item) for i, item in enumerate(value)]
            else:
                named.append((_VARIABLE.get(name, name), value))
        return self._agreed(operation, named)

    def home_of_flat(self, operation: str, inputs: Sequence[Any]) -> str | None:
        """As ``home_of``, of inputs in one flat list."""
        definition = op_def_registry.get(operation)
        if definition is None:
            return self.home_of(operation, inputs)
        arguments = definition.input_arg
        of_several = [bool(each.number_attr or each.type_list_attr) for each in arguments]
        if sum(of_several) > 1:
            return self._agreed(operation, _numbered(inputs))
        left, length = iter(inputs), len(inputs) - len(arguments) + 1
        nested = [list(islice(left, length)) if each else next(left) for each in of_several]
        return self.home_of(operation, nested)

    def _agreed(self, operation: str, named: list[tuple[str, Any]]) -> str | None:
        found = [(name, there) for name, value in named if (there := self.place_of(value))]
        if not found:
            return None
        home = found[0][1]
        if any(there != home for _, there in found):
            error = mismatch(
                title_of(operation), [(name, self._backend.device(there)) for name, there in found]
            )
            # Otherwise a layer of Keras makes a RuntimeError of it, to add what it was called with.
            vars(error)["_keras_call_info_injected"] = True
            raise error
        return home

    def place_of(self, value: Any) -> str | None:
        """TensorFlow's name of the device where an operand is.

        None for what is no operand: a 0-dim tensor of the CPU, a string, a handle, a number.
        """
        if isinstance(value, EagerTensor):
            # Where the operation ran that made it. The bytes are elsewhere only where TensorFlow
            # keeps them in the host's memory, as it does int32, shapes and handles of variables.
            there: str = value.device
            rank = value._rank()
            if value.dtype in _ON_THE_HOST:
                # A variable's handle knows the shape of what it leads to; an iterator's does not.
                data = getattr(value, "_handle_data", None)
                if data is None or not data.is_set:
                    return None
                shape = data.shape_and_type[0].shape
                rank = -1 if shape.unknown_rank else len(shape.dim)
            return there if rank or self._backend.device(there) is not CPU else None
        if not isinstance(value, tf.Variable):
            value = getattr(value, "_value", None)  # of Keras' variable
            if not isinstance(value, tf.Variable):
                return None
        return self.place_of(getattr(value, "handle", None))


def _numbered(inputs: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"operand_{index}", value) for index, value in enumerate(inputs)]


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
