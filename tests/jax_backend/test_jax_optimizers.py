"""``place`` of ``nnx.Optimizer``: with its model, its state and its step counter."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from d2ldev import cpu, gpu

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}


def regression(backend, device):
    """A model and data that it can learn."""
    net = backend.mlp([3, 4, 1], activation="tanh", device=device)
    x = backend.randn((16, 3), seed=0, device=device)
    return net, x, x.sum(1, keepdims=True)


def train(net, optimizer, x, y, steps):
    losses = []
    for _ in range(steps):
        loss, gradients = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
        optimizer.update(net, gradients)
        losses.append(float(loss))
    return losses


def make(net, name):
    return nnx.Optimizer(net, OPTIMIZERS[name](), wrt=nnx.Param)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 3], ids=["new", "trained"])
def test_training_goes_on_with_the_losses_of_an_unmoved_twin(backend, name, trained):
    (net, x, y), (twin, *_) = regression(backend, "cpu"), regression(backend, "cpu")
    optimizer, twins = make(net, name), make(twin, name)
    train(net, optimizer, x, y, trained)
    backend.place((net, optimizer), "gpu:1")
    losses = train(net, optimizer, *backend.to((x, y), "gpu:1"), 3)
    np.testing.assert_allclose(losses, train(twin, twins, x, y, trained + 3)[trained:], rtol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_step_counter_are_where_the_model_is(backend, name):
    net, x, y = regression(backend, "cpu")
    optimizer = make(net, name)
    train(net, optimizer, x, y, 2)
    placed = backend.place({"net": net, "optimizer": optimizer}, "gpu:1")
    assert placed["optimizer"] is optimizer
    assert backend.device_of(optimizer.step[...]) is gpu(1)
    assert int(optimizer.step[...]) == 2
    assert {backend.device_of(x) for x in jax.tree.leaves(nnx.state(optimizer))} == {gpu(1)}
    train(net, optimizer, *backend.to((x, y), "gpu:1"), 1)
    assert {backend.device_of(x) for x in jax.tree.leaves(nnx.state(optimizer))} == {gpu(1)}


def test_there_and_back_changes_nothing(backend):
    net, x, y = regression(backend, "cpu")
    optimizer = make(net, "adam")
    train(net, optimizer, x, y, 2)
    before = [array.tolist() for array in backend.named_tensors(optimizer).values()]
    backend.place(backend.place(optimizer, "gpu:0"), "cpu")
    assert [array.tolist() for array in backend.named_tensors(optimizer).values()] == before
    assert set(backend.placement(optimizer).values()) == {cpu()}


def test_an_optimizer_that_holds_its_model_takes_it_along(backend):
    net, *_ = regression(backend, "cpu")
    optimizer = nnx.ModelAndOptimizer(net, optax.adam(0.1))
    backend.place(optimizer, "gpu:1")
    assert optimizer.model is net
    assert set(backend.placement(net).values()) == {gpu(1)}


def test_the_model_stays_if_only_the_optimizer_is_placed(backend):
    net, *_ = regression(backend, "cpu")
    backend.place(make(net, "adam"), "gpu:1")
    assert set(backend.placement(net).values()) == {cpu()}
