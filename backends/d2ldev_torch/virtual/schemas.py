"""What an operator's schema says about its tensors: read once for each operator."""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.errors import DeviceMismatchError
from d2ldev.operations import strictness
from d2ldev_torch.virtual.devices import device_of

# Arguments that CUDA's kernels, too, take from the host: CPU tensors index any tensor, and the
# lengths of packed sequences are read by the host.
_HOST_ARGUMENTS = {
    "aten::index": "indices",
    "aten::index_put": "indices",
    "aten::index_put_": "indices",
    "aten::_index_put_impl": "indices",
    "aten::_index_put_impl_": "indices",
    "aten::_unsafe_index": "indices",
    "aten::_unsafe_index_put": "indices",
    "aten::_unsafe_masked_index": "indices",
    "aten::_unsafe_masked_index_put_accumulate": "indices",
    "aten::_pack_padded_sequence": "lengths",
    "aten::_pack_padded_sequence_backward": "batch_sizes",
    "aten::_pad_packed_sequence": "batch_sizes",
    "aten::lstm": "batch_sizes",
    "aten::gru": "batch_sizes",
    "aten::rnn_tanh": "batch_sizes",
    "aten::rnn_relu": "batch_sizes",
}

# What CUDA's kernels, too, return on the host.
_HOST_RESULTS = {"aten::_pack_padded_sequence": (1,), "aten::_pad_packed_sequence": (1,)}
# A 0-dim tensor of the host stands for a number, but not for an index or a piece of a tensor.
_NO_NUMBERS = frozenset(("index", "indices", "target", "tensors"))
_NUMBERS = frozenset((bool, int, float, complex))


class Plan:
    """How to call one operator.

    Args:
        op: a ``torch._ops.OpOverload``.
    """

    __slots__ = (
        *("_generator", "_host", "_names", "_tensors", "_written"),
        *("host_results", "is_mutable", "name", "op", "outs"),
    )

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.op = op
        self.name: str = str(schema.name).removeprefix("aten::")
        self.is_mutable: bool = schema.is_mutable
        self.outs = tuple(argument.name for argument in schema.arguments if argument.is_out)
        self._names = tuple(argument.name for argument in schema.arguments)
        self._written = frozenset(
            argument.name for argument in schema.arguments if argument.is_write
        )
        self._tensors = tuple(
            i
            for i, argument in enumerate(schema.arguments)
            if isinstance(argument.type, torch.TensorType) and not argument.kwarg_only
        )
        self._generator = next(
            (i for i, one in enumerate(schema.arguments) if "Generator" in str(one.type)), -1
        )
        self._host = _HOST_ARGUMENTS.get(schema.name)
        self.host_results = _HOST_RESULTS.get(schema.name, ())

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers by a generator that it may be given."""
        return self._generator >= 0

    def mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceMismatchError:
        """The error of a call whose tensors are on different devices."""
        operands = []
        for name, value in self._named(args, kwargs).items():
            found = _tensors_in(value)
            several = isinstance(value, (list, tuple))
            for i, x in enumerate(found):
                operands.append((f"{name}[{i}]" if several else name, device_of(x)))
        return strictness.mismatch(self.name, operands)

    def has_number(self, args: list[Any]) -> bool:
        """Whether a number stands where the operator takes a tensor."""
        number = len(args)
        return any(i < number and type(args[i]) in _NUMBERS for i in self._tensors)

    def generator_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The generator that an operator which draws was given; None if it was given none."""
        i = self._generator
        return args[i] if i < len(args) else kwargs.get(self._names[i])

    def may_be_host(self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operand may be on the host: a number, or what is always there."""
        roles = {
            name
            for name, value in self._named(args, kwargs).items()
            if any(x is one for one in _tensors_in(value))
        }
        if roles <= {self._host}:
            return True
        return x.dim() == 0 and not roles & self._written and not roles & _NO_NUMBERS

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names, args, strict=False)), **kwargs}


def _tensors_in(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]
