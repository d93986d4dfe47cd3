"""Several GPUs: a mirrored strategy over two virtual GPUs."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_copies import check_copies_of_a_changed_model
from several_gpus import (
    CLASSES,
    FEATURES,
    PAIR,
    TOLERANCE,
    assert_same_as_one,
    flat_batches,
    train,
)
from what_changes import measure, read_column

from d2ldev import Trainer, UnsupportedValueError, gpu

layers = keras.layers


def dense():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES)])


def unbuilt():
    keras.utils.set_random_seed(0)
    return keras.Sequential([layers.Dense(CLASSES)])


def normalize(**options):
    keras.utils.set_random_seed(0)
    norm = layers.BatchNormalization(momentum=0.0, **options)
    return keras.Sequential([keras.Input((FEATURES,)), norm, layers.Dense(CLASSES)])


def drop_some():
    keras.utils.set_random_seed(0)
    weights = layers.Dense(2, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((32,)), layers.Dropout(0.5), weights])


def own_output(prediction, y):
    """Return a loss by which each of two examples trains weights of its own."""
    return tf.reduce_mean(tf.gather(prediction, y, axis=1, batch_dims=1))


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.dense = layers.Dense(CLASSES)

    def call(self, x):
        return self.dense(x)

    def training_step(self, batch):
        x, y = batch
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, self(x))


def test_a_model_without_shapes_learns_like_on_one_device(backend):
    assert_same_as_one(backend, unbuilt, flat_batches(), loss="cross_entropy", lr=0.1)


class OfRows(keras.Model):
    """A model of the sums of rows that have several lengths."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.dense = layers.Dense(CLASSES)

    def call(self, x):
        return self.dense(tf.reduce_sum(x, 1))


def test_rows_of_several_lengths_are_split(backend):
    data = [
        (tf.RaggedTensor.from_row_lengths(x, [0, 2, 1, 0, 2][: len(x)]), y)
        for x, y in flat_batches(10)
    ]
    assert_same_as_one(backend, OfRows, data, loss="cross_entropy", lr=0.1)


class Adding(keras.Model):
    """A model that adds a loss of its outputs."""

    def __init__(self, added):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.dense, self.added = layers.Dense(CLASSES), added

    def call(self, x):
        outputs = self.dense(x)
        self.add_loss(self.added(outputs))
        return outputs


def test_an_added_loss_sees_a_part(backend):
    mean = tf.reduce_mean
    for added, is_same in ((lambda x: mean(x**2), True), (lambda x: mean(x) ** 2, False)):
        found = [
            train(backend, partial(Adding, added), flat_batches(), n, loss="cross_entropy")[0]
            for n in (1, 2)
        ]
        one, two = (list(values.values()) for values in found)
        pairs = zip(one, two, strict=True)
        assert all(np.allclose(a, b, **TOLERANCE) for a, b in pairs) is is_same


def test_a_training_step_of_the_model_sees_a_part(backend):
    assert_same_as_one(backend, Own, flat_batches(), lr=0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda _: keras.optimizers.Nadam(0.1),
        lambda _: keras.optimizers.SGD(0.1, use_ema=True),
        lambda _: keras.optimizers.SGD(0.1, clipnorm=0.1),
        lambda _: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
        lambda _: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, clipvalue=0.01)),
    ],
    ids=["nadam", "ema", "clipnorm", "global_clipnorm", "clipvalue"],
)
def test_an_optimizer_of_keras_is_trained_on(backend, optimizer):
    assert_same_as_one(
        backend, dense, flat_batches(), loss="cross_entropy", fits=2, optimizer=optimizer
    )


@pytest.mark.parametrize(
    "options",
    [{"use_ema": True, "ema_overwrite_frequency": 2}, {"gradient_accumulation_steps": 2}],
    ids=["ema", "accumulation"],
)
def test_an_optimizer_with_conditions_is_refused(backend, options):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, **options))
    with pytest.raises(UnsupportedValueError, match="on 2 devices"):
        backend.learner(dense(), optimizer=optimizer, devices=["gpu:0", "gpu:1"])


def test_optimizers_for_some_variables_are_refused(backend):
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    one = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.MultiOptimizer(lambda _: one)
    with pytest.raises(UnsupportedValueError, match="for some variables"):
        backend.learner(dense(), optimizer=optimizer, devices=["gpu:0", "gpu:1"])


def test_a_loss_object_of_keras_is_a_mean(backend):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    assert_same_as_one(backend, dense, flat_batches(), loss=loss, lr=0.1)


