"""Devices: MXNet's contexts. The CPU's contexts after the first one are virtual GPUs.

``mx.context.num_gpus`` initialises CUDA, and a forked child cannot use CUDA then. So NVML counts
the GPUs, if the wheel has CUDA.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from d2ldev import Device, DeviceUnavailableError, gpu
from d2ldev.framework import CPU, Devices, Memory, nvml
from d2ldev_mxnet.framework import mx

# MXNet has no exception for it. These are the words of the CPU's, C++'s and the GPU's allocators.
_OUT_OF_MEMORY = (
    "Failed to allocate CPU Memory",
    "std::bad_alloc",
    "cudaMalloc failed",
    "out of memory",
    "ALLOC_FAILED",
)
# The text of a context: ``str(x.ctx)``.
_CONTEXT = re.compile(r"(cpu|gpu|cpu_pinned|cpu_shared)\(([0-9]{1,9})\)", re.ASCII)


class MXNetDevices(Devices):
    """The CPU, and CUDA's cards or virtual GPUs.

    Args:
        virtual_gpus: the number of virtual GPUs; None is for the hardware's GPUs.
    """

    def __init__(self, virtual_gpus: int | None) -> None:
        self._virtual_gpus = virtual_gpus
        # The used cards. Only these have a cache, and a question creates a context.
        self._used: set[Device] = set()

    def count(self) -> int:
        if self._virtual_gpus is not None:
            return self._virtual_gpus
        if not has_cuda():
            return 0
        cards = nvml.visible_cards()
        if cards is not None:
            return len(cards)
        number = int(mx.context.num_gpus())
        if number:
            nvml.warn_of_context("mxnet")
        return number

    def native(self, device: Device) -> mx.Context:
        if device is CPU:
            return mx.cpu()
        if self._virtual_gpus:
            return mx.cpu(device.index + 1)
        check_card(device)
        self._used.add(device)
        return mx.gpu(device.index)

    def native_of_missing(self, device: Device) -> mx.Context | None:
        # MXNet raises no error for another context of the CPU.
        return None if self._virtual_gpus else mx.gpu(device.index)

    def from_native(self, native: Any) -> Device | None:
        match = _CONTEXT.fullmatch(native) if isinstance(native, str) else None
        if match is not None:
            native = mx.Context(match[1], int(match[2]))
        if not isinstance(native, mx.Context):
            return None
        index: int = native.device_id
        if native.device_type == "cpu" and 0 < index <= (self._virtual_gpus or 0):
            return gpu(index - 1)
        if native.device_type.startswith("cpu"):  # also pinned and shared memory
            return CPU
        return None if index < 0 else gpu(index)

    def platform(self, device: Device) -> str:
        if device is CPU:
            return "cpu"
        return "virtual" if self._virtual_gpus else "cuda"

    def default(self) -> mx.Context:
        return mx.context.current_context()

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        # A context stores its predecessor in itself, so that one object cannot be entered twice.
        return _DefaultContext(self.native(device))

    def synchronize(self, device: Device) -> None:
        # MXNet waits for all devices or for none. It raises here the errors of earlier operations.
        mx.nd.waitall()

    def is_idle(self, device: Device) -> bool:
        # MXNet's engine does not list its queue. Only a wait gives a sure answer.
        mx.nd.waitall()
        return True

    def matmul_precision(self) -> str:
        return "high" if self._virtual_gpus is None and rounds_convolutions() else "highest"

    def memory(self, device: Device) -> Memory:
        if self._virtual_gpus:
            return Memory(None, None, None)
        # MXNet tells the card's free memory, and not the memory that MXNet itself holds.
        return Memory(None, None, int(mx.context.gpu_memory_info(device.index)[1]))

    def empty_cache(self, device: Device) -> None:
        if device is CPU or self._virtual_gpus or device in self._used:
            self.native(device).empty_cache()

    def is_out_of_memory(self, error: Exception) -> bool:
        if isinstance(error, mx.base.MXNetError):
            return any(words in str(error) for words in _OUT_OF_MEMORY)
        return super().is_out_of_memory(error)


class _DefaultContext(mx.Context):
    """A context that ends only if no inner one is in force. Each restores its predecessor."""

    def __exit__(self, *error: object) -> None:
        if (current := mx.context.current_context()) is not self:
            raise RuntimeError(f"mx.Context {current} is in force")
        super().__exit__(*error)


def has_cuda() -> bool:
    """Return whether this MXNet was built for CUDA."""
    return bool(mx.runtime.Features().is_enabled("CUDA"))


def rounds_convolutions() -> bool:
    """Return whether a card computes convolutions in TensorFloat-32.

    MXNet multiplies matrices in float32, and leaves convolutions to cuDNN's default. Only this
    variable of NVIDIA's libraries changes the default, before they are loaded.
    https://github.com/apache/mxnet/blob/v1.9.x/src/operator/nn/cudnn/cudnn_convolution-inl.h
    """
    return has_cuda() and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"


@cache
def check_card(device: Device) -> None:
    """Run a first kernel on a card, until one has worked.

    Raises:
        DeviceUnavailableError: if it fails, above all because the wheel has none for the card.
    """
    try:
        mx.nd.ones((1,), ctx=mx.gpu(device.index)).wait_to_read()
    except mx.base.MXNetError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise DeviceUnavailableError(
            f"use {device}",
            f"MXNet's first kernel fails on this card: {reason}. "
            "The published wheels are for CUDA 10 to 11.7. Their kernels are for compute "
            "capability 8.6 and below, without PTX. Hopper (9.0) and later cards cannot run them",
            "use the CPU: D2LDEV_BACKEND=mxnet with D2LDEV_VIRTUAL_GPUS=1; another framework: "
            "D2LDEV_BACKEND=torch; or an MXNet built for this card",
            [device],
        ) from error
