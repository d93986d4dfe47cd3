"""``torch.accelerator`` for virtual GPUs: what torch's hooks for backends in Python lack of it.

Its functions ask ``torch._C``, which asks the C++ half of a backend: that one knows one device,
no queues and no allocator. Where torch wants an allocator that counts, it ends in an internal
assertion, and where it wants one for pinned memory, the process ends.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/DeviceAccelerator.cpp
https://github.com/pytorch/pytorch/pull/138222
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch

from d2ldev.errors import UnsupportedValueError
from d2ldev_torch.virtual import ledger, module
from d2ldev_torch.virtual.current import enter, make_current
from d2ldev_torch.virtual.labels import NAME


def install() -> None:
    """Answer for ``torch._C``; ``torch.accelerator`` speaks of virtual GPUs alone."""
    for name, answer in _ANSWERS.items():
        setattr(torch._C, f"_accelerator_{name}", answer)


def _set_device(index: int) -> None:
    _require(index)
    make_current(index)


def _exchange_device(index: int) -> int:
    """``with torch.accelerator.device_index(...)``, when it is entered."""
    _require(index)
    enter(index, sys._getframe(1).f_back)
    return module.current_device()


def _restore_device(_index: int) -> int:
    """When it is left: nothing was changed."""
    return module.current_device()


def _require(index: int) -> None:
    if index >= 0:  # torch takes a negative one for none
        module.synchronize(index)


def _statistics(index: int) -> dict[str, Any]:
    """Nothing is kept in reserve: what is held is what tensors hold."""
    _require(index)
    used, peak = ledger.used_and_peak(index)
    held = {"all": {"current": used, "peak": peak}}
    return {"allocated_bytes": held, "reserved_bytes": held}


def _refuse_total(index: int) -> NoReturn:
    _require(index)
    raise UnsupportedValueError(
        f"tell how much memory {NAME}:{index} has, and how much is free",
        "a virtual GPU has no memory of its own: it takes the host's",
        f"torch.accelerator.memory_allocated({index}) tells what tensors hold there",
        [f"{NAME}:{index}"],
    )


_ANSWERS = {
    "setDeviceIndex": _set_device,
    "exchangeDevice": _exchange_device,
    "maybeExchangeDevice": _restore_device,
    "synchronizeDevice": module.synchronize,
    "isAllocatorInitialized": lambda: True,
    "emptyCache": module.empty_cache,
    "emptyHostCache": module.empty_cache,
    "getDeviceStats": _statistics,
    "getMemoryInfo": _refuse_total,
    "resetPeakStats": module.reset_peak_memory_stats,
    "resetAccumulatedStats": _require,  # what was held in all is not counted
}
