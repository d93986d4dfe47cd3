"""Runs of ``Trainer`` on JAX: the user's model, its modes, and training that is resumed."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_models import Attentive, Convolutional, Recurrent, batches, build

from d2ldev import CheckpointError, Trainer, UnsupportedValueError, gpu

RANDOM = np.random.default_rng(0)
IMAGES = [
    (RANDOM.random((4, 8, 8, 3), dtype=np.float32), RANDOM.integers(0, 2, 4)) for _ in range(3)
]
OPTIONS = {"loss": "cross_entropy", "optimizer": "adam"}


@pytest.fixture
def net():
    return Convolutional(nnx.Rngs(0, dropout=1))


def test_the_users_model_has_the_trained_parameters(backend, net):
    before = np.asarray(net.dense.kernel[...])
    trainer = Trainer(1, backend=backend)
    trainer.fit(net, IMAGES, **OPTIONS)
    assert trainer.model is net
    assert not np.array_equal(net.dense.kernel[...], before)


def test_the_users_model_holds_it_after_an_error_in_the_loop_too(backend, net):
    def fail_midway():
        for count in range(3):
            if count == 2:
                raise OSError("the disk is gone")
            yield IMAGES[count]

    before = np.asarray(net.dense.kernel[...])
    trainer = Trainer(1, num_gpus=1, backend=backend)
    with pytest.raises(OSError, match="disk"):
        trainer.fit(net, fail_midway(), **OPTIONS)
    assert trainer.model is net
    assert not np.array_equal(net.dense.kernel[...], before)
    assert set(backend.placement(net).values()) == {gpu(0)}


def test_and_after_an_error_while_a_step_is_traced(backend, net):
    trainer = Trainer(1, backend=backend)
    with pytest.raises(UnsupportedValueError):
        trainer.fit(net, [*IMAGES, (IMAGES[0][0], np.ones(4, np.float32))], loss="mse")
    assert net.dense.kernel[...].shape == (64, 2)


def test_an_epoch_after_a_callback_that_changes_nothing_puts_no_parameter(backend, net, puts):
    parameters = len(jax.tree.leaves(nnx.state(net)))
    Trainer(3, backend=backend, callbacks=lambda *_: None).fit(net, IMAGES, **OPTIONS)
    assert [number for number, _ in puts].count(parameters) <= 2  # to place it, and to begin


def test_a_callback_sees_the_trained_parameters_and_may_change_them(backend, net):
    seen = []

    def watch(epoch, history):
        seen.append(np.asarray(net.dense.bias[...]))
        net.dense.bias[...] = net.dense.bias[...] * 0

    # With a rate of 0 from the second epoch on, it stays as the first callback made it.
    schedule = optax.piecewise_constant_schedule(0.1, {3: 0.0})
    trainer = Trainer(2, backend=backend, callbacks=watch)
    trainer.fit(net, IMAGES, loss="cross_entropy", optimizer=optax.sgd(schedule))
    assert seen[0].any()
    assert not seen[1].any()


# -- modes -----------------------------------------------------------------------------------------


class Normalised(nnx.Module):
    """A model that has no flags but those of its batch normalisation."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(256, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(self.convolution(x)).reshape(len(x), -1))


def with_a_flag(rngs):
    net = Normalised(rngs)
    net.deterministic = False
    return net


def statistics(net):
    return np.asarray(net.norm.mean[...])


def test_modules_in_evaluation_mode_stay_in_it(backend):
    ((inputs, y),) = batches(backend, Convolutional, "cpu", 1)
    net = build(backend, Convolutional, "cpu")
    net.norm.eval()
    before = np.asarray(net.norm.mean[...])
    learner = backend.learner(net, loss="cross_entropy", lr=0.0)
    losses = {float(learner.step(inputs, y)[0]) for _ in range(2)}
    assert np.array_equal(sync_and_read(learner)["model"].norm.mean[...], before)
    assert len(losses) == 2  # there is still dropout


def test_the_modes_of_the_users_model_are_left_alone(backend):
    ((inputs, y),) = batches(backend, Convolutional, "cpu", 1)
    net = build(backend, Convolutional, "cpu")
    net.eval()
    learner = backend.learner(net, loss="cross_entropy")
    learner.step(inputs, y)
    assert sync_and_read(learner)["model"].dropout.deterministic
    # A model that is in evaluation mode as a whole is trained all the same.
    assert net.norm.mean[...].any()


