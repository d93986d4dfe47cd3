"""What cannot be trained on MXNet is refused; trainers of the user's own are placed and kept."""

import pytest
from d2ldev_mxnet.framework import mx

from d2ldev.errors import UnsupportedValueError

nn = mx.gluon.nn

# As a user of Gluon with NumPy arrays begins.
pytestmark = pytest.mark.usefixtures("set_np")


class Either(mx.gluon.Block):
    """Of its two layers one is used."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Dense(1, in_units=2), nn.Dense(1, in_units=2)

    def forward(self, x, uses_a):
        return (self.a if uses_a else self.b)(x)


def initialized(backend, make):
    net = make()
    mx.random.seed(3)
    net.initialize(mx.init.Xavier(), ctx=backend.native("cpu"))
    return net


def uninitialized():
    return nn.Dense(1)


def without_gradients():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    net.collect_params().setattr("grad_req", "null")
    return net


def of_another():
    net = nn.Dense(1, in_units=1)
    net.initialize()
    return mx.gluon.Trainer(net.collect_params(), "sgd")


def in_a_store(net):
    return mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("local"))


REFUSED = {
    "a function": (lambda: len, None, "no gluon.Block"),
    "not initialised": (uninitialized, None, "net.initialize"),
    "without gradients": (without_gradients, None, "no parameter with a gradient"),
    "a class": (Either, lambda net: mx.optimizer.SGD, "gluon.Trainer"),
    "another's trainer": (Either, lambda net: of_another(), "none of its parameters"),
    "a store": (Either, in_a_store, "KVStore"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(backend, case):
    make, optimizer, words = REFUSED[case]
    net = initialized(backend, make) if make is Either else make()
    with pytest.raises(UnsupportedValueError, match=words):
        backend.learner(net, optimizer="sgd" if optimizer is None else optimizer(net))


def test_a_model_of_arrays_of_the_old_kind_is_refused(backend):
    mx.npx.reset_np()
    net = initialized(backend, Either)
    with pytest.raises(UnsupportedValueError, match="set_np"):
        backend.learner(net)


def test_errors_that_would_be_broadcast_are_refused(backend):
    net = initialized(backend, Either)
    learner = backend.learner(net)
    with pytest.raises(UnsupportedValueError, match="reshape"):
        learner.step((backend.ones((3, 2)), True), backend.zeros(3))


def test_a_loss_that_is_no_array_is_refused(backend):
    learner = backend.learner(initialized(backend, Either), loss=lambda p, y: 1.0)
    with pytest.raises(UnsupportedValueError, match=r"1\.0, a float, and no scalar"):
        learner.step((backend.ones((3, 2)), True), backend.zeros((3, 1)))


@pytest.mark.parametrize("options", [{"learning_rate": 0.5}, {"learning_rate": 0.5, "wd": 0.1}])
def test_the_learning_rate_of_a_trainer_is_its_own(backend, options):
    net = initialized(backend, Either)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options)
    learner = backend.learner(net, optimizer=trainer, lr=0.01)
    learner.step((backend.ones((3, 2)), True), backend.zeros((3, 1)))
    assert learner.parts["optimizer"] is trainer
    assert trainer.learning_rate == 0.5


def test_a_trainer_that_was_built_before_the_model_was_placed_trains_it(backend):
    def losses(device):
        net = initialized(backend, Either)
        trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
        learner = backend.learner(backend.place(net, device), optimizer=trainer)
        x, y = backend.ones((3, 2), device=device), backend.zeros((3, 1), device=device)
        return [learner.step((x, True), y)[0].item() for _ in range(4)]

    assert losses("gpu:1") == losses("cpu")
