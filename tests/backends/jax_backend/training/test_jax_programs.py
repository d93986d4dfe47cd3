"""Programs on JAX: a second training compiles nothing, a change is seen, no model is kept alive."""

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from d2ldev import Trainer, gpu

X = np.linspace(-1, 1, 20, dtype="float32").reshape(10, 2)
DATA = [(X[i : i + 4], X[i : i + 4, :1]) for i in range(0, 10, 4)]


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(2, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)
        self.power = 1

    def __call__(self, x):
        return jnp.tanh(self.last(self.dropout(self.first(x)))) ** self.power


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, prediction, y):
        return self.scale * jnp.mean((prediction - y) ** 2)


@pytest.fixture
def compiled(caplog):
    """Tells what JAX has compiled since it was asked before."""
    caplog.set_level("WARNING")
    with jax.log_compiles():

        def since():
            found = [each.getMessage() for each in caplog.records]
            caplog.clear()
            return [text for text in found if text.startswith(("Compiling", "Finished tracing"))]

        yield since


@pytest.fixture
def train(backend):
    def train_for(net, trainer=None, data=DATA, **options):
        options = {"optimizer": "adam", "lr": 0.1, **options}
        return (trainer or Trainer(2, backend=backend)).fit(net, data, data[:1], **options)

    return train_for


def test_a_new_trainer_compiles_nothing(train, compiled):
    net = Net()
    train(net)
    compiled()
    train(net)
    assert compiled() == []


def test_a_second_fit_on_two_gpus_compiles_nothing(backend, train, compiled):
    net = Net()
    for is_second in (False, True):
        train(net, Trainer(1, 2, backend=backend), data=DATA[:1])
        assert (compiled() == []) is is_second


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_another_learning_rate_compiles_nothing(train, compiled, optimizer):
    expected = train(Net(), optimizer=optimizer, lr=0.05)
    before = train(Net(), optimizer=optimizer)
    net = Net()
    compiled()
    found = train(net, optimizer=optimizer, lr=0.05)
    assert compiled() == []
    assert found == expected != before


def square(prediction, y):
    return jnp.mean((prediction - y) ** 2)


LOSSES = {
    "one object": (lambda: LOSS, 0),
    "one function": (lambda: square, 0),
    "a method of one object": (lambda: LOSS.__call__, 0),
    "a new function": (lambda: lambda prediction, y: square(prediction, y), len(DATA) - 1),
}


@pytest.mark.parametrize(("make", "number"), LOSSES.values(), ids=LOSSES)
def test_the_same_loss_compiles_nothing_and_a_new_one_each_step(train, compiled, make, number):
    net = Net()
    train(net, loss=make())
    compiled()
    train(net, loss=make())
    steps = [text for text in compiled() if text.startswith("Finished tracing") and "step" in text]
    assert len(steps) == number


def test_a_loss_that_is_dropped_takes_its_data_with_it(train):
    weights = jnp.ones(1)
    gone = ref(weights)
    net = Net()
    train(net, loss=lambda prediction, y, weights=weights: square(prediction * weights, y))
    del weights
    gc.collect()
    assert gone() is None


class Slotted:
    __slots__ = ("weights",)

    def __call__(self, prediction, y):
        return square(prediction * self.weights, y)


def test_a_loss_without_weak_references_takes_its_data_with_it(train):
    loss = Slotted()
    loss.weights = jnp.ones(1)
    gone = ref(loss.weights)
    train(Net(), loss=loss)
    del loss
    gc.collect()
    assert gone() is None


def fail(*_):
    raise ZeroDivisionError


def interrupt(*_):
    raise KeyboardInterrupt


FAILURES = {
    "the loss": ({"loss": fail}, None),
    "a callback": ({}, fail),
    "Ctrl-C": ({}, interrupt),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("num_gpus", [0, 2], ids=["cpu", "gpus"])
def test_a_fit_that_fails_holds_no_arrays_and_spoils_no_other(backend, train, num_gpus, failure):
    def fit(net, options=None, callback=None):
        trainer = Trainer(1, num_gpus, backend=backend)
        trainer.callbacks = callback and SimpleNamespace(on_step_end=callback)
        return train(net, trainer, data=DATA[:1], **(options or {}))

    expected = fit(Net())
    gc.collect()
    before = len(jax.live_arrays())
    net, (options, callback) = Net(), failure
    own = len(jax.tree.leaves(nnx.state(net)))
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        fit(net, options, callback)
    gc.collect()
    assert len(jax.live_arrays()) <= before + own
    del net
    assert fit(Net()) == expected


def test_caches_that_jax_has_cleared_are_filled_again(train):
    expected = train(Net())
    jax.clear_caches()
    assert train(Net()) == expected


def test_threads_train_models_of_one_structure_at_once(backend):
    def learn(number, barrier):
        learner = backend.learner(Net(number), optimizer="adam", lr=0.1)
        batch = (backend.asarray(X),), backend.asarray(X[:, :1])
        barrier.wait()
        return [float(learner.step(*batch)[0]) for _ in range(3)]

    expected = [learn(number, Barrier(1)) for number in range(4)]
    barrier = Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(learn, range(4), [barrier] * 4)) == expected


