"""Every operator on a virtual GPU runs the CPU's kernel, on the same memory.

The CPU kernel gets the operands as CPU tensors, and its results are given to the virtual GPU. So
results are the CPU's, bit for bit. An operator without a CPU kernel has none on virtual GPUs,
except those in ``cuda_kernels.py``. Operands on different devices are refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from d2ldev import DeviceMismatchError
from d2ldev.framework import Operand, mismatch
from d2ldev_torch.devices import MOVE, NATIVE_CPU
from d2ldev_torch.virtual.devices import NAME, device_of, index_of
from d2ldev_torch.virtual.memory import (
    CPU_KEYS,
    SPARSE_KEYS,
    as_cpu,
    as_virtual,
    forget_origin,
    join_memory,
    layout_refusal,
    origin_of,
    replace_parts,
    resize,
)

_Tensor = torch.Tensor

# Arguments that CUDA's kernels also take from the host. CPU tensors index any tensor, and the host
# reads the sizes of packed sequences.
_HOST_ARGUMENTS = {
    **dict.fromkeys(
        (
            *("index", "index_put", "index_put_", "_index_put_impl", "_index_put_impl_"),
            *("_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index"),
            "_unsafe_masked_index_put_accumulate",
        ),
        "indices",
    ),
    **dict.fromkeys(
        ("_pack_padded_sequence_backward", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        "batch_sizes",
    ),
}
# What a user calls, of operators with another name.
_TITLES = {
    "_sparse_mm": "sparse.mm",
    "_sparse_coo_tensor_with_dims_and_tensors": "sparse_coo_tensor",
}
# A 0-dim tensor on the host stands for a number, but not in these arguments.
_NO_NUMBERS = frozenset(("index", "indices", "target", "tensors"))
_NUMBERS = frozenset((bool, int, float, complex))
# Arguments of these types contain neither tensors nor devices.
_PLAIN = _NUMBERS | {type(None), str, torch.dtype, torch.memory_format}
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_UNUSUAL = object()
_is_autocast_enabled = torch._C._is_any_autocast_enabled


class Schema:
    """The tensors in an operator's schema.

    Args:
        op: a ``torch._ops.OpOverload``.

    Attributes:
        outs: the names of the arguments that the operator writes its results to.
        is_random: whether it takes a generator.
    """

    def __init__(self, op: Any) -> None:
        schema = op._schema
        arguments = schema.arguments
        self.op = op
        self.name: str = str(schema.name).removeprefix("aten::")
        self.is_mutable: bool = schema.is_mutable
        self.outs = tuple(argument.name for argument in arguments if argument.is_out)
        self._host = _HOST_ARGUMENTS.get(self.name)
        self._names = tuple(argument.name for argument in arguments)
        self._written = frozenset(argument.name for argument in arguments if argument.is_write)
        self._tensors = tuple(
            i
            for i, argument in enumerate(arguments)
            if isinstance(argument.type, torch.TensorType) and not argument.kwarg_only
        )
        # The arguments in which a 0-dim tensor on the host stands for a number.
        self._numbers = frozenset(
            i
            for i in self._tensors
            if not arguments[i].is_write and arguments[i].name not in _NO_NUMBERS
        )
        self._may_be_quick = not self.outs and self._host is None
        self._redispatch = op._handle.redispatch_boxed
        self.is_random = "generator" in self._names

    def has_number(self, args: list[Any]) -> bool:
        """Return whether a number is given for a tensor argument, as in ``x + 2``."""
        number = len(args)
        return any(i < number and type(args[i]) in _NUMBERS for i in self._tensors)

    def may_be_on_host(
        self, x: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether an operand may be on the CPU, with others on a virtual GPU."""
        roles = {
            name
            for name, value in self.name_arguments(args, kwargs).items()
            if any(x is one for one in _tensors_in(value))
        }
        if roles <= {self._host}:
            return True
        return x.dim() == 0 and not roles & self._written and not roles & _NO_NUMBERS

    def mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceMismatchError:
        """Return the error of a call whose tensors are on different devices."""
        operands: list[Operand] = []
        # The names of a schema, such as ``self`` and ``mat2``, are not the user's.
        named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            is_list = isinstance(value, (list, tuple))
            for i, x in enumerate(_tensors_in(value)):
                if not (x.is_cpu and self.may_be_on_host(x, args, kwargs)):
                    operands.append(((name, i) if is_list else name, device_of(x.device)))
        return mismatch(_TITLES.get(self.name, self.name), operands, move=MOVE)

    def run_quickly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a common call with the CPU's kernel, on the tensors that the operands were made of.

        A common call has tensors, numbers and lists of numbers, and no ``out``. It needs no
        aliases. Making those takes longer than a kernel runs on small tensors.

        Returns:
            The result on the virtual GPU; ``_UNUSUAL``, with nothing done, for any other call.
        """
        if not self._may_be_quick or _is_autocast_enabled():
            return _UNUSUAL
        new: list[Any] = []
        index = -1
        has_number = False
        for value in args:
            kind = type(value)
            if kind in _TENSORS:
                found = origin_of(value)
                if found is not None:
                    value, own = found
                    if index != own:
                        if index >= 0:
                            return _UNUSUAL
                        index = own
                elif not (value.is_cpu and value.dim() == 0 and len(new) in self._numbers):
                    return _UNUSUAL
            elif kind in _NUMBERS:
                has_number = has_number or len(new) in self._tensors
            elif kind not in _PLAIN and not _is_plain_list(value):
                return _UNUSUAL
            new.append(value)
        if index < 0 or (kwargs and not all(type(value) in _PLAIN for value in kwargs.values())):
            return _UNUSUAL
        if has_number:  # only the whole call turns it into a tensor
            result = self.op(*new, **kwargs)
        elif kwargs:
            result = self._redispatch(CPU_KEYS, *new, **kwargs)
        else:
            result = self._redispatch(CPU_KEYS, *new)
        if self.is_mutable:
            _follow(args, new)
        if isinstance(result, (list, tuple)):
            return type(result)(_take(one, args, new, index) for one in result)
        return _take(result, args, new, index)

    def list_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call writes to."""
        named = self.name_arguments(args, kwargs)
        return [x for name in self._written if name in named for x in _tensors_in(named[name])]

    def name_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}


