"""Keras' models and layers, ``tf.Module``s and variables after ``place``."""

import copy
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import D2LDevWarning, UnsupportedValueError, cpu, gpu

# -- Keras -----------------------------------------------------------------------------------------


@pytest.fixture
def x(backend):
    return backend.rand((6, 3), seed=0)


def list_devices(backend, obj):
    return set(backend.placement(obj).values())


class Blocks(keras.Model):
    """A model of one's own, with layers and tensors in attributes."""

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(4), keras.layers.BatchNormalization()]
        self.heads = {"a": keras.layers.Dense(1)}
        self.scale = tf.constant([2.0])
        self._hidden = tf.constant([1.0])
        self.raw = tf.Variable([3.0])

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) * self.scale * self._hidden * self.raw


def test_a_keras_that_makes_no_model_without_a_layer_is_looked_through(run):
    # Keras 3.10 to 3.13. What is made for the question takes no name that a user's layer would get.
    names, following = run(
        """
import keras
from keras.src.ops.function import Function
make = Function.__init__
def connected(self, inputs, outputs, **options):
    if inputs is outputs:
        raise ValueError("`inputs` not connected to `outputs`")
    make(self, inputs, outputs, **options)
Function.__init__ = connected
from d2ldev import tensorflow as d2l
net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
show(list(d2l.named_tensors(net)))
show([keras.layers.Identity().name, keras.Sequential().name])
"""
    )
    assert len(names) == 2
    assert following == ["identity", "sequential_1"]


MODELS = {
    "sequential": lambda: keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)]),
    "dropout and statistics": lambda: keras.Sequential(
        [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    ),
    "subclass": Blocks,
    "layer": lambda: keras.layers.Dense(2),
    "recurrent": lambda: keras.Sequential([keras.layers.Reshape((3, 1)), keras.layers.LSTM(4)]),
}


models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@models
def test_a_model_that_is_not_built_builds_where_it_was_placed(backend, make, x):
    net = backend.place(make(), "gpu:1")
    y = net(x)
    assert backend.device_of(y) is gpu(1)
    assert list_devices(backend, net) == {gpu(1)}


@models
def test_a_model_that_is_built_computes_the_same_where_it_was_placed(backend, make, x):
    net = make()
    before = net(x).numpy()
    backend.place(net, "gpu:1")
    after = net(x)
    assert backend.device_of(after) is gpu(1)
    assert list_devices(backend, net) == {gpu(1)}
    np.testing.assert_allclose(after.numpy(), before, rtol=1e-5, atol=1e-6)


def test_a_layer_with_layers_made_by_its_build_builds_them_there(backend):
    layer = backend.place(keras.layers.MultiHeadAttention(2, 2), "gpu:0")
    y = layer(tf.ones((1, 3, 4)), tf.ones((1, 3, 4)))
    assert backend.device_of(y) is gpu(0)
    assert list_devices(backend, layer) == {gpu(0)}


