"""Devices: the CPU, and the accelerator of the machine: CUDA or ROCm, else XPU, else MPS.

``torch.device('cuda')`` is not equal to ``torch.device('cuda:0')``, nor ``'cpu:0'`` to ``'cpu'``.
So this module makes all native devices in one spelling.

Counting makes no context, and a later fork works. torch counts CUDA devices through NVML.
``torch.cuda.is_available`` is not called, because it calls the CUDA runtime. Nothing here makes a
context on a GPU without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any

import torch

from d2ldev import Device, gpu
from d2ldev.framework import CPU, Devices, Memory, nvml
from d2ldev_torch.precision import matmul_precision, set_matmul_precision

NATIVE_CPU = torch.device("cpu")
MOVE = "{x} = {x}.to({y}.device)"
"""The line that moves an operand: it is right in a library, too, which knows no backend."""


class TorchDevices(Devices):
    """The CPU and one kind of accelerator.

    Args:
        type: the ``type`` of its ``torch.device``: ``'cuda'`` (also for ROCm), ``'xpu'``.
        platform: the result of ``backend.platform``: ``'cuda'``, ``'rocm'``, ``'xpu'``.
        module: torch's module for the accelerator, ``torch.cuda`` or ``torch.xpu``.

    Attributes:
        types: the types of all ``torch.device``s that name such an accelerator.
        streams: the module with ``Stream`` and ``stream``; None if there is only one queue.
    """

    def __init__(self, type: str, platform: str, module: ModuleType) -> None:  # noqa: A002
        self.type = type
        self.types: tuple[str, ...] = (type,)
        self.streams: ModuleType | None = module
        self._platform = platform
        self._module = module

    def count(self) -> int:
        number = int(self._module.device_count())
        if not number and self._module is torch.cuda and torch.version.cuda is not None:
            nvml.warn_without_driver("torch")
        return number

    # torch's compiler takes the number for a constant, which it cannot find out by tracing.
    # Private: ``torch.compiler.assume_constant_result`` first imports the whole compiler.
    count._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def current(self) -> int:
        """Return the index of the current device, which ``torch.device(type)`` names."""
        return int(self._module.current_device()) if self._module.is_initialized() else 0

    def native(self, device: Device) -> torch.device:
        return NATIVE_CPU if device is CPU else torch.device(self.type, device.index)

    def native_of_missing(self, device: Device) -> torch.device | None:
        return self.native(device)

    def from_native(self, native: Any) -> Device | None:
        if isinstance(native, str) and native.startswith(f"{self.type}:"):
            with suppress(RuntimeError):  # the text may look like a device, and be invalid
                native = torch.device(native)
        if not isinstance(native, torch.device):
            return None
        if native.type == "cpu":
            return CPU
        if native.type not in self.types:
            return None
        # Without an index it names the current device, as in torch.
        return gpu(self.current() if native.index is None else native.index)

    def platform(self, device: Device) -> str:
        return "cpu" if device is CPU else self._platform

    def default(self) -> torch.device:
        return torch.get_default_device()

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        return self.native(device)  # a torch.device is a context manager

    def synchronize(self, device: Device) -> None:
        if self._has_context(device):
            self._module.synchronize(device.index)

    def is_idle(self, device: Device) -> bool:
        # Only the current stream is checked.
        return not self._has_context(device) or self._module.current_stream(device.index).query()

    def uuid(self, device: Device) -> str | None:
        """Return an identifier of a GPU that is the same in all processes."""
        if self.type != "cuda":
            return None
        found = str(getattr(self._module.get_device_properties(device.index), "uuid", ""))
        # Some drivers have no UUID for a GPU, and report zeros.
        return f"GPU-{found}" if found.strip("0-") else None  # as the driver's tools print it

    def matmul_precision(self) -> str:
        return matmul_precision()

    def set_matmul_precision(self, precision: str) -> Callable[[], None]:
        return set_matmul_precision(precision)

    def memory(self, device: Device) -> Memory:
        index = device.index
        total = int(self._module.get_device_properties(index).total_memory)
        if not self._has_context(device):
            return Memory(0, 0, total)
        used, peak = self._module.memory_allocated(index), self._module.max_memory_allocated(index)
        return Memory(int(used), int(peak), total)

    def empty_cache(self, device: Device) -> None:
        if device is not CPU:
            self._module.empty_cache()  # of all devices; a no-op without a context

    def is_out_of_memory(self, error: Exception) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # The CPU's allocator has no exception class of its own, only these words. The same holds
        # for sizes above the address space: https://github.com/pytorch/pytorch/pull/20618
        words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
        return isinstance(error, RuntimeError) and any(text in str(error) for text in words)

    def _has_context(self, device: Device) -> bool:
        """Return whether this process uses a GPU. On an unused GPU, nothing is queued."""
        if device is CPU or not self._module.is_initialized():
            return False
        # Private, but torch's own memory pinning calls it. Other platforms lack it.
        ask = getattr(torch._C, f"_{self.type}_hasPrimaryContext", None)
        return True if ask is None else bool(ask(device.index))


class MetalDevices(TorchDevices):
    """The CPU and Apple's only GPU, which has its own names for everything."""

    def __init__(self) -> None:
        super().__init__("mps", "mps", torch.mps)
        self.streams = None

    def count(self) -> int:
        return 1

    def current(self) -> int:
        return 0

    def synchronize(self, device: Device) -> None:
        if device is not CPU:
            torch.mps.synchronize()

    def is_idle(self, device: Device) -> bool:
        if device is CPU:
            return True
        event = torch.mps.Event()  # an event with timing would disturb the next measurement
        event.record()
        return bool(event.query())

    def memory(self, device: Device) -> Memory:
        used = int(torch.mps.current_allocated_memory())
        return Memory(used, None, int(torch.mps.recommended_max_memory()))


def find_devices() -> TorchDevices:
    """Return the devices of this machine; CUDA with the count 0 if it has no accelerator."""
    if torch.version.hip is not None:
        return TorchDevices("cuda", "rocm", torch.cuda)
    if torch.version.cuda is None:
        if torch.xpu.device_count():
            return TorchDevices("xpu", "xpu", torch.xpu)
        if torch.backends.mps.is_available():
            return MetalDevices()
    return TorchDevices("cuda", "cuda", torch.cuda)
