"""D2L 6.7.3: runs that end early: by ``should_stop``, ``EarlyStopping`` or a callback's error.

A run that ends by itself, or by an error, leaves its model at the last whole step. Days of training
depend on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from d2ldev import ArrayLoader, EarlyStopping, Trainer, UnsupportedValueError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_run, read_saved_values

SECTION = "6.7.3"
SOURCE = "contract, Callbacks"
EPOCHS = 3
STEPS = 4
"""In an epoch."""


class AfterStep:
    """A callback that does something after a step; it may be sent to another process."""

    trainer: Any = None

    def __init__(self, when: int) -> None:
        self.when = when
        self.steps: list[int] = []

    def on_step_end(self, step: int, _loss: Any) -> None:
        """Do it if it is time."""
        self.steps.append(step)
        if step == self.when:
            self.act()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        self.steps = list(state["steps"])

    def act(self) -> None:
        """Stop the run."""
        self.trainer.should_stop = True


class HookError(Exception):
    """An error of the user's."""


class RaisingAfterStep(AfterStep):
    """A callback that fails after a step."""

    def act(self) -> None:
        """Fail."""
        raise HookError


class RaisingAfterEpoch:
    """A callback that raises an error after the second epoch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_epoch_end(self, epoch: int, _history: Any) -> None:
        """Raise it."""
        if epoch == 1:
            raise self.error


def _net(backend):
    return backend.mlp([2, 1], seed=0)


def _alone(backend, batches, steps):
    """Return the parameters after so many steps, one by one."""
    learner = backend.learner(_net(backend), loss="mse", optimizer="sgd", lr=0.1)
    for step in range(steps):
        learner.step(*_operands(backend, batches[step % STEPS]))
    return read_saved_values(backend, learner.sync()["model"])


def _operands(backend, batch):
    x, y = backend.to(batch, "cpu")
    return (x,), y


@requirement("runs.stopped", section=SECTION, source="contract, Training")
@pytest.mark.parametrize("last", [STEPS + 1, 2 * STEPS - 1], ids=["within", "at the end"])
def test_should_stop_ends_the_run_after_the_step_or_the_epoch(backend, batches, num_gpus, last):
    """End a run after the step in which ``should_stop`` is set."""
    stopping = AfterStep(last)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=stopping)
    history = trainer.fit(_net(backend), batches, batches[:1], lr=0.1)
    done = (last + 1) // STEPS  # the epoch whose last step it was is whole
    assert [len(column) for column in history.values()] == [done, done, done]
    assert stopping.steps == list(range(last + 1))
    assert trainer.should_stop is True
    assert trainer.history == history
    assert_same_run(
        (read_saved_values(backend, trainer.model), {}), (_alone(backend, batches, last + 1), {})
    )


@requirement("runs.stop-is-forgotten-by-the-next", section=SECTION, source="contract, Training")
def test_the_next_fit_begins_with_a_new_state(backend, batches, num_gpus):
    """Begin the next ``fit`` without the earlier ``should_stop``.

    A cell of a notebook is run again.
    """
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    trainer.should_stop = True
    assert len(trainer.fit(_net(backend), batches)["loss"]) == EPOCHS
    assert trainer.should_stop is False


@requirement("runs.stopped-go-on", section=SECTION, source="contract, Resuming a run")
@pytest.mark.parametrize("last", [STEPS + 1, 2 * STEPS - 1], ids=["within", "at the end"])
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(
    backend, batches, num_gpus, tmp_path, last
):
    """Continue a stopped run from its checkpoint to the end of an unbroken one."""

    def fit(callback, **options):
        trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=callback)
        history = trainer.fit(_net(backend), batches, lr=0.1, **options)
        return read_saved_values(backend, trainer.model), history

    path = tmp_path / "run"
    fit(AfterStep(last), checkpoint=path)
    assert_same_run(fit(AfterStep(-1), checkpoint=path, resume=True), fit(AfterStep(-1)))


@requirement("runs.accumulated-before-a-stop", section=SECTION, source="contract, Training")
def test_gradients_that_wait_for_a_step_are_not_lost(backend, batches, num_gpus):
    """Make the step of gradients that wait when a run stops.

    Examples that were seen have to count.
    """

    class Stopping(ArrayLoader):
        def __iter__(self):
            for i, batch in enumerate(super().__iter__()):
                trainer.should_stop = i == 1
                yield batch

    x, y = batches[0]
    seen = AfterStep(-1)
    trainer = Trainer(1, num_gpus, backend=backend, callbacks=seen, accumulate_grad_batches=2)
    trainer.fit(_net(backend), Stopping(x, y, batch_size=1), lr=0.1)
    assert seen.steps in ([1], [1, 3])  # the batches are drawn ahead on some devices


@requirement("runs.error-in-a-callback", section=SECTION, source="contract, Training")
def test_an_error_in_a_callback_keeps_the_trained_parameters(backend, batches, num_gpus):
    """Keep the trained parameters after an error in a callback.

    A failed plot must not cost the model.
    """
    net = _net(backend)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=RaisingAfterStep(STEPS + 1))
    with pytest.raises(HookError):
        trainer.fit(net, batches, lr=0.1)
    learned = _alone(backend, batches, STEPS + 2)
    assert_same_run((read_saved_values(backend, trainer.model), {}), (learned, {}))
    assert [len(column) for column in trainer.history.values()] == [1, 1]


@requirement("runs.error-in-a-callback", section=SECTION, source="contract, Training")
@pytest.mark.parametrize(
    "error", [StopIteration("mine"), KeyboardInterrupt(), SystemExit(3)], ids=lambda x: type(x)
)
def test_an_error_that_means_something_to_python_is_raised_as_it_is(
    backend, batches, num_gpus, error
):
    """Raise ``StopIteration``, ``KeyboardInterrupt`` and ``SystemExit`` of a callback as they are.

    Python's own loops swallow the first of them.
    """
    trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=RaisingAfterEpoch(error))
    with pytest.raises(type(error)) as raised:
        trainer.fit(_net(backend), batches, lr=0.1)
    assert raised.value is error
    learned = _alone(backend, batches, 2 * STEPS)
    assert_same_run((read_saved_values(backend, trainer.model), {}), (learned, {}))
    assert [len(column) for column in trainer.history.values()] == [2, 2]


@requirement("callbacks.answers-are-refused", section=SECTION)
@pytest.mark.needs("train")
@pytest.mark.parametrize("answer", [True, np.True_], ids=["Python's", "NumPy's"])
@pytest.mark.parametrize("hook", ["on_step_end", "on_epoch_end"])
def test_a_callback_that_returns_a_value_is_refused_with_should_stop(
    backend, batches, num_gpus, hook, answer
):
    """Refuse a callback that returns True, and name ``should_stop``.

    Other libraries stop by the returned value.
    """
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    setattr(trainer, hook, lambda number, _: answer if number == 1 else False)
    with pytest.raises(UnsupportedValueError, match="should_stop = True"):
        trainer.fit(_net(backend), batches)


# -- EarlyStopping --------------------------------------------------------------------------------


@requirement("callbacks.early-stopping", section=SECTION, source="Keras, EarlyStopping")
@pytest.mark.parametrize(
    ("arguments", "rates", "epochs"),
    [
        ({"patience": 2}, 0.0, 3),
        ({"patience": 1}, 0.0, 2),
        ({"patience": 2, "mode": "max"}, 0.1, 3),
        ({"patience": 2, "min_delta": 1e6}, 0.1, 3),
        ({"patience": 2}, 0.1, 8),
    ],
    ids=["no change", "impatient", "the wrong way", "too little", "improving"],
)
def test_a_run_ends_after_some_epochs_in_a_row_without_an_improvement(
    backend, batches, num_gpus, arguments, rates, epochs
):
    """End a run after ``patience`` epochs in a row without an improvement."""
    stopping = EarlyStopping("val_loss", **arguments)
    trainer = Trainer(8, num_gpus, backend=backend, callbacks=stopping)
    history = trainer.fit(_net(backend), batches, batches, lr=rates)
    assert len(history["val_loss"]) == epochs
    assert trainer.should_stop is (epochs < 8)


@requirement("callbacks.early-stopping", section=SECTION, source="contract, Resuming a run")
def test_a_resumed_run_counts_on(backend, batches, num_gpus, tmp_path):
    """Count the epochs without an improvement on in a resumed run."""
    lengths = []
    for epochs in (2, 9):
        stopping = EarlyStopping("loss", patience=3)
        trainer = Trainer(epochs, num_gpus, backend=backend, callbacks=stopping)
        net = _net(backend)
        history = trainer.fit(net, batches, lr=0.0, checkpoint=tmp_path / "run", resume=True)
        lengths.append(len(history["loss"]))
    assert lengths == [2, 4]


@requirement("callbacks.early-stopping-needs-its-number", section=SECTION)
@pytest.mark.needs("train")
def test_a_number_that_the_history_will_not_have_is_an_error_before_the_run(
    backend, batches, num_gpus
):
    """Refuse before the run to watch a number that the history will not have.

    The mistake would show after the first epoch.
    """
    net = _net(backend)
    before = read_saved_values(backend, net)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=EarlyStopping())
    with pytest.raises(UnsupportedValueError, match=r"'val_loss'.*has loss, error"):
        trainer.fit(net, batches, metrics=[error])
    assert_same_run((read_saved_values(backend, net), {}), (before, {}))


def error(prediction, y):
    """Return the error of the first example."""
    return (prediction - y)[0, 0]
