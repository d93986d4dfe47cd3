"""Devices: the CPU, and the accelerator that is there: CUDA or ROCm, else XPU, else MPS.

``torch.device('cuda')`` is not equal to ``torch.device('cuda:0')``, nor ``'cpu:0'`` to ``'cpu'``:
native devices are made in one spelling here.

Counting makes no context, so that a later fork works: torch counts CUDA devices through NVML, and
``torch.cuda.is_available``, which calls into the CUDA runtime, is not asked. Nor does anything here
make a context on a GPU that has none.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any

import torch

from d2ldev.device import CPU, Device, gpu
from d2ldev.framework import Devices, Memory
from d2ldev.operations import nvml

NATIVE_CPU = torch.device("cpu")


class TorchDevices(Devices):
    """The CPU and the devices of one accelerator.

    Args:
        accelerator: the hardware's, or virtual GPUs.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def count(self) -> int:
        return self.accelerator.count()

    def native(self, device: Device) -> torch.device:
        return NATIVE_CPU if device is CPU else torch.device(self.accelerator.type, device.index)

    def missing(self, device: Device) -> torch.device | None:
        return None if self.accelerator.platform == "virtual" else self.native(device)

    def from_native(self, native: Any) -> Device | None:
        if isinstance(native, str) and native.startswith(f"{self.accelerator.type}:"):
            with suppress(RuntimeError):  # it is spelt so, and is none
                native = torch.device(native)
        if not isinstance(native, torch.device):
            return None
        if native.type == "cpu":
            return CPU
        if native.type not in self.accelerator.types:
            return None
        # Without an index it is torch's current device, as in torch itself.
        return gpu(self.accelerator.current() if native.index is None else native.index)

    def platform(self, device: Device) -> str:
        return "cpu" if device is CPU else self.accelerator.platform

    def default(self) -> torch.device:
        return torch.get_default_device()

    def scope(self, device: Device) -> AbstractContextManager[Any]:
        return self.native(device)  # torch.device is a context

    def synchronize(self, device: Device) -> None:
        if device is not CPU:
            self.accelerator.synchronize(device.index)

    def is_idle(self, device: Device) -> bool:
        return device is CPU or self.accelerator.is_idle(device.index)

    def mark(self, device: Device) -> Any:
        return None if device is CPU else self.accelerator.mark(device.index)

    def seconds_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3  # of milliseconds

    def memory(self, device: Device) -> Memory:
        return self.accelerator.memory(device.index)

    def empty_cache(self, device: Device) -> None:
        if device is not CPU:
            self.accelerator.empty_cache()

    def is_out_of_memory(self, error: Exception) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # The CPU's allocator has no exception of its own, only these words, nor have sizes that
        # no address reaches: https://github.com/pytorch/pytorch/pull/20618
        words = ("DefaultCPUAllocator", "Storage size calculation overflowed")
        return isinstance(error, RuntimeError) and any(text in str(error) for text in words)


class Accelerator:
    """One kind of accelerator, by the module of torch that drives it.

    Args:
        type: the ``type`` of its ``torch.device``: ``'cuda'`` (also for ROCm), ``'xpu'``.
        platform: what ``backend.platform`` calls it: ``'cuda'``, ``'rocm'``, ``'xpu'``.
        module: ``torch.cuda`` or ``torch.xpu``.

    Attributes:
        types: the types of all ``torch.device``s that stand for one of it.
    """

    def __init__(self, type: str, platform: str, module: ModuleType) -> None:  # noqa: A002
        self.type = type
        self.types: tuple[str, ...] = (type,)
        self.platform = platform
        self._module = module

    def count(self) -> int:
        """Return how many devices this process can use."""
        number = int(self._module.device_count())
        if not number and self._module is torch.cuda and torch.version.cuda is not None:
            nvml.warn_without_driver("torch")
        return number

    # torch's compiler takes the number for a constant, which it cannot find out by tracing.
    count._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def current(self) -> int:
        """Return the index of the device that ``torch.device(type)`` means."""
        return int(self._module.current_device()) if self._module.is_initialized() else 0

    def copies(self, xs: list[torch.Tensor], native: torch.device) -> list[torch.Tensor]:
        """Return tensors in new memory on a device of this accelerator, or on the CPU."""
        return [x.to(native, copy=True) for x in xs]

    def synchronize(self, index: int) -> None:
        """Wait for a device; one without a context has nothing to wait for."""
        if self._has_context(index):
            self._module.synchronize(index)

    def is_idle(self, index: int) -> bool:
        """Return whether nothing is queued on a device's current stream."""
        return not self._has_context(index) or self._module.current_stream(index).query()

    def mark(self, index: int) -> Any:
        """Return an event in a device's current stream; None for one without a context."""
        if not self._has_context(index):
            return None
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(index))
        return event

    def streams(self) -> ModuleType | None:
        """Return the module with ``Stream`` and ``stream``; None where there is one queue."""
        return self._module

    def memory(self, index: int) -> Memory:
        """Return the bytes that torch's allocator holds for tensors, and the size of the card."""
        total = int(self._module.get_device_properties(index).total_memory)
        if not self._has_context(index):
            return Memory(0, 0, total)
        return Memory(
            int(self._module.memory_allocated(index)),
            int(self._module.max_memory_allocated(index)),
            total,
        )

    def of_users(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of all tensors that a user may know of."""
        return xs

    def empty_cache(self) -> None:
        """Give back what torch's allocator keeps on all devices: nothing without a context."""
        self._module.empty_cache()

    def _has_context(self, index: int) -> bool:
        if not self._module.is_initialized():
            return False
        # Private, but what torch's own pinning of memory asks; other platforms have no such thing.
        ask = getattr(torch._C, f"_{self.type}_hasPrimaryContext", None)
        return True if ask is None else bool(ask(index))


class MetalAccelerator(Accelerator):
    """Apple's GPU, of which there is one, with its own names for everything."""

    def __init__(self) -> None:
        super().__init__("mps", "mps", torch.mps)

    def count(self) -> int:
        return 1

    def current(self) -> int:
        return 0

    def synchronize(self, index: int) -> None:
        torch.mps.synchronize()

    def is_idle(self, index: int) -> bool:
        event = torch.mps.Event()
        event.record()
        return bool(event.query())

    def mark(self, index: int) -> Any:
        event = torch.mps.Event(enable_timing=True)
        event.record()
        return event

    def streams(self) -> None:
        """Return None: Metal has one queue."""

    def memory(self, index: int) -> Memory:
        used = int(torch.mps.current_allocated_memory())
        return Memory(used, None, int(torch.mps.recommended_max_memory()))


def find_accelerator() -> Accelerator:
    """Return the accelerator of this machine; CUDA, with a count of 0, where there is none."""
    if torch.version.hip is not None:
        return Accelerator("cuda", "rocm", torch.cuda)
    if torch.version.cuda is None:
        if torch.xpu._is_compiled() and torch.xpu.device_count():
            return Accelerator("xpu", "xpu", torch.xpu)
        if torch.backends.mps.is_available():
            return MetalAccelerator()
    return Accelerator("cuda", "cuda", torch.cuda)
