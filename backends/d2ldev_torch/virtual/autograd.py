"""Backward passes on virtual GPUs, and gradients of operators that torch composes by device.

torch's engine has a thread for each device that a backend's guard reports. A guard in Python
reports one device, so a gradient on ``vgpu:1`` would find no thread. Therefore a backward pass runs
on the thread that calls it, which is an option of torch.
https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.set_multithreading_enabled.html

C++ asks the guard for its type also while it unwinds an exception. Python calls nothing during a
pending exception, so an error in a hook would end the process. Therefore the guard takes the
pending exception before it answers, and the engine raises it in the end.

For attention, dropout and recurrent layers, torch chooses a fused kernel or a composition by the
device. For the gradient of group normalization, it chooses the order of memory by the device. There
the whole operator runs on CPU aliases of its operands. Making an alias is an operation with a
gradient. So the gradient is the CPU's, too, and has gradients of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.variable import Variable

from d2ldev import UnsupportedValueError
from d2ldev_torch.virtual.as_cuda import mode_of_backward
from d2ldev_torch.virtual.kernels import Operands, Schema, autocast_of_kernels
from d2ldev_torch.virtual.memory import as_cpu, as_virtual

# Like every call by ctypes into Python itself, it raises a pending exception.
_raise_pending = ctypes.pythonapi.PyErr_Occurred
_raise_pending.restype = None
_raise_pending.argtypes = []


# The last exception that the guard took in each thread.
_taken = threading.local()


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The guard's answers about the current device; all others are fixed."""

    def type_(self) -> Any:
        """Return the type of the device."""
        try:
            _raise_pending()
        except BaseException as error:
            _taken.error = error
        return torch._C._autograd.DeviceType.PrivateUse1


class CallingThreadEngine(torch._C._ImperativeEngine):
    """torch's engine, which runs a backward pass on the calling thread."""

    def run_backward(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """See ``torch.autograd.backward``."""
        try:
            with mode_of_backward(), torch.autograd.set_multithreading_enabled(False):
                return super().run_backward(outputs, *args, **kwargs)
        except RuntimeError as error:
            # The engine finds the streams of one kind of accelerator only, and ends with an
            # assertion on another: https://github.com/pytorch/pytorch/issues/161129.
            found = next((x for x in outputs if getattr(x, "is_cuda", False)), None)
            if found is None or not found.requires_grad:
                raise
            raise UnsupportedValueError(
                f"compute gradients on {found.device}",
                "virtual GPUs are the accelerator of torch in this process",
                "use real GPUs in a process without virtual ones: unset D2LDEV_VIRTUAL_GPUS",
            ) from error
        except SystemError:
            # The C++ code reports an exception without an object: the guard has taken the object.
            taken, _taken.error = getattr(_taken, "error", None), None
            if taken is None:
                raise
            raise taken from None


def install() -> None:
    """Make ``CallingThreadEngine`` the engine of this process."""
    Variable._execution_engine = CallingThreadEngine()


# These operators are ``CompositeImplicitAutograd`` in torch, and depend on the device.
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
        # Kept to check later whether it was changed: the kernels keep only its alias.
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
        # The tensors of ``vmap`` and of a compiler have no memory. For them torch's composition
        # for an unknown device is used.
        return schema.op.decompose(*args, **kwargs)
    return run_differentiable(schema, *args, **kwargs)


def run_differentiable(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Run a whole operator on the CPU, under the CPU's autocast if the virtual GPU's is on."""
    operands = Operands(schema, _to_cpu, _to_virtual)
    new, named = operands.to_cpu(args, kwargs)
    with autocast_of_kernels():
        return operands.to_virtual(schema.op(*new, **named))
