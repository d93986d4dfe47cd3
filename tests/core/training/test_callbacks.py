"""Callbacks, schedules, and Ctrl-C, on the reference backend."""

import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from d2ldev_conformance.suite.training.conftest import ctrl_c  # noqa: F401  # a fixture

from d2ldev import CheckpointError, Schedule, Trainer, UnsupportedValueError

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


class Scheduler:
    """A scheduler as PyTorch has them."""

    def __init__(self):
        self.steps = []

    def step(self, *numbers):
        self.steps.append(numbers)

    def state_dict(self):
        return {"steps": [list(numbers) for numbers in self.steps]}

    def load_state_dict(self, state):
        self.steps = [tuple(numbers) for numbers in state["steps"]]


class Stateless:
    def __init__(self):
        self.count = 0

    def step(self):
        self.count += 1


@pytest.fixture
def net(reference):
    return reference.mlp([2, 1])


# -- schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("per", "count"), [("step", 6), ("epoch", 2)])
def test_a_schedule_steps_after_each_counted_step_or_epoch(reference, net, per, count):
    scheduler = Scheduler()
    trainer = Trainer(2, backend=reference, callbacks=Schedule(scheduler, per=per))
    trainer.fit(net, [BATCH] * 3)
    assert scheduler.steps == [()] * count


def test_a_schedule_counts_the_steps_of_the_optimizer(reference, net):
    scheduler = Scheduler()
    schedule = Schedule(scheduler, per="step")
    Trainer(2, backend=reference, callbacks=schedule, accumulate_grad_batches=2).fit(
        net, [BATCH] * 5
    )
    assert len(scheduler.steps) == 6


def test_a_function_with_a_hook_is_called_for_both(reference, net):
    class Both:
        def __init__(self):
            self.steps, self.epochs = [], []

        def on_step_end(self, step, loss):
            self.steps.append(step)

        def __call__(self, epoch, history):
            self.epochs.append(epoch)

    both = Both()
    Trainer(2, backend=reference, callbacks=both).fit(net, [BATCH] * 2)
    assert (both.steps, both.epochs) == ([0, 1, 2, 3], [0, 1])


def test_a_schedule_may_take_a_number_of_the_history(reference, net):
    scheduler = Scheduler()
    trainer = Trainer(2, backend=reference, callbacks=Schedule(scheduler, metric="val_loss"))
    history = trainer.fit(net, [BATCH], [BATCH])
    assert scheduler.steps == [(value,) for value in history["val_loss"]]


def test_a_schedule_by_a_number_that_is_not_in_the_history_is_refused(reference, net):
    trainer = Trainer(2, backend=reference, callbacks=Schedule(Scheduler(), metric="val_loss"))
    with pytest.raises(UnsupportedValueError, match=r"the history has loss, lr\n.*metric='loss'"):
        trainer.fit(net, [BATCH])


def test_a_schedule_without_a_history_is_refused(reference, net):
    class Mine(Trainer):
        def fit_epoch(self):
            """Compute nothing."""

    net = SimpleNamespace(configure_optimizers=lambda: None)
    trainer = Mine(1, backend=reference, callbacks=Schedule(Scheduler(), metric="loss"))
    trainer.prepare_model = lambda model: model
    with pytest.raises(UnsupportedValueError, match="the history has nothing"):
        trainer.fit(net, [BATCH])


def test_a_schedule_of_an_optimizer_that_does_not_train_is_refused(reference, net):
    scheduler = Scheduler()
    scheduler.optimizer = object()
    trainer = Trainer(1, backend=reference, callbacks=Schedule(scheduler))
    with pytest.raises(UnsupportedValueError, match="another optimizer than 'sgd'") as error:
        trainer.fit(net, [BATCH])
    assert error.value.fix == "fit(..., optimizer=scheduler.optimizer)"


def test_the_state_of_a_scheduler_is_resumed(reference, tmp_path):
    schedulers = [Scheduler(), Scheduler()]
    for epochs, scheduler in zip((1, 3), schedulers, strict=True):
        trainer = Trainer(epochs, backend=reference, callbacks=Schedule(scheduler))
        trainer.fit(reference.mlp([2, 1]), [BATCH], checkpoint=tmp_path / "run", resume=True)
    assert [len(scheduler.steps) for scheduler in schedulers] == [1, 3]


