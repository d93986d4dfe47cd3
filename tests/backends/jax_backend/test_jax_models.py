"""``place`` of ``flax.nnx`` modules: in place, whole, and with what they share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from d2ldev import UnsupportedValueError, cpu, gpu


class Network(nnx.Module):
    """Statistics, randomness, a tie, and arrays in plain attributes."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(3, 3, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.plain = jnp.ones(2)
        self.kept = nnx.data({"masks": [jnp.ones(2), None, "a string"], "again": self.first})
        self.rngs = rngs

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


@pytest.fixture
def net(backend):
    with backend.on("cpu"):
        return Network()


def everything(backend, obj):
    """All arrays of an object, as Flax itself finds them."""
    return jax.tree.leaves(nnx.split(obj)[1])


def test_a_module_moves_in_place_and_whole(backend, net):
    variables = [net.first.kernel, net.norm.mean, net.norm.scale, net.rngs.dropout.key]
    assert backend.place(net, "gpu:1") is net
    assert {backend.device_of(x) for x in everything(backend, net)} == {gpu(1)}
    after = [net.first.kernel, net.norm.mean, net.norm.scale, net.rngs.dropout.key]
    assert all(now is then for now, then in zip(after, variables, strict=True))


def test_what_was_placed_is_committed(backend, net):
    backend.place(net, "gpu:0")
    assert all(x.committed for x in everything(backend, net))


def test_everything_that_flax_knows_of_is_named(backend, net):
    named = {id(x) for x in backend.named_tensors(net).values()}
    assert {id(x) for x in everything(backend, net)} <= named


def test_a_shared_variable_stays_one(backend, net):
    backend.place(net, "gpu:1")
    assert net.second.kernel is net.first.kernel
    assert net.kept["again"] is net.first


def test_a_shared_variable_is_copied_once(backend, net, monkeypatch):
    copied = []
    original = backend._copy_all
    monkeypatch.setattr(
        backend, "_copy_all", lambda xs, native: copied.extend(xs) or original(xs, native)
    )
    backend.place(net, "gpu:1")
    assert len(copied) == len({id(x) for x in copied})
    assert net.first.kernel[...].shape == (3, 3)


def test_the_metadata_and_type_of_a_variable_stay(backend):
    variable = nnx.Param(jnp.ones(2), note="mine")
    backend.place(variable, "gpu:0")
    assert (type(variable), variable.note) == (nnx.Param, "mine")


def test_plain_attributes_move(backend, net):
    backend.place(net, "gpu:1")
    assert backend.device_of(net.plain) is gpu(1)
    assert backend.device_of(net.kept["masks"][0]) is gpu(1)
    assert net.kept["masks"][1:] == [None, "a string"]


def test_batch_norm_goes_on_with_its_statistics(backend, net):
    x = backend.rand((8, 3), seed=0)
    net.norm(x)
    before = net.norm.mean[...].tolist()
    backend.place(net, "gpu:0")
    assert net.norm.mean[...].tolist() == before
    net.norm(backend.to(x, "gpu:0"))
    assert backend.device_of(net.norm.mean[...]) is gpu(0)
    assert net.norm.mean[...].tolist() != before


def test_dropout_goes_on_with_its_random_numbers(backend):
    x = backend.ones((64, 3))
    moved, stayed = (Network().dropout for _ in range(2))
    for dropout in (moved, stayed):
        dropout(x)
    backend.place(moved, "gpu:0")
    assert moved(backend.to(x, "gpu:0")).tolist() == stayed(x).tolist()


def test_a_placed_module_computes_where_it_is(backend, net):
    net.eval()
    x = backend.rand((4, 3), seed=0)
    expected = net(x)
    y = backend.place(net, "gpu:1")(backend.to(x, "gpu:1"))
    assert backend.device_of(y) is gpu(1)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_a_failure_leaves_a_module_where_it_was(backend, net, monkeypatch):
    def fail(xs, native):
        raise MemoryError

    monkeypatch.setattr(backend, "_copy_all", fail)
    kernel = net.first.kernel[...]
    with pytest.raises(MemoryError):
        backend.place(net, "gpu:0")
    assert net.first.kernel[...] is kernel
    assert set(backend.placement(net).values()) == {cpu()}


def test_a_module_with_a_sharded_parameter_is_left_alone(backend, net):
    mesh = Mesh(np.array([backend.native("gpu:0"), backend.native("gpu:1")]), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec())
    net.first.bias = nnx.Param(jax.device_put(jnp.ones(3), sharding))
    with pytest.raises(UnsupportedValueError, match="spread over 2 devices"):
        backend.place(net, "gpu:0")
    assert backend.device_of(net.first.kernel[...]) is cpu()


def test_a_module_without_arrays_is_no_hindrance(backend):
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert backend.place(abstract, "gpu:0") is abstract
    assert dict(backend.placement(abstract)) == {}


def test_a_variable_with_a_nesting_moves(backend):
    variable = nnx.Variable({"x": jnp.ones(1), "n": 3})
    backend.place([variable], "gpu:0")
    assert backend.device_of(variable["x"]) is gpu(0)
    assert variable["n"] == 3


def test_a_state_moves(backend, net):
    state = nnx.state(net)
    placed = backend.place(state, "gpu:1")
    assert {backend.device_of(x) for x in jax.tree.leaves(placed)} == {gpu(1)}


def test_rngs_move(backend):
    rngs = nnx.Rngs(0)
    backend.place(rngs, "gpu:1")
    assert backend.device_of(rngs.params()) is gpu(1)


def test_metrics_move(backend):
    metric = nnx.metrics.Average()
    metric.update(values=jnp.arange(4.0))
    backend.place(metric, "gpu:0")
    assert set(backend.placement(metric).values()) == {gpu(0)}
    assert float(metric.compute()) == 1.5


@pytest.mark.parametrize("method", ["to", "copy"])
def test_a_module_in_a_batch_is_refused_and_place_is_named(backend, net, method):
    with pytest.raises(UnsupportedValueError, match=r"(?s)at 1 is.*backend\.place"):
        getattr(backend, method)([jnp.ones(1), net], "gpu:0")
    assert backend.device_of(net.plain) is cpu()


def test_a_module_cannot_be_placed_while_it_is_traced(backend, net):
    def f(net):
        backend.place(net, "gpu:0")

    with pytest.raises(UnsupportedValueError, match="traced"):
        nnx.jit(f)(net)
    assert backend.device_of(net.plain) is cpu()
