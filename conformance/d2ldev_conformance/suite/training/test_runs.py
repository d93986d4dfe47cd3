"""D2L 6.7.3: a run that is interrupted, saved on the way or at its best; a model that is used.

Runs end early, by a user or a power cut, and models are used afterwards. What was learned must not
be lost.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest

from d2ldev import ArrayLoader, Trainer, UnsupportedValueError
from d2ldev_conformance.provision import models_without_parameters, networks, untrainable_models
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_values, values_of

SECTION = "6.7.3"
SOURCE = "contract, Training"
EPOCHS = 3
STEPS = 4
"""In an epoch."""


class AtStep:
    """A callback that does something after a step."""

    def __init__(self, when, action):
        self.when, self.action, self.steps = when, action, []

    def on_step_end(self, step, _loss):
        """Do it if it is time."""
        self.steps.append(step)
        if step == self.when:
            self.action()


class PowerCutError(Exception):
    """The end of a run."""


def cut():
    """End the run."""
    raise PowerCutError


# -- runs that end --------------------------------------------------------------------------------


@requirement("runs.interrupted", section=SECTION)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("last", [STEPS + 1, 2 * STEPS - 1], ids=["within", "at the end"])
def test_ctrl_c_ends_the_run_after_the_step_with_the_model_and_the_history(
    backend, batches, num_gpus, last
):
    """End a run at Ctrl-C after the step, with the model and the history.

    A notebook's user wants to look, and go on.
    """
    handler = signal.getsignal(signal.SIGINT)
    interrupting = AtStep(last, lambda: signal.raise_signal(signal.SIGINT))
    trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=interrupting)
    history = trainer.fit(backend.mlp([2, 1]), batches, batches, lr=0.1)
    assert interrupting.steps == list(range(last + 1))
    assert signal.getsignal(signal.SIGINT) is handler
    cutting = AtStep(last, cut)
    expected = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=cutting)
    with pytest.raises(PowerCutError):
        expected.fit(backend.mlp([2, 1]), batches, batches, lr=0.1)
    assert_same_values(backend, trainer.model, values_of(backend, expected.model))
    assert [len(column) for column in history.values()] == [1, 1, 1]


class Interrupted:
    """Batches of a loader whose processes have ended by Ctrl-C, before one of them."""

    def __init__(self, batches, last):
        self.batches, self.last = batches, last

    def __iter__(self):
        """Press it, and fail."""
        yield from self.batches[: self.last]
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a process that reads has ended")


@requirement("runs.interrupted-while-waiting", section=SECTION)
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("last", [0, STEPS - 1])
@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_ctrl_c_ends_the_run_at_once_where_a_batch_is_waited_for(
    backend, batches, num_gpus, where, last
):
    """End a run at Ctrl-C at once while it waits for a batch.

    A loader that has died would keep the run for ever.
    """
    handler = signal.getsignal(signal.SIGINT)
    interrupted = Interrupted(batches, last)
    data = (interrupted, batches) if where == "training" else (batches, interrupted)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    history = trainer.fit(backend.mlp([2, 1]), *data)
    assert history == {"loss": [], "val_loss": [], "lr": []}
    assert signal.getsignal(signal.SIGINT) is handler
    assert set(backend.placement(trainer.model).values()) == {trainer.device}


@requirement("runs.saved-every-n-steps", section=SECTION, source="contract, Resuming a run")
@pytest.mark.parametrize("every", [1, 3])
def test_a_run_that_ends_within_an_epoch_goes_on_there(backend, num_gpus, network, every, tmp_path):
    """Resume within an epoch after ``checkpoint_every`` steps, bit for bit.

    An epoch may take a day.

    With the random numbers of dropout, and the batches in the order of that epoch.
    """
    inputs = np.random.default_rng(0).standard_normal((STEPS * 4, 4)).astype("float32")
    labels = (inputs.sum(1) > 0).astype("int32")

    def run(path, callback, seed):
        loader = ArrayLoader(inputs, labels, batch_size=4, shuffle=True, seed=seed)
        trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=callback)
        options = {"checkpoint": path, "resume": True, "checkpoint_every": every}
        options |= {"loss": "cross_entropy", "optimizer": "adam"}
        return trainer, trainer.fit(networks(backend)[network](backend.cpu()), loader, **options)

    begun, unbroken, broken = (tmp_path / name for name in ("begun", "unbroken", "broken"))
    with pytest.raises(PowerCutError):
        run(begun, AtStep(0, cut), 0)  # so that both begin with the same random numbers
    for path in (unbroken, broken):
        path.write_bytes(begun.read_bytes())
    expected = AtStep(None, None)
    trainer, history = run(unbroken, expected, 1)
    with pytest.raises(PowerCutError):
        run(broken, AtStep(STEPS + 2, cut), 2)
    resumed = AtStep(None, None)
    found, its_history = run(broken, resumed, 3)
    saved = (STEPS + 2) // every * every
    assert resumed.steps == list(range(saved, STEPS * EPOCHS))
    assert its_history == history
    assert_same_values(backend, found.model, values_of(backend, trainer.model))


@requirement("runs.saved-between-shared-steps", section=SECTION, source="contract, Resuming a run")
def test_a_run_that_ends_before_a_shared_step_goes_on_before_its_batches(
    backend, batches, num_gpus, tmp_path
):
    """Resume before the batches of a step that was not made.

    Gradients of half a step are in no file.
    """

    def run(path, callback):
        trainer = Trainer(
            EPOCHS, num_gpus, backend=backend, callbacks=callback, accumulate_grad_batches=2
        )
        net = backend.load_into(backend.mlp([2, 1]), begun)
        options = {"checkpoint": path, "resume": True, "checkpoint_every": 1, "lr": 0.1}
        return trainer, trainer.fit(net, batches, **options)

    begun = tmp_path / "begun"
    backend.save(backend.mlp([2, 1]), begun)
    unbroken, history = run(tmp_path / "unbroken", AtStep(None, None))
    with pytest.raises(PowerCutError):
        run(tmp_path / "broken", AtStep(STEPS + 3, cut))
    resumed = AtStep(None, None)
    found, its_history = run(tmp_path / "broken", resumed)
    assert resumed.steps == list(range(STEPS + 3, STEPS * EPOCHS, 2))
    assert its_history == history
    assert_same_values(backend, found.model, values_of(backend, unbroken.model))


class Changing:
    """Data to evaluate on, whose targets are far from the predictions by another factor each time.

    Args:
        factors: one for each epoch.
    """

    def __init__(self, *factors):
        self.factors = iter(factors)

    def __iter__(self):
        yield np.ones((4, 2), "float32"), np.full((4, 1), 100, "float32") * next(self.factors)


@requirement("runs.keep-the-best", section=SECTION)
@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({}, 1),
        ({"mode": "max"}, 0),
        ({"monitor": "val_error", "mode": "min"}, 1),
        ({"monitor": "val_error", "mode": "max"}, 0),
        ({"monitor": "loss"}, 2),
    ],
    ids=str,
)
def test_the_best_epoch_is_kept_beside_the_last(
    backend, batches, num_gpus, options, best, tmp_path
):
    """Keep the state of the epoch with the best number, and that of the last epoch.

    Later epochs may overfit, and the run must still resume.
    """

    def error(_prediction, y):
        return float(backend.to_numpy(y)[0, 0])

    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    files = {"checkpoint": tmp_path / "last", "best": tmp_path / "best"}
    history = trainer.fit(
        backend.mlp([2, 1]),
        batches,
        Changing(np.float32(3), np.float32(1), np.float32(2)),
        lr=0.01,
        metrics=[error],
        **files,
        **options,
    )
    for path, epochs in ((files["best"], best + 1), (files["checkpoint"], EPOCHS)):
        run = backend.load(path)["run"]
        assert run["epoch"] == epochs
        assert run["history"] == {name: column[:epochs] for name, column in history.items()}


@requirement("runs.resume-beside-the-best", section=SECTION, source="contract, Resuming a run")
@pytest.mark.parametrize("has_file", [True, False], ids=["kept", "lost"])
def test_a_resumed_run_knows_the_best_of_all_epochs(backend, batches, num_gpus, has_file, tmp_path):
    """Compare with all epochs in a resumed run; without their file only with those from then on.

    A killed run must not replace its best model by a worse one, and a lost file comes back.
    """
    files = {"checkpoint": tmp_path / "last", "best": tmp_path / "best"}
    factors = [np.float32(factor) for factor in (1, 4, 3, 2)]
    for epochs in (2, 4):
        trainer = Trainer(epochs, num_gpus, backend=backend)
        data = Changing(*(factors if epochs == 2 else factors[2:]))
        trainer.fit(backend.mlp([2, 1]), batches, data, lr=0.0, resume=True, **files)
        if not has_file and epochs == 2:
            files["best"].unlink()
    assert backend.load(files["best"])["run"]["epoch"] == (1 if has_file else 4)
    assert backend.load(files["checkpoint"])["run"]["epoch"] == 4


@requirement("runs.refuse-contradictions", section=SECTION)
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_every": 2},
        {"checkpoint_every": 2, "best": "best"},
        {"checkpoint_every": 0, "checkpoint": "run"},
        {"checkpoint": "run", "best": "run"},
        {"monitor": "loss"},
        {"mode": "max", "checkpoint": "run"},
        {"best": "best", "monitor": "val_loss"},
        {"best": "best", "monitor": "lr"},
        {"best": "best", "mode": "most"},
    ],
    ids=str,
)
def test_values_that_cannot_be_saved_are_refused_before_writing(
    backend, batches, num_gpus, options, tmp_path, monkeypatch
):
    """Refuse options of saving that contradict one another, and write nothing.

    The misunderstanding would show after the run.
    """
    monkeypatch.chdir(tmp_path)
    net = backend.mlp([2, 1])
    before = values_of(backend, net)
    with pytest.raises(UnsupportedValueError, match="fix:"):
        Trainer(EPOCHS, num_gpus, backend=backend).fit(net, batches, **options)
    assert_same_values(backend, net, before)
    assert list(tmp_path.iterdir()) == []


@requirement("runs.second-fit-begins-anew", section=SECTION)
def test_a_second_fit_with_a_named_optimizer_begins_with_a_new_state(
    backend, batches, num_gpus, tmp_path
):
    """Begin a second ``fit`` with a new state of a named optimizer.

    Momentum of the first run would push the second.
    """
    path = tmp_path / "before.safetensors"
    net = backend.mlp([2, 1])
    backend.save(net, path)
    histories = []
    for optimizer, lr in (("momentum", 0.1), ("momentum", 0.01), ("adam", 0.1), ("momentum", 0.1)):
        net = backend.load_into(net, path)
        trainer = Trainer(2, num_gpus, backend=backend)
        histories.append(trainer.fit(net, batches, optimizer=optimizer, lr=lr)["loss"])
        net = backend.place(trainer.model, "cpu")
    first, *others, again = histories
    np.testing.assert_allclose(again, first, rtol=1e-5)
    assert all(not np.allclose(other, first, rtol=1e-5) for other in others)


@requirement("runs.second-fit-compiles-nothing", section=SECTION)
@pytest.mark.parametrize("verb", ["fit", "validate"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["", "loaded"])
def test_a_second_call_compiles_nothing(backend, num_gpus, verb, is_loaded, tmp_path):
    """Compile nothing in a second call with another trainer.

    Compilation takes longer than a short run.

    A framework that compiles calls the loss only during a trace, and any other in each step.

    The second call is another trainer's, with another learning rate.
    """
    x = np.linspace(-1, 1, 8, dtype="float32").reshape(4, 2)
    data, path = [(x, x[:, :1])] * 6, tmp_path / "net.safetensors"
    net, calls, counts = backend.mlp([2, 1]), [], []

    def loss(prediction, y):
        calls.append(verb)
        error = prediction[0, 0] - y[0, 0]
        return error * error

    for lr in (0.1, 0.2):
        trainer = Trainer(1, num_gpus, backend=backend)
        options = {"optimizer": "adam", "lr": lr} if verb == "fit" else {}
        getattr(trainer, verb)(net, data, loss=loss, **options)
        net = trainer.model if verb == "fit" else net
        if is_loaded:
            backend.save(net, path)
            net = backend.load_into(net, path)
        counts.append(len(calls))
        calls.clear()
    first, second = counts
    assert 0 < first <= len(data)
    assert second in (0, len(data))
    assert second <= first


# -- models that are used -------------------------------------------------------------------------


@requirement("runs.validate", section=SECTION)
def test_validation_measures_the_model_and_changes_nothing(backend, batches, num_gpus, network):
    """Measure a model in ``validate`` in the same way twice, and change nothing.

    Running means and dropout belong to training.
    """
    arrays = [np.concatenate([x, -x], axis=1) for x, _ in batches]
    labelled = [(x, (x[:, 0] > 0).astype("int32")) for x in arrays]
    trainer = Trainer(1, num_gpus, backend=backend)
    options = {"loss": "cross_entropy", "metrics": ["accuracy"]}
    trainer.fit(networks(backend)[network](backend.cpu()), labelled, **options)
    net = trainer.model
    before = values_of(backend, net)
    found = [trainer.validate(net, labelled, **options) for _ in range(2)]
    assert found[0] == found[1]
    assert_same_values(backend, net, before)
    assert found[0].keys() == {"loss", "accuracy"}
    assert 0 <= found[0]["accuracy"] <= 1


@requirement("runs.validate-means", section=SECTION)
def test_validation_gives_the_means_over_the_examples(backend, batches, num_gpus):
    """Return from ``validate`` the mean over the examples.

    The last batch is smaller.
    """
    net = backend.mlp([2, 1])
    errors = [backend.to_numpy(net(backend.asarray(x))) - y for x, y in batches]
    found = Trainer(1, num_gpus, backend=backend).validate(net, batches)
    np.testing.assert_allclose(found["loss"], np.mean(np.concatenate(errors) ** 2), rtol=1e-5)


@requirement("runs.validate-besides", section=SECTION)
def test_validation_in_a_callback_does_not_change_the_run(backend, batches, num_gpus):
    """Keep a run as it is if a callback validates another model.

    The trainer's counters belong to the run.
    """
    seen, trainer = [], Trainer(EPOCHS, num_gpus, backend=backend)
    other = backend.mlp([2, 1], seed=9)

    def prepare_model(model):
        """Be the book's."""
        trainer.model = backend.place(model, trainer.device)

    def validate(_epoch, _history):
        before = trainer.model
        trainer.validate(other, batches[:1])
        trainer.predict(other, batches[:1])
        seen.append((trainer.val_batch_idx, trainer.num_val_batches, trainer.model is before))

    trainer.prepare_model, trainer.callbacks = prepare_model, validate
    trainer.fit(backend.mlp([2, 1]), batches, batches[:3])
    assert seen == [(3 * (epoch + 1), 3, True) for epoch in range(EPOCHS)]


