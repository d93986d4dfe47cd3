"""The arrays of a training state by name, and the flags of its modes, and back, checked.

Typed random keys are numbers with the name of a generator, and no file has a dtype for them: a
state holds the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from d2ldev.errors import describe
from d2ldev.interface import Backend, Tensor
from d2ldev.training.learner import refused_state


def arrays_of(names: Sequence[str], arrays: Sequence[Tensor]) -> dict[str, Any]:
    """Name -> array; a typed key is a dict of its generator's name and its numbers."""
    return {name: _plain(x) for name, x in zip(names, arrays, strict=True)}


def _plain(x: Tensor) -> Any:
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return {"generator": str(jax.random.key_impl(x)), "key": jax.random.key_data(x)}


def checked_arrays(
    backend: Backend, part: str, current: Mapping[str, Any], saved: Any, native: Any
) -> list[Tensor]:
    """The arrays of one part of a saved state, on a device, in the order of the current one.

    Args:
        backend: the JAX backend.
        part: ``'model'`` or ``'optimizer'``.
        current: the state as it is now, which says what is expected.
        saved: what is restored.
        native: where to.

    Raises:
        CheckpointError: if there is anything in it that is not expected, or is missing.
    """
    expected, found = current[part], saved.get(part) if isinstance(saved, Mapping) else None
    if not isinstance(found, Mapping):
        raise refused_state(part, f"{describe(found)} is no dict of arrays")
    different = sorted({*map(str, found)} ^ {*expected})
    if different:
        raise refused_state(part, f"only one of the two has {different[0]}")
    for name, x in expected.items():
        if _form(found[name]) != _form(x):
            problem = f"{name} is {_shown(x)}, and {_shown(found[name])} in the state"
            raise refused_state(part, problem)
    return [_array(backend, found[name], native) for name in expected]


def checked_flags(names: Sequence[str], saved: Any) -> list[str]:
    """The names of the flags that are set in a saved state.

    Args:
        names: those of all flags of the model.
        saved: what is restored.

    Raises:
        CheckpointError: if it is no list of such names.
    """
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved):
        raise refused_state("model", f"what is in evaluation mode is {describe(saved)}")
    unknown = sorted({*saved} - {*names})
    if unknown:
        raise refused_state("model", f"only the state has {unknown[0]}")
    return saved


def _array(backend: Backend, x: Any, native: Any) -> Tensor:
    if not isinstance(x, Mapping):
        return backend.asarray(x, device=native)
    numbers = backend.asarray(x["key"], device=native)
    return jax.random.wrap_key_data(numbers, impl=x["generator"])


def _form(x: Any) -> Any:
    """What has to agree: of an array its shape and its dtype."""
    if isinstance(x, Mapping):
        return {key: _form(value) for key, value in x.items()}
    if isinstance(x, str):
        return x
    return tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__))


def _shown(x: Any) -> str:
    if isinstance(x, Mapping):
        return f"a random key of {x.get('generator')}"
    shape, dtype = _form(x) if not isinstance(x, str) else ("", repr(x))
    return f"{dtype} {shape}"
