"""Training of pytrees that can be called: registered classes, and ``Partial`` of a function."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, struct

from d2ldev import Trainer, UnsupportedValueError, gpu

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
DATA = [(X[i : i + 8], X[i : i + 8, :2]) for i in (0, 8)]


@jax.tree_util.register_pytree_node_class
class Dense:
    """A user's own class, with a function, and an array of integers."""

    def __init__(self, kernel, bias, calls, activation=jnp.tanh):
        self.kernel, self.bias, self.calls, self.activation = kernel, bias, calls, activation

    def __call__(self, inputs):
        return self.activation(inputs @ self.kernel + self.bias)

    def tree_flatten(self):
        return (self.kernel, self.bias, self.calls), self.activation

    @classmethod
    def tree_unflatten(cls, activation, children):
        return cls(*children, activation)


@struct.dataclass
class Pair:
    """A dataclass of Flax with another model in it."""

    first: Dense
    scale: jax.Array

    def __call__(self, inputs):
        return self.first(inputs) * self.scale


def make_dense():
    return Dense(jnp.full((4, 2), 0.1), jnp.zeros(2), jnp.asarray(3))


def make_linen():
    net = linen.Dense(2)
    return jax.tree_util.Partial(net.apply, net.init(jax.random.key(0), X))


def make_vmapped():
    return jax.tree_util.Partial(lambda net, x: jax.vmap(net)(x), make_dense())


MODELS = {
    "class": make_dense,
    "dataclass": lambda: Pair(make_dense(), jnp.ones(2)),
    "linen": make_linen,
    "vmap": make_vmapped,
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def train_by_hand(model, steps):
    """Return the floats of a model after steps of the batch ``X``."""
    leaves, structure = jax.tree.flatten(model)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def compute_loss(parameters):
        for i, x in zip(floats, parameters, strict=True):
            leaves[i] = x
        return jnp.mean((jax.tree.unflatten(structure, leaves)(X) - X[:, :2]) ** 2)

    parameters = [leaves[i] for i in floats]
    for _ in range(steps):
        gradients = jax.grad(compute_loss)(parameters)
        parameters = [x - 0.1 * g for x, g in zip(parameters, gradients, strict=True)]
    return parameters


@models
@pytest.mark.parametrize("optimizer", ["name", "object"])
def test_a_pytree_learns_as_by_hand_and_the_trainer_returns_it(backend, make, optimizer):
    model = make()
    given = {"optimizer": optax.sgd(0.1)} if optimizer == "object" else {"lr": 0.1}
    trainer = Trainer(max_epochs=3, num_gpus=1, backend=backend)
    trainer.fit(model, [(X, X[:, :2])], **given)
    assert type(trainer.model) is type(model)
    assert set(backend.placement(trainer.model).values()) == {gpu(0)}
    found = [x for x in jax.tree.leaves(trainer.model) if jnp.issubdtype(x.dtype, jnp.inexact)]
    for x, expected in zip(found, train_by_hand(make(), 3), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-6)


@models
def test_two_gpus_learn_what_one_does(backend, make):
    found = []
    for number in (1, 2):
        trainer = Trainer(max_epochs=2, num_gpus=number, backend=backend)
        trainer.fit(make(), DATA, optimizer="adam", lr=0.1)
        found.append(jax.tree.leaves(trainer.model))
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_arrays_of_integers_and_the_users_own_pytree_stay(backend):
    model = backend.place(make_dense(), "gpu:1")
    before = np.array(model.kernel)
    learner = backend.learner(model, lr=0.1)
    batch = backend.to(((X,), X[:, :2]), "gpu:1")
    learner.step(*batch)
    learner.sync()
    assert np.array_equal(model.kernel, before)
    assert not np.array_equal(learner.sync()["model"].kernel, before)
    assert int(learner.sync()["model"].calls) == 3
    assert learner.sync()["model"].activation is jnp.tanh
    assert learner.signature.names == ("inputs",)


def test_a_run_of_a_pytree_resumes(backend, tmp_path):
    def run(epochs, **options):
        trainer = Trainer(max_epochs=epochs, num_gpus=1, backend=backend)
        trainer.fit(make_dense(), DATA, optimizer="adam", lr=0.1, **options)
        return jax.tree.leaves(trainer.model)

    path = tmp_path / "run.safetensors"
    run(1, checkpoint=path)
    for x, y in zip(run(3, checkpoint=path, resume=True), run(3), strict=True):
        assert np.array_equal(x, y)


def test_a_pytree_of_one_example_is_refused_with_the_line_that_maps_it(backend):
    def compute(net, x):
        if x.ndim > 1:
            raise ValueError("one example, please")
        return net(x)

    model = jax.tree_util.Partial(compute, make_dense())
    trainer = Trainer(max_epochs=1, num_gpus=1, backend=backend)
    with pytest.raises(UnsupportedValueError, match="one example, please") as caught:
        trainer.fit(model, DATA)
    assert "jax.vmap(net)(x)" in caught.value.fix
    mapped = jax.tree_util.Partial(lambda net, x: jax.vmap(net)(x), model)
    assert len(trainer.fit(mapped, DATA)["loss"]) == 1


def test_a_function_without_arrays_is_no_model(backend):
    with pytest.raises(UnsupportedValueError, match="neither a flax"):
        backend.learner(jnp.tanh)
