"""The accelerator that is there: CUDA or ROCm, else XPU, else MPS.

Counting makes no context, so that a later fork works: torch counts CUDA devices through NVML,
and ``torch.cuda.is_available``, which calls into the CUDA runtime, is not asked. Nor does
anything here make a context on a GPU that has none.
"""

from __future__ import annotations

from types import ModuleType

import torch

from d2ldev.interface import Memory


class Accelerator:
    """One kind of accelerator, by the module of torch that drives it.

    Args:
        type: the ``type`` of its ``torch.device``: ``'cuda'`` (also for ROCm), ``'xpu'``.
        platform: what a person calls it: ``'cuda'``, ``'rocm'``, ``'xpu'``.
        module: ``torch.cuda`` or ``torch.xpu``.
    """

    def __init__(self, type: str, platform: str, module: ModuleType) -> None:  # noqa: A002
        self.type = type
        self.platform = platform
        self._module = module

    def count(self) -> int:
        """How many there are for this process."""
        return int(self._module.device_count())

    def current(self) -> int:
        """The index of the one that ``torch.device(type)`` means."""
        return int(self._module.current_device()) if self._module.is_initialized() else 0

    def generator(self, native: torch.device) -> torch.Generator:
        """A new generator for random numbers on a device: one of these, or the CPU."""
        return torch.Generator(native)

    def copies(self, xs: list[torch.Tensor], native: torch.device) -> list[torch.Tensor]:
        """Tensors in new memory on a device: one of these, or the CPU."""
        if native.type == "cpu":
            # On one device ``clone`` takes two thirds of the time of ``to``.
            return [x.clone() if x.is_cpu else x.to(native, copy=True) for x in xs]
        return [x.to(native, copy=True) for x in xs]

    def synchronize(self, index: int) -> None:
        """Wait for one; one without a context has nothing to wait for."""
        if self._has_context(index):
            self._module.synchronize(index)

    def is_idle(self, index: int) -> bool:
        """Whether nothing is queued on its current stream."""
        return not self._has_context(index) or self._module.current_stream(index).query()

    def streams(self) -> ModuleType | None:
        """What has ``Stream``, ``stream`` and ``current_stream``; None where there is one queue."""
        return self._module

    def memory(self, index: int) -> Memory:
        """What torch's allocator holds for tensors, and the size of the card, in bytes."""
        total = int(self._module.get_device_properties(index).total_memory)
        if not self._has_context(index):
            return Memory(0, 0, total)
        return Memory(
            int(self._module.memory_allocated(index)),
            int(self._module.max_memory_allocated(index)),
            total,
        )

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

    def streams(self) -> None:
        """Metal has one queue."""

    def memory(self, index: int) -> Memory:
        used = int(torch.mps.current_allocated_memory())
        return Memory(used, None, int(torch.mps.recommended_max_memory()))


def find_accelerator(virtual_gpus: int | None = None) -> Accelerator:
    """The accelerator of this machine; CUDA, with a count of 0, where there is none.

    Args:
        virtual_gpus: how many GPUs to make out of nothing in its stead, if any.
    """
    if virtual_gpus:
        # Imported only where they are asked for: they change what torch knows of devices.
        from d2ldev_torch.virtual.accelerator import VirtualAccelerator

        return VirtualAccelerator(virtual_gpus)
    if torch.version.hip is not None:
        return Accelerator("cuda", "rocm", torch.cuda)
    if torch.version.cuda is None:
        if torch.xpu._is_compiled() and torch.xpu.device_count():
            return Accelerator("xpu", "xpu", torch.xpu)
        if torch.backends.mps.is_available():
            return MetalAccelerator()
    return Accelerator("cuda", "cuda", torch.cuda)
