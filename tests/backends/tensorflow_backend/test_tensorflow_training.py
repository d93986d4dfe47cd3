"""Optimizers after ``place``: training goes on with the same state and exactly the same losses."""

import keras
import pytest
import tensorflow as tf

from d2ldev import gpu

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.5),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaling the loss": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 8)),
}
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.fixture
def train(tensorflow_backend):
    """Makes steps with a model and an optimizer; the losses, as bits."""
    x, target = (tensorflow_backend.rand((8, n), seed=n) for n in (3, 1))

    def training(net, optimizer, steps):
        losses = []
        for _ in range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x) - target) ** 2)
            parameters = net.trainable_variables
            optimizer.apply(tape.gradient(loss, parameters), parameters)
            losses.append(float(loss))
        return losses

    return training


@pytest.fixture
def expected(tensorflow_backend, train):
    """The losses of a twin that is never moved."""
    return lambda make, steps: train(tensorflow_backend.mlp([3, 4, 1]), make(), steps)


def placed_on(backend, obj):
    return set(backend.placement(obj).values())


@optimizers
def test_training_goes_on_after_both_have_moved_together(tensorflow_backend, train, expected, make):
    net, optimizer = tensorflow_backend.mlp([3, 4, 1]), make()
    losses = train(net, optimizer, 3)
    tensorflow_backend.place({"net": net, "optimizer": optimizer}, "gpu:1")
    losses += train(net, optimizer, 4)
    assert losses == expected(make, 7)
    assert placed_on(tensorflow_backend, [net, optimizer]) == {gpu(1)}


@optimizers
def test_training_goes_on_after_one_has_moved_after_the_other(
    tensorflow_backend, train, expected, make
):
    net, optimizer = tensorflow_backend.mlp([3, 4, 1]), make()
    losses = train(net, optimizer, 2)
    tensorflow_backend.place(optimizer, "gpu:0")
    losses += train(net, optimizer, 2)
    tensorflow_backend.place(net, "gpu:0")
    losses += train(net, optimizer, 3)
    assert losses == expected(make, 7)
    assert placed_on(tensorflow_backend, [net, optimizer]) == {gpu(0)}


@optimizers
def test_an_optimizer_that_is_not_built_makes_its_state_where_it_was_placed(
    tensorflow_backend, train, expected, make
):
    net = tensorflow_backend.mlp([3, 4, 1], device="gpu:1")
    optimizer = tensorflow_backend.place(make(), "gpu:1")
    assert train(net, optimizer, 4) == expected(make, 4)
    assert placed_on(tensorflow_backend, [net, optimizer]) == {gpu(1)}


def test_the_rate_and_the_steps_of_an_optimizer_move_with_it(tensorflow_backend, train):
    net, optimizer = tensorflow_backend.mlp([3, 1]), keras.optimizers.Adam(0.25)
    train(net, optimizer, 2)
    tensorflow_backend.place(optimizer, "gpu:1")
    assert (float(optimizer.learning_rate), int(optimizer.iterations)) == (0.25, 2)
    optimizer.learning_rate = 0.5
    assert tensorflow_backend.device_of(optimizer._learning_rate.value) is gpu(1)


def test_the_model_stays_when_its_optimizer_moves(tensorflow_backend, train):
    net, optimizer = tensorflow_backend.mlp([3, 1]), keras.optimizers.SGD(0.1, momentum=0.9)
    train(net, optimizer, 1)
    before = tensorflow_backend.placement(net)
    tensorflow_backend.place(optimizer, "gpu:1")
    assert tensorflow_backend.placement(net) == before


def test_scratch_parameters_are_trained_by_the_optimizer_that_knows_them(tensorflow_backend):
    weight = tf.Variable([[1.0], [2.0]])
    optimizer = keras.optimizers.Adam(0.1)
    for device in ("cpu", "gpu:0", "gpu:1", "cpu"):
        parameters = tensorflow_backend.place([weight], device)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(parameters[0] ** 2)
        optimizer.apply(tape.gradient(loss, parameters), parameters)
    assert int(optimizer.iterations) == 4
    assert float(weight[0, 0]) == pytest.approx(0.6, abs=0.01)


def test_a_step_under_tf_function_is_made_on_the_device(tensorflow_backend):
    net = tensorflow_backend.mlp([3, 1], device="gpu:1")
    optimizer = tensorflow_backend.place(keras.optimizers.SGD(0.1, momentum=0.9), "gpu:1")
    optimizer.build(net.trainable_variables)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(x) ** 2)
        parameters = net.trainable_variables
        optimizer.apply(tape.gradient(loss, parameters), parameters)
        return loss

    losses = [float(step(tf.ones((2, 3)) * 0.1)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert placed_on(tensorflow_backend, [net, optimizer]) == {gpu(1)}