def test_a_scheduler_without_a_state_is_stepped_too(reference, net, tmp_path):
    scheduler = Stateless()
    trainer = Trainer(2, backend=reference, callbacks=Schedule(scheduler))
    for _ in range(2):
        trainer.fit(net, [BATCH], checkpoint=tmp_path / "run", resume=True)
    assert scheduler.count == 2


@pytest.mark.parametrize(
    "arguments",
    [(object(),), (Scheduler(), "batch"), (Scheduler(), "step", "loss")],
    ids=["no scheduler", "per batch", "a metric per step"],
)
def test_an_invalid_schedule_is_refused(arguments):
    with pytest.raises(UnsupportedValueError, match="cannot step a scheduler"):
        Schedule(*arguments)


def test_a_scheduler_that_is_given_as_a_callback_is_refused_with_the_line_that_is_right(reference):
    with pytest.raises(UnsupportedValueError, match=r"Schedule\(scheduler, per='epoch'\)"):
        Trainer(1, backend=reference, callbacks=[Scheduler()]).fit(reference.mlp([2, 1]), [BATCH])


class StepsWithoutALoss:
    def on_step_end(self, step):
        raise AssertionError("it takes a step and a loss")


class EndsWithoutAHistory(Trainer):
    def on_epoch_end(self, epoch):
        raise AssertionError("it takes an epoch and a history")


@pytest.mark.parametrize(
    ("make", "callback", "operands"),
    [
        (Trainer, lambda: None, "epoch, history"),
        (Trainer, [print, StepsWithoutALoss()], "step, loss"),
        (EndsWithoutAHistory, None, "epoch, history"),
    ],
    ids=["a function", "a callback", "a subclass"],
)
def test_a_hook_that_cannot_be_called_is_refused_before_anything_is_trained(
    reference, net, make, callback, operands
):
    trainer = make(1, backend=reference, callbacks=callback)
    with pytest.raises(UnsupportedValueError, match=rf"cannot be called with \({operands}\)"):
        trainer.fit(net, [BATCH])
    assert trainer.model is None


# -- states ------------------------------------------------------------------------------------


class Keeping:
    def __init__(self, value, refuses=False):
        self.value, self.refuses = value, refuses

    def on_epoch_end(self, epoch, history):
        pass

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        if self.refuses and state != self.value:
            raise KeyError("odd")
        self.value = state


def test_if_one_callback_refuses_its_state_all_and_the_model_stay_as_they_were(
    reference, net, tmp_path
):
    begun = Trainer(1, backend=reference, callbacks=[Keeping(1), Keeping(None)])
    begun.fit(net, [BATCH], checkpoint=tmp_path / "run")
    other = reference.mlp([2, 1], seed=9)
    callbacks = [Keeping(5), Keeping(6, refuses=True)]
    trainer = Trainer(2, backend=reference, callbacks=callbacks)
    with pytest.raises(CheckpointError, match=r"one refuses its state: KeyError\('odd'\)"):
        trainer.fit(other, [BATCH], checkpoint=tmp_path / "run", resume=True)
    assert [callback.value for callback in callbacks] == [5, 6]
    assert trainer.model is other


def test_a_state_keeps_the_values_of_an_array_in_another_order_of_bytes(reference, net, tmp_path):
    begun = Trainer(1, backend=reference, callbacks=Keeping(np.arange(3, dtype=">i4")))
    begun.fit(net, [BATCH], checkpoint=tmp_path / "run")
    callback = Keeping(None)
    Trainer(1, backend=reference, callbacks=callback).fit(
        net, [BATCH], checkpoint=tmp_path / "run", resume=True
    )
    assert callback.value.tolist() == [0, 1, 2]


def test_a_state_that_cannot_be_loaded_is_refused_before_the_run(reference, net):
    class Half:
        def on_epoch_end(self, epoch, history):
            pass

        def state_dict(self):
            return {}

    with pytest.raises(UnsupportedValueError, match="state_dict and load_state_dict"):
        Trainer(1, backend=reference, callbacks=Half()).fit(net, [BATCH])


