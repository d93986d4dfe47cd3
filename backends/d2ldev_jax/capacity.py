"""Arrays that are computed when they are made, and too large for their device.

Zeros too large are an error at once. A computation that is too large is not: the CPU's fails after
JAX has returned, and whoever reads the array first gets the error; and a range of 2**40 numbers
ends the process in jaxlib 0.12, with a floating point exception.
"""

from __future__ import annotations

import math
import os

import jax

from d2ldev.interface import Tensor

# Below this many bytes nothing is looked at, and nothing waited for.
_LARGE = 2**30


def check_capacity(count: int, itemsize: int, native: jax.Device) -> None:
    """Refuse what no allocator could find room for.

    Raises:
        MemoryError: if so many numbers are more than the device's whole memory.
    """
    wanted = count * itemsize
    if wanted < _LARGE:
        return
    total = (native.memory_stats() or {}).get("bytes_limit")
    if total is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > total:
        raise MemoryError(f"{wanted} bytes are wanted of {total}")


def computed(x: Tensor) -> Tensor:
    """The array, when it is there, if it is so large that memory may run out for it."""
    if math.prod(x.shape) * x.dtype.itemsize < _LARGE:
        return x
    return jax.block_until_ready(x)  # type: ignore[no-untyped-call]
