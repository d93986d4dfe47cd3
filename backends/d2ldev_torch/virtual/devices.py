"""The devices ``vgpu:0``, ``vgpu:1`` ...: their number, and the error for a missing one.

The current device is always the first, and d2ldev refuses to make another one current. torch asks
the C++ half of a backend for its current device. A backend in Python always answers 0 there, so
``device='vgpu'`` means the first device everywhere.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from d2ldev import DeviceUnavailableError, gpu
from d2ldev.framework import CPU

NAME = "vgpu"
"""The ``type`` of a virtual GPU's ``torch.device``."""

_number = 0
_first: ContextVar[int] = ContextVar("d2ldev_first_vgpu", default=0)


def count() -> int:
    """Return the number of virtual GPUs of this process."""
    return _number


def make(number: int) -> None:
    """Set the number of virtual GPUs."""
    global _number
    _number = number


def index_of(native: torch.device) -> int:
    """Return the index of a ``torch.device('vgpu:i')``; without an index it is the first.

    Raises:
        DeviceUnavailableError: if there is no such virtual GPU.
    """
    index = _first.get() if native.index is None else native.index
    if index >= _number:
        raise refuse_missing(str(native), f"{NAME}:0")
    return index


@contextmanager
def begin_at(index: int) -> Iterator[None]:
    """Let ``torch.device('vgpu')`` without an index mean another virtual GPU than the first."""
    token = _first.set(index)
    try:
        yield
    finally:
        _first.reset(token)


def refuse_missing(name: str, existing: str) -> DeviceUnavailableError:
    """Return the error of a virtual GPU that does not exist.

    Args:
        name: as the program calls it, with its index.
        existing: the name of one that exists.
    """
    index = int(name.rpartition(":")[2])
    return DeviceUnavailableError(
        f"use {name}",
        f"torch has {_number} virtual GPU{'' if _number == 1 else 's'} here",
        f"use one that exists, such as {existing}, or set D2LDEV_VIRTUAL_GPUS={index + 1}",
        [CPU, *(gpu(i) for i in range(_number))],
    )


def device_of(native: torch.device) -> Any:
    """Return the ``Device`` that an error names; torch's own for other devices like ``meta``."""
    if native.type == "cpu":
        return CPU
    return gpu(native.index) if native.type == NAME else native