def _is_plain_list(value: Any) -> bool:
    """Return whether a value is a list without tensors, such as ``dim=[0]``."""
    return type(value) is list and all(type(one) in _PLAIN for one in value)


def _take(result: Any, args: tuple[Any, ...], new: list[Any], index: int) -> Any:
    """Return a result on the virtual GPU: an operand itself, a number unchanged."""
    if not isinstance(result, _Tensor):
        return result
    for i, origin in enumerate(new):
        if result is origin:
            return args[i]
    return as_virtual(result, index)


def _follow(args: tuple[Any, ...], new: list[Any]) -> None:
    """Give operands the shapes that the kernel has given to their CPU tensors."""
    for operand, origin in zip(args, new, strict=True):
        if origin is not operand and (
            origin.shape != operand.shape or origin.stride() != operand.stride()
        ):
            forget_origin(operand.untyped_storage())
            resize(operand, origin)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


@lru_cache(None)
def schema_of(op: Any) -> Schema:
    """Return the schema of an operator. There are some thousand operators."""
    return Schema(op)


def operator_named(name: str) -> Any:
    """Return the ``OpOverload`` of a name such as ``aten::add.Tensor``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class Operands:
    """The operands of one call, as CPU tensors.

    Args:
        schema: the schema of the operator.
        alias: makes a CPU tensor of an operand.
        take: makes a tensor on a virtual GPU from a result and the GPU's index.
    """

    __slots__ = (
        *("_agree", "_alias", "_hosts", "_is_made_elsewhere", "_schema", "_take"),
        *("aliases", "is_whole", "index"),
    )

    def __init__(
        self,
        schema: Schema,
        alias: Callable[[_Tensor], _Tensor] = as_cpu,
        take: Callable[[_Tensor, int], _Tensor] = as_virtual,
    ) -> None:
        self._schema, self._alias, self._take = schema, alias, take
        self._hosts: list[_Tensor] = []
        self._agree = True
        # Whether the call names another kind of device, as in ``zeros_like(x, device='cpu')``.
        self._is_made_elsewhere = False
        # Whether an operand or the result is nested or sparse.
        self.is_whole = False
        self.index = -1
        # By the alias's id, which stays unique because the alias is kept here.
        self.aliases: dict[int, tuple[_Tensor, _Tensor]] = {}

    def to_cpu(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments for the CPU kernel.

        Raises:
            DeviceMismatchError: if tensors are on different devices.
            DeviceUnavailableError: if the call names a missing virtual GPU.
        """
        new = [self._convert(value) for value in args]
        named = {key: self._convert(value) for key, value in kwargs.items()} if kwargs else kwargs
        if not self._agree or (
            self._hosts
            and self.aliases
            and not all(
                host.is_cpu and self._schema.may_be_on_host(host, args, kwargs)
                for host in self._hosts
            )
        ):
            raise self._schema.mismatch(args, kwargs)
        return new, named

    def _convert(self, value: Any) -> Any:
        if isinstance(value, _Tensor):
            device = value.device
            if device.type != NAME:
                self._hosts.append(value)
                return value
            if self.index != device.index:
                self._agree = not self.aliases
                self.index = device.index
            if value.is_nested or value.layout is not torch.strided:
                self.is_whole = True
                for alias, operand in self.aliases.values():
                    if operand is value:  # so that both arguments are one tensor, too
                        return alias
            alias = self._alias(value)
            self.aliases[id(alias)] = alias, value
            return alias
        if isinstance(value, (list, tuple)):
            return [self._convert(item) for item in value]
        if isinstance(value, torch.device):
            self._is_made_elsewhere = value.type != NAME
            if self._is_made_elsewhere:
                return value
            self.index = index_of(value)
            return NATIVE_CPU
        if isinstance(value, torch.layout):
            self.is_whole = self.is_whole or value is not torch.strided
        return value

    def to_virtual(self, result: Any) -> Any:
        """Return the CPU kernel's results on the virtual GPU; an operand as itself."""
        if isinstance(result, _Tensor):
            known = self.aliases.get(id(result))
            if known is not None:
                return known[1]
            return result if self._is_made_elsewhere else self._take(result, self.index)
        if isinstance(result, (list, tuple)):
            return type(result)(self.to_virtual(item) for item in result)
        return result


