"""``strict()`` and Keras: models, optimizers and ``fit`` on one device, and on two."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from d2ldev import DeviceMismatchError, gpu

IMAGES, SEQUENCES, FEATURES, WORDS = (8, 8, 3), (5, 6), (6,), (5,)


def attention():
    inputs = keras.Input(SEQUENCES)
    seen = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    seen = layers.LayerNormalization()(layers.Dropout(0.1, seed=1)(seen) + inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(seen)))


def stacked(*of):
    return keras.Sequential([*of, layers.Dense(1)])


MODELS = {
    "dense": (FEATURES, lambda: stacked(layers.Dense(4, activation="relu"))),
    "convolution": (
        IMAGES,
        lambda: stacked(
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
        ),
    ),
    "causal convolution": (
        SEQUENCES,
        lambda: stacked(layers.Conv1D(4, 2, padding="causal"), layers.GlobalMaxPooling1D()),
    ),
    "embedding": (
        WORDS,
        lambda: stacked(layers.Embedding(9, 4), layers.GlobalAveragePooling1D()),
    ),
    "LSTM": (SEQUENCES, lambda: stacked(layers.LSTM(4))),
    "masked GRU": (
        WORDS,
        lambda: stacked(
            layers.Embedding(9, 4, mask_zero=True), layers.Bidirectional(layers.GRU(3))
        ),
    ),
    "dropout": (FEATURES, lambda: stacked(layers.Dropout(0.1, seed=1), layers.GaussianNoise(0.01))),
    "attention": (SEQUENCES, attention),
}


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(1)
    yield
    keras.utils.set_random_seed(1)


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def kind(request):
    return request.param


def data_for(shape):
    generator = np.random.default_rng(0)
    if shape == WORDS:
        return generator.integers(0, 9, (4, *shape))
    return generator.random((4, *shape), "float32")


@pytest.fixture(params=["placed", "placed before it is built", "made there"])
def model(request, tensorflow_backend, kind):
    """A model on the second GPU, and its input in NumPy."""
    shape, make = kind
    x = data_for(shape)
    if request.param == "made there":
        with tensorflow_backend.on("gpu:1"):
            net = make()
            net(tensorflow_backend.asarray(x, device="gpu:1"))
    else:
        net = make()
        if request.param == "placed":
            net(x)
        tensorflow_backend.place(net, "gpu:1")
    return net, x


def test_a_model_is_trained_where_it_is(tensorflow_backend, model):
    net, x = model
    x, target = (tensorflow_backend.asarray(each, device="gpu:1") for each in (x, np.ones((4, 1))))
    optimizer, losses = keras.optimizers.Adam(0.01), []
    with tensorflow_backend.strict():
        for _ in range(8):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x, training=True) - tf.cast(target, "float32")) ** 2)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply(gradients, net.trainable_variables)
            losses.append(float(loss))
        computed = [loss, *map(tf.convert_to_tensor, gradients)]
    assert {tensorflow_backend.device_of(each) for each in computed} == {gpu(1)}
    assert set(tensorflow_backend.placement(net).values()) == {gpu(1)}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
def test_a_model_refuses_data_from_elsewhere(tensorflow_backend, model, device):
    net, x = model
    net(tensorflow_backend.asarray(x, device="gpu:1"))
    elsewhere = tensorflow_backend.asarray(x, device=device)
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError):
        net(elsewhere)


@pytest.mark.parametrize("eagerly", [True, False])
def test_a_model_is_fitted_to_arrays(tensorflow_backend, kind, eagerly):
    shape, make = kind
    x, net = data_for(shape), make()
    net(x)
    tensorflow_backend.place(net, "gpu:1")
    optimizer = tensorflow_backend.place(keras.optimizers.Adam(0.01), "gpu:1")
    net.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eagerly, jit_compile=False)
    with tensorflow_backend.strict():
        history = net.fit(x, np.ones((4, 1)), epochs=6, verbose=0, shuffle=False).history["loss"]
        net.train_on_batch(x, np.ones((4, 1)))
        assert np.isfinite(net.evaluate(x, np.ones((4, 1)), verbose=0)).all()
        assert net.predict(x, verbose=0).shape == (4, 1)
    assert history[-1] < history[0]
    assert set(tensorflow_backend.placement([net, optimizer]).values()) == {gpu(1)}


def schedule():
    return keras.optimizers.schedules.CosineDecay(0.1, 8)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, clipnorm=1.0),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaling the loss": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "schedule": lambda: keras.optimizers.Adam(schedule()),
}


@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_the_cpu(tensorflow_backend, make, is_placed):
    def trained(device):
        weight = tf.Variable(tensorflow_backend.rand((3, 2), seed=1, device=device))
        optimizer = make()
        if is_placed:
            tensorflow_backend.place([weight, optimizer], device)
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((weight - 1.0) ** 2)
            optimizer.apply(tape.gradient(loss, [weight]), [weight])
        assert str(tensorflow_backend.device_of(weight)) == device
        return weight.numpy().tobytes()

    with tensorflow_backend.strict():
        assert trained("gpu:1") == trained("cpu")


def test_an_optimizer_refuses_gradients_from_elsewhere(tensorflow_backend):
    with tensorflow_backend.strict():
        weight = tf.Variable(tensorflow_backend.ones((3, 2), device="gpu:0"))
        gradient = tensorflow_backend.ones((3, 2), device="gpu:1")
        with pytest.raises(DeviceMismatchError):
            keras.optimizers.SGD(0.1).apply([gradient], [weight])


def test_a_model_on_two_devices_is_trained_with_moves_between_them(tensorflow_backend):
    first = tensorflow_backend.mlp([3, 4, 4], device="gpu:0")
    second = tensorflow_backend.mlp([4, 4, 1], device="gpu:1")
    x = tensorflow_backend.rand((5, 3), seed=1, device="gpu:0")
    parameters = first.trainable_variables + second.trainable_variables
    with tensorflow_backend.strict():
        with tf.GradientTape() as tape:
            hidden = tensorflow_backend.to(tf.nn.relu(first(x)), "gpu:1")
            loss = tf.reduce_mean(second(hidden) ** 2)
        gradients = tape.gradient(loss, parameters)
        keras.optimizers.SGD(0.1).apply(gradients, parameters)
    places = [tensorflow_backend.device_of(each) for each in gradients]
    assert places == [gpu(0)] * 4 + [gpu(1)] * 4


def test_a_loss_takes_labels_from_numpy(tensorflow_backend):
    logits = tensorflow_backend.rand((4, 4), seed=1, device="gpu:1")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tensorflow_backend.strict():
        assert tensorflow_backend.device_of(loss(np.array([1, 2, 3, 0]), logits)) is gpu(1)


@pytest.mark.parametrize("of", [tf.nn.relu, tf.transpose, lambda x: tf.split(x, 2)[0]])
def test_gradients_are_where_the_tensor_is(tensorflow_backend, of):
    x = tensorflow_backend.rand((4, 4), seed=1, device="gpu:1")
    with tensorflow_backend.strict():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = of(x)
        assert tensorflow_backend.device_of(tape.gradient(y, x)) is gpu(1)
