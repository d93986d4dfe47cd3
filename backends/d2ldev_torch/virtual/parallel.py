"""``torch.nn.DataParallel`` on virtual GPUs: tensors are sent to several devices, and fetched.

torch has that in the CUDA half of its C++ alone, where other accelerators lack it, too:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/cuda/python_comm.cpp
https://github.com/pytorch/pytorch/issues/143239
A tensor that is where it is sent to is sent as itself, as on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _utils
from torch.cuda import nccl
from torch.nn.parallel import data_parallel

from d2ldev_torch.virtual.labels import NAME


def install(aten: Any) -> None:
    """Teach it to ``torch.nn.parallel``, for tensors that are not on real GPUs."""
    for send in (_broadcast, _broadcast_coalesced, _scatter, _gather):
        name = send.__name__
        setattr(torch._C, name, _unless_on_cuda(send, getattr(torch._C, name, None)))
    module: Any = nccl
    can_reduce = module.is_available
    module.is_available = lambda xs: xs[0].device.type != NAME and can_reduce(xs)
    for module in (_utils, data_parallel):
        module._get_available_device_type = lambda: NAME
    aten.impl("record_stream", _record_stream, "PrivateUse1")


def _unless_on_cuda(run: Callable[..., Any], on_cuda: Callable[..., Any] | None) -> Any:
    def send(tensors: Any, *args: Any) -> Any:
        first = next(iter(tensors), None) if isinstance(tensors, (list, tuple)) else tensors
        if on_cuda is not None and first is not None and first.is_cuda:
            return on_cuda(tensors, *args)
        return run(tensors, *args)

    return send


def _broadcast(x: torch.Tensor, indices: Sequence[int]) -> list[torch.Tensor]:
    return [x.to(_device(index)) for index in indices]


def _broadcast_coalesced(
    xs: Sequence[torch.Tensor], indices: Sequence[int], _buffer_size: int
) -> list[list[torch.Tensor]]:
    return [[x.to(_device(index)) for x in xs] for index in indices]


def _scatter(
    x: torch.Tensor, indices: Sequence[int], sizes: Any, dim: int, _streams: Any
) -> list[torch.Tensor]:
    pieces = x.chunk(len(indices), dim) if sizes is None else torch.split(x, list(sizes), dim)
    return [piece.to(_device(index)) for piece, index in zip(pieces, indices, strict=False)]


def _gather(xs: Sequence[torch.Tensor], dim: int, index: int | None) -> torch.Tensor:
    place = _device(index or 0)
    return torch.cat([x.to(place) for x in xs], dim)


def _device(index: int) -> torch.device:
    """The device of an index, which is -1 for the CPU."""
    return torch.device(NAME, index) if index >= 0 else torch.device("cpu")


def _record_stream(_x: torch.Tensor, _stream: Any) -> None:
    """Memory is used by nobody after the call that used it."""