def test_a_schedule_of_optax_compiles_each_program_once(train, compiled):
    net, rates = Net(), optax.exponential_decay(0.1, 1, 0.5)
    train(net, optimizer=optax.sgd(rates), lr=None)
    traced = [text for text in compiled() if text.startswith("Finished tracing") and "step" in text]
    assert len(traced) == len({x.shape for x, _ in DATA})


def test_a_model_that_was_loaded_into_compiles_nothing(backend, train, compiled, path):
    net = Net()
    train(net)
    backend.save(net, path)
    compiled()
    backend.load_into(net, path)
    compiled()  # reading has programs of its own
    train(net)
    assert compiled() == []


def test_a_model_of_the_same_structure_is_trained_by_the_same_programs(train, compiled):
    expected = train(Net())
    other = Net(1)
    compiled()
    assert train(other) != expected
    assert compiled() == []


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_using_a_model_for_a_second_time_compiles_nothing(backend, compiled, verb):
    net = Net()
    getattr(Trainer(1, backend=backend), verb)(net, DATA)
    compiled()
    getattr(Trainer(1, backend=backend), verb)(net, DATA)
    assert compiled() == []


def test_a_new_shape_is_compiled_though_the_first_model_is_gone(backend, train):
    expected = train(Net(), data=DATA[2:])
    train(Net(), data=DATA[:1])
    gc.collect()
    assert train(Net(), data=DATA[2:]) == expected


def test_each_device_trains_where_its_model_is(backend, train):
    losses = []
    for device in ("cpu", "gpu:1", "cpu"):
        learner = backend.learner(backend.place(Net(), device), lr=0.1)
        x, y = backend.to(DATA[0], device)
        losses.append(float(learner.step((x,), y)[0]))
    assert len(set(losses)) == 1
    net = backend.place(Net(), "gpu:0")
    train(net, Trainer(1, 1, backend=backend))
    assert set(backend.placement(net).values()) == {gpu(0)}


LOSS = Scaled(1.0)
CHANGES = {
    "the loss": lambda _net, _patch: {"loss": lambda prediction, y: jnp.mean(abs(prediction - y))},
    "an attribute of the loss": lambda _net, patch: patch.setattr(LOSS, "scale", 3.0),
    "the optimizer": lambda _net, _patch: {"optimizer": "sgd"},
    "an attribute of the model": lambda net, _patch: setattr(net, "power", 2),
    "its rate of dropout": lambda net, _patch: setattr(net.dropout, "rate", 0.5),
    "a layer that is in evaluation mode": lambda net, _patch: net.dropout.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_two_fits_compile_again(train, compiled, monkeypatch, change):
    train(Net(), loss=LOSS)
    net = Net()
    options = change(net, monkeypatch) or {}
    compiled()
    train(net, **{"loss": LOSS, **options})
    assert any("step" in text for text in compiled())


@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 0.01}, {"precision": "bf16"}],
    ids=lambda each: next(iter(each)),
)
def test_changes_by_another_trainer_compile_again(backend, train, options):
    before = train(Net())
    assert train(Net(), Trainer(2, backend=backend, **options)) != before
    assert train(Net()) == before


def test_models_that_were_trained_and_dropped_are_gone(backend, train):
    gone = []
    for i in range(100):
        net, options = Net(i), {}
        if i % 50 == 0:  # a loss that refers to the model
            options = {"loss": lambda prediction, y, net=net: jnp.mean((prediction - y) ** 2)}
        train(net, Trainer(1, backend=backend), data=DATA[:1], **options)
        gone.append(ref(net))
    del net, options
    gc.collect()
    assert [each for each in gone if each() is not None] == []


class WithOwnStep(Net):
    """A model of D2L, whose ``trainer`` the Trainer sets."""

    def training_step(self, batch):
        return jnp.mean((self(batch[0]) - batch[1]) ** 2) * self.trainer.max_epochs

    def configure_optimizers(self):
        return optax.sgd(0.1)


def test_models_with_a_trainer_that_were_trained_and_dropped_are_gone(backend):
    gone = []
    for epochs in (1, 2):
        net, trainer = WithOwnStep(), Trainer(epochs, backend=backend)
        before = float(np.mean((np.asarray(net(X[:4])) - X[:4, :1]) ** 2))
        history = trainer.fit(net, DATA[:1])
        assert history["loss"][0] == pytest.approx(epochs * before, rel=1e-5)
        assert net.trainer is trainer
        gone.append(ref(net))
    del net, trainer
    gc.collect()
    assert [each for each in gone if each() is not None] == []
