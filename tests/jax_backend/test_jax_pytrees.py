"""Parameter trees: linen's variables, optax's states, and classes registered with JAX."""

import dataclasses
from collections import namedtuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState

import d2ldev
from d2ldev import UnsupportedValueError, gpu


class Network(linen.Module):
    @linen.compact
    def __call__(self, x, *, train=False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))
        return linen.Dense(1)(linen.relu(x))


@pytest.fixture
def variables(backend):
    with backend.on("cpu"):
        return Network().init(jax.random.key(0), jnp.ones((1, 3)))


def devices(backend, tree):
    return {backend.device_of(x) for x in jax.tree.leaves(tree)}


def test_linen_s_variables_move(backend, variables):
    placed = backend.place(variables, "gpu:1")
    assert devices(backend, placed) == {gpu(1)}
    assert jax.tree.structure(placed) == jax.tree.structure(variables)


def test_linen_s_variables_compute_where_they_are(backend, variables):
    x = backend.rand((4, 3), seed=0)
    expected = Network().apply(variables, x)
    y = Network().apply(backend.place(variables, "gpu:1"), backend.to(x, "gpu:1"))
    assert backend.device_of(y) is gpu(1)
    assert y.tolist() == expected.tolist()


def test_a_frozen_dict_stays_one(backend, variables):
    frozen = freeze(variables)
    placed = backend.place(frozen, "gpu:0")
    assert type(placed) is FrozenDict
    assert devices(backend, placed) == {gpu(0)}
    assert backend.place(placed, "gpu:0") is placed


def test_the_names_in_a_frozen_dict_are_its_keys(backend):
    tree = freeze({"params": {"dense": {"kernel": jnp.ones(1)}}})
    assert list(backend.placement(tree)) == ["params.dense.kernel"]


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "schedule": optax.sgd(optax.exponential_decay(0.1, 10, 0.9)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "steps": optax.MultiSteps(optax.adam(0.1), 2),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "ema": optax.chain(optax.scale_by_adam(), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_moves_and_goes_on(backend, name):
    optimizer = OPTIMIZERS[name]

    def steps(parameters, state, count):
        for _ in range(count):
            gradients = jax.tree.map(lambda p: p + 1, parameters)
            updates, state = optimizer.update(gradients, state, parameters)
            parameters = optax.apply_updates(parameters, updates)
        return parameters, state

    with backend.on("cpu"):
        parameters = {"w": backend.rand(3, seed=0), "b": backend.zeros(1)}
        parameters, state = steps(parameters, optimizer.init(parameters), 2)
        expected = steps(parameters, state, 2)
    placed = backend.place((parameters, state), "gpu:1")
    with backend.on("gpu:1"):
        result = steps(*placed, 2)
    assert devices(backend, result) == {gpu(1)}
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    after, before = (backend.to(jax.tree.leaves(x), "cpu") for x in (result, expected))
    assert all(jnp.array_equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_train_state_moves_but_for_its_functions(backend, variables):
    state = TrainState.create(
        apply_fn=Network().apply, params=variables["params"], tx=OPTIMIZERS["adam"]
    )
    placed = backend.place(state, "gpu:1")
    assert type(placed) is TrainState
    assert devices(backend, (placed.params, placed.opt_state)) == {gpu(1)}
    assert placed.apply_fn is state.apply_fn
    assert placed.tx is state.tx


@flax.struct.dataclass
class Batch:
    x: jax.Array
    label: str = flax.struct.field(pytree_node=False)
    function: object = flax.struct.field(pytree_node=False, default=len)


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, left, right, note):
        self.left, self.right, self.note = left, right, note

    def tree_flatten(self):
        return (self.left, self.right), self.note

    @classmethod
    def tree_unflatten(cls, note, children):
        return cls(*children, note)


@dataclasses.dataclass
class Registered:
    x: jax.Array
    function: object


jax.tree_util.register_dataclass(Registered, data_fields=["x"], meta_fields=["function"])


@jax.tree_util.register_static
class Setting:
    """A node without children, to JAX."""


@pytest.mark.parametrize("method", ["to", "copy", "place"])
def test_a_dataclass_of_flax_moves_its_data(backend, method):
    batch = Batch(backend.ones(2), "cat", print)
    moved = getattr(backend, method)({"batch": batch}, "gpu:0")["batch"]
    assert type(moved) is Batch
    assert backend.device_of(moved.x) is gpu(0)
    assert (moved.label, moved.function) == ("cat", print)


@pytest.mark.parametrize("method", ["to", "copy", "place"])
def test_a_registered_class_moves(backend, method):
    pair = Pair(backend.ones(1), [backend.zeros(1), None], "mine")
    moved = getattr(backend, method)((pair, 3), "gpu:0")[0]
    assert type(moved) is Pair
    assert devices(backend, moved) == {gpu(0)}
    assert moved.note == "mine"
    assert moved.right[1] is None


def test_a_dataclass_registered_with_jax_moves_its_data(backend):
    moved = backend.to(Registered(backend.ones(1), print), "gpu:1")
    assert backend.device_of(moved.x) is gpu(1)
    assert moved.function is print


def test_a_registered_class_without_children_stays(backend):
    setting = Setting()
    assert backend.to([setting, backend.ones(1)], "gpu:0")[0] is setting


def test_a_partial_of_jax_moves(backend):
    partial = jax.tree_util.Partial(jnp.add, backend.ones(1))
    moved = backend.to(partial, "gpu:0")
    assert backend.device_of(moved(1.0)) is gpu(0)


def test_what_is_there_is_itself(backend):
    tree = [Batch(backend.ones(1), "cat"), Pair(backend.ones(1), {}, 1)]
    assert backend.to(tree, "cpu") is tree
    assert backend.place(tree, "cpu") is tree


def test_ties_through_registered_classes_stay(backend):
    x = backend.ones(1)
    pair, batch = backend.to((Pair(x, [x], 0), Batch(x, "cat")), "gpu:0")
    assert pair.left is pair.right[0] is batch.x


def test_the_names_of_a_registered_class_are_those_that_jax_has(backend):
    tree = {"batch": Batch(jnp.ones(1), "cat"), "pair": Pair(jnp.ones(1), [jnp.ones(1)], 0)}
    assert list(backend.placement(tree)) == ["batch.x", "pair.0", "pair.1.0"]


def test_d2ldev_s_own_registration_comes_first(backend):
    class Both(Pair):
        pass

    jax.tree_util.register_pytree_node_class(Both)
    d2ldev.register_container(
        Both, lambda b: [b.left], lambda old, new: Both(new[0], old.right, "by d2ldev")
    )
    moved = backend.to(Both(backend.ones(1), print, ""), "gpu:0")
    assert (moved.right, moved.note) == (print, "by d2ldev")


def test_a_namedtuple_stays_one(backend):
    cls = namedtuple("Point", "x y")
    moved = backend.to(cls(backend.ones(1), 2), "gpu:0")
    assert type(moved) is cls


def test_a_dict_keeps_its_order(backend):
    moved = backend.to({"b": backend.ones(1), "a": backend.ones(1)}, "gpu:0")
    assert list(moved) == ["b", "a"]


def test_a_class_that_jax_does_not_know_is_refused(backend):
    class Unknown:
        pass

    with pytest.raises(UnsupportedValueError, match="Unknown"):
        backend.to([backend.ones(1), Unknown()], "gpu:0")