def test_a_compiled_model_is_trained_as_on_one(backend):
    def compile_model():
        net = dense()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(0.1), loss)
        return net

    assert_same_as_one(backend, compile_model, flat_batches())


def test_regularization_counts_where_no_example_does(backend):
    def regularize():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(CLASSES, kernel_regularizer="l2")]
        )

    x, y = flat_batches(4, 4)[0]
    data = [{"x": x, "y": y, "sample_weight": np.zeros(4, "float32")}]
    assert_same_as_one(backend, regularize, data, loss="cross_entropy", lr=0.1)


@pytest.mark.parametrize(("precision", "digits"), [("bf16", 2e-3), ("fp16", 2e-4)])
def test_fewer_bits_are_as_few_as_on_one(backend, precision, digits):
    assert_same_as_one(
        backend,
        dense,
        flat_batches(),
        loss="cross_entropy",
        lr=0.1,
        precision=precision,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        tolerance={"rtol": digits, "atol": digits},
    )


def test_it_computes_under_strict(backend):
    with backend.strict():
        assert_same_as_one(
            backend, dense, flat_batches(), loss="cross_entropy", lr=0.1, metrics=["accuracy"]
        )


def test_each_virtual_gpu_has_masks_of_its_own(backend):
    values, _ = train(backend, drop_some, PAIR, 2, loss=own_output)
    (weight,) = (value for value in values.values() if value.shape == (32, 2))
    assert ((weight[:, 0] != 0) != (weight[:, 1] != 0)).any()
    assert not weight.all()


def test_statistics_are_those_of_the_first_device(backend):
    x, y = flat_batches(4, 4)[0]
    values, _ = train(backend, normalize, [(x, y)], 2, loss="cross_entropy")
    (mean,) = (value for name, value in values.items() if "moving_mean" in name)
    np.testing.assert_allclose(mean, x[:2].mean(0), rtol=1e-5)


def test_synchronized_statistics_are_those_of_the_whole_batch(backend):
    assert_same_as_one(
        backend,
        lambda: normalize(synchronized=True),
        flat_batches(4, 4),
        loss="cross_entropy",
        lr=0.1,
    )


def test_variables_are_the_users_own_again(backend):
    net = backend.place(dense(), "gpu:0")
    own = [variable.value for variable in net.variables]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    learner = backend.learner(
        net, optimizer=optimizer, loss="cross_entropy", devices=["gpu:0", "gpu:1"]
    )
    x, y = backend.to(flat_batches(4, 4)[0], "gpu:0")
    learner.step((x,), y)
    assert len(learner._strategy.experimental_local_results(net.variables[0].value)) == 2
    learner.sync()
    assert all(a.value is b for a, b in zip(net.variables, own, strict=True))
    assert set(backend.placement([net, optimizer]).values()) == {gpu(0)}
    with tf.device(backend.native("gpu:0")), tf.GradientTape() as tape:
        loss = tf.reduce_sum(net(x))
    gradients = tape.gradient(loss, net.trainable_variables)
    optimizer.apply(gradients, net.trainable_variables)


def test_a_module_of_tensorflow_is_refused(backend):
    class Scale(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(1.0)

        def __call__(self, x):
            return x * self.weight

    with pytest.raises(UnsupportedValueError, match="on 2 devices"):
        backend.learner(Scale(), devices=["gpu:0", "gpu:1"])


def test_a_model_without_a_configuration_is_not_replicated(backend):
    class Closed(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x):
            return self.inner(x)

    with pytest.raises(UnsupportedValueError, match="get_config"):
        backend.replicate(Closed(lambda x: x), ["cpu"])


def test_the_copy_of_a_changed_layer_lacks_a_variable(backend):
    check_copies_of_a_changed_model(backend)


@pytest.mark.parametrize(("is_global", "other"), [(False, "global"), (True, "local")])
def test_statistics_that_a_layer_has_not_are_refused(backend, is_global, other):
    own = "global" if is_global else "local"
    options = {"loss": "cross_entropy", "lr": 0.1}
    net, data = normalize(synchronized=is_global), flat_batches()
    Trainer(1, 2, backend=backend, batch_norm=own).fit(net, data, **options)
    with pytest.raises(UnsupportedValueError, match=f"synchronized={not is_global}"):
        Trainer(1, 2, backend=backend, batch_norm=other).fit(net, data, **options)


def test_two_gpus_change_what_the_page_says(backend):
    assert measure(backend) == read_column("TensorFlow")
