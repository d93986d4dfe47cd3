"""D2L 3.2, 3.4 and 6.7.3: the book's own code for the Trainer, its hooks, Module and DataModule.

The book builds its trainer from classes with hooks, cell by cell. Its readers' code has to run as
it stands.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import CheckpointError, Trainer, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev.native import NativeDevices
from d2ldev_conformance.provision import modules
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_values, values_of

SECTION = "6.7.3"
SOURCE = "contract, The book's own code"
EPOCHS = 2


@pytest.fixture
def add_to_class(monkeypatch):
    """The book's decorator, undone after the test."""

    def add_to_class(cls):
        return lambda function: monkeypatch.setattr(cls, function.__name__, function, raising=False)

    return add_to_class


class Data:
    """A D2L ``DataModule``."""

    def __init__(self, batches):
        self.batches = batches
        self.made = []

    def train_dataloader(self):
        self.made.append("train")
        return self.batches

    def val_dataloader(self):
        self.made.append("val")
        return self.batches[:1]


@requirement("hooks.patched-onto-the-class", section=SECTION, source="D2L 3.2")
def test_hooks_that_are_patched_onto_the_class_are_called(backend, batches, num_gpus, add_to_class):
    """Call hooks that are patched onto the class, in the order of steps and epochs."""
    seen = []

    @add_to_class(Trainer)
    def prepare_batch(self, batch):
        seen.append("batch")
        return self.backend.to(batch, self.device)

    @add_to_class(Trainer)
    def on_step_end(*_):
        seen.append("step")

    @add_to_class(Trainer)
    def on_epoch_end(*_):
        seen.append("epoch")

    Trainer(EPOCHS, num_gpus, backend=backend).fit(backend.mlp([2, 1]), batches[:2])
    assert seen == ["batch", "step", "batch", "step", "epoch"] * EPOCHS


@requirement("hooks.of-the-books-handle", section=SECTION)
def test_add_to_class_changes_only_the_book_handles_trainer(
    backend, batches, num_gpus, monkeypatch
):
    """Change only the trainer of the book's handle with ``add_to_class``.

    A notebook must not change the class of another library.

    Train with the book's lines in the class ``d2l.Trainer``; ``d2ldev.Trainer`` has none.
    """
    d2l, seen = NativeDevices(backend), []
    for name in ("__init__", "prepare_batch"):
        monkeypatch.setattr(Trainer, name, getattr(Trainer, name))  # undone, whatever happens
    kept = dict(vars(Trainer))

    @d2l.add_to_class(d2l.Trainer)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):  # noqa: ARG001, N807
        self.save_hyperparameters()
        self.gpus = [d2l.gpu(i) for i in range(min(num_gpus, d2l.num_gpus()))]

    @d2l.add_to_class(d2l.Trainer)
    def prepare_batch(self, batch):
        place = self.gpus[0] if self.gpus else d2l.cpu()
        moved = [d2l.to(a, place) for a in batch]
        seen.extend(backend.device_of(a) for a in moved)
        return moved

    assert dict(vars(Trainer)) == kept
    trainer = d2l.Trainer(max_epochs=EPOCHS, num_gpus=num_gpus)
    history = trainer.fit(backend.mlp([2, 1], seed=0), batches, lr=0.05)
    assert trainer.backend is backend
    assert set(seen) == {trainer.device}
    expected = Trainer(EPOCHS, num_gpus, backend=backend)
    assert history == expected.fit(backend.mlp([2, 1], seed=0), batches, lr=0.05)


@requirement("hooks.the-books-trainer", section=SECTION, source="D2L")
def test_the_books_trainer_trains_as_ours_does(backend, batches, num_gpus, add_to_class):
    """Train with the book's own three methods as d2ldev's trainer does."""
    d2l = backend
    expected = Trainer(EPOCHS, num_gpus, backend=backend)
    history = expected.fit(backend.mlp([2, 1]), batches)

    @add_to_class(Trainer)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):  # noqa: ARG001, N807
        self.save_hyperparameters()
        self.gpus = [d2l.gpu(i) for i in range(min(num_gpus, d2l.num_gpus()))]

    @add_to_class(Trainer)
    def prepare_batch(self, batch):
        return [d2l.to(a, self.gpus[0] if self.gpus else d2l.cpu()) for a in batch]

    @add_to_class(Trainer)
    def prepare_model(self, model):
        self.model = d2l.place(model, self.gpus[0] if self.gpus else d2l.cpu())

    trainer = Trainer(max_epochs=EPOCHS, num_gpus=num_gpus)
    trainer.backend = backend
    assert trainer.fit(backend.mlp([2, 1]), batches) == history
    assert trainer.device == expected.device
    assert_same_values(backend, trainer.model, values_of(backend, expected.model))


