"""Where an array is, or why that is no one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError, describe


def find(x: Any, device_for: Callable[[jax.Device], Device | None]) -> Device:
    """The device of an array.

    Args:
        x: anything.
        device_for: what a device of JAX's stands for; None if it stands for nothing.

    Raises:
        UnsupportedValueError: for what is no array, and for arrays without one place of their
            own: traced, deleted, sharded, another process's, kept in the host's memory.
    """
    if isinstance(x, jax.core.Tracer):
        raise _nowhere(
            f"a {x.dtype}{list(x.shape)} is traced by jit, grad or vmap, and has no memory yet",
            "ask outside of the traced function; inside, x = jax.device_put(x, "
            "backend.native('gpu:0')) moves it",
        )
    if not isinstance(x, jax.Array):
        raise _nowhere(f"{describe(x)} is no JAX array", "x = backend.asarray(x) makes an array")
    kind = f"the {x.dtype}{list(x.shape)}"
    if x.is_deleted():
        raise _nowhere(
            f"{kind} was deleted, or donated to a function that has used up its memory",
            "keep a copy: x = backend.copy(x), before it is donated",
        )
    natives = x.sharding.device_set
    if len(natives) != 1:
        spread = ", ".join(sorted(map(str, natives)))
        raise _nowhere(
            f"{kind} is spread over {len(natives)} devices: {spread}",
            "x = jax.device_put(x, backend.native('cpu')) brings it to one; x.sharding says "
            "which part is where",
        )
    native: Any = next(iter(natives))
    device = device_for(native)
    if device is None:
        raise _nowhere(
            f"{kind} is on {native}, which is no CPU or GPU of this process",
            "x.addressable_shards are this process's parts of an array",
        )
    memory = x.sharding.memory_kind
    if device is not CPU and memory not in (None, native.default_memory().kind):
        raise _nowhere(
            f"{kind} belongs to {device}, but its bytes are in the host's memory ({memory})",
            f"x = jax.device_put(x, backend.native('{device}')) brings them there",
        )
    return device


def _nowhere(problem: str, fix: str) -> UnsupportedValueError:
    return UnsupportedValueError("tell the device of a tensor", problem, fix)
