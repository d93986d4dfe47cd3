"""What JAX takes for a part of a node's type: files have it, if a file can."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax.provision import Scaled
from flax import nnx, struct
from jax.experimental import sparse

from d2ldev import CheckpointError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nodes.safetensors"


@jax.tree_util.register_pytree_node_class
class Counted:
    """A node with a number beside its array."""

    def __init__(self, x, number):
        self.x, self.number = x, number

    def tree_flatten(self):
        return (self.x,), self.number

    @classmethod
    def tree_unflatten(cls, number, children):
        return cls(*children, number)


@struct.dataclass
class WithFunction:
    """A node with a function beside its array, as a ``TrainState`` has it."""

    x: jax.Array
    function: object = struct.field(pytree_node=False)


def test_static_values_are_in_the_file_and_come_back(backend, path):
    backend.save([Scaled(weight=jnp.ones(2), factor=0.5), Counted(jnp.ones(1), 7)], path)
    scaled, counted = backend.load(path)
    assert (scaled["factor"], counted["static"]) == (0.5, 7)
    old = [Scaled(weight=jnp.zeros(2), factor=0.9), Counted(jnp.zeros(1), 8)]
    scaled, counted = backend.load_into(old, path)
    assert (scaled.factor, scaled.weight.tolist()) == (0.5, [1.0, 1.0])
    assert (counted.number, counted.x.tolist()) == (7, [1.0])
    assert (old[0].factor, old[1].number) == (0.9, 8)


@pytest.mark.parametrize("kind", [sparse.BCOO, sparse.BCSR, sparse.COO, sparse.CSR])
def test_a_sparse_array_comes_back_with_its_shape(backend, path, kind):
    dense = jnp.zeros((2, 3)).at[1, 2].set(4.0)
    backend.save(kind.fromdense(dense), path)
    assert backend.load(path)["shape"] == (2, 3)
    wider = jnp.zeros((2, 5)).at[0, 0].set(1.0)
    loaded = backend.load_into(kind.fromdense(wider), path)
    assert loaded.shape == (2, 3)
    np.testing.assert_array_equal(loaded.todense(), dense)


def test_functions_are_the_programs_own(backend, path):
    backend.save(WithFunction(x=jnp.ones(2), function=jnp.tanh), path)
    assert list(backend.load(path)) == ["x"]
    loaded = backend.load_into(WithFunction(x=jnp.zeros(2), function=jnp.exp), path)
    assert (loaded.function, loaded.x.tolist()) == (jnp.exp, [1.0, 1.0])


class Keeping(nnx.Module):
    """A module with a node in a parameter."""

    def __init__(self, node):
        self.weight = nnx.Param(node)


def _sparse(shape):
    return sparse.BCOO((jnp.ones(2), jnp.zeros((2, 2), "int32")), shape=shape)


@pytest.mark.parametrize(
    ("make", "saved", "other", "told"),
    [
        (_sparse, (2, 2), (4, 5), r"weight\.value\.shape is \[4, 5\]"),
        (lambda number: Counted(jnp.ones(1), number), 7, 8, r"weight\.value\.static is 8"),
        (
            lambda factor: Scaled(weight=jnp.ones(2), factor=factor),
            0.5,
            0.9,
            r"weight\.value\.factor is 0\.9, and the file has 0\.5",
        ),
    ],
    ids=["sparse", "registered", "struct"],
)
def test_a_model_takes_no_node_with_another_static_value(backend, path, make, saved, other, told):
    backend.save({"net": Keeping(make(saved))}, path)
    backend.load_into({"net": Keeping(make(saved))}, path)
    net = Keeping(make(other))
    for only, obj in (("", {"net": net}), ("net", net)):
        with pytest.raises(CheckpointError, match=told):
            backend.load_into(obj, path, only=only)