def run_on_cpu(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a virtual GPU with its CPU kernel."""
    quick = schema.run_quickly(args, kwargs)
    return _run_unusual(schema, args, kwargs) if quick is _UNUSUAL else quick


def _run_unusual(schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands = Operands(schema)
    new, named = operands.to_cpu(args, kwargs)
    if not schema.is_mutable:
        return operands.to_virtual(_call_kernel(schema, operands, new, named))
    if len(operands.aliases) > 1 and not operands.is_whole:
        join_memory(operands.aliases.values())
    try:
        result = _call_kernel(schema, operands, new, named)
    except RuntimeError as error:
        # The memory of a capsule cannot grow: a tensor that has to grow is made anew.
        if not schema.outs or "not resizable" not in str(error):
            raise
        return _run_with_new_outs(schema, operands, new, named)
    for alias, operand in operands.aliases.values():
        if operand.layout in SPARSE_KEYS:
            if any(operand is x for x in schema.list_written(args, kwargs)):
                replace_parts(operand, alias)
            continue
        # The kernel may have made an ``out`` smaller, or changed its strides.
        if alias.shape != operand.shape or alias.stride() != operand.stride():
            resize(operand, alias)
        if alias.is_conj() != operand.is_conj():
            torch._C._set_conj(operand, alias.is_conj())
    return operands.to_virtual(result)


def _run_with_new_outs(
    schema: Schema, operands: Operands, new: list[Any], named: dict[str, Any]
) -> Any:
    """Let an operator make new results, and write each into its ``out``."""
    written = []

    def make(alias: _Tensor) -> _Tensor:
        operand = operands.aliases[id(alias)][1]
        fresh = as_cpu(operand).clone()  # the alias may claim more memory than it has
        operands.aliases[id(fresh)] = fresh, operand
        written.append((fresh, operand))
        return fresh

    for name in schema.outs:
        out = named[name]
        named[name] = [make(one) for one in out] if isinstance(out, list) else make(out)
    result = _call_kernel(schema, operands, new, named)
    for fresh, operand in written:
        if operand.layout in SPARSE_KEYS:
            replace_parts(operand, fresh)
            continue
        if operand.shape != fresh.shape:
            resize(operand, fresh)
        as_cpu(operand).copy_(fresh)
    return operands.to_virtual(result)


def _call_kernel(
    schema: Schema, operands: Operands, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    with autocast_of_kernels():
        if operands.is_whole or schema.has_number(args):
            # Only the whole call finds the kernels of a layout, and makes tensors of numbers.
            return schema.op(*args, **kwargs)
        return schema.op.redispatch(CPU_KEYS, *args, **kwargs)


_NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


def autocast_of_kernels() -> AbstractContextManager[Any]:
    """Give the operators inside a CPU kernel the autocast of virtual GPUs, not the CPU's."""
    if not torch._C._is_any_autocast_enabled():
        return _NO_AUTOCAST
    return torch.autocast(
        "cpu", dtype=torch.get_autocast_dtype(NAME), enabled=torch.is_autocast_enabled(NAME)
    )


def fall_back(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that has no own kernel for virtual GPUs."""
    return run_on_cpu(schema_of(op), *args, **kwargs)


def refuse_layout(op: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Refuse an operator on quantized tensors.

    Raises:
        UnsupportedValueError: always.
    """
    raise layout_refusal(f"compute {schema_of(op).name}")