# -- Ctrl-C ------------------------------------------------------------------------------------


class Pressing:
    """Presses Ctrl-C in the first step."""

    def __init__(self, times):
        self.times, self.steps = times, 0

    def on_step_end(self, step, loss):
        self.steps += 1
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_that_is_pressed_twice_raises(reference, net):
    with pytest.raises(KeyboardInterrupt):
        Trainer(1, backend=reference, callbacks=Pressing(2)).fit(net, [BATCH] * 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_is_left_alone(reference, net, monkeypatch):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        pressing = Pressing(1)
        Trainer(1, backend=reference, callbacks=pressing).fit(net, [BATCH] * 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(seen), pressing.steps) == (3, 3)


def test_a_run_in_another_thread_does_without_a_handler(reference, net):
    histories = []

    def run():
        histories.append(Trainer(1, backend=reference).fit(net, [BATCH]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(histories[0]["loss"]) == 1


class PressedBefore(Trainer):
    """Ctrl-C while the model is placed."""

    def prepare_model(self, model):
        signal.raise_signal(signal.SIGINT)
        return super().prepare_model(model)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_the_first_step_ends_the_run_without_one(reference, net, tmp_path):
    pressing, path = Pressing(0), tmp_path / "run.safetensors"
    path.write_bytes(b"an older run's")
    trainer = PressedBefore(2, backend=reference, callbacks=pressing)
    history = trainer.fit(net, [BATCH], [BATCH], checkpoint=path)
    assert (history, pressing.steps) == ({"loss": [], "val_loss": [], "lr": []}, 0)
    assert path.read_bytes() == b"an older run's"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class StartingWorkers(list):
    """A loader with processes; Ctrl-C when it is told the number of the second epoch."""

    num_workers = 1
    started = 0

    def __iter__(self):
        self.started += 1
        return super().__iter__()

    def set_epoch(self, epoch):
        if epoch:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_an_epoch_starts_no_processes_of_a_loader(reference, net):
    loader = StartingWorkers([BATCH])
    history = Trainer(3, backend=reference).fit(net, loader)
    assert (len(history["loss"]), loader.started) == (1, 1)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_a_run_goes_on_leaves_it_where_it_was(reference, tmp_path):
    path = tmp_path / "run.safetensors"
    done = Trainer(2, backend=reference)
    begun = done.fit(reference.mlp([2, 1]), [BATCH], checkpoint=path)
    before = path.read_bytes()
    trainer = PressedBefore(5, backend=reference)
    history = trainer.fit(reference.mlp([2, 1]), [BATCH], checkpoint=path, resume=True)
    assert history == begun
    found, wanted = (
        [np.asarray(x).tolist() for x in reference.named_tensors(net).values()]
        for net in (trainer.model, done.model)
    )
    assert found == wanted
    assert path.read_bytes() == before


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_a_loop_of_the_users_raises(reference, net):
    class ByTheBook(PressedBefore):
        def fit_epoch(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        ByTheBook(2, backend=reference).fit(net, [BATCH])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_evaluating_ends_without_the_epoch(reference, net):
    class Data(list):
        def __iter__(self):
            signal.raise_signal(signal.SIGINT)
            return super().__iter__()

    ends = []
    trainer = Trainer(3, backend=reference, callbacks=lambda *_: ends.append(True))
    history = trainer.fit(net, [BATCH], Data([BATCH]))
    assert (history, ends) == ({"loss": [], "val_loss": [], "lr": []}, [])


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_at_the_end_of_an_epoch_begins_no_other(reference, net):
    class AtTheEnd:
        steps = 0

        def on_step_end(self, step, loss):
            self.steps += 1

        def on_epoch_end(self, epoch, history):
            signal.raise_signal(signal.SIGINT)

    ending = AtTheEnd()
    history = Trainer(3, backend=reference, callbacks=ending).fit(net, [BATCH] * 2)
    assert (len(history["loss"]), ending.steps) == (1, 2)
