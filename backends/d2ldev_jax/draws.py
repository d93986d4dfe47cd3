"""The keys of random numbers: JAX has no random state of its own."""

from __future__ import annotations

import itertools
import os
from typing import Any

import jax


class Draws:
    """Keys for ``rand`` and ``randn``: a seed's own, or each time another one.

    Without a seed a key is the number of the draw, folded into a root that this process drew from
    the operating system. A count is what threads can share without a lock.
    """

    def __init__(self) -> None:
        self._root = int.from_bytes(os.urandom(4))
        self._numbers = itertools.count()

    def key(self, seed: int | None, native: jax.Device) -> Any:
        """A key that was made on a device, and is committed to it."""
        with jax.default_device(native):
            key = jax.random.key(self._root if seed is None else seed)
            if seed is None:
                key = jax.random.fold_in(key, next(self._numbers))
        # No copy: it is there already.
        return jax.device_put(key, native)