@requirement("runs.errors-name-the-call", section=SECTION, source="contract, Containers and errors")
@pytest.mark.needs("train")
@pytest.mark.parametrize("verb", ["validate", "predict"])
@pytest.mark.parametrize("problem", ["no model", "no batch"])
def test_an_error_names_the_call_that_was_made(backend, batches, num_gpus, verb, problem):
    """Name ``validate`` or ``predict`` in an error, as the user called it.

    All three share their code, and a user called one.
    """
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    net = backend.mlp([2, 1])
    if problem == "no model":
        trainer.prepare_model = lambda _: 3
    else:
        trainer.prepare_batch = lambda _: None
    with pytest.raises(UnsupportedValueError, match=f"^cannot {verb} "):
        getattr(trainer, verb)(net, batches)


@requirement("runs.predict", section=SECTION)
@pytest.mark.parametrize(
    "take",
    [lambda x, y: (x, y), lambda x, _: x, lambda x, _: (x,), lambda x, _: {"x": x}],
    ids=["X, y", "X", "(X,)", "dict"],
)
def test_predictions_come_one_for_each_batch_on_the_device(backend, batches, num_gpus, take):
    """Return a prediction for each batch, on the device, with or without targets."""
    net = backend.mlp([2, 1])
    expected = [backend.to_numpy(net(backend.asarray(x))) for x, _ in batches]
    trainer = Trainer(1, num_gpus, backend=backend)
    found = trainer.predict(net, [take(x, y) for x, y in batches])
    assert {backend.device_of(prediction) for prediction in found} == {trainer.device}
    for prediction, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(backend.to_numpy(prediction), values, rtol=1e-5)


