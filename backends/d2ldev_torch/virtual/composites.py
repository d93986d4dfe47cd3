"""Operators that torch composes of others, and composes differently on the CPU.

torch asks what device it is on before it chooses between a fused kernel and a row of small ones:
for attention, dropout and recurrent layers the CPU's choice is another one than that of a
device which it does not know, and so is the order of memory in the gradient of a group
normalisation. Here the whole operator runs on the CPU's names of its operands. Giving a name is
itself an operation with a gradient, so that the gradient is the CPU's as well, and has gradients
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual.fallback import Operands, autocast_of_kernels
from d2ldev_torch.virtual.labels import NAME, as_cpu, as_virtual
from d2ldev_torch.virtual.schemas import Plan

# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml
COMPOSED_BY_DEVICE = (
    "scaled_dot_product_attention",
    "dropout",
    "group_norm",
    "lstm.input",
    "lstm.data",
    "gru.input",
    "gru.data",
    "rnn_tanh.input",
    "rnn_tanh.data",
    "rnn_relu.input",
    "rnn_relu.data",
    "lstm_cell",
    "gru_cell",
)
"""They are ``CompositeImplicitAutograd`` in torch, and ask for the device."""


class _NamedCpu(torch.autograd.Function):
    """The CPU's name for a tensor's memory."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return as_cpu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], _output: torch.Tensor) -> None:
        ctx.index = inputs[0].device.index
        # Kept to be asked whether it was changed: the kernels keep only its other name.
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors  # noqa: B018 - raises if an operand was changed in place
        return _name_virtual(gradient, ctx.index)

    @staticmethod
    def jvp(_ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return _name_cpu(tangent)


class _NamedVirtual(torch.autograd.Function):
    """A virtual GPU's name for the memory of a result."""

    @staticmethod
    def forward(x: torch.Tensor, index: int) -> torch.Tensor:
        return as_virtual(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], _output: torch.Tensor) -> None:
        ctx.index = inputs[1]

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _name_cpu(gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _index: None) -> torch.Tensor:
        return _name_virtual(tangent, ctx.index)


_name_cpu: Callable[[torch.Tensor], torch.Tensor] = _NamedCpu.apply
_name_virtual: Callable[[torch.Tensor, int], torch.Tensor] = _NamedVirtual.apply


class _DifferentiableOperands(Operands):
    """Operands whose names are given by operations that autograd records."""

    __slots__ = ()

    def _alias(self, value: torch.Tensor) -> torch.Tensor:
        return _name_cpu(value)

    def _label(self, result: torch.Tensor) -> torch.Tensor:
        return _name_virtual(result, self.index)


def run_composed(plan: Plan, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as torch composes it for the CPU."""
    if torch._C._are_functorch_transforms_active() or _are_fake():
        # There operands have no memory of their own: torch composes for a device it does not know.
        return plan.op.decompose(*args, **kwargs)
    operands = _DifferentiableOperands(plan)
    new, named = operands.renamed(args, kwargs)
    with autocast_of_kernels() if torch._C._is_any_autocast_enabled() else nullcontext():
        return operands.given_back(plan.op(*new, **named))


def _are_fake() -> bool:
    """Whether tensors are only pretended, as while a compiler looks at a function."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def run_autocast(plan: Plan, *args: Any, **kwargs: Any) -> Any:
    """Run an operator under ``torch.autocast('vgpu')``, as the CPU does under its own.

    Raises:
        UnsupportedValueError: under a transform of ``torch.func``.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedValueError(
            f"compute {plan.name} under torch.autocast({NAME!r}) and a transform of torch.func",
            "its operands have no memory of their own there",
            f"leave torch.autocast({NAME!r}), or torch.func",
        )
    operands = _DifferentiableOperands(plan)
    new, named = operands.renamed(args, kwargs)
    with autocast_of_kernels():
        return operands.given_back(plan.op(*new, **named))