@requirement("hooks.that-return-none", section=SECTION)
@pytest.mark.needs("train")
@pytest.mark.parametrize("hook", ["prepare_model", "prepare_batch"])
def test_a_hook_that_returns_nothing_is_an_error_that_names_it(backend, batches, num_gpus, hook):
    """Refuse a hook that returns None, and name it.

    A forgotten ``return`` is the most common mistake in a hook.
    """
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    setattr(trainer, hook, lambda _: None)
    net = backend.mlp([2, 1])
    before = values_of(backend, net)
    with pytest.raises(UnsupportedValueError, match=f"{hook} returned None"):
        trainer.fit(net, batches)
    assert_same_values(backend, net, before)


# -- callbacks ---------------------------------------------------------------------------------


class Noting:
    """A callback that notes each step, and what it was given, and can be resumed."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, step, _loss):
        """Note the step."""
        self.steps.append(step)

    def state_dict(self):
        """Return the steps so far."""
        return {"steps": self.steps}

    def load_state_dict(self, state):
        """Go on with them."""
        self.steps = list(state["steps"])


@requirement("callbacks.each-step", section=SECTION, source="contract, Callbacks")
def test_every_callback_is_given_the_loss_of_each_step_on_the_device(backend, batches, num_gpus):
    """Give each callback the loss of each step, on the device, unread."""
    seen, epochs, noting = [], [], Noting()

    class Watching(Trainer):
        def on_step_end(self, step, loss):
            seen.append((step, backend.device_of(loss), backend.to_numpy(loss)))

    callbacks = [noting, lambda epoch, history: epochs.append((epoch, len(history["loss"])))]
    trainer = Watching(EPOCHS, num_gpus, backend=backend, callbacks=callbacks)
    history = trainer.fit(backend.mlp([2, 1]), batches)
    assert noting.steps == [step for step, _, _ in seen] == list(range(len(batches) * EPOCHS))
    assert {device for _, device, _ in seen} == {trainer.device}
    weights = [len(y) for _, y in batches]
    losses = np.reshape([loss for _, _, loss in seen], (EPOCHS, -1))
    np.testing.assert_allclose(np.average(losses, 1, weights), history["loss"], rtol=1e-5)
    assert epochs == [(0, 1), (1, 2)]


@requirement("callbacks.wait-for-nothing", section=SECTION, source="contract, Callbacks")
@pytest.mark.needs_gpus(1)
def test_a_callback_of_steps_neither_reads_losses_nor_stops_prefetching(
    backend, batches, monkeypatch
):
    """Call a callback of steps without reading losses or stopping ``prefetch``.

    A callback that logs must not make the GPU wait.
    """
    read, drawn, ahead = [], [], []
    to_numpy = framework_of(backend).tensors.to_numpy
    monkeypatch.setattr(
        framework_of(backend).tensors, "to_numpy", lambda x: read.append(x) or to_numpy(x)
    )

    class Drawn(list):
        def __iter__(self):
            for batch in super().__iter__():
                drawn.append(batch)
                yield batch

    class Counting(Noting):
        def on_step_end(self, step, loss):
            super().on_step_end(step, loss)
            ahead.append(len(drawn) - step - 1)

    Trainer(EPOCHS, 1, backend=backend).fit(backend.mlp([2, 1]), batches)
    without = len(read)
    trainer = Trainer(EPOCHS, 1, backend=backend, callbacks=Counting())
    trainer.fit(backend.mlp([2, 1]), Drawn(batches))
    assert len(read) == 2 * without
    assert ahead[0] == min(2, len(batches) - 1)


class Typo:
    """A callback with a hook that there is not."""

    def on_epoch_end(self, epoch, history):
        """Do nothing."""

    def on_train_begin(self):
        """Never be called."""


@requirement("callbacks.ignores-nothing", section=SECTION, source="contract, Callbacks")
@pytest.mark.parametrize(
    "callback",
    [3, object(), Typo(), Noting, [Noting(), "x"]],
    ids=["a number", "an object", "a misspelt hook", "a class", "a word in a list"],
)
def test_invalid_callbacks_and_unknown_hooks_are_refused(backend, batches, num_gpus, callback):
    """Refuse an object without a known hook, and a misspelt hook.

    A callback that is never called looks like one that finds nothing.
    """
    net = backend.mlp([2, 1])
    before = values_of(backend, net)
    with pytest.raises(UnsupportedValueError, match="during training"):
        Trainer(EPOCHS, num_gpus, backend=backend, callbacks=callback).fit(net, batches)
    assert_same_values(backend, net, before)


@requirement("callbacks.are-resumed", section=SECTION, source="contract, Callbacks")
def test_the_checkpoint_has_the_state_of_callbacks(backend, batches, num_gpus, tmp_path):
    """Save the state of callbacks, and restore it in a resumed run.

    A count that begins at 0 stops too late.
    """
    notings = [Noting() for _ in range(3)]
    path = tmp_path / "run"
    for noting, epochs in zip(notings, (1, EPOCHS, EPOCHS), strict=True):
        trainer = Trainer(epochs, num_gpus, backend=backend, callbacks=[noting, print_nothing])
        trainer.fit(backend.mlp([2, 1]), batches, checkpoint=path, resume=True)
    everything = list(range(len(batches) * EPOCHS))
    assert [noting.steps for noting in notings] == [everything[:4], everything, everything]
    with pytest.raises(CheckpointError, match="callbacks"):
        Trainer(EPOCHS, num_gpus, backend=backend).fit(
            backend.mlp([2, 1]), batches, checkpoint=path, resume=True
        )


def print_nothing(epoch, history):
    """Be a callback without a state."""


# -- D2L's Module and DataModule ---------------------------------------------------------------


@requirement("module.its-steps", section=SECTION, source="D2L 3.2")
def test_a_module_is_trained_by_its_own_steps_and_its_own_optimizer(
    backend, batches, num_gpus, module
):
    """Train a ``Module`` by its own steps, optimizer and data.

    Its loss is its author's decision.

    Halve the learning rate, because the module's loss is twice the squared error.
    """
    expected = Trainer(EPOCHS, num_gpus, backend=backend)
    history = expected.fit(
        backend.mlp([2, 1]), batches, batches[:1], loss="mse", optimizer="sgd", lr=0.1
    )
    trainer, data = Trainer(EPOCHS, num_gpus, backend=backend), Data(batches)
    found = trainer.fit(modules(backend)[module](backend.cpu(), 0.05), data)
    assert data.made == ["train", "val"]
    assert found.keys() - {"lr"} == {"loss", "val_loss"}
    np.testing.assert_allclose(found["loss"], 2 * np.array(history["loss"]), rtol=1e-5)
    np.testing.assert_allclose(found["val_loss"], 3 * np.array(history["val_loss"]), rtol=1e-5)
    x = backend.ones((1, 2), device=trainer.device)
    values = [backend.to_numpy(each.model(x)) for each in (trainer, expected)]
    np.testing.assert_allclose(*values, rtol=1e-5)
    assert set(backend.placement(trainer.model).values()) == {trainer.device}


@requirement("module.has-its-learning-rate", section=SECTION)
@pytest.mark.needs("train")
@pytest.mark.parametrize("is_given", [False, True], ids=["configured", "given"])
def test_a_learning_rate_beside_an_optimizer_of_the_users_own_is_refused(
    backend, batches, num_gpus, module, is_given
):
    """Refuse ``lr=`` beside an optimizer that has its own.

    One of the two numbers would be ignored.
    """
    net = modules(backend)[module](backend.cpu(), 0.05)
    before = values_of(backend, net)
    options = {"optimizer": net.configure_optimizers()} if is_given else {}
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    with pytest.raises(UnsupportedValueError, match="has a learning rate of its own"):
        trainer.fit(net, batches, lr=0.5, **options)
    assert_same_values(backend, net, before)


@requirement("module.ignores-nothing", section=SECTION)
@pytest.mark.parametrize("option", [{"loss": "mse"}, {"metrics": ["accuracy"]}], ids=str)
def test_arguments_that_a_modules_steps_ignore_are_refused(
    backend, batches, num_gpus, module, option
):
    """Refuse ``loss=`` and ``metrics=`` that a module's own steps ignore.

    A reader believes the line that is written.
    """
    net = modules(backend)[module](backend.cpu(), 0.05)
    with pytest.raises(UnsupportedValueError, match="training_step"):
        Trainer(EPOCHS, num_gpus, backend=backend).fit(net, batches, **option)


@requirement("module.knows-its-trainer", section=SECTION, source="D2L 3.2")
def test_a_module_knows_its_trainer_when_it_configures_its_optimizer(
    backend, batches, num_gpus, module, monkeypatch
):
    """Set a module's trainer before it configures its optimizer.

    A schedule needs the number of steps.
    """
    net, seen = modules(backend)[module](backend.cpu(), 0.05), []
    configure = type(net).configure_optimizers

    def configure_optimizers(self):
        seen.append((self.trainer.max_epochs, self.trainer.num_train_batches))
        return configure(self)

    monkeypatch.setattr(type(net), "configure_optimizers", configure_optimizers)
    Trainer(EPOCHS, num_gpus, backend=backend).fit(net, batches)
    assert seen == [(EPOCHS, len(batches))]


@requirement("module.counts-batches", section=SECTION, source="D2L 3.2")
def test_a_module_that_is_only_evaluated_finds_the_number_of_its_batches(
    backend, batches, num_gpus, module, monkeypatch
):
    """Tell a module the number of batches, also in ``validate`` alone.

    The book's plots divide by this number.

    Tell a module how many batches there are, also if it is only evaluated.
    """
    net, seen = modules(backend)[module](backend.cpu(), 0.05), set()
    step = type(net).validation_step

    def validation_step(self, batch):
        seen.add((self.trainer.num_train_batches, self.trainer.num_val_batches))
        return step(self, batch)

    monkeypatch.setattr(type(net), "validation_step", validation_step)
    Trainer(EPOCHS, num_gpus, backend=backend).validate(net, batches)
    assert seen == {(len(batches), len(batches))}