@requirement("runs.without-parameters", section=SECTION)
def test_a_model_without_parameters_is_measured_and_predicts(
    backend, batches, num_gpus, model_without_parameters
):
    """Measure and use a model without parameters.

    A baseline has nothing to train.
    """
    net = models_without_parameters(backend)[model_without_parameters](backend.cpu())
    trainer = Trainer(1, num_gpus, backend=backend)
    found = trainer.predict(net, batches)
    assert {backend.device_of(prediction) for prediction in found} == {trainer.device}
    for prediction, (x, _) in zip(found, batches, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(prediction), 2 * x)
    errors = np.concatenate([x for x, _ in batches])
    loss = trainer.validate(net, [(x, x) for x, _ in batches])["loss"]
    np.testing.assert_allclose(loss, np.mean(errors**2), rtol=1e-5)


@requirement("runs.measure-what-is-frozen", section=SECTION)
def test_a_model_that_is_frozen_predicts_and_is_measured(backend, batches, num_gpus, frozen_model):
    """Measure and use a model whose parameters are all frozen.

    A pretrained model is used as it is.
    """
    net = untrainable_models(backend)[frozen_model](backend.cpu())
    expected = [backend.to_numpy(net(backend.asarray(x))) for x, _ in batches]
    trainer = Trainer(1, num_gpus, backend=backend)
    found = trainer.predict(net, batches)
    assert {backend.device_of(prediction) for prediction in found} == {trainer.device}
    for prediction, values in zip(found, expected, strict=True):
        np.testing.assert_allclose(backend.to_numpy(prediction), values, rtol=1e-5)
    errors = [values - y for values, (_, y) in zip(expected, batches, strict=True)]
    loss = trainer.validate(net, batches)["loss"]
    np.testing.assert_allclose(loss, np.mean(np.concatenate(errors) ** 2), rtol=1e-5)


