"""Programs on TensorFlow: a second training traces nothing, a change is seen, nothing is kept."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from weakref import ref

import keras
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import Trainer

X = np.linspace(-1, 1, 20, dtype="float32").reshape(10, 2)
DATA = [(X[i : i + 4], X[i : i + 4, :1]) for i in range(0, 10, 4)]
TRACES = []


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4, activation="tanh")
        self.leaky = keras.layers.LeakyReLU(0.1)
        self.last = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.0))
        self.power = 1

    def call(self, x):
        TRACES.append(type(x))
        return self.last(self.leaky(self.first(x))) ** self.power


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, prediction, y):
        return self.scale * tf.reduce_mean((prediction - y) ** 2)


@pytest.fixture
def net():
    """A model with the same weights each time."""
    keras.utils.set_random_seed(0)
    net = Net()
    net(X)
    return net


@pytest.fixture
def begin(net):
    """Brings the model back to the weights that it had."""
    before = net.get_weights()
    return lambda: net.set_weights(before)


@pytest.fixture
def traces():
    """Tells how often the model was traced since it was asked before."""

    def since():
        number = len(TRACES)
        TRACES.clear()
        return number

    since()
    return since


@pytest.fixture
def train(backend):
    def train_with(net, trainer=None, data=DATA, **options):
        options = {"optimizer": "adam", **options}
        if isinstance(options["optimizer"], str):
            options = {"lr": 0.1, **options}
        return (trainer or Trainer(2, backend=backend)).fit(net, data, data[:1], **options)

    return train_with


def test_a_second_fit_on_labels_traces_nothing(net, train, traces):
    labels = [np.zeros(4, "int64"), np.array([0, -100, 0, 0])]
    data = [(X[:4], y) for y in [*labels, *labels]]
    train(net, data=data, loss="cross_entropy")
    assert traces() == 2  # a step, and an evaluation
    train(net, data=data, loss="cross_entropy")
    assert traces() == 0


def test_a_new_trainer_traces_nothing(backend, net, train, traces):
    first = Trainer(2, backend=backend)
    train(net, first)
    assert traces()
    train(net)
    assert traces() == 0
    assert first.model is net


def square(prediction, y):
    return tf.reduce_mean((prediction - y) ** 2)


LOSSES = {
    "one object": (lambda: LOSS, False),
    "one function": (lambda: square, False),
    "a method of one object": (lambda: LOSS.__call__, False),
    "a new function": (lambda: lambda prediction, y: square(prediction, y), True),
}


@pytest.mark.parametrize(("make", "is_traced"), LOSSES.values(), ids=LOSSES)
def test_the_same_loss_traces_nothing_and_a_new_one_each_time(net, train, traces, make, is_traced):
    train(net, loss=make())
    traces()
    train(net, loss=make())
    assert (traces() > 0) is is_traced


def test_a_second_fit_of_a_compiled_model_traces_nothing(backend, net, traces):
    net.compile("adam", keras.losses.Huber(0.5), loss_weights=2.0)
    for is_first in (True, False):
        Trainer(1, backend=backend).fit(net, DATA, DATA[:1])
        assert (traces() > 0) is is_first


def test_a_loss_that_is_dropped_takes_its_data_with_it(net, train):
    weights = tf.ones(1)
    gone = ref(weights)
    train(net, loss=lambda prediction, y, weights=weights: square(prediction * weights, y))
    del weights
    gc.collect()
    gc.collect()  # what a program holds goes after its loss
    assert gone() is None


class Slotted:
    __slots__ = ("weights",)

    def __call__(self, prediction, y):
        return square(prediction * self.weights, y)


def test_a_loss_without_weak_references_takes_its_data_with_it(net, train):
    loss = Slotted()
    loss.weights = tf.ones(1)
    gone = ref(loss.weights)
    train(net, loss=loss)
    del loss
    gc.collect()
    gc.collect()  # what a program holds goes after its loss
    assert gone() is None


def fail(*_):
    raise ZeroDivisionError


def interrupt(*_):
    raise KeyboardInterrupt


IS_BROKEN = []
"""Not empty while the loss fails."""


def break_sometimes(prediction, y):
    return fail() if IS_BROKEN else square(prediction, y)


FAILURES = {"the loss": None, "a callback": fail, "Ctrl-C": interrupt}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_fit_that_fails_holds_no_tensors_and_spoils_no_other(
    backend, net, train, begin, num_gpus, failure, monkeypatch
):
    def fit(data, callback=None):
        trainer = Trainer(1, num_gpus, backend=backend)
        trainer.callbacks = callback and SimpleNamespace(on_step_end=callback)
        return train(net, trainer, data=data, loss=break_sometimes)

    def count():
        gc.collect()
        gc.collect()
        kernels = {tuple(x.shape) for x in net.weights if x.shape.rank == 2}
        return sum(live.shape in kernels for live in backend.live_tensors())

    expected = fit(DATA[:1])
    begin()
    before = count()
    monkeypatch.setitem(globals(), "IS_BROKEN", [True] if failure is None else [])
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        fit(DATA[2:], failure)  # another shape, which is traced
    monkeypatch.undo()
    assert count() <= before
    begin()
    assert fit(DATA[:1]) == expected


def test_a_model_that_was_loaded_into_is_not_traced_again(backend, net, train, traces, path):
    train(net)
    backend.save(net, path)
    backend.load_into(net, path)
    traces()
    train(net)
    assert traces() == 0


def test_a_users_optimizer_goes_on_with_what_was_traced(net, train, traces):
    optimizer = keras.optimizers.Adam(0.1)
    train(net, optimizer=optimizer)
    traces()
    train(net, optimizer=optimizer)
    assert traces() == 0
    assert int(optimizer.iterations) == 2 * 2 * len(DATA)


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_using_a_model_for_a_second_time_traces_nothing(backend, net, traces, verb):
    getattr(Trainer(1, backend=backend), verb)(net, DATA)
    assert traces()
    getattr(Trainer(1, backend=backend), verb)(net, DATA)
    assert traces() == 0


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "model") for name in ("sgd", "momentum", "adam", "adamw", "adagrad")),
        ("adam", "fp16"),
    ],
)
def test_a_named_optimizer_begins_with_a_new_state_in_each_fit(
    backend, net, train, begin, name, precision
):
    first, second = (Trainer(2, backend=backend, precision=precision) for _ in "ab")
    expected = train(net, first, optimizer=name)
    begin()
    assert train(net, second, optimizer=name) == expected


def test_another_learning_rate_needs_no_trace_and_counts(net, train, begin, traces):
    expected = [train(net, lr=0.2), begin()]
    other = train(net, lr=0.1)
    begin()
    traces()
    assert [train(net, lr=0.2), None] == expected
    assert traces() == 0
    assert other != expected[0]


def test_learners_that_take_turns_have_optimizers_of_their_own(backend, net, begin):
    batch = ((backend.asarray(X),), backend.asarray(X[:, :1]))
    alone = backend.learner(net, optimizer="adam", lr=0.1)
    for _ in range(3):
        alone.step(*batch)
    expected = [x.numpy() for x in alone.sync()["optimizer"].variables]
    begin()
    # The weights are shared: both take the same steps from the same weights.
    learners = [backend.learner(net, optimizer="adam", lr=0.1) for _ in "ab"]
    for _ in range(3):
        weights = net.get_weights()
        for learner in learners:
            net.set_weights(weights)
            learner.step(*batch)
    after = [[x.numpy() for x in learner.sync()["optimizer"].variables] for learner in learners]
    for found in after:
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_optimizer_that_was_taken_from_a_learner_stays_as_it_is(backend, net, train):
    learner = backend.learner(net, optimizer="adam", lr=0.1)
    learner.step((backend.asarray(X),), backend.asarray(X[:, :1]))
    taken = learner.sync()["optimizer"]
    before = [x.numpy() for x in taken.variables]
    del learner
    train(net)
    assert all(np.array_equal(x, y) for x, y in zip(taken.variables, before, strict=True))


def test_changes_of_an_optimizer_between_two_steps_count(backend, net):
    learner = backend.learner(net, optimizer="sgd", lr=0.1)
    batch = ((backend.asarray(X),), backend.asarray(X[:, :1]))
    learner.step(*batch)
    learner.sync()["optimizer"].learning_rate = 0.0
    before = net.get_weights()
    learner.step(*batch)
    assert all(np.array_equal(x, y) for x, y in zip(net.get_weights(), before, strict=True))


LOSS = Scaled(1.0)
CHANGES = {
    "the loss": lambda *_: {"loss": lambda prediction, y: tf.reduce_mean(abs(prediction - y))},
    "an attribute of the loss": lambda _net, patch: patch.setattr(LOSS, "scale", 3.0),
    "the optimizer": lambda *_: {"optimizer": "sgd"},
    "an attribute of the model": lambda net, _patch: setattr(net, "power", 2),
    "an attribute of a layer": lambda net, _patch: setattr(net.leaky, "negative_slope", 0.9),
    "its activation": lambda net, _patch: setattr(net.first, "activation", keras.ops.relu),
    "what is trainable": lambda net, _patch: setattr(net.first, "trainable", False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_two_fits_count(net, train, begin, monkeypatch, change):
    before = train(net, loss=LOSS)
    begin()
    options = change(net, monkeypatch) or {}
    assert train(net, **{"loss": LOSS, **options}) != before


def test_another_schedule_of_a_users_optimizer_counts(net, train, begin):
    constant = keras.optimizers.schedules.PiecewiseConstantDecay
    optimizer = keras.optimizers.SGD(constant([1], [0.0, 0.0]))
    before = net.get_weights()
    train(net, optimizer=optimizer)
    assert all(map(np.array_equal, net.get_weights(), before))
    optimizer.learning_rate = constant([1], [0.5, 0.5])
    train(net, optimizer=optimizer)
    assert not any(map(np.array_equal, net.get_weights(), before))


def test_a_model_without_variables_computes_where_each_trainer_does(backend):
    class Twice(keras.Model):
        def call(self, x):
            return 2 * x

    net = Twice()
    found = [Trainer(1, number, backend=backend).predict(net, DATA) for number in (1, 0)]
    assert [str(backend.device_of(each[0])) for each in found] == ["gpu:0", "cpu"]


def test_a_model_that_was_moved_is_trained_where_it_is(backend, net, train, begin):
    before = train(net)
    begin()
    assert train(net, Trainer(2, 1, backend=backend)) == before
    assert {str(each) for each in backend.placement(net).values()} == {"gpu:0"}
    backend.place(net, "cpu")
    begin()
    assert train(net, Trainer(2, 1, backend=backend)) == before


def test_a_layer_that_is_added_is_trained(train):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    train(net)
    net.add(keras.layers.Dense(1))
    before = net.get_weights()
    train(net)
    assert not any(map(np.array_equal, net.get_weights(), before))


def test_a_layer_of_another_dtype_computes_in_it(net, train):
    dtypes = []

    def loss(prediction, y):
        dtypes.append(prediction.dtype)
        return square(tf.cast(prediction, "float32"), y)

    train(net, loss=loss)
    net.last.dtype_policy = "mixed_bfloat16"
    train(net, loss=loss)
    assert [*dict.fromkeys(dtypes)] == [tf.float32, tf.bfloat16]


def test_models_that_threads_train_at_once_share_no_optimizer(backend, net):
    batch = ((backend.asarray(X),), backend.asarray(X[:, :1]))
    backend.learner(net, optimizer="adam", lr=0.1).step(*batch)  # its program is free now
    barrier = Barrier(4)

    def make(_):
        barrier.wait()
        return backend.learner(net, optimizer="adam", lr=0.1)

    with ThreadPoolExecutor(4) as pool:
        learners = list(pool.map(make, range(4)))
    optimizers = [each.sync()["optimizer"] for each in learners]
    found = {id(x.value) for each in optimizers for x in each.variables}
    assert len(found) == 4 * len(optimizers[0].variables)
    learners[0].step(*batch)
    assert [int(each.iterations) for each in optimizers] == [1, 0, 0, 0]


def test_a_copy_of_a_model_is_trained_by_programs_of_its_own(train):
    class Line(tf.Module):
        def __init__(self):
            self.weight = tf.Variable([[1.0], [1.0]])

        def __call__(self, x):
            TRACES.append(type(x))
            return x @ self.weight

    first = Line()
    train(first)
    second = copy.copy(first)  # it has the same variable
    second.weight = tf.Variable([[1.0], [1.0]])
    TRACES.clear()
    before = first.weight.numpy()
    train(second)
    assert TRACES
    np.testing.assert_array_equal(first.weight, before)
    np.testing.assert_array_equal(second.weight, before)


def test_a_model_keeps_four_programs(net, train, traces):
    rates = [0.5, 0.25, 0.125, 0.0625, 0.03125]
    losses = [Scaled(rate) for rate in rates]
    for loss in losses:
        train(net, loss=loss)
    traces()
    train(net, loss=losses[-2])
    assert traces() == 0
    train(net, loss=losses[0])
    assert traces()


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.01}, {"precision": "bf16"}])
def test_changes_by_another_trainer_count(backend, net, train, begin, options):
    before = train(net)
    begin()
    assert train(net, Trainer(2, backend=backend, **options)) != before
    begin()
    assert train(net) == before


def test_models_that_were_trained_and_dropped_are_gone(backend, train):
    gone = []
    for i in range(20):
        net, options = backend.mlp([2, 1]), {"optimizer": ("sgd", "adam")[i % 2]}
        if i % 10 == 0:  # an attribute that refers to the model, a loss and an optimizer that do
            net.itself = [net]
            options = {
                "loss": lambda prediction, y, net=net: tf.reduce_mean((prediction - y) ** 2),
                "optimizer": keras.optimizers.Adam(0.1),
            }
            options["optimizer"].net = net
        train(net, Trainer(1, backend=backend), data=DATA[:1], **options)
        gone += [ref(net), ref(net.variables[0].value)]
    del net, options
    gc.collect()
    gc.collect()  # what a program holds goes after its model
    assert [each for each in gone if each() is not None] == []


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"optimizer": "sgd", "lr": 0.1}, {}),
        ({"optimizer": "adamw", "lr": 0.1}, {"gradient_clip_val": 1.0}),
        ({"optimizer": lambda: keras.optimizers.Adam(0.1)}, {}),
    ],
    ids=["plain", "clipped", "users"],
)
def test_what_was_traced_goes_with_its_model(backend, options, settings):
    graphs = []

    def loss(prediction, y):
        graphs.append(ref(prediction.graph))
        return tf.reduce_mean((prediction - y) ** 2)

    made = {key: each() if callable(each) else each for key, each in options.items()}
    Trainer(1, backend=backend, **settings).fit(backend.mlp([2, 4, 1]), DATA, loss=loss, **made)
    assert graphs
    del made
    gc.collect()
    gc.collect()  # what a program holds goes after its model
    assert [each for each in graphs if each() is not None] == []
