"""Variables that hold a ``jax.Ref``, which others may hold too: they are refused."""

import jax.numpy as jnp
import pytest
from flax import nnx

from d2ldev import UnsupportedValueError


def test_a_variable_with_a_reference_is_refused(backend):
    option = "ref" if hasattr(nnx, "List") else "use_ref"
    variable = nnx.Param(jnp.ones(2), **{option: True})
    with pytest.raises(UnsupportedValueError, match=r"Param: it holds a jax\.Ref"):
        backend.place({"w": variable}, "gpu:0")
