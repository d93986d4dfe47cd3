"""The accelerator of this process: the machine's own, or virtual GPUs in its stead."""

from __future__ import annotations

import torch

from d2ldev_torch.accelerator import Accelerator, MetalAccelerator


def find_accelerator(virtual_gpus: int | None = None) -> Accelerator:
    """Return the accelerator of this machine; CUDA, with a count of 0, where there is none.

    Args:
        virtual_gpus: how many virtual GPUs to make in its stead, if any.
    """
    hardware = _find_hardware()
    if not virtual_gpus:
        return hardware
    # Imported only where they are asked for: they change what torch knows of devices.
    from d2ldev_torch.virtual.accelerator import VirtualAccelerator

    return VirtualAccelerator(virtual_gpus, hardware)


def _find_hardware() -> Accelerator:
    if torch.version.hip is not None:
        return Accelerator("cuda", "rocm", torch.cuda)
    if torch.version.cuda is None:
        if torch.xpu._is_compiled() and torch.xpu.device_count():
            return Accelerator("xpu", "xpu", torch.xpu)
        if torch.backends.mps.is_available():
            return MetalAccelerator()
    return Accelerator("cuda", "cuda", torch.cuda)