class Wrapper(keras.Model):
    """A model that Keras traces to build its one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


def test_a_placed_layer_of_a_model_that_was_not_builds_where_it_was_placed(backend, x):
    layer = backend.place(keras.layers.Dense(2), "gpu:1")
    y = Wrapper(layer)(x)
    assert list_devices(backend, layer) == {gpu(1)}
    assert backend.device_of(y) is gpu(1)


def test_a_functional_model_is_placed(backend, x):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4)(inputs)
    net = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.ops.sum(hidden, axis=1)])
    backend.place(net, "gpu:1")
    assert [backend.device_of(y) for y in net(x)] == [gpu(1), gpu(1)]


def test_the_layers_of_a_model_can_be_on_several_devices(backend, x):
    net = backend.place(MODELS["sequential"](), "gpu:0")
    first, last = net.layers
    backend.place(last, "gpu:1")
    y = net(x)
    assert backend.device_of(y) is gpu(1)
    assert list_devices(backend, first) == {gpu(0)}
    assert list_devices(backend, last) == {gpu(1)}


def test_the_same_variables_stay_in_the_model(backend, x):
    net = MODELS["subclass"]()
    net(x)
    variables, raw = list(net.variables), net.raw
    backend.place(net, "gpu:1")
    assert all(now is then for now, then in zip(net.variables, variables, strict=True))
    assert net.raw is raw


def test_the_classes_of_keras_are_left_alone(backend, x):
    backend.place(MODELS["sequential"](), "gpu:1")
    other = MODELS["sequential"]()
    assert backend.device_of(other(x)) is cpu()
    assert list_devices(backend, other) == {cpu()}


def test_strings_and_tables_of_a_model_stay_on_the_host(backend):
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    lookup.words = tf.constant(["a", "b"])
    net = keras.Sequential([lookup, keras.layers.Embedding(3, 2)])
    backend.place(net, "gpu:0")
    y = net(tf.constant([["a"], ["b"]]))
    assert y.shape == (2, 1, 2)
    assert list_devices(backend, net) == {gpu(0)}


def test_a_compiled_model_is_trained_where_it_was_placed(backend, x):
    net = backend.place(MODELS["sequential"](), "gpu:1")
    net.compile("adam", "mse")
    net.fit(x, np.ones((6, 1)), epochs=2, verbose=0)
    assert list_devices(backend, net.layers) == {gpu(1)}


def compile_model(jit):
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    net.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=jit)
    return net


def losses(net, x, epochs):
    return net.fit(x, np.ones((6, 1)), epochs=epochs, shuffle=False, verbose=0).history["loss"]


def test_fit_goes_on_after_the_move_as_if_nothing_had_been(backend, x):
    moved, twin = compile_model(False), compile_model(False)
    expected = losses(twin, x, 6)
    found = losses(moved, x, 3)
    backend.place(moved, "gpu:1")
    found += losses(moved, x, 3)
    assert found == expected
    assert list_devices(backend, moved) == {gpu(1)}
    assert list_devices(backend, moved.optimizer) == {gpu(1)}


class WithDropout(keras.Model):
    """A subclassed model with dropout, whose seeds are a variable."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(4)
        self.dropout = keras.layers.Dropout(0.5, seed=1)
        self.outer = keras.layers.Dense(2)

    def call(self, x, training=False):
        return self.outer(self.dropout(self.inner(x), training=training))


def nest_model():
    """Return a functional model with a model in it, and statistics."""
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
    return keras.Model(inputs, keras.layers.Dense(2)(inner(inputs)))


def compile_all(net):
    """Compile for XLA, with metrics of the user's, by name and weighted, and moving averages."""
    net.compile(
        keras.optimizers.Adam(0.01, use_ema=True),
        "mse",
        metrics=["mae", keras.metrics.MeanSquaredError()],
        weighted_metrics=["mae"],
        jit_compile=True,
    )


def call_fit(net, x, y):
    net.fit(x, y, callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)


def call_all(net, x, y):
    net.fit(x, y, validation_data=(x, y), callbacks=[keras.callbacks.SwapEMAWeights()], verbose=0)
    net.evaluate(x, y, verbose=0)
    net.predict(x, verbose=0)
    net.train_on_batch(x, y)
    net.test_on_batch(x, y)
    net.predict_on_batch(x)


def places_by_keras(backend, net):
    """Return the devices of a model's, its optimizer's and its metrics' variables."""
    metrics = [variable for metric in net.metrics for variable in metric.variables]
    variables = [*net.variables, *net.optimizer.variables, *metrics]
    return {backend.device_of(variable.value) for variable in variables}


def compile_and_place(backend, net, x, compiled_at, call):
    y = np.ones(net(x).shape, np.float32)
    if compiled_at != "after":
        compile_all(net)
    if compiled_at == "used":
        call(net, x, y)
    backend.place(net, "gpu:1")
    if compiled_at == "after":
        compile_all(net)
    call(net, x, y)
    assert places_by_keras(backend, net) == list_devices(backend, net) == {gpu(1)}
    return y


@pytest.mark.parametrize("compiled_at", ["before", "after"])
def test_a_model_is_compiled_by_xla_where_it_was_placed(backend, compiled_at, x):
    compile_and_place(backend, WithDropout(), x, compiled_at, call_fit)


