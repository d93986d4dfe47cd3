"""``torch.accelerator`` for virtual GPUs: what torch's hooks for backends in Python lack of it.

Its functions ask ``torch._C``, which asks the C++ half of a backend: that one knows one device,
no queues and no allocator.
"""

from __future__ import annotations

from typing import Any

import torch

from d2ldev_torch.virtual import ledger, module


def install() -> None:
    """Answer for ``torch._C``; ``torch.accelerator`` speaks of virtual GPUs alone."""
    for name, answer in _ANSWERS.items():
        setattr(torch._C, f"_accelerator_{name}", answer)


def _set_device(index: int) -> None:
    if index >= 0:  # torch takes a negative one for none
        module.set_device(index)


def _exchange_device(index: int) -> int:
    """``with torch.accelerator.device_index(...)``, which torch's own code enters."""
    if index >= 0:
        module.synchronize(index)  # it is there
    return module.current_device()


def _statistics(index: int) -> dict[str, Any]:
    used, peak = ledger.used_and_peak(index)
    return {"allocated_bytes": {"all": {"current": used, "peak": peak}}}


_ANSWERS = {
    "setDeviceIndex": _set_device,
    "exchangeDevice": _exchange_device,
    "maybeExchangeDevice": _exchange_device,
    "synchronizeDevice": module.synchronize,
    "isAllocatorInitialized": lambda: True,
    "emptyCache": module.empty_cache,
    "getDeviceStats": _statistics,
    "resetPeakStats": module.reset_peak_memory_stats,
}
