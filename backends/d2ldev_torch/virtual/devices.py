"""Which virtual GPUs there are, and the errors of those that are not there or do not agree."""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.device import CPU, gpu
from d2ldev.errors import DeviceUnavailableError
from d2ldev_torch.virtual.labels import NAME

_number = 0


def count() -> int:
    """How many virtual GPUs this process has."""
    return _number


def make(number: int) -> None:
    """Say how many virtual GPUs there are from now on: once for a process.

    Raises:
        DeviceUnavailableError: if there is another number of them already.
    """
    global _number
    if _number not in (0, number):
        raise DeviceUnavailableError(
            f"make {number} virtual GPUs",
            f"torch has {_number} already, and their number is fixed for the process",
            f"use D2LDEV_VIRTUAL_GPUS={_number}, or start another process",
            [gpu(i) for i in range(_number)],
        )
    _number = number


def index_of(device: torch.device) -> int:
    """The index of a ``torch.device('vgpu:i')`` that exists; without an index it is 0.

    Raises:
        DeviceUnavailableError: if there is no such virtual GPU.
    """
    index = device.index or 0
    if index >= _number:
        raise DeviceUnavailableError(
            f"use {device}",
            f"torch has {_number} virtual GPU{'' if _number == 1 else 's'} here",
            f"use one that exists, such as {NAME}:0, or set D2LDEV_VIRTUAL_GPUS={index + 1}",
            [CPU, *(gpu(i) for i in range(_number))],
        )
    return index


def device_of(x: torch.Tensor) -> Any:
    """Where an operand is, for a message: a ``Device``, or torch's own for meta and the like."""
    native = x.device
    if native.type == "cpu":
        return CPU
    return gpu(native.index) if native.type == NAME else native
