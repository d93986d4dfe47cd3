"""Backward passes on virtual GPUs, and gradients of operators that torch composes by device.

torch's engine has a thread for each device that a backend's guard reports, and a guard in Python
reports one: a gradient on ``vgpu:1`` would find no thread. So a backward pass runs on the thread
that asked for it, which torch offers as an option of a thread.
https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.set_multithreading_enabled.html

The guard is asked for its type while C++ unwinds an exception, too, and Python calls nothing
while an exception of its own is pending: the process would end for an error in a hook. So the
guard takes the pending exception before it answers, and the engine raises it in the end.

For attention, dropout and recurrent layers torch asks for the device before it chooses between a
fused kernel and a composition of small ones, and so it does for the order of memory in the
gradient of a group normalisation. There the whole operator runs on the CPU's aliases of its
operands. Making an alias is itself an operation with a gradient, so that the gradient is the CPU's
as well, and has gradients of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.variable import Variable

from d2ldev_torch.virtual.kernels import Operands, Schema, autocast_of_kernels
from d2ldev_torch.virtual.memory import as_cpu, as_virtual

# As every call by ctypes into Python itself, it raises an exception that was pending.
_raise_pending = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = None
_raise_pending.argtypes = []


# The exception that the guard took last in each thread.
_taken = threading.local()


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The answers about the current device; all but this one are fixed."""

    def type_(self) -> Any:
        """Return the type of the device."""
        try:
            _raise_pending()
        except BaseException as error:
            _taken.error = error
        return torch._C._autograd.DeviceType.PrivateUse1


class CallingThreadEngine(torch._C._ImperativeEngine):
    """torch's engine, which runs a backward pass on the thread that asked for it."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """See ``torch.autograd.backward``."""
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(*args, **kwargs)
        except SystemError:
            # An exception without an exception: the guard has it.
            error, _taken.error = getattr(_taken, "error", None), None
            if error is None:
                raise
            raise error from None


def install() -> None:
    """Make ``CallingThreadEngine`` the engine of this process."""
    Variable._execution_engine = CallingThreadEngine()


# These operators are ``CompositeImplicitAutograd`` in torch, and ask for the device.
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml
COMPOSED_BY_DEVICE = frozenset(
    (
        *("scaled_dot_product_attention", "dropout", "group_norm", "lstm_cell", "gru_cell"),
        *("lstm.input", "lstm.data", "gru.input", "gru.data"),
        *("rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"),
    )
)


class _AsCpu(torch.autograd.Function):
    """``as_cpu`` with a gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return as_cpu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], _output: torch.Tensor) -> None:
        ctx.index = inputs[0].device.index
        # Kept to be asked whether it was changed: the kernels keep only its alias.
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ctx.saved_tensors  # noqa: B018 - raises if an operand was changed in place
        return _to_virtual(gradient, ctx.index)


class _AsVirtual(torch.autograd.Function):
    """``as_virtual`` with a gradient."""

    @staticmethod
    def forward(x: torch.Tensor, index: int) -> torch.Tensor:
        return as_virtual(x, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], _output: torch.Tensor) -> None:
        ctx.index = inputs[1]

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_cpu(gradient), None


_to_cpu: Callable[[torch.Tensor], torch.Tensor] = _AsCpu.apply
_to_virtual: Callable[[torch.Tensor, int], torch.Tensor] = _AsVirtual.apply


def run_composite(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run an operator as torch composes it for the CPU."""
    if (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    ):
        # Mapped tensors, and a compiler's, have no memory of their own: torch composes for a
        # device that it does not know.
        return schema.op.decompose(*args, **kwargs)
    return run_differentiable(schema, *args, **kwargs)


def run_differentiable(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run a whole operator on the CPU: under its autocast, if ``torch.autocast('vgpu')`` is on."""
    operands = Operands(schema, _to_cpu, _to_virtual)
    new, named = operands.to_cpu(args, kwargs)
    with autocast_of_kernels():
        return operands.to_virtual(schema.op(*new, **named))
