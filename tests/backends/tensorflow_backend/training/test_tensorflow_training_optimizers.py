"""Keras' optimizers: placed, built once for what may be trained, and frozen layers."""

from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from d2ldev_tensorflow.provision import Around, Listed
from keras import layers

from d2ldev import CheckpointError, Trainer, UnsupportedValueError, gpu

# -- Placed ----------------------------------------------------------------------------------------


MOVED = {
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
    "momenta in a list": Listed,
    "around another": lambda: Around(keras.optimizers.Adam(0.1)),
}


moved = pytest.mark.parametrize("make", MOVED.values(), ids=MOVED)


@pytest.fixture
def train(backend):
    """Makes steps with a model and an optimizer; the losses, as bits."""
    x, target = (backend.rand((8, n), seed=n) for n in (3, 1))

    def train_model(net, optimizer, steps):
        losses = []
        for _ in range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x) - target) ** 2)
            parameters = net.trainable_variables
            optimizer.apply(tape.gradient(loss, parameters), parameters)
            losses.append(float(loss))
        return losses

    return train_model


@pytest.fixture
def expected(backend, train):
    """The losses of a twin that is never moved."""
    return lambda make, steps: train(backend.mlp([3, 4, 1]), make(), steps)


def list_devices(backend, obj):
    return set(backend.placement(obj).values())


@moved
def test_training_goes_on_after_both_have_moved_together(backend, train, expected, make):
    net, optimizer = backend.mlp([3, 4, 1]), make()
    losses = train(net, optimizer, 3)
    backend.place({"net": net, "optimizer": optimizer}, "gpu:1")
    losses += train(net, optimizer, 4)
    assert losses == expected(make, 7)
    assert list_devices(backend, [net, optimizer]) == {gpu(1)}


@moved
def test_training_goes_on_after_one_has_moved_after_the_other(backend, train, expected, make):
    net, optimizer = backend.mlp([3, 4, 1]), make()
    losses = train(net, optimizer, 2)
    backend.place(optimizer, "gpu:0")
    losses += train(net, optimizer, 2)
    backend.place(net, "gpu:0")
    losses += train(net, optimizer, 3)
    assert losses == expected(make, 7)
    assert list_devices(backend, [net, optimizer]) == {gpu(0)}


@moved
def test_an_optimizer_that_is_not_built_makes_its_state_where_it_was_placed(
    backend, train, expected, make
):
    net = backend.mlp([3, 4, 1], device="gpu:1")
    optimizer = backend.place(make(), "gpu:1")
    assert train(net, optimizer, 4) == expected(make, 4)
    assert list_devices(backend, [net, optimizer]) == {gpu(1)}


def test_the_rate_and_the_steps_of_an_optimizer_move_with_it(backend, train):
    net, optimizer = backend.mlp([3, 1]), keras.optimizers.Adam(0.25)
    train(net, optimizer, 2)
    backend.place(optimizer, "gpu:1")
    assert (float(optimizer.learning_rate), int(optimizer.iterations)) == (0.25, 2)
    optimizer.learning_rate = 0.5
    assert backend.device_of(optimizer._learning_rate.value) is gpu(1)


def test_the_model_stays_when_its_optimizer_moves(backend, train):
    net, optimizer = backend.mlp([3, 1]), keras.optimizers.SGD(0.1, momentum=0.9)
    train(net, optimizer, 1)
    before = backend.placement(net)
    backend.place(optimizer, "gpu:1")
    assert backend.placement(net) == before


def test_scratch_parameters_are_trained_by_the_optimizer_that_knows_them(backend):
    weight = tf.Variable([[1.0], [2.0]])
    optimizer = keras.optimizers.Adam(0.1)
    for device in ("cpu", "gpu:0", "gpu:1", "cpu"):
        parameters = backend.place([weight], device)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(parameters[0] ** 2)
        optimizer.apply(tape.gradient(loss, parameters), parameters)
    assert int(optimizer.iterations) == 4
    assert float(weight[0, 0]) == pytest.approx(0.6, abs=0.01)


def test_a_step_under_tf_function_is_made_on_the_device(backend):
    net = backend.mlp([3, 1], device="gpu:1")
    optimizer = backend.place(keras.optimizers.SGD(0.1, momentum=0.9), "gpu:1")
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
    assert list_devices(backend, [net, optimizer]) == {gpu(1)}


# -- A network whose layers are frozen and thawed --------------------------------------------------


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "averaging": lambda: keras.optimizers.Adam(0.1, use_ema=True),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.1)),
}


optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def network(backend, frozen=()):
    """Return three layers on the second virtual GPU."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
    )
    freeze(net, frozen)
    return backend.place(net, "gpu:1")


def freeze(net, frozen):
    """Freeze the layers with these numbers, and thaw the others."""
    for index, layer in enumerate(net.layers):
        layer.trainable = index not in frozen


def learner_of(backend, net, optimizer, **options):
    """Return a learner of labels."""
    return backend.learner(net, loss="cross_entropy", optimizer=optimizer, **options)


def batch_for(backend):
    """Return inputs and labels on the network's device."""
    x, y = backend.rand((6, 3), seed=0, device="gpu:1"), [0, 1, 0, 1, 1, 0]
    return (x,), backend.asarray(y, device="gpu:1")


def losses(learner, batch, count):
    """Return the losses of some steps on one batch."""
    return [float(learner.step(*batch)[0]) for _ in range(count)]


def values(obj):
    """Return the values of all of its variables, for ``changed``."""
    return [np.array(v.numpy()) for v in obj.variables]


def find_changed(obj, before):
    """Return for each of its variables whether its value has changed."""
    return [not np.array_equal(v, old) for v, old in zip(obj.variables, before, strict=True)]


@pytest.fixture
def batch(backend):
    return batch_for(backend)


@optimizers
def test_what_is_frozen_between_two_steps_stays_as_it_is(backend, batch, make):
    net = network(backend)
    learner = learner_of(backend, net, make())
    with backend.strict():
        losses(learner, batch, 2)
        freeze(net, [0, 1])
        before = values(net)
        losses(learner, batch, 4)
    assert find_changed(net, before) == [False] * 6 + [True] * 2


@optimizers
def test_thawed_parameters_keep_their_slots(backend, batch, make):
    """As in a loop of one's own, with an optimizer that was built for everything."""
    net, optimizer = network(backend), make()
    learner = learner_of(backend, net, optimizer)
    losses(learner, batch, 2)
    slots = {id(v): np.array(v.numpy()) for v in optimizer.variables if "dense_kernel" in v.name}
    freeze(net, [0])
    losses(learner, batch, 2)
    kept = [v for v in optimizer.variables if id(v) in slots and "accumulator" not in v.name]
    assert all(np.array_equal(v, slots[id(v)]) for v in kept)
    freeze(net, [])
    losses(learner, batch, 2)
    assert {id(v) for v in optimizer.variables} >= {*slots}
    assert not any(np.array_equal(v, slots[id(v)]) for v in kept)


def test_freezing_and_thawing_is_as_in_a_loop_of_ones_own(backend, batch):
    ((x,), y) = batch
    net, other, own = network(backend), network(backend), OPTIMIZERS["momentum"]()
    learner = learner_of(backend, net, "momentum", lr=0.1)
    own.build(other.trainable_variables)
    backend.place(own, "gpu:1")
    for frozen in ([], [0], [0, 1], []):
        freeze(net, frozen)
        freeze(other, frozen)
        losses(learner, batch, 2)
        for _ in range(2):
            with backend.on("gpu:1"), tf.GradientTape() as tape:
                logits = other(x, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
                gradients = tape.gradient(loss, other.trainable_variables)
                own.apply(gradients, other.trainable_variables)
    for v, expected in zip(net.variables, other.variables, strict=True):
        np.testing.assert_allclose(v, expected, rtol=1e-4, atol=1e-5)


@optimizers
def test_parameters_frozen_at_the_beginning_are_trained_when_thawed(backend, batch, make):
    net, optimizer = network(backend, [0, 1]), make()
    learner = learner_of(backend, net, optimizer)
    with backend.strict():
        losses(learner, batch, 2)
        had = {id(v) for v in optimizer.variables}
        freeze(net, [])
        before = values(net)
        losses(learner, batch, 2)
    assert find_changed(net, before) == [True] * 8
    assert {id(v) for v in optimizer.variables} >= had
    assert learner.sync()["optimizer"] is optimizer
    assert set(backend.placement(learner.sync()).values()) == {gpu(1)}


def test_a_callback_freezes_and_thaws(backend):
    x, y = np.random.default_rng(0).random((6, 3), "float32"), np.array([0, 1, 0, 1, 1, 0])
    net = network(backend, [0, 1])
    kernels = []

    def callback(epoch, _history):
        kernels.append(np.array(net.layers[0].kernel.numpy()))
        net.layers[0].trainable = epoch == 1

    Trainer(5, backend=backend, callbacks=callback).fit(net, [(x, y)], loss="cross_entropy", lr=0.1)
    same = [np.array_equal(a, b) for a, b in pairwise(kernels)]
    assert same == [True, False, True, True]


def test_a_step_is_traced_again_only_when_something_was_set(backend, batch):
    traced = []

    def loss(prediction, y):
        traced.append(prediction)
        return tf.reduce_mean(prediction**2)

    net = network(backend)
    learner = backend.learner(net, loss=loss)
    # The last one is as the first, whose program is kept.
    for frozen, times in (([], 1), ([], 1), ([0], 2), ([0], 2), ([], 2)):
        freeze(net, frozen)
        losses(learner, batch, 2)
        assert len(traced) == times


def test_a_layer_without_parameters_of_its_own_is_frozen_too(backend, batch):
    norm = layers.BatchNormalization(center=False, scale=False)
    net = keras.Sequential([keras.Input((3,)), norm, layers.Dense(2)])
    learner = learner_of(backend, backend.place(net, "gpu:1"), "sgd")
    losses(learner, batch, 1)
    norm.trainable = False
    before = values(norm)
    losses(learner, batch, 1)
    assert find_changed(norm, before) == [False, False]


def test_a_model_of_which_all_is_frozen_is_refused_until_something_is_thawed(backend, batch):
    net = network(backend)
    learner = learner_of(backend, net, "adam")
    losses(learner, batch, 1)
    net.trainable = False
    for _ in range(2):
        with pytest.raises(UnsupportedValueError, match="no trainable variables"):
            learner.step(*batch)
    net.trainable = True
    before = values(net)
    losses(learner, batch, 1)
    assert all(find_changed(net, before))


def test_an_optimizer_of_another_model_is_refused(backend):
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(network(backend).trainable_variables)
    with pytest.raises(UnsupportedValueError, match="other variables than the 6"):
        learner_of(backend, network(backend), optimizer)


@pytest.fixture
def several():
    """One optimizer for matrices, and one for vectors."""
    of_vectors = keras.optimizers.Adam(0.1)
    chosen = {2: keras.optimizers.SGD(0.1, momentum=0.9)}
    return keras.optimizers.MultiOptimizer(lambda v: chosen.get(len(v.shape), of_vectors))


has_several = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)


