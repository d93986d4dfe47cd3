"""Stacking many arrays: JAX compiles a program for each number of operands it has not seen.

``jnp.stack`` of a thousand scalars also dispatches a thousand operations, of which each takes as
long as reading the scalar would. Stacked in groups of one size, any number of arrays needs few
programs, and few calls of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

_GROUP = 32


@jax.jit
def _grouped(xs: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(xs)


def stack(xs: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one shape, dtype and device as one array with a first axis more."""
    level, size = list(xs), 1
    while len(level) > 1 or size == 1:
        # The last group is filled up with what is cut off in the end.
        level += level[-1:] * (-len(level) % _GROUP)
        level = [_grouped(level[i : i + _GROUP]) for i in range(0, len(level), _GROUP)]
        size *= _GROUP
    return level[0].reshape(size, *xs[0].shape)[: len(xs)]
