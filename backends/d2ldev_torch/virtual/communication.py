"""``torch.distributed`` between the virtual GPUs of several processes: gloo, on their memory."""

from __future__ import annotations

import warnings
from functools import partial, wraps
from typing import Any

import torch
from torch import distributed

from d2ldev_torch.virtual.devices import NAME
from d2ldev_torch.virtual.memory import as_cpu

_Library: Any = torch.library.Library
# The operators with tensors of the device among their arguments, for which the CPU has an engine.
_NAMES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"),
)


def install() -> list[Any]:
    """Register the operators with torch; return the objects that keep them registered."""
    if not distributed.is_available():
        return []
    library = _Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch's own kernels look for an engine that is registered for the device.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in _NAMES:
            op = getattr(torch.ops.c10d, name).default
            library.impl(name, partial(_run, op), "PrivateUse1", allow_override=True)
    _choose_gloo()
    return [library]


def _choose_gloo() -> None:
    """Let ``init_process_group()`` choose gloo for virtual GPUs, by its name or without an engine.

    Without an engine's name torch starts one for the accelerator alone, and the operators here run
    on the CPU's.
    https://github.com/pytorch/pytorch/blob/main/torch/distributed/distributed_c10d.py
    """
    c10d: Any = distributed.distributed_c10d
    gloo = c10d.Backend.GLOO
    c10d.Backend.default_device_backend_map[NAME] = gloo
    c10d.Backend.backend_capability[gloo] = [*c10d.Backend.backend_capability[gloo], NAME]
    make = c10d.BackendConfig.__init__

    @wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        engines = self.device_backend_map
        if NAME in engines:
            engines.setdefault("cpu", engines[NAME])

    c10d.BackendConfig.__init__ = init


def _run(op: Any, *args: Any) -> Any:
    results = op(*map(_on_cpu, args))
    # The engine writes into its first argument, now or until the work is waited for.
    return (args[0], results[-1]) if isinstance(results, tuple) else results


def _on_cpu(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_cpu(each) for each in value]
    is_virtual = isinstance(value, torch.Tensor) and value.device.type == NAME
    return as_cpu(value) if is_virtual else value