@has_several
def test_several_optimizers_refuse_parameters_frozen_later(backend, batch, several):
    net = network(backend)
    learner = learner_of(backend, net, several)
    losses(learner, batch, 1)
    freeze(net, [0])
    with pytest.raises(UnsupportedValueError, match="other variables than the 4"):
        learner.step(*batch)
    freeze(net, [])
    losses(learner, batch, 1)


def test_an_optimizer_that_was_built_for_some_trains_no_others(backend, batch):
    net, optimizer = network(backend, [0]), keras.optimizers.Adam(0.1)
    optimizer.build(net.trainable_variables)
    learner = learner_of(backend, net, optimizer)
    losses(learner, batch, 1)
    freeze(net, [])
    with pytest.raises(UnsupportedValueError, match="built for other variables"):
        learner.step(*batch)
    freeze(net, [0])
    before = values(net)
    losses(learner, batch, 1)
    assert find_changed(net, before) == [False] * 2 + [True] * 6


@pytest.mark.parametrize("modes", [None, [True], ["yes"] * 12, {}], ids=repr)
def test_modes_of_another_model_are_refused(backend, modes):
    learner = learner_of(backend, network(backend), "sgd")
    with pytest.raises(CheckpointError, match="flags"):
        learner.check_modes(modes)


def test_several_gpus_refuse_variables_that_no_list_of_keras_has(backend):
    batches = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))]
    with pytest.raises(UnsupportedValueError, match="variables that Keras does not list"):
        Trainer(1, 2, backend=backend).fit(backend.mlp([2, 1]), batches, optimizer=Listed())


def test_what_an_optimizer_keeps_as_a_tensor_is_refused_in_a_file(backend, tmp_path):
    optimizer = Listed()
    optimizer.build(backend.mlp([2, 1]).trainable_variables)
    optimizer.scale = [tf.ones(1)]
    with pytest.raises(UnsupportedValueError, match=r"its scale\.0 is not a variable"):
        backend.save(optimizer, tmp_path / "state.safetensors")


@pytest.mark.parametrize("num_gpus", [0, 2])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["", "scaled"])
def test_the_history_has_the_rate_of_a_schedule(backend, num_gpus, is_scaled):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    optimizer = keras.optimizers.SGD(schedule)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
    data = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))] * 2
    history = Trainer(3, num_gpus, backend=backend).fit(
        backend.mlp([2, 1]), data, optimizer=optimizer
    )
    # After the last step of each epoch.
    assert history["lr"] == [0.25, 0.125, 0.0625]


def test_the_history_has_the_rate_that_a_callback_sets(backend):
    optimizer = keras.optimizers.Adam(0.5)

    def halve(_epoch, _history):
        optimizer.learning_rate = optimizer.learning_rate / 2

    data = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))]
    trainer = Trainer(3, 1, backend=backend, callbacks=halve)
    assert trainer.fit(backend.mlp([2, 1]), data, optimizer=optimizer)["lr"] == [0.5, 0.25, 0.125]
