"""Layers whose ``trainable`` is set while they are trained: frozen, thawed, and thawed late."""

from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from freezing import (
    OPTIMIZERS,
    batch_for,
    changed,
    freeze,
    learner_of,
    losses,
    network,
    optimizers,
    values,
)
from keras import layers

from d2ldev import Trainer, UnsupportedValueError, gpu


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
    assert changed(net, before) == [False] * 6 + [True] * 2


@optimizers
def test_what_is_thawed_goes_on_with_its_slots(backend, batch, make):
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
def test_what_was_frozen_at_the_beginning_is_trained_when_it_is_thawed(backend, batch, make):
    net, optimizer = network(backend, [0, 1]), make()
    learner = learner_of(backend, net, optimizer)
    with backend.strict():
        losses(learner, batch, 2)
        had = {id(v) for v in optimizer.variables}
        freeze(net, [])
        before = values(net)
        losses(learner, batch, 2)
    assert changed(net, before) == [True] * 8
    assert {id(v) for v in optimizer.variables} >= had
    assert learner.parts["optimizer"] is optimizer
    assert set(backend.placement(learner.parts).values()) == {gpu(1)}


def test_a_callback_freezes_and_thaws(backend):
    x, y = np.random.default_rng(0).random((6, 3), "float32"), np.array([0, 1, 0, 1, 1, 0])
    net = network(backend, [0, 1])
    kernels = []

    def callback(epoch, _history):
        kernels.append(np.array(net.layers[0].kernel.numpy()))
        net.layers[0].trainable = epoch == 1

    Trainer(5, backend=backend, callback=callback).fit(net, [(x, y)], loss="cross_entropy", lr=0.1)
    same = [np.array_equal(a, b) for a, b in pairwise(kernels)]
    assert same == [True, False, True, True]


def test_an_optimizer_of_a_run_before_trains_what_was_thawed_since(backend):
    x, y = np.random.default_rng(0).random((6, 3), "float32"), np.array([0, 1, 0, 1, 1, 0])
    net, optimizer = network(backend, [0, 1]), keras.optimizers.Adam(0.1)
    for frozen in ([0, 1], []):
        freeze(net, frozen)
        before = values(net)
        trainer = Trainer(2, backend=backend)
        trainer.fit(net, [(x, y)], loss="cross_entropy", optimizer=optimizer)
    assert changed(net, before) == [True] * 8
    assert int(optimizer.iterations) == 4


def test_a_step_is_traced_again_only_when_something_was_set(backend, batch):
    traced = []

    def loss(prediction, y):
        traced.append(prediction)
        return tf.reduce_mean(prediction**2)

    net = network(backend)
    learner = backend.learner(net, loss=loss)
    for frozen, times in (([], 1), ([], 1), ([0], 2), ([0], 2), ([], 3)):
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
    assert changed(norm, before) == [False, False]


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
    assert all(changed(net, before))


class InDict(keras.optimizers.SGD):
    """It keeps its slots in a way of its own."""

    def build(self, variables):
        super().build(variables)
        self.kept = {v.path: self.add_variable_from_reference(v, "kept") for v in variables}


def test_an_optimizer_that_would_forget_is_refused_and_has_not_changed(backend, batch):
    net, optimizer = network(backend, [0]), InDict(0.1)
    learner = learner_of(backend, net, optimizer)
    losses(learner, batch, 1)
    before = [id(v) for v in optimizer.variables]
    freeze(net, [])
    with pytest.raises(UnsupportedValueError, match="keeps what it learns in a way of its own"):
        learner.step(*batch)
    assert [id(v) for v in optimizer.variables] == before
    freeze(net, [0])
    losses(learner, batch, 1)
    assert int(optimizer.iterations) == 2


def _tracked(optimizer):
    """What an optimizer knows and has, and in which lists."""
    return {
        "names": {*vars(optimizer)},
        "built": optimizer.built,
        "indices": dict(optimizer._trainable_variables_indices),
        "trained": [id(v) for v in optimizer._trainable_variables],
        "variables": [id(v) for v in optimizer.variables],
    }


class Once(keras.optimizers.SGD):
    """Its own ``build`` raises, in the middle, when it is built for the second time."""

    error = ValueError("built already")

    def build(self, variables):
        is_built_again = hasattr(self, "mine")
        super().build(variables)
        if is_built_again:
            self.late = self.add_variable((), name="late")
            raise self.error
        self.mine = True


@pytest.mark.parametrize("error", [ValueError("built already"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("wrap", [lambda x: x, keras.optimizers.LossScaleOptimizer])
def test_an_optimizer_whose_build_raises_has_not_changed(backend, batch, error, wrap):
    net, once = network(backend, [0]), Once(0.1, momentum=0.9)
    once.error, optimizer = error, wrap(once)
    learner = learner_of(backend, net, optimizer)
    losses(learner, batch, 1)
    before = _tracked(once), _tracked(optimizer)
    freeze(net, [])
    with pytest.raises(type(error)):
        learner.step(*batch)
    assert (_tracked(once), _tracked(optimizer)) == before
    freeze(net, [0])
    values_before = values(net.layers[2])
    losses(learner, batch, 1)
    assert changed(net.layers[2], values_before) == [True] * 2


class Later(keras.optimizers.SGD):
    """Its own ``build`` raises, at the end, when it is built for the first time."""

    def build(self, variables):
        super().build(variables)
        if not self.may_be_built:
            raise ValueError("not yet")

    may_be_built = False


def test_an_optimizer_whose_first_build_raises_is_not_built(backend, batch):
    net, optimizer = network(backend), Later(0.1, momentum=0.9)
    before = _tracked(optimizer)
    with pytest.raises(ValueError, match="not yet"):
        learner_of(backend, net, optimizer)
    assert _tracked(optimizer) == before
    optimizer.may_be_built = True
    losses(learner_of(backend, net, optimizer), batch, 1)
    assert int(optimizer.iterations) == 1


def test_an_optimizer_of_another_model_is_refused(backend):
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(network(backend).trainable_variables)
    with pytest.raises(UnsupportedValueError, match="built for none of the variables"):
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
def test_several_optimizers_are_placed_and_part_of_the_state(backend, batch, several):
    learner = learner_of(backend, network(backend), several)
    with backend.strict():
        losses(learner, batch, 2)
    assert set(backend.placement(learner.parts).values()) == {gpu(1)}
    state = learner.state()
    expected = losses(learner, batch, 2)
    learner.restore(state)
    assert losses(learner, batch, 2) == expected


@has_several
def test_several_optimizers_refuse_what_is_frozen_since(backend, batch, several):
    net = network(backend)
    learner = learner_of(backend, net, several)
    losses(learner, batch, 1)
    freeze(net, [0])
    with pytest.raises(UnsupportedValueError, match="a MultiOptimizer takes the gradients of all"):
        learner.step(*batch)
    freeze(net, [])
    losses(learner, batch, 1)