@pytest.mark.nightly
@pytest.mark.parametrize("compiled_at", ["before", "used", "after"])
@pytest.mark.parametrize("make", [MODELS["sequential"], WithDropout, nest_model])
def test_all_methods_are_compiled_by_xla_there_and_back(backend, make, compiled_at, x):
    net = make()
    y = compile_and_place(backend, net, x, compiled_at, call_all)
    backend.place(net, "cpu")
    call_all(net, x, y)
    assert places_by_keras(backend, net) == list_devices(backend, net) == {cpu()}


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_method_is_compiled_by_xla_again_after_the_move(backend, method, x):
    net = MODELS["sequential"]()
    net.compile("sgd", "mse", metrics=[keras.metrics.MeanSquaredError()], jit_compile=True)
    data = (x,) if method == "predict" else (x, np.ones(net(x).shape))
    before = getattr(net, method)(*data, verbose=0)
    backend.place(net, "gpu:1")
    np.testing.assert_allclose(getattr(net, method)(*data, verbose=0), before, rtol=1e-6)
    assert list_devices(backend, net) == {gpu(1)}


def test_the_metrics_of_a_compiled_model_are_listed_and_not_saved(backend, x, tmp_path):
    net = compile_model(False)
    losses(net, x, 1)
    listed = backend.placement(net)
    assert {name for name in listed if name.startswith("compiled.")} == {
        "compiled.0.loss_total",
        "compiled.1.loss_count",
    }
    backend.save(net, tmp_path / "net.st")
    assert not [name for name in backend.load(tmp_path / "net.st") if "compiled" in name]


def test_predict_and_evaluate_see_the_memory_of_after_the_move(backend, x):
    net = compile_model(False)
    before = net.predict(x, verbose=0), net.evaluate(x, np.ones((6, 1)), verbose=0)
    backend.place(net, "gpu:0")
    for variable in net.trainable_variables:
        variable.assign(variable * 2.0)
    after = net.predict(x, verbose=0), net.evaluate(x, np.ones((6, 1)), verbose=0)
    assert not np.allclose(after[0], before[0])
    assert after[1] != before[1]


def test_a_function_that_was_traced_before_the_move_fails_and_forgets_nothing(backend):
    net = backend.mlp([3, 2])
    traced = tf.function(lambda x: net(x), autograph=False)
    traced(tf.ones((1, 3)))
    backend.place(net, "gpu:1")
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(tf.ones((1, 3)))


def test_a_model_that_did_not_move_keeps_its_traced_functions(backend, x):
    net = compile_model(False)
    losses(net, x, 1)
    function = net.train_function
    backend.place(net, "cpu")
    assert net.train_function is function


def test_a_model_is_moved_for_good_while_a_function_is_traced(backend):
    net = backend.mlp([3, 2])

    @tf.function(autograph=False)
    def trace(x):
        backend.place(net, "gpu:1")
        return net(x)

    assert trace(tf.ones((1, 3))).shape == (1, 2)
    assert list_devices(backend, net) == {gpu(1)}


def test_seeds_of_dropout_go_on_after_the_move(backend):
    moved, twin = (keras.layers.Dropout(0.5, seed=3) for _ in range(2))
    ones = tf.ones((4, 4))
    for layer in (moved, twin):
        layer(ones, training=True)
    backend.place(moved, "gpu:1")
    np.testing.assert_array_equal(moved(ones, training=True), twin(ones, training=True))


def test_statistics_go_on_after_the_move(backend, x):
    moved, twin = (keras.layers.BatchNormalization() for _ in range(2))
    for layer in (moved, twin):
        layer(x, training=True)
    backend.place(moved, "gpu:1")
    for layer in (moved, twin):
        layer(x * 2.0, training=True)
    np.testing.assert_array_equal(moved.moving_mean, twin.moving_mean)
    assert backend.device_of(moved.moving_mean.value) is gpu(1)


# Of TensorFlow's tensors under NumPy 2, wherever Keras makes arrays of them.
arrays_of_keras = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@arrays_of_keras
def test_a_placed_model_is_saved_and_read(backend, x, tmp_path):
    net = backend.mlp([3, 4, 1], device="gpu:1")
    net.save(tmp_path / "net.keras")
    net.save_weights(tmp_path / "net.weights.h5")
    again = keras.models.load_model(tmp_path / "net.keras")
    np.testing.assert_array_equal(again(x), net(x))
    other = backend.mlp([3, 4, 1], seed=9, device="gpu:0")
    other.load_weights(tmp_path / "net.weights.h5")
    np.testing.assert_array_equal(other(x), net(x))
    assert list_devices(backend, other) == {gpu(0)}