@requirement("runs.nothing-to-train", section=SECTION)
@pytest.mark.needs("train")
def test_a_model_without_parameters_is_not_trained(
    backend, batches, num_gpus, model_without_parameters
):
    """Refuse to train a model without parameters, with a line that helps.

    The run would change nothing, and look like one that does not learn.
    """
    net = models_without_parameters(backend)[model_without_parameters](backend.cpu())
    trainer = Trainer(1, num_gpus, backend=backend)
    with pytest.raises(UnsupportedValueError) as caught:
        trainer.fit(net, [(x, x) for x, _ in batches])  # it could be measured
    assert all((caught.value.attempted, caught.value.problem, caught.value.fix))
    assert not any(trainer.history.values())


@requirement("runs.predict-in-use", section=SECTION, source="D2L 5.6")
def test_predictions_are_without_dropout_and_change_nothing(backend, num_gpus, network):
    """Predict without dropout, and change nothing.

    One input has one answer.

    Also of a network that gets its shapes from the first batch.
    """
    inputs = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
    trainer, net = Trainer(1, num_gpus, backend=backend), networks(backend)[network](backend.cpu())
    (first,) = trainer.predict(net, [inputs])
    before = values_of(backend, net)
    (again,) = trainer.predict(net, [inputs])
    np.testing.assert_array_equal(backend.to_numpy(first), backend.to_numpy(again))
    assert_same_values(backend, net, before)


