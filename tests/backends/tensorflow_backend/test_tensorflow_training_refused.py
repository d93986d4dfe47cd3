"""What ``TensorFlowLearner`` refuses, with what to do instead."""

import pytest

from d2ldev import UnsupportedValueError


def test_what_is_no_model_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match="neither a Keras model"):
        backend.learner(lambda x: x)


def test_another_optimizer_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match=r"no keras\.optimizers\.Optimizer"):
        backend.learner(backend.mlp([2, 1]), optimizer=object())


def test_a_model_of_which_all_is_frozen_is_refused(backend):
    net = backend.mlp([2, 1])
    net.trainable = False
    with pytest.raises(UnsupportedValueError, match="no trainable variables"):
        backend.learner(net)


def test_shapes_that_would_be_broadcast_are_refused(backend):
    learner = backend.learner(backend.mlp([2, 1]))
    with pytest.raises(UnsupportedValueError, match=r"\(4, 1\), and y of shape \(4,\)"):
        learner.step((backend.ones((4, 2)),), backend.ones(4))


@pytest.mark.parametrize(
    ("loss", "found"),
    [(lambda p, y: (p - y) ** 2, r"of shape \(4, 1\)"), (lambda p, y: 1.0, "1.0")],
)
def test_a_loss_that_is_no_scalar_is_refused(backend, loss, found):
    learner = backend.learner(backend.mlp([2, 1]), loss=loss)
    with pytest.raises(UnsupportedValueError, match=f"the loss is {found}"):
        learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))
