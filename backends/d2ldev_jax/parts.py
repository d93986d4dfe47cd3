"""What ``flax.nnx`` modules, optimizers and variables keep, for ``place``.

Everything is moved in place: a variable is given another array, so that all who share it still do.
Flax is not imported for this: where it is not, nobody has an object of its.
"""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from d2ldev.errors import UnsupportedValueError
from d2ldev.operations.placing import Part

# Most attributes are of these types, and hold no array.
_WITHOUT_ARRAYS = (bool, int, float, str, type(None), np.dtype, type(jnp.float32))


class NnxObject(ABC):  # noqa: B024  # it is asked, and never inherited from
    """Modules, optimizers, metrics and random streams, which are all ``Pytree``; variables."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        nnx = sys.modules.get("flax.nnx")
        # While flax is being imported, it has neither.
        found = [getattr(nnx, name, None) for name in ("Pytree", "Variable")]
        return issubclass(other, tuple(base for base in found if base is not None))


OBJECT_TYPES: tuple[type, ...] = (NnxObject,)


def parts_of(obj: Any) -> Iterator[Part]:
    """The parts of an object, or the array of a variable."""
    if isinstance(obj, sys.modules["flax.nnx"].Variable):
        yield _value_of(obj)
        return
    attributes = vars(obj)
    for name, value in attributes.items():
        if not name.startswith("_pytree__") and not isinstance(value, _WITHOUT_ARRAYS):
            yield Part(name, value, partial(attributes.__setitem__, name))


def _value_of(variable: Any) -> Part:
    # Past the hooks, which are about values that are other ones: ``raw_value`` in flax 0.11,
    # which warns in 0.12, where it is ``_raw_value`` behind two methods.
    slot = "_raw_value" if hasattr(type(variable), "get_raw_value") else "raw_value"
    value = object.__getattribute__(variable, slot)
    if sys.modules["flax.nnx.variablelib"].is_array_ref(value):
        raise UnsupportedValueError(
            f"place a {type(variable).__name__}",
            "it holds a jax.Ref, whose memory cannot be replaced, and other holders see the Ref",
            "make the model without: with nnx.use_refs(False): model = Model(...)",
        )
    return Part("value", value, partial(object.__setattr__, variable, slot))