@requirement("runs.refuse-what-is-none", section=SECTION, source="contract, Containers and errors")
@pytest.mark.parametrize("verb", ["validate", "predict"])
@pytest.mark.parametrize("wrong", ["model", "array", "number", "nothing"])
def test_invalid_models_and_data_are_refused(backend, batches, num_gpus, verb, wrong):
    """Refuse an object that is not a model, and data that is not batches.

    The first error would come from deep within the framework.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    model, data = {
        "model": (trainer.model, batches),
        "array": (backend.mlp([2, 1]), backend.ones((4, 2))),
        "number": (backend.mlp([2, 1]), 5),
        "nothing": (backend.mlp([2, 1]), []),
    }[wrong]
    with pytest.raises(UnsupportedValueError, match="fix:"):
        getattr(trainer, verb)(model, data)


@requirement("fit.without-a-target", section=SECTION)
@pytest.mark.parametrize(
    "take", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["X", "(X,)", "dict"]
)
def test_a_loss_of_the_prediction_alone_takes_data_without_a_target(
    backend, num_gpus, network, take
):
    """Train on data without targets with a loss of the prediction alone.

    Autoencoders have no labels.
    """
    inputs = np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
    data, trainer = [take(inputs)], Trainer(EPOCHS, num_gpus, backend=backend)

    def loss(prediction):
        return prediction[0, 0] * prediction[0, 0]

    history = trainer.fit(networks(backend)[network](backend.cpu()), data, data, loss=loss)
    (prediction,) = trainer.predict(trainer.model, data)
    found = trainer.validate(trainer.model, data, loss=loss)["loss"]
    np.testing.assert_allclose(found, backend.to_numpy(prediction)[0, 0] ** 2, rtol=1e-5)
    assert history["val_loss"][-1] == found
    assert len(history["loss"]) == EPOCHS
