"""JAX takes the GPU's memory as it needs it, and not three quarters of it at the start.

Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
"""

from __future__ import annotations

import os

from d2ldev.memory_policy import user_has_chosen, warn_too_late
from d2ldev_jax.accelerator import Accelerator, is_initialized

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_VARIABLES = (
    _PREALLOCATE,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "TF_GPU_ALLOCATOR",
    "JAX_PJRT_CLIENT_CREATE_OPTIONS",
)


def let_it_grow(accelerator: Accelerator) -> None:
    """Ask JAX not to preallocate, if it will use a GPU and the user has said nothing else."""
    if user_has_chosen(_VARIABLES):
        return
    if not is_initialized():
        if accelerator.may_be_used():
            os.environ[_PREALLOCATE] = "false"
    elif accelerator.gpus():
        warn_too_late("JAX", f"{_PREALLOCATE}=false")
