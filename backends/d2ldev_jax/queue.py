"""What a device has still to do. JAX computes after it has returned, on the CPU as well.

JAX has no queue that can be asked. A GPU's work is done in its order, and so is the work that one
thread gives to the CPU: a small computation that is queued now is done when everything before it
is. What other threads gave to the CPU is known by its results, as long as somebody holds them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import jax
import numpy as np

# How long a small computation may take on a device that has nothing else to do, in seconds.
_PATIENCE = 0.002


def synchronize(native: jax.Device) -> None:
    """Return when a device has computed everything."""
    marker = _marker(native)
    for x in _results(native):
        # What failed, or was deleted meanwhile, is done too; whoever reads it gets the error.
        with suppress(RuntimeError):
            x.block_until_ready()
    marker.block_until_ready()


def is_idle(native: jax.Device) -> bool:
    """Whether a device has computed everything: if so, a small computation ends at once."""
    marker = _marker(native)
    for x in _results(native):
        with suppress(RuntimeError):
            if x is not marker and not x.is_ready():
                return False
    end = time.monotonic() + _PATIENCE
    while not (ready := marker.is_ready()) and time.monotonic() < end:
        time.sleep(0)
    return bool(ready)


def _results(native: jax.Device) -> Iterator[Any]:
    """The arrays of a device that somebody holds."""
    for x in jax.live_arrays(native.platform):  # type: ignore[no-untyped-call]
        with suppress(RuntimeError):
            if native in x.devices():
                yield x


_add_one = jax.jit(lambda x: x + 1)


def _marker(native: jax.Device) -> Any:
    """The result of a small computation that is queued now, also while JAX traces a function."""
    with jax.ensure_compile_time_eval():
        return _add_one(_number(native))


@lru_cache
def _number(native: jax.Device) -> Any:
    return jax.device_put(np.zeros((), np.int32), native)
