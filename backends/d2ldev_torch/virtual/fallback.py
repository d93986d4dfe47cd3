"""Every operator on a virtual GPU: the kernel that the CPU has for it, on the same memory.

An operator's operands are given the CPU's name, its CPU kernel runs, and what it made is given
to the virtual GPU. So results are the CPU's bit for bit, and what the CPU has no kernel for,
virtual GPUs have none for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual import devices
from d2ldev_torch.virtual.labels import NAME, as_cpu, as_virtual
from d2ldev_torch.virtual.schemas import Plan

CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""With these keys an operator runs the CPU's kernel, whatever its operands' devices."""

_CPU = torch.device("cpu")
_Tensor = torch.Tensor


class Operands:
    """The operands of one call of an operator, under their CPU names.

    Args:
        plan: what the operator's schema says.
    """

    __slots__ = (
        *("_agree", "_hosts", "_is_made_elsewhere", "_plan"),
        *("aliases", "holds_nested", "index"),
    )

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._hosts: list[_Tensor] = []
        self._agree = True
        # Whether a device was given that is none of ours, as in ``zeros_like(x, device='cpu')``.
        self._is_made_elsewhere = False
        self.holds_nested = False
        self.index = -1
        # By the alias's identity, which is its own for as long as it is kept here.
        self.aliases: dict[int, tuple[_Tensor, _Tensor]] = {}

    def renamed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the CPU kernel.

        Raises:
            DeviceMismatchError: if tensors are on different devices.
            DeviceUnavailableError: if a virtual GPU is named that does not exist.
        """
        new = [self._rename(value) for value in args]
        named = {key: self._rename(value) for key, value in kwargs.items()} if kwargs else kwargs
        if self._agree and not (self._hosts and self.aliases):
            return new, named
        if not self._agree or not self._may_mix(args, kwargs):
            raise self._plan.mismatch(args, kwargs)
        return new, named

    def _rename(self, value: Any) -> Any:
        if isinstance(value, _Tensor):
            device = value.device
            if device.type != NAME:
                self._hosts.append(value)
                return value
            if self.index != device.index:
                self._agree = not self.aliases
                self.index = device.index
            if value.is_nested:
                self.holds_nested = True
            alias = self._alias(value)
            self.aliases[id(alias)] = alias, value
            return alias
        if isinstance(value, (list, tuple)):
            return [self._rename(item) for item in value]
        if isinstance(value, torch.device):
            self._is_made_elsewhere = value.type != NAME
            if self._is_made_elsewhere:
                return value
            self.index = devices.index_of(value)
            return _CPU
        return value

    def _alias(self, value: _Tensor) -> _Tensor:
        return as_cpu(value)

    def _may_mix(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the tensors that are elsewhere are those that torch lets be on the host."""
        return all(
            host.is_cpu and self._plan.may_be_host(host, args, kwargs) for host in self._hosts
        )

    def given_back(self, result: Any) -> Any:
        """What the CPU kernel returned, on the virtual GPU; operands as themselves."""
        if isinstance(result, _Tensor):
            known = self.aliases.get(id(result))
            if known is not None:
                return known[1]
            return result if self._is_made_elsewhere else self._label(result)
        if isinstance(result, (list, tuple)):
            hosts = self._plan.host_results
            return type(result)(
                item if i in hosts else self.given_back(item) for i, item in enumerate(result)
            )
        return result

    def _label(self, result: _Tensor) -> _Tensor:
        return as_virtual(result, self.index)


def run(plan: Plan, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on a virtual GPU by its CPU kernel."""
    operands = Operands(plan)
    new, named = operands.renamed(args, kwargs)
    if not plan.is_mutable:
        return operands.given_back(_call(plan, operands, new, named))
    try:
        result = _call(plan, operands, new, named)
    except RuntimeError as error:
        # A name for memory cannot grow: what is to be resized is made anew.
        if not plan.outs or "not resizable" not in str(error):
            raise
        return _run_with_new_outs(plan, operands, new, {**named}, kwargs)
    for alias, operand in operands.aliases.values():
        if alias.shape != operand.shape:  # an ``out`` that has become smaller
            set_memory(operand, operand.untyped_storage(), int(operand.storage_offset()), alias)
    return operands.given_back(result)


def _call(plan: Plan, operands: Operands, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the CPU's kernel."""
    if torch._C._is_any_autocast_enabled():
        with autocast_of_kernels():
            return _call_kernel(plan, operands, args, kwargs)
    return _call_kernel(plan, operands, args, kwargs)


def _call_kernel(plan: Plan, operands: Operands, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not operands.holds_nested and not plan.has_number(args):
        return plan.op.redispatch(CPU_KERNELS, *args, **kwargs)
    # Only the whole call takes a number where the schema has a tensor, as in ``x + 2``, and finds
    # the kernels of nested tensors.
    return plan.op(*args, **kwargs)


def autocast_of_kernels() -> torch.autocast:
    """What autocast is to the CPU's kernels, which call others: that of virtual GPUs.

    ``torch.autocast('cpu')`` is not about tensors on a virtual GPU.
    """
    return torch.autocast(
        "cpu", dtype=torch.get_autocast_dtype(NAME), enabled=torch.is_autocast_enabled(NAME)
    )


def _run_with_new_outs(
    plan: Plan, operands: Operands, new: list[Any], named: dict[str, Any], kwargs: dict[str, Any]
) -> Any:
    for name in plan.outs:
        named[name] = fresh = torch.empty(0, dtype=named[name].dtype)
        operands.aliases[id(fresh)] = fresh, kwargs[name]
    result = _call(plan, operands, new, named)
    for name in plan.outs:
        made = as_virtual(named[name], operands.index)
        set_memory(kwargs[name], made.untyped_storage(), 0, made)
    return operands.given_back(result)


def run_any(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operator that has none of its own."""
    return run(plan_of(op), *args, **kwargs)


def refuse_layout(op: Any, *_args: Any, **_kwargs: Any) -> Any:
    """The kernel of every operator on sparse and quantized tensors.

    Raises:
        UnsupportedValueError: always.
    """
    raise UnsupportedValueError(
        f"compute {plan_of(op).name}",
        "virtual GPUs hold dense numbers, no sparse or quantized tensors",
        "keep the tensor on the CPU, or make it dense first: x.to_dense(), x.dequantize(); "
        "Embedding(..., sparse=False)",
    )


def operator(name: str) -> Any:
    """The ``OpOverload`` of a name such as ``aten::add.Tensor``."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@lru_cache(None)
def plan_of(op: Any) -> Plan:
    """How to call an operator; there are some thousand operators, and no more."""
    return Plan(op)


def set_memory(x: _Tensor, storage: torch.UntypedStorage, offset: int, like: _Tensor) -> None:
    """Give a tensor a storage of its device, with the shape and strides of another tensor."""
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KERNELS, x, storage, offset, list(like.shape), list(like.stride())
    )
