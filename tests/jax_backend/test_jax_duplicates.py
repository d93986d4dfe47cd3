"""Deep copies are where the originals are, whatever JAX's default device is."""

import copy

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from d2ldev import gpu


def make_optimizer(backend):
    net = backend.mlp([3, 2], device="gpu:1")
    return backend.place(nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param), "gpu:1")


MAKERS = {
    "array": lambda backend: backend.asarray(np.arange(3.0), device="gpu:1"),
    "model": lambda backend: backend.mlp([3, 4, 1], device="gpu:1"),
    "optimizer": make_optimizer,
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_deep_copy_is_where_the_original_is(backend, name):
    original = MAKERS[name](backend)
    duplicate = copy.deepcopy(original)
    assert duplicate is not original
    placement = backend.placement([duplicate])
    assert set(placement.values()) == {gpu(1)}
    copies = backend.named_tensors([duplicate])
    for tensor_name, x in backend.named_tensors([original]).items():
        assert copies[tensor_name].committed
        assert np.array_equal(jax.device_get(x), jax.device_get(copies[tensor_name]))
