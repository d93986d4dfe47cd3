"""Models: ``place`` of Flax's modules, optimizers and variables, and of parameter pytrees."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import d2ldev
from d2ldev import UnsupportedValueError, cpu, gpu

# -- modules ---------------------------------------------------------------------------------------


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
    """Return all arrays of an object, as Flax itself finds them."""
    return jax.tree.leaves(nnx.split(obj)[1])


def test_a_module_moves_in_place_and_whole(backend, net):
    variables = [net.first.kernel, net.norm.mean, net.norm.scale, net.rngs.dropout.key]
    assert backend.place(net, "gpu:1") is net
    assert {backend.device_of(x) for x in everything(backend, net)} == {gpu(1)}
    after = [net.first.kernel, net.norm.mean, net.norm.scale, net.rngs.dropout.key]
    assert all(now is then for now, then in zip(after, variables, strict=True))


def test_placed_arrays_are_committed(backend, net):
    backend.place(net, "gpu:0")
    assert all(x.committed for x in everything(backend, net))


def test_everything_that_flax_knows_of_is_named(backend, net):
    named = {id(x) for x in backend.named_tensors(net).values()}
    assert {id(x) for x in everything(backend, net)} <= named


def test_a_shared_variable_stays_one(backend, net):
    backend.place(net, "gpu:1")
    assert net.second.kernel is net.first.kernel
    assert net.kept["again"] is net.first


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


def test_a_module_with_a_sharded_parameter_is_left_alone(backend, net):
    mesh = Mesh(np.array([backend.native("gpu:0"), backend.native("gpu:1")]), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec())
    net.first.bias = nnx.Param(jax.device_put(jnp.ones(3), sharding))
    with pytest.raises(UnsupportedValueError, match="spread over 2 devices"):
        backend.place(net, "gpu:0")
    assert backend.device_of(net.first.kernel[...]) is cpu()


def test_an_attribute_whose_name_is_a_number_moves(backend):
    layers = nnx.Module()
    # As ``nnx.List`` of flax 0.12.0 keeps its items.
    vars(layers).update({0: nnx.Param(jnp.ones(2)), 1: jnp.zeros(2)})
    backend.place(layers, gpu(1))
    assert set(backend.placement(layers).values()) == {gpu(1)}
    assert set(backend.named_tensors(layers)) == {"0.value", "1"}


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


def test_a_variable_with_a_reference_is_refused(backend):
    option = "ref" if hasattr(nnx, "List") else "use_ref"
    variable = nnx.Param(jnp.ones(2), **{option: True})
    with pytest.raises(UnsupportedValueError, match=r"Param: it holds a jax\.Ref"):
        backend.place({"w": variable}, "gpu:0")


# -- mlp -------------------------------------------------------------------------------------------


def test_it_is_made_of_flax_s_layers(backend):
    net = backend.mlp([3, 4, 1])
    assert isinstance(net, nnx.Sequential)
    linears = [layer for layer in net.layers if isinstance(layer, nnx.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linears] == [(3, 4), (4, 1)]


def test_its_parameters_are_committed(backend):
    net = backend.mlp([3, 4, 1], device="gpu:1")
    assert all(x.committed for x in backend.named_tensors(net).values())


@pytest.mark.parametrize("default", ["cpu", "gpu:0"])
def test_nothing_of_it_goes_through_another_device(backend, default):
    backend.mlp([3, 4, 1], device="gpu:1")
    with (
        jax.default_device(backend.native(default)),
        jax.transfer_guard_device_to_device("disallow"),
    ):
        net = backend.mlp([3, 4, 1], device="gpu:1")
    assert set(backend.placement(net).values()) == {gpu(1)}


def test_it_keeps_float32_also_where_jax_has_float64(backend, configure):
    configure("jax_enable_x64", True)
    net = backend.mlp([3, 1])
    assert {x.dtype for x in backend.named_tensors(net).values()} == {jnp.dtype("float32")}


def test_it_can_be_differentiated_and_compiled(backend):
    net = backend.mlp([3, 4, 1], device="gpu:0")
    x = backend.rand((5, 3), seed=0, device="gpu:0")
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda net, x: (net(x) ** 2).mean()))(net, x)
    assert backend.device_of(loss) is gpu(0)
    assert set(backend.placement(gradients).values()) == {gpu(0)}


def test_its_names_are_those_of_the_layers(backend):
    names = sorted(backend.placement(backend.mlp([3, 4, 1])))
    assert names == [
        "layers.0.bias.value",
        "layers.0.kernel.value",
        "layers.2.bias.value",
        "layers.2.kernel.value",
    ]


# -- optimizers ------------------------------------------------------------------------------------

MADE_OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}


def regression(backend, device):
    """Return a model and data that it can learn."""
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
    return nnx.Optimizer(net, MADE_OPTIMIZERS[name](), wrt=nnx.Param)


@pytest.mark.parametrize("name", MADE_OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 3], ids=["new", "trained"])
def test_training_goes_on_with_the_losses_of_an_unmoved_twin(backend, name, trained):
    (net, x, y), (twin, *_) = regression(backend, "cpu"), regression(backend, "cpu")
    optimizer, twins = make(net, name), make(twin, name)
    train(net, optimizer, x, y, trained)
    backend.place((net, optimizer), "gpu:1")
    losses = train(net, optimizer, *backend.to((x, y), "gpu:1"), 3)
    np.testing.assert_allclose(losses, train(twin, twins, x, y, trained + 3)[trained:], rtol=1e-5)


@pytest.mark.parametrize("name", MADE_OPTIMIZERS)
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


# -- parameter pytrees -----------------------------------------------------------------------------


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x, *, train=False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x))
        return linen.Dense(1)(linen.relu(x))


@pytest.fixture
def variables(backend):
    with backend.on("cpu"):
        return Dense().init(jax.random.key(0), jnp.ones((1, 3)))


def devices(backend, tree):
    return {backend.device_of(x) for x in jax.tree.leaves(tree)}


class Encoding(linen.Module):
    table: jax.Array
    board: object

    def __call__(self, x):
        return x + self.table


def test_what_a_linen_module_was_made_of_moves_and_the_rest_stays(backend):
    board = object()
    module = Encoding(jnp.ones(3), board)
    assert backend.place(module, "gpu:1") is module
    assert backend.device_of(module.table) is gpu(1)
    assert module.board is board
    assert backend.device_of(module.apply({}, backend.ones(3, device="gpu:1"))) is gpu(1)


def test_a_table_of_a_linen_module_tells_where_its_parameters_are(backend):
    net = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(1)])
    summary = backend.summarize(net)
    assert summary.total.parameters == 0
    (note,) = summary.notes
    assert note.startswith("parameters are not in it, because init returns them; fix: ")
    shown = []
    line = note.partition("; fix: ")[2].replace("backend.summarize", "shown.append")
    exec(line, {"jax": jax, "net": net, "X": jnp.ones((1, 3)), "shown": shown})
    assert backend.summarize(shown).total.parameters == 21


def test_a_table_of_a_linen_module_and_its_variables_has_no_notes(backend, variables):
    summary = backend.summarize((Dense(), variables))
    assert summary.total.parameters > 0
    assert summary.notes == ()


def test_a_linen_module_is_placed_and_saved_without_its_parameters(backend, variables, tmp_path):
    net = Dense()
    assert backend.place(net, "gpu:1") is net
    backend.save({"net": net, "variables": variables}, tmp_path / "net.safetensors")


def test_linen_s_variables_move(backend, variables):
    placed = backend.place(variables, "gpu:1")
    assert devices(backend, placed) == {gpu(1)}
    assert jax.tree.structure(placed) == jax.tree.structure(variables)


def test_a_frozen_dict_stays_one(backend, variables):
    frozen = freeze(variables)
    placed = backend.place(frozen, "gpu:0")
    assert type(placed) is FrozenDict
    assert devices(backend, placed) == {gpu(0)}
    assert backend.place(placed, "gpu:0") is placed


def test_the_names_in_a_frozen_dict_are_its_keys(backend):
    tree = freeze({"params": {"dense": {"kernel": jnp.ones(1)}}})
    assert list(backend.placement(tree)) == ["params.dense.kernel"]


TRANSFORMATIONS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "schedule": optax.sgd(optax.exponential_decay(0.1, 10, 0.9)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "steps": optax.MultiSteps(optax.adam(0.1), 2),
    "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "ema": optax.chain(optax.scale_by_adam(), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_the_state_of_an_optimizer_moves_and_goes_on(backend, name):
    optimizer = TRANSFORMATIONS[name]

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
        apply_fn=Dense().apply, params=variables["params"], tx=TRANSFORMATIONS["adam"]
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
    """A node of JAX's without children."""


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


def test_a_tensor_already_there_is_returned_itself(backend):
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


# -- models without values ------------------------------------------------------------------------


def test_a_model_of_shapes_alone_is_refused(backend, tmp_path):
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(UnsupportedValueError, match=r"\.value has a shape and no values") as error:
        backend.place(abstract, gpu(0))
    assert "outside of nnx.eval_shape" in error.value.fix
    with pytest.raises(UnsupportedValueError, match="has a shape and no values"):
        backend.save(abstract, tmp_path / "net.safetensors")


def test_a_bound_module_is_refused_and_its_variables_are_placed(backend):
    module = linen.Dense(2)
    variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
    with pytest.raises(UnsupportedValueError, match="variables are bound to it") as error:
        backend.place(module.bind(variables), gpu(0))
    assert "unbind()" in error.value.fix
    module, variables = module.bind(variables).unbind()
    placed, variables = backend.place((module, variables), gpu(0))
    assert placed is module
    assert {*backend.placement(variables).values()} == {gpu(0)}
