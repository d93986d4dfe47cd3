"""The keys of random numbers: JAX has no random state of its own."""

from __future__ import annotations

import itertools
import os
from typing import Any

import jax

_WORD = 2**32 - 1


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
        words = [self._root, next(self._numbers)] if seed is None else _words(seed)
        with jax.default_device(native):
            key = jax.random.key(words[0])
            for word in words[1:]:
                key = jax.random.fold_in(key, word)
        # No copy: it is there already.
        return jax.device_put(key, native)


def _words(seed: int) -> list[int]:
    """A seed of any size in pieces that JAX takes; it forgets all bits but the last 32."""
    words = [seed & _WORD]
    while (seed := seed >> 32) not in (0, -1):
        words.append(seed & _WORD)
    return words
