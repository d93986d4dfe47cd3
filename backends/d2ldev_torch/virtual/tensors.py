"""The area of tensors on the CPU and virtual GPUs."""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.framework import Tensor
from d2ldev_torch.devices import NATIVE_CPU
from d2ldev_torch.tensors import TorchTensors
from d2ldev_torch.virtual import memory
from d2ldev_torch.virtual.devices import NAME, index_of
from d2ldev_torch.virtual.memory import as_cpu, as_virtual

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class VirtualTensors(TorchTensors):
    """Tensors of torch on the CPU and virtual GPUs."""

    def live(self) -> list[Tensor]:
        return memory.without_lenders([*super().live()])

    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        if native is NATIVE_CPU and xs[0].is_cpu:  # without the questions of a move
            return [x.clone() if x.is_cpu else x.to(native) for x in xs]
        return _copies(xs, native)


def _copies(xs: list[torch.Tensor], target: torch.device) -> list[torch.Tensor]:
    """Return ``[x.to(target, copy=True) for x in xs]``, in half of the time.

    The other half is the way through torch's dispatcher to ``_to_copy``. It is taken only if
    something may hook into it: gradients, modes, ``torch.func``, a compiler.
    """
    index = -1 if target == NATIVE_CPU else index_of(target)
    if (
        torch.compiler.is_compiling()  # first: a compiler cannot trace the other calls
        or torch.is_inference_mode_enabled()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return [x.to(target, copy=True) for x in xs]
    return [
        _copy_straightforward(x, index) if _is_straightforward(x) else x.to(target, copy=True)
        for x in xs
    ]


def _is_straightforward(x: torch.Tensor) -> bool:
    """Return whether a tensor is plain bytes without gradients, on the CPU or a virtual GPU."""
    return (
        type(x) in _TENSORS
        and not x.requires_grad
        and (x.is_cpu or x.device.type == NAME)
        and x.layout is torch.strided
        and not (x.is_nested or x.is_conj() or x.is_neg())
    )


def _copy_straightforward(x: torch.Tensor, index: int) -> torch.Tensor:
    """Return a copy on the virtual GPU with this number, or on the CPU if it is negative."""
    new = (x if x.is_cpu else as_cpu(x)).clone()
    return new if index < 0 else as_virtual(new, index)
