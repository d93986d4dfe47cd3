"""Keras' models and layers after ``place``: where they build, compute and train."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import cpu, gpu


@pytest.fixture
def x(tensorflow_backend):
    return tensorflow_backend.rand((6, 3), seed=0)


def placed_on(backend, obj):
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
def test_a_model_that_is_not_built_builds_where_it_was_placed(tensorflow_backend, make, x):
    net = tensorflow_backend.place(make(), "gpu:1")
    y = net(x)
    assert tensorflow_backend.device_of(y) is gpu(1)
    assert placed_on(tensorflow_backend, net) == {gpu(1)}


@models
def test_a_model_that_is_built_computes_the_same_where_it_was_placed(tensorflow_backend, make, x):
    net = make()
    before = net(x).numpy()
    tensorflow_backend.place(net, "gpu:1")
    after = net(x)
    assert tensorflow_backend.device_of(after) is gpu(1)
    assert placed_on(tensorflow_backend, net) == {gpu(1)}
    np.testing.assert_allclose(after.numpy(), before, rtol=1e-5, atol=1e-6)


def test_a_layer_with_layers_made_by_its_build_builds_them_there(tensorflow_backend):
    layer = tensorflow_backend.place(keras.layers.MultiHeadAttention(2, 2), "gpu:0")
    y = layer(tf.ones((1, 3, 4)), tf.ones((1, 3, 4)))
    assert tensorflow_backend.device_of(y) is gpu(0)
    assert placed_on(tensorflow_backend, layer) == {gpu(0)}


class Holder(keras.Model):
    """A model that Keras traces to build its one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x)


def test_a_placed_layer_of_a_model_that_was_not_builds_where_it_was_placed(tensorflow_backend, x):
    layer = tensorflow_backend.place(keras.layers.Dense(2), "gpu:1")
    y = Holder(layer)(x)
    assert placed_on(tensorflow_backend, layer) == {gpu(1)}
    assert tensorflow_backend.device_of(y) is gpu(1)


def test_a_functional_model_is_placed(tensorflow_backend, x):
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4)(inputs)
    net = keras.Model(inputs, [keras.layers.Dense(1)(hidden), keras.ops.sum(hidden, axis=1)])
    tensorflow_backend.place(net, "gpu:1")
    assert [tensorflow_backend.device_of(y) for y in net(x)] == [gpu(1), gpu(1)]


def test_the_layers_of_a_model_can_be_on_several_devices(tensorflow_backend, x):
    net = tensorflow_backend.place(MODELS["sequential"](), "gpu:0")
    first, last = net.layers
    tensorflow_backend.place(last, "gpu:1")
    y = net(x)
    assert tensorflow_backend.device_of(y) is gpu(1)
    assert placed_on(tensorflow_backend, first) == {gpu(0)}
    assert placed_on(tensorflow_backend, last) == {gpu(1)}


def test_a_model_comes_back_to_the_cpu(tensorflow_backend, x):
    net = tensorflow_backend.place(MODELS["sequential"](), "gpu:0")
    tensorflow_backend.place(net, "cpu")
    assert tensorflow_backend.device_of(net(x)) is cpu()
    assert placed_on(tensorflow_backend, net) == {cpu()}


def test_the_same_variables_stay_in_the_model(tensorflow_backend, x):
    net = MODELS["subclass"]()
    net(x)
    variables, raw = list(net.variables), net.raw
    tensorflow_backend.place(net, "gpu:1")
    assert all(now is then for now, then in zip(net.variables, variables, strict=True))
    assert net.raw is raw


def test_the_classes_of_keras_are_left_alone(tensorflow_backend, x):
    tensorflow_backend.place(MODELS["sequential"](), "gpu:1")
    other = MODELS["sequential"]()
    assert tensorflow_backend.device_of(other(x)) is cpu()
    assert placed_on(tensorflow_backend, other) == {cpu()}


def test_strings_and_tables_of_a_model_stay_on_the_host(tensorflow_backend):
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
    lookup.words = tf.constant(["a", "b"])
    net = keras.Sequential([lookup, keras.layers.Embedding(3, 2)])
    tensorflow_backend.place(net, "gpu:0")
    y = net(tf.constant([["a"], ["b"]]))
    assert y.shape == (2, 1, 2)
    assert placed_on(tensorflow_backend, net) == {gpu(0)}


def test_a_compiled_model_is_trained_where_it_was_placed(tensorflow_backend, x):
    net = tensorflow_backend.place(MODELS["sequential"](), "gpu:1")
    net.compile("adam", "mse")
    net.fit(x, np.ones((6, 1)), epochs=2, verbose=0)
    assert placed_on(tensorflow_backend, net.layers) == {gpu(1)}


def compiled(jit):
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    net.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=jit)
    return net


def losses(net, x, epochs):
    return net.fit(x, np.ones((6, 1)), epochs=epochs, shuffle=False, verbose=0).history["loss"]


def test_fit_goes_on_after_the_move_as_if_nothing_had_been(tensorflow_backend, x):
    moved, twin = compiled(False), compiled(False)
    expected = losses(twin, x, 6)
    found = losses(moved, x, 3)
    tensorflow_backend.place(moved, "gpu:1")
    found += losses(moved, x, 3)
    assert found == expected
    assert placed_on(tensorflow_backend, moved) == {gpu(1)}
    assert placed_on(tensorflow_backend, moved.optimizer) == {gpu(1)}