def test_the_only_batch_norm_is_frozen_beside_a_flag_of_the_models_own(backend):
    net = with_a_flag(nnx.Rngs(0))
    net.norm.eval()
    kernel = np.asarray(net.convolution.kernel[...])
    Trainer(2, backend=backend).fit(net, IMAGES, loss="cross_entropy")
    assert not statistics(net).any()
    assert not np.array_equal(net.convolution.kernel[...], kernel)
    assert (net.deterministic, net.norm.use_running_average) == (False, True)


@pytest.mark.parametrize("make", [Normalised, with_a_flag])
def test_a_model_that_was_left_in_evaluation_mode_is_trained(backend, make):
    net = make(nnx.Rngs(0))
    net.eval()
    Trainer(2, backend=backend).fit(net, IMAGES, loss="cross_entropy")
    assert statistics(net).any()
    assert net.norm.use_running_average


def test_a_resumed_run_keeps_modules_in_evaluation_mode_that_a_callback_put_there(
    backend, tmp_path
):
    """From the second epoch to the fourth, in a run that is killed in between."""

    def run(epochs, path, **options):
        net, seen = with_a_flag(nnx.Rngs(0)), []

        def freeze(epoch, history):
            seen.append((net.norm.use_running_average, statistics(net)))
            net.norm.set_attributes(use_running_average=1 <= epoch < 4)

        trainer = Trainer(epochs, 1, backend=backend, callbacks=freeze)
        trainer.fit(net, IMAGES, IMAGES, loss="cross_entropy", checkpoint=path, **options)
        return seen, [np.asarray(x) for _, x in nnx.to_flat_state(nnx.state(net, nnx.Param))]

    expected, parameters = run(6, tmp_path / "unbroken")
    run(3, tmp_path / "run")
    found, resumed = run(6, tmp_path / "run", resume=True)
    assert [flag for flag, _ in expected] == [False, False, True, True, True, False]
    assert [flag for flag, _ in found] == [True, True, False]
    for (_, x), (_, y) in zip(found, expected[3:], strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(resumed, parameters, strict=True):
        np.testing.assert_array_equal(x, y)


# -- what is resumed -------------------------------------------------------------------------------

OPTIMIZERS = {
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.01),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 1), optax.sgd(0.1)),
}


def learner_of(backend, model=Convolutional, optimizer="adam", device="gpu:1", **options):
    return backend.learner(
        build(backend, model, device), loss="cross_entropy", optimizer=optimizer, **options
    )


def sync_and_read(learner):
    """Return the model and the optimizer as they are after the last step."""
    return learner.sync()


def keep(backend, learner, path):
    """Write what a checkpoint has of a learner."""
    backend.save([sync_and_read(learner), learner.modes()], path)


def go_on(backend, learner, path):
    """Let another learner go on from there."""
    loaded, modes = backend.load_into([sync_and_read(learner), learner.modes()], path)
    set_modes = learner.check_modes(modes)
    learner.replace(loaded)
    set_modes()


def values(backend, learner):
    named = backend.named_tensors(sync_and_read(learner))
    return {name: backend.to_numpy(x).tolist() for name, x in named.items()}


