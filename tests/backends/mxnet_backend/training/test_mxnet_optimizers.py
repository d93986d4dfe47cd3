"""Gluon's optimizers that keep more than their states: they move, and are saved."""

import mxnet as mx
import numpy as np
import pytest
from d2ldev_mxnet.provision import Around, Listed
from numpy_semantics import NumPySemantics

from d2ldev import Trainer, UnsupportedValueError

BATCHES = [(np.full((4, 2), i, "float32"), np.ones((4, 1), "float32")) for i in (1, 2)]


class Counting(mx.optimizer.Optimizer):
    """Has dicts as its states, with a number in each."""

    def create_state(self, index, weight):
        return {"momentum": mx.nd.zeros_like(weight), "steps": 0}

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state["steps"] += 1
        state["momentum"] += grad
        weight -= self._get_lr(index) * state["momentum"] / state["steps"]


class Averaging(mx.gluon.Trainer):
    """Keeps means of the parameters, and goes back to them."""

    def __init__(self, *operands):
        super().__init__(*operands, kvstore=None)
        self.means = [parameter.data().copy() for parameter in self._params]

    def update(self, batch_size, ignore_stale_grad=False):
        super().update(batch_size, ignore_stale_grad)
        for mean, parameter in zip(self.means, self._params, strict=True):
            mean[:] = (mean + parameter.data()) / 2
            parameter.set_data(mean)


def with_optimizer(make):
    return lambda net: mx.gluon.Trainer(net.collect_params(), make(), kvstore=None)


MAKERS = {
    "momenta in a dict": with_optimizer(Listed),
    "around another": with_optimizer(lambda: Around(mx.optimizer.Adam())),
    "numbers in states": with_optimizer(Counting),
    "means in a trainer": lambda net: Averaging(net.collect_params(), "adam"),
}
made = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def trainer_of(net, make):
    with NumPySemantics():
        return make(net)


def begin(backend, make):
    """Return a model and a trainer that has made steps with it."""
    net = backend.mlp([2, 3, 1], seed=0)
    trainer = trainer_of(net, make)
    losses(backend, net, trainer)
    return net, trainer


def losses(backend, net, trainer, num_gpus=0):
    fit = Trainer(2, num_gpus, backend=backend).fit
    return fit(net, BATCHES, loss="mse", optimizer=trainer)["loss"]


@made
def test_what_was_placed_goes_on_as_what_was_not(backend, make):
    expected = losses(backend, *begin(backend, make))
    net, trainer = backend.place(begin(backend, make), "gpu:1")
    places = backend.placement(trainer)
    assert {str(place) for place in places.values()} == {"gpu:1"}
    assert len(places) > 2 * len(net.collect_params().keys())
    assert losses(backend, net, trainer, 1) == expected


@made
def test_what_is_loaded_goes_on_as_what_was_saved(backend, tmp_path, make):
    net, trainer = begin(backend, make)
    backend.save((net, trainer), tmp_path / "both.safetensors")
    other = backend.mlp([2, 3, 1], seed=1)
    other = backend.load_into((other, trainer_of(other, make)), tmp_path / "both.safetensors")
    assert losses(backend, *other) == losses(backend, net, trainer)


def test_a_step_of_the_users_own_that_fit_would_not_call_is_refused(backend):
    class Own(mx.gluon.Trainer):
        def step(self, batch_size, ignore_stale_grad=False):
            super().step(batch_size, ignore_stale_grad)

    net = backend.mlp([2, 1])
    trainer = Own(net.collect_params(), "sgd")
    with pytest.raises(UnsupportedValueError, match="its step\\(\\) is its own"):
        losses(backend, net, trainer)


@pytest.mark.parametrize("is_trainer", [False, True], ids=["optimizer", "trainer"])
def test_the_history_has_the_rate_of_a_schedule(backend, is_trainer):
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
    net = backend.mlp([2, 1])
    with NumPySemantics():
        optimizer = mx.optimizer.SGD(lr_scheduler=schedule)
        if is_trainer:
            optimizer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    history = Trainer(3, 1, backend=backend).fit(net, BATCHES, optimizer=optimizer)
    assert history["lr"] == [0.5, 0.25, 0.125]