def test_predict_and_evaluate_see_the_memory_of_after_the_move(tensorflow_backend, x):
    net = compiled(False)
    before = net.predict(x, verbose=0), net.evaluate(x, np.ones((6, 1)), verbose=0)
    tensorflow_backend.place(net, "gpu:0")
    for variable in net.trainable_variables:
        variable.assign(variable * 2.0)
    after = net.predict(x, verbose=0), net.evaluate(x, np.ones((6, 1)), verbose=0)
    assert not np.allclose(after[0], before[0])
    assert after[1] != before[1]


def test_a_function_that_was_traced_before_the_move_fails_and_forgets_nothing(tensorflow_backend):
    net = tensorflow_backend.mlp([3, 2])
    traced = tf.function(lambda x: net(x), autograph=False)
    traced(tf.ones((1, 3)))
    tensorflow_backend.place(net, "gpu:1")
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(tf.ones((1, 3)))


def test_a_model_that_did_not_move_keeps_its_traced_functions(tensorflow_backend, x):
    net = compiled(False)
    losses(net, x, 1)
    function = net.train_function
    tensorflow_backend.place(net, "cpu")
    assert net.train_function is function


def test_a_model_is_moved_for_good_while_a_function_is_traced(tensorflow_backend):
    net = tensorflow_backend.mlp([3, 2])

    @tf.function(autograph=False)
    def traced(x):
        tensorflow_backend.place(net, "gpu:1")
        return net(x)

    assert traced(tf.ones((1, 3))).shape == (1, 2)
    assert placed_on(tensorflow_backend, net) == {gpu(1)}


def test_seeds_of_dropout_go_on_after_the_move(tensorflow_backend):
    moved, twin = (keras.layers.Dropout(0.5, seed=3) for _ in range(2))
    ones = tf.ones((4, 4))
    for layer in (moved, twin):
        layer(ones, training=True)
    tensorflow_backend.place(moved, "gpu:1")
    np.testing.assert_array_equal(moved(ones, training=True), twin(ones, training=True))


def test_statistics_go_on_after_the_move(tensorflow_backend, x):
    moved, twin = (keras.layers.BatchNormalization() for _ in range(2))
    for layer in (moved, twin):
        layer(x, training=True)
    tensorflow_backend.place(moved, "gpu:1")
    for layer in (moved, twin):
        layer(x * 2.0, training=True)
    np.testing.assert_array_equal(moved.moving_mean, twin.moving_mean)
    assert tensorflow_backend.device_of(moved.moving_mean.value) is gpu(1)


# Of TensorFlow's tensors under NumPy 2, wherever Keras makes arrays of them.
arrays_of_keras = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@arrays_of_keras
def test_a_placed_model_is_saved_and_read(tensorflow_backend, x, tmp_path):
    net = tensorflow_backend.mlp([3, 4, 1], device="gpu:1")
    net.save(tmp_path / "net.keras")
    net.save_weights(tmp_path / "net.weights.h5")
    again = keras.models.load_model(tmp_path / "net.keras")
    np.testing.assert_array_equal(again(x), net(x))
    other = tensorflow_backend.mlp([3, 4, 1], seed=9, device="gpu:0")
    other.load_weights(tmp_path / "net.weights.h5")
    np.testing.assert_array_equal(other(x), net(x))
    assert placed_on(tensorflow_backend, other) == {gpu(0)}


def test_a_checkpoint_finds_the_variables_after_the_move(tensorflow_backend, tmp_path):
    net = tensorflow_backend.mlp([3, 1])
    saved = tf.train.Checkpoint(net=net).save(str(tmp_path / "net"))
    before = net.get_weights()
    tensorflow_backend.place(net, "gpu:1")
    net.layers[0].kernel.assign(tf.zeros((3, 1)))
    tf.train.Checkpoint(net=net).restore(saved).assert_existing_objects_matched()
    assert placed_on(tensorflow_backend, net) == {gpu(1)}
    np.testing.assert_array_equal(net.get_weights()[0], before[0])


@arrays_of_keras
@pytest.mark.parametrize("copied", [copy.deepcopy, keras.models.clone_model])
def test_a_copy_of_a_placed_model_has_its_own_variables(tensorflow_backend, x, copied):
    net = tensorflow_backend.mlp([3, 1], device="gpu:1")
    before = net(x).numpy()
    other = copied(net)
    other(x)
    for variable in other.variables:
        variable.assign(variable + 1.0)
    np.testing.assert_array_equal(net(x), before)
    assert placed_on(tensorflow_backend, net) == {gpu(1)}


def test_mixed_precision_is_placed(tensorflow_backend, x):
    net = keras.Sequential([keras.layers.Dense(2, dtype="mixed_bfloat16")])
    net(x)
    tensorflow_backend.place(net, "gpu:1")
    y = net(x)
    assert tensorflow_backend.dtype_of(y) == "bfloat16"
    assert tensorflow_backend.device_of(y) is gpu(1)


def test_a_variable_of_keras_in_a_pytree_is_placed(tensorflow_backend):
    variable = keras.Variable(np.ones(2, "float32"), name="w")
    tree = {"w": variable, "also": [variable]}
    assert tensorflow_backend.place(tree, "gpu:1") is tree
    assert tensorflow_backend.placement(tree) == {"w.w": gpu(1)}


def test_metrics_in_a_model_are_placed(tensorflow_backend):
    metric = keras.metrics.Mean()
    metric.update_state([1.0, 3.0])
    tensorflow_backend.place([metric], "gpu:1")
    metric.update_state([5.0])
    assert float(metric.result()) == 3
    assert placed_on(tensorflow_backend, [metric]) == {gpu(1)}