@pytest.mark.parametrize("device", ["cpu", "gpu:1"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_to_the_last_bit(backend, path, device, make):
    data = batches(backend, Convolutional, device)
    unbroken, first, second = (
        learner_of(backend, optimizer=make(), device=device, gradient_clip_val=1.0)
        for _ in range(3)
    )
    expected = [float(unbroken.step(*batch)[0]) for batch in data]
    losses = [float(first.step(*batch)[0]) for batch in data[:3]]
    keep(backend, first, path)
    go_on(backend, second, path)
    losses += [float(second.step(*batch)[0]) for batch in data[3:]]
    assert losses == expected
    assert values(backend, second) == values(backend, unbroken)
    assert set(backend.placement(second.sync()).values()) == {backend.device(device)}


@pytest.mark.parametrize(
    "key",
    [lambda: jax.random.key(0, impl="rbg"), lambda: jax.random.PRNGKey(0)],
    ids=["of another generator", "of the older kind"],
)
def test_keys_of_every_kind_go_on(backend, path, key):
    data = batches(backend, Convolutional, "gpu:1", 3)

    def learner():
        net = Convolutional(nnx.Rngs(0, dropout=key()))
        return backend.learner(backend.place(net, "gpu:1"), loss="cross_entropy")

    first, second = learner(), learner()
    for batch in data[:2]:
        first.step(*batch)
    keep(backend, first, path)
    go_on(backend, second, path)
    assert float(second.step(*data[2])[0]) == float(first.step(*data[2])[0])


def other_keys(backend):
    net = Convolutional(nnx.Rngs(0, dropout=jax.random.key(0, impl="rbg")))
    return backend.learner(backend.place(net, "gpu:1"), loss="cross_entropy", optimizer="adam")


OTHERS = {
    "another model": lambda backend: learner_of(backend, Recurrent),
    "another optimizer": lambda backend: learner_of(backend, optimizer="momentum"),
    "keys of another generator": other_keys,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_the_state_of_another_run_is_refused_and_nothing_has_changed(backend, path, make):
    keep(backend, learner_of(backend), path)
    learner = make(backend)
    before = values(backend, learner)
    with pytest.raises(CheckpointError):
        go_on(backend, learner, path)
    assert values(backend, learner) == before


@pytest.mark.parametrize(
    "modes", [None, {"norm/use_running_average": 1}, [["a"]], ["other/deterministic"]], ids=str
)
def test_modes_of_another_model_are_refused_and_nothing_has_changed(backend, modes):
    net = build(backend, Convolutional, "cpu")
    net.norm.eval()
    learner = backend.learner(net, loss="cross_entropy")
    with pytest.raises(CheckpointError, match="another model"):
        learner.check_modes(modes)
    assert learner.modes() == ["norm/use_running_average"]


def test_a_model_in_which_nothing_is_frozen_is_restored_into_one_in_which_something_is(
    backend, path
):
    learner = backend.learner(build(backend, Convolutional, "gpu:1"), loss="cross_entropy")
    net = build(backend, Convolutional, "gpu:1")
    net.norm.eval()
    other = backend.learner(net, loss="cross_entropy")
    learner.sync()
    other.check_modes(learner.modes())()
    ((inputs, y),) = batches(backend, Convolutional, "gpu:1", 1)
    assert float(other.step(inputs, y)[0]) == float(learner.step(inputs, y)[0])
    assert np.array_equal(
        statistics(sync_and_read(other)["model"]), statistics(sync_and_read(learner)["model"])
    )
    assert statistics(net).any()


def test_a_flag_that_is_neither_set_nor_unset_is_left_alone(backend):
    learner = backend.learner(build(backend, Attentive, "cpu"), loss="cross_entropy")
    learner.check_modes(learner.modes())()
    assert learner.sync()["model"].attention.deterministic is None


@pytest.mark.parametrize("is_nnx", [False, True], ids=["optax", "nnx"])
@pytest.mark.parametrize("num_gpus", [0, 2])
def test_the_history_has_the_rate_of_injected_hyperparameters(backend, net, num_gpus, is_nnx):
    schedule = optax.exponential_decay(0.5, len(IMAGES), 0.5, staircase=True)
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), rate)
    if is_nnx:
        optimizer = nnx.Optimizer(net, optimizer, wrt=nnx.Param)
    trainer = Trainer(3, num_gpus, backend=backend)
    history = trainer.fit(net, IMAGES, loss="cross_entropy", optimizer=optimizer)
    assert history["lr"] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        # A state of its own with this name, as the line search of ``optax.lbfgs`` has.
        optax.chain(
            optax.sgd(0.1),
            optax.GradientTransformation(
                lambda _: {"learning_rate": np.ones((), "float32")},
                lambda updates, state, _: (updates, state),
            ),
        ),
    ],
    ids=["adam", "line search"],
)
def test_the_history_has_no_rate_that_optax_does_not_show(backend, net, optimizer):
    history = Trainer(1, backend=backend).fit(
        net, IMAGES, loss="cross_entropy", optimizer=optimizer
    )
    assert list(history) == ["loss"]


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_a_metric_of_nnx_measures_an_epoch(backend, num_gpus):
    metrics = {"right": "accuracy", "nnx": nnx.metrics.Accuracy()}
    inputs = np.linspace(-1, 1, 33, dtype="float32").reshape(11, 3)
    data = [(inputs[i : i + 4], np.arange(len(inputs[i : i + 4])) % 2) for i in range(0, 11, 4)]
    trainer = Trainer(2, num_gpus, backend=backend)
    history = trainer.fit(
        backend.mlp([3, 2]), data, data[:1], loss="cross_entropy", metrics=metrics
    )
    for prefix in ("", "val_"):
        right = history[f"{prefix}right"]
        np.testing.assert_allclose(history[f"{prefix}nnx"], right, rtol=1e-6)
    with pytest.raises(UnsupportedValueError, match="'values'") as error:
        trainer.validate(trainer.model, data, loss="cross_entropy", metrics=[nnx.metrics.Average()])
    assert "logits, labels" in error.value.fix
