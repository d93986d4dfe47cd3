"""What ``JaxLearner`` refuses, with what to do instead."""

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from d2ldev import UnsupportedValueError


def test_linens_train_state_is_refused_with_what_to_do(backend):
    state = TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    with pytest.raises(UnsupportedValueError, match="ToNNX"):
        backend.learner(state)


def test_a_model_without_parameters_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match="no parameters"):
        backend.learner(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    "optimizer",
    [object(), lambda net: nnx.ModelAndOptimizer(net, optax.sgd(0.1))],
    ids=["another's", "one with a model of its own"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_optimizer_is_refused(backend, optimizer):
    net = backend.mlp([2, 1])
    optimizer = optimizer(net) if callable(optimizer) else optimizer
    with pytest.raises(UnsupportedValueError, match="neither an optax"):
        backend.learner(net, optimizer=optimizer)


def test_shapes_that_would_be_broadcast_are_refused(backend):
    learner = backend.learner(backend.mlp([2, 1]))
    with pytest.raises(UnsupportedValueError, match=r"\(4, 1\), and y of shape \(4,\)"):
        learner.step((backend.ones((4, 2)),), backend.ones(4))


def test_a_model_that_makes_variables_in_a_step_is_refused(backend):
    class Growing(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Variable(x)
            return self.dense(x)

    learner = backend.learner(Growing(nnx.Rngs(0)))
    with pytest.raises(UnsupportedValueError, match="seen"):
        learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))


@pytest.mark.parametrize(
    ("loss", "found"),
    [(lambda p, y: (p - y) ** 2, r"of shape \(4, 1\)"), (lambda p, y: 1.0, "1.0")],
)
def test_a_loss_that_is_no_scalar_is_refused(backend, loss, found):
    learner = backend.learner(backend.mlp([2, 1]), loss=loss)
    with pytest.raises(UnsupportedValueError, match=f"the loss is {found}"):
        learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))
