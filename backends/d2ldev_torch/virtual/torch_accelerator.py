"""What of ``torch.accelerator`` would be silent or end the process on virtual GPUs.

Its functions ask ``torch._C``, which asks the C++ half of a backend: that one knows one device
and has no allocator. Making another device current would be silently ignored, and emptying the
cache of pinned memory would end the process. What is about an allocator's memory ends in torch's
own error; ``torch.vgpu.memory_allocated`` tells what tensors hold.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/DeviceAccelerator.cpp
"""

from __future__ import annotations

import torch

from d2ldev_torch.virtual import module


def install() -> None:
    """Replace functions of ``torch._C``."""
    answers = {
        "setDeviceIndex": _set_device,
        "exchangeDevice": _set_device,
        "maybeExchangeDevice": lambda _index: 0,
        "synchronizeDevice": module.synchronize,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": module.empty_cache,
        "emptyHostCache": module.empty_cache,
    }
    for name, answer in answers.items():
        setattr(torch._C, f"_accelerator_{name}", answer)


def _set_device(index: int) -> int:
    if index >= 0:  # torch takes a negative one for none
        module.set_device(index)
    return 0