def test_a_checkpoint_finds_the_variables_after_the_move(backend, tmp_path):
    net = backend.mlp([3, 1])
    saved = tf.train.Checkpoint(net=net).save(str(tmp_path / "net"))
    before = net.get_weights()
    backend.place(net, "gpu:1")
    net.layers[0].kernel.assign(tf.zeros((3, 1)))
    tf.train.Checkpoint(net=net).restore(saved).assert_existing_objects_matched()
    assert list_devices(backend, net) == {gpu(1)}
    np.testing.assert_array_equal(net.get_weights()[0], before[0])


@arrays_of_keras
@pytest.mark.parametrize("copied", [copy.deepcopy, keras.models.clone_model])
def test_a_copy_of_a_placed_model_has_its_own_variables(backend, x, copied):
    net = backend.mlp([3, 1], device="gpu:1")
    before = net(x).numpy()
    other = copied(net)
    other(x)
    for variable in other.variables:
        variable.assign(variable + 1.0)
    np.testing.assert_array_equal(net(x), before)
    assert list_devices(backend, net) == {gpu(1)}


def test_mixed_precision_is_placed(backend, x):
    net = keras.Sequential([keras.layers.Dense(2, dtype="mixed_bfloat16")])
    net(x)
    backend.place(net, "gpu:1")
    y = net(x)
    assert backend.dtype_of(y) == "bfloat16"
    assert backend.device_of(y) is gpu(1)


def test_a_variable_of_keras_in_a_pytree_is_placed(backend):
    variable = keras.Variable(np.ones(2, "float32"), name="w")
    tree = {"w": variable, "also": [variable]}
    assert backend.place(tree, "gpu:1") is tree
    assert backend.placement(tree) == {"w.w": gpu(1)}


def test_metrics_in_a_model_are_placed(backend):
    metric = keras.metrics.Mean()
    metric.update_state([1.0, 3.0])
    backend.place([metric], "gpu:1")
    metric.update_state([5.0])
    assert float(metric.result()) == 3
    assert list_devices(backend, [metric]) == {gpu(1)}


# -- TensorFlow ------------------------------------------------------------------------------------


class Linear(tf.Module):
    """A module with a method under ``tf.function``."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable([[2.0], [3.0]])
        self.scale = tf.constant(1.0)

    @tf.function(autograph=False)
    def __call__(self, x):
        return x @ self.weight * self.scale


class Holder(tf.Module):
    """A module with whatever it is given, in attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def on(device, value):
    with tf.device({"cpu": "/CPU:0", "gpu:0": "/CPU:1", "gpu:1": "/CPU:2"}[device]):
        return tf.Variable(value)


def test_a_method_that_was_traced_is_traced_again_after_the_move(backend):
    module = Linear()
    x = tf.constant([[1.0, 1.0]])
    assert float(module(x)[0, 0]) == 5
    backend.place(module, "gpu:1")
    module.weight.assign([[4.0], [5.0]])
    assert float(module(x)[0, 0]) == 9


def test_a_function_in_an_attribute_is_traced_again_after_the_move(backend):
    module = Holder(weight=tf.Variable([[2.0], [3.0]]))
    module.compute = tf.function(lambda x: x @ module.weight, autograph=False)
    x = tf.constant([[1.0, 1.0]])
    assert float(module.compute(x)[0, 0]) == 5
    backend.place(module, "gpu:1")
    module.weight.assign([[4.0], [5.0]])
    assert float(module.compute(x)[0, 0]) == 9


def test_a_function_for_xla_runs_in_the_scope_of_the_model_s_device(backend):
    net = backend.place(backend.mlp([3, 2]), "gpu:1")
    compute = tf.function(lambda x: net(x), autograph=False, jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="located in device"):
        compute(tf.ones((1, 3)))
    with backend.on("gpu:1"):
        assert backend.device_of(compute(tf.ones((1, 3)))) is gpu(1)


def test_a_method_of_another_module_keeps_its_trace(backend):
    moved, other = Linear(), Linear()
    x = tf.constant([[1.0, 1.0]])
    moved(x), other(x)
    before = other.__call__
    backend.place(moved, "gpu:1")
    assert other.__call__ is before


