"""What JAX takes for a part of a node's type, and functions among the leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax.provision import Scaled
from flax import nnx, struct
from jax.experimental import sparse

from d2ldev import CheckpointError, Trainer, UnsupportedValueError, gpu


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


# -- functions among the leaves --------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Net:
    """A node with functions and other values among its leaves, as Equinox's modules have them."""

    def __init__(self, layers, dtype=jnp.float32):
        self.layers, self.dtype = layers, dtype

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x) if callable(layer) else x @ layer
        return x.astype(self.dtype)

    def tree_flatten(self):
        return (self.layers, self.dtype), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def make_net(value=0.5):
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    layers = [jnp.full((2, 3), value), jax.nn.relu, jnp.full((3, 2), value), jax.nn.relu]
    return Net([*layers, lambda x: x + 1, jax.jit(jnp.sin), gelu, None, "text", 2])


def test_functions_among_the_leaves_stay_as_they_are(backend):
    net = make_net()
    x = jnp.ones((1, 2))
    made = {
        "place": backend.place(net, "gpu:1"),
        "to": backend.to(net, "gpu:1"),
        "copy": backend.copy(net, "gpu:1"),
        "replicate": backend.replicate(net, ["gpu:0", "gpu:1"])[1],
    }
    net.layers = net.layers[:7]
    for each in made.values():
        assert backend.placement(each) == {"0.0": gpu(1), "0.2": gpu(1)}
        assert each.layers[1] is each.layers[3] is jax.nn.relu
        assert each.layers[4] is net.layers[4]
        assert (each.layers[7:], each.dtype) == ([None, "text", 2], jnp.float32)
        each.layers = each.layers[:7]
        np.testing.assert_allclose(each(backend.to(x, "gpu:1")), net(x), rtol=1e-5)


def test_a_file_leaves_out_functions_and_load_into_keeps_them(backend, path):
    backend.save([make_net(), 1], path)
    assert backend.load(path)[0][0][1] is None
    old = make_net(0.0)
    net, _ = backend.load_into([old, 0], path)
    assert np.all(np.asarray(net.layers[0]) == 0.5)
    for index in (1, 3, 4, 5):
        assert net.layers[index] is old.layers[index]
    assert net.layers[6].keywords == {"approximate": False}
    assert "0.0" in str(backend.summarize(net))


def test_a_function_in_a_plain_container_is_in_no_file(backend, path):
    with pytest.raises(UnsupportedValueError, match="at f cannot be saved"):
        backend.save({"net": make_net(), "f": jax.nn.relu}, path)


def test_tensors_in_a_partial_are_moved_and_saved(backend, path):
    x = jnp.ones(2)
    scale = functools.partial(jnp.multiply, x)
    placed = backend.place(Net([scale]), "gpu:0")
    assert backend.placement(placed) == {"0.0.0": gpu(0)}
    backend.save(placed, path)
    loaded = backend.load_into(Net([functools.partial(jnp.multiply, x * 0)]), path)
    assert np.array_equal(loaded.layers[0](x), x)


def test_a_net_with_functions_is_trained(backend):
    class Trained(Net):
        pass

    jax.tree_util.register_pytree_node_class(Trained)
    x = np.ones((4, 2), "float32")
    net = Trained([jnp.full((2, 3), 0.1), jax.nn.relu, jnp.full((3, 1), 0.1)])
    trainer = Trainer(5, num_gpus=1, backend=backend)
    history = trainer.fit(net, [(x, x[:, :1])], lr=0.1)
    assert history["loss"][-1] < history["loss"][0]
    assert trainer.model.layers[1] is jax.nn.relu
