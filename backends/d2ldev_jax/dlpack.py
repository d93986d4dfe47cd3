"""Taking over memory by DLPack, or an error: JAX would rather copy than say that it cannot.

It copies what does not begin at a multiple of 64 bytes, and what is of a dtype that it has only
with ``jax_enable_x64``: https://github.com/jax-ml/jax/issues/29810. What is not in the order of C
some releases take over as if it were: https://github.com/jax-ml/jax/issues/17784.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from d2ldev.interface import Tensor
from d2ldev.operations.dlpack import ON_CPU, description_of

_ALIGNMENT = 64


class _Watched:
    """Another framework's tensor, whose address is noted when it is handed over."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self._device = x.__dlpack_device__()
        self.address = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._device
        return device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        # Of no version, which every framework can give.
        capsule = self._x.__dlpack__(stream=stream)
        memory = description_of(capsule)
        self.address = memory.address
        sizes = memory.shape[: memory.ndim]
        if not _is_in_the_order_of_c(sizes, memory.strides and memory.strides[: memory.ndim]):
            raise BufferError("JAX takes memory in the order of C, without gaps")
        # JAX warns on the standard error of the process before it copies.
        if self._device[0] == ON_CPU and self.address % _ALIGNMENT and 0 not in sizes:
            raise BufferError(f"JAX takes memory that begins at a multiple of {_ALIGNMENT} bytes")
        return capsule


def from_dlpack(x: Any) -> Tensor:
    """An array on the memory of ``x``, committed to its device.

    Raises:
        BufferError: if JAX would copy it.
    """
    watched = _Watched(x)
    made = jnp.from_dlpack(watched)
    if made.size and made.unsafe_buffer_pointer() != watched.address:
        raise BufferError(f"JAX takes over no such memory, and has made a {made.dtype} copy of it")
    (native,) = made.devices()
    return jax.device_put(made, native)


def _is_in_the_order_of_c(sizes: list[int], strides: list[int] | None) -> bool:
    """Whether neighbours in the last dimension are neighbours in memory, and so on."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides or ()), strict=False):
        if size > 1 and stride != expected:
            return 0 in sizes
        expected *= size
    return True