def test_references_to_a_variable_stay_valid(backend):
    variable = on("cpu", [1.0, 2.0])
    held = {"v": variable}
    backend.place(variable, "gpu:1")
    held["v"].assign_add([1.0, 1.0])
    assert variable.numpy().tolist() == [2, 3]
    assert backend.device_of(held["v"]) is gpu(1)


@pytest.mark.parametrize(
    "dtype", ["float32", "int32", "int64", "bool", "bfloat16", "complex64", "float8_e5m2"]
)
def test_a_variable_of_every_dtype_moves_with_its_values(backend, dtype):
    with tf.device("/CPU:0"):
        variable = tf.Variable(backend.ones((2, 3), dtype=dtype))
    backend.place(variable, "gpu:0")
    assert backend.device_of(variable) is gpu(0)
    assert backend.to_numpy(variable).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_variable_keeps_its_name_its_shape_and_whether_it_is_trained(backend):
    variable = tf.Variable([1.0], name="w", trainable=False, shape=tf.TensorShape([None]))
    before = (variable.name, variable.trainable, variable.shape, variable._unique_id)
    backend.place(variable, "gpu:1")
    after = (variable.name, variable.trainable, variable.shape, variable._unique_id)
    assert after[:2] == before[:2]
    assert after[2].as_list() == before[2].as_list()
    assert after[3] == before[3]
    variable.assign([1.0, 2.0, 3.0])
    assert variable.numpy().tolist() == [1, 2, 3]


def test_a_moved_variable_is_watched_by_a_tape(backend):
    variable = backend.place(tf.Variable(3.0), "gpu:1")
    with tf.GradientTape() as tape:
        y = variable * variable
    assert float(tape.gradient(y, variable)) == 6


def test_a_moved_variable_is_written_in_every_way(backend):
    variable = backend.place(tf.Variable([1.0, 2.0, 3.0]), "gpu:1")
    variable.assign_sub([1.0, 1.0, 1.0])
    variable.scatter_nd_update([[0]], [9.0])
    variable[1:2].assign([7.0])
    assert variable.numpy().tolist() == [9, 7, 2]
    assert backend.device_of(variable) is gpu(1)


def test_the_memory_on_the_old_device_is_given_back(backend):
    variable = tf.Variable(tf.ones(1000))
    old = variable.handle
    backend.place(variable, "gpu:0")
    left = tf.raw_ops.ReadVariableOp(resource=old, dtype=tf.float32)
    assert left.shape == (0,)


def test_a_moved_variable_ends_with_its_last_holder(backend):
    variable = tf.Variable([1.0])
    backend.place(variable, "gpu:1")
    ended = weakref.ref(variable)
    del variable
    gc.collect()
    assert ended() is None


def test_ties_survive(backend):
    variable = on("cpu", [1.0])
    module = Holder(a=variable, b=[variable], c=Holder(d=variable))
    backend.place(module, "gpu:1")
    assert module.a is module.b[0] is module.c.d is variable


def test_tensors_in_wrapped_containers_are_replaced_in_them(backend):
    x = tf.ones(2)
    module = Holder(
        mapping={"x": x, "inner": {"y": (x, [x])}}, pair=(x, on("cpu", 1.0)), names=["a", x]
    )
    backend.place(module, "gpu:0")
    found = [module.mapping["x"], module.mapping["inner"]["y"][0], module.pair[0], module.names[1]]
    assert {backend.device_of(each) for each in found} == {gpu(0)}
    assert len({id(each) for each in found}) == 1
    assert module.names[0] == "a"


