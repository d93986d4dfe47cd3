"""``mlp``: Flax's own layers, with parameters that were made on the device."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from d2ldev import gpu


def test_it_is_made_of_flax_s_layers(backend):
    net = backend.mlp([3, 4, 1])
    assert isinstance(net, nnx.Sequential)
    linears = [layer for layer in net.layers if isinstance(layer, nnx.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linears] == [(3, 4), (4, 1)]


def test_its_parameters_are_uniform_and_its_biases_zero(backend):
    layer = backend.mlp([16, 400]).layers[0]
    kernel, bias = layer.kernel[...], layer.bias[...]
    assert kernel.dtype == jnp.float32
    assert float(jnp.abs(kernel).max()) <= 1 / math.sqrt(16)
    assert abs(float(kernel.std()) - 1 / math.sqrt(16 * 3)) < 0.01
    assert float(jnp.abs(bias).max()) == 0


def test_its_parameters_are_committed(backend):
    net = backend.mlp([3, 4, 1], device="gpu:1")
    assert all(x.committed for x in backend.named_tensors(net).values())


def test_its_parameters_come_from_the_backend_s_random_numbers(backend):
    kernel = backend.mlp([3, 4], seed=5).layers[0].kernel[...]
    uniform = backend.rand((3, 4), seed=5)
    assert kernel.tolist() == ((2 * uniform - 1) / math.sqrt(3)).tolist()


@pytest.mark.parametrize("default", ["cpu", "gpu:0"])
def test_nothing_of_it_goes_through_another_device(backend, default):
    backend.mlp([3, 4, 1], device="gpu:1")
    with (
        jax.default_device(backend.native(default)),
        jax.transfer_guard_device_to_device("disallow"),
    ):
        net = backend.mlp([3, 4, 1], device="gpu:1")
    assert set(backend.placement(net).values()) == {gpu(1)}


def test_it_keeps_float32_also_where_jax_has_float64(backend):
    jax.config.update("jax_enable_x64", True)
    try:
        net = backend.mlp([3, 1])
        assert {x.dtype for x in backend.named_tensors(net).values()} == {jnp.dtype("float32")}
    finally:
        jax.config.update("jax_enable_x64", False)


def test_it_can_be_differentiated_and_compiled(backend):
    net = backend.mlp([3, 4, 1], device="gpu:0")
    x = backend.rand((5, 3), seed=0, device="gpu:0")
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda net, x: (net(x) ** 2).mean()))(net, x)
    assert backend.device_of(loss) is gpu(0)
    assert set(backend.placement(gradients).values()) == {gpu(0)}


def test_its_names_are_those_of_the_layers(backend):
    names = sorted(backend.placement(backend.mlp([3, 4, 1])))
    assert names == [
        "layers.0.bias.value",
        "layers.0.kernel.value",
        "layers.2.bias.value",
        "layers.2.kernel.value",
    ]