def test_a_moved_module_is_tracked_as_before(backend, tmp_path):
    module = Holder(mapping={"x": tf.ones(2), "v": on("cpu", 1.0)}, pair=(on("cpu", 1.0), {"w": 2}))
    backend.place(module, "gpu:1")
    module.mapping["new"] = tf.Variable(5.0)
    path = tf.train.Checkpoint(m=module).save(str(tmp_path / "m"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any("mapping/new" in name for name in names)
    assert len(module.variables) == 3


def test_strings_in_a_module_stay_on_the_host(backend):
    module = Holder(words=tf.constant(["a"]), seen=tf.Variable(["b"]), weight=tf.Variable(1.0))
    backend.place(module, "gpu:0")
    assert backend.placement(module) == {"weight": gpu(0)}
    assert module.seen.numpy().tolist() == [b"b"]


def test_a_variable_of_strings_stays_on_the_host(backend):
    variable = tf.Variable(["a"])
    assert backend.place({"v": variable, "w": tf.Variable(1.0)}, "gpu:0")["v"] is variable
    assert backend.device_of(variable) is cpu()


def test_a_generator_goes_on_with_its_numbers(backend):
    moved, twin = (tf.random.Generator.from_seed(3) for _ in range(2))
    moved.normal((2,)), twin.normal((2,))
    backend.place(moved, "gpu:1")
    assert moved.normal((3,)).numpy().tolist() == twin.normal((3,)).numpy().tolist()
    assert backend.device_of(moved.state) is gpu(1)


def test_a_moved_module_is_exported(backend, tmp_path):
    module = Linear()
    backend.place(module, "gpu:1")
    x = tf.constant([[1.0, 1.0]])
    module(x)
    tf.saved_model.save(module, str(tmp_path / "module"))
    again = tf.saved_model.load(str(tmp_path / "module"))
    assert float(again(x)[0, 0]) == 5


def test_a_moved_variable_s_handle_says_whose_it_is(backend):
    variable = tf.Variable([1.0], name="w")
    before = vars(variable.handle)
    backend.place(variable, "gpu:1")
    assert vars(variable.handle) == before
    assert variable.handle._parent_trackable() is variable


def test_a_model_that_is_not_built_is_placed_and_not_saved(backend, tmp_path):
    model = keras.Sequential([keras.layers.Dense(2)])
    assert backend.place(model, gpu(1)) is model
    with pytest.raises(UnsupportedValueError, match="not made before it is built") as error:
        backend.save(model, tmp_path / "net.safetensors")
    assert error.value.fix == "model(X), with one batch"
    model(backend.ones((1, 3), device=gpu(1)))
    assert {*backend.placement(model).values()} == {gpu(1)}
    backend.save(model, tmp_path / "net.safetensors")


def test_a_table_of_a_model_that_is_not_built_has_the_line_that_builds_it(backend):
    (note,) = backend.summarize(keras.Sequential([keras.layers.Dense(2)])).notes
    assert note == "variables are not made before it is built; fix: model(X), with one batch"


class Attentive(tf.Module):
    """A module that leaves its attention weights in an attribute."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones((2, 1)))

    def __call__(self, x):
        self.attention_weights = tf.nn.softmax(x)
        return self.attention_weights @ self.weight


def test_a_module_whose_call_was_traced_is_listed_placed_and_copied(backend):
    net = Attentive()
    tf.function(net.__call__, autograph=False)(tf.ones((3, 2)))
    assert not hasattr(net.attention_weights, "numpy")
    assert backend.placement(net) == {"weight": cpu()}
    (copied,) = backend.replicate(net, ["gpu:1"])
    assert backend.placement(copied) == {"weight": gpu(1)}
    assert backend.placement(backend.place(net, "gpu:0")) == {"weight": gpu(0)}


def test_constants_of_keras_s_own_settings_are_not_named(backend, recwarn):
    dense = keras.layers.Dense(1, kernel_regularizer="l1", kernel_constraint="max_norm")
    net = backend.place(keras.Sequential([keras.Input((2,)), dense]), "gpu:0")
    assert {*backend.placement(net)} == {"layers.1.kernel", "layers.1.bias"}
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]
    with backend.strict():
        net(backend.ones((1, 2), device="gpu:0"))
        assert all(backend.device_of(x) is gpu(0) for x in net.losses)


def test_containers_of_a_module_are_listed_once(backend):
    module = tf.Module()
    module.by_name = {"a": tf.ones(2), "b": [tf.ones(3)]}
    module.listed = [tf.ones(1), {"c": tf.Variable(1.0)}]
    names = ["by_name.a", "by_name.b.0", "listed.0", "listed.1.c"]
    assert sorted(backend.placement(module)) == names
    with pytest.warns(D2LDevWarning, match=r"by_name\.b\.0 is on cpu"):
        backend.place(module, "gpu:0")
    assert backend.device_of(module.listed[1]["c"]) is gpu(0)
