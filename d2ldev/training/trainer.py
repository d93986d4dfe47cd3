"""``Trainer``: the training loop that moves the model once, and each batch at the boundary.

Source: D2L, sections 3.2.4 and 6.7.3 (``Trainer``, ``prepare_batch``, ``prepare_model``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from operator import length_hint
from os import PathLike
from typing import Any

from d2ldev.active import active_backend, get_backend
from d2ldev.backend import Backend
from d2ldev.device import CPU, Device, gpu, gpus_in_words
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError, describe
from d2ldev.framework import Learner, Loss, Settings
from d2ldev.operations.arguments import is_iterable, whole_number
from d2ldev.operations.devices import asked_for_too_late
from d2ldev.operations.prefetching import moved_ahead
from d2ldev.training.data import count_of, inputs_and_target, unweighted
from d2ldev.training.log import DeviceLog
from d2ldev.training.metrics import Metric, check_names, named_metrics
from d2ldev.training.order import begin_epoch
from d2ldev.training.run import Run

History = dict[str, list[float]]
"""Name -> one number per epoch."""


class Trainer:
    """Train models of any framework on one device.

    Args:
        max_epochs: how often the data is gone through.
        num_gpus: 0 is the CPU, 1 is ``gpu(0)``, -1 is all that there are.
        gradient_clip_val: the largest global norm of the gradients; 0 is no clipping.
        backend: the framework's, or its name; None is the active one.
        callback: called after each epoch with its number, from 0, and the history so far.
        progress: whether a bar is shown in the terminal.
        accumulate: how many batches make one step of the optimizer, with the mean of their
            gradients: with batches of one size, the step on all of them in one. The last step of an
            epoch is made with the batches that are left, so that nothing waits for the next epoch.
        precision: ``'bf16'`` or ``'fp16'``: the model computes in it, by the framework's own means;
            parameters, losses and metrics are float32. With ``'fp16'``, gradients are scaled, and a
            step in which they are too large is left out.

    Attributes:
        gpus: the GPUs that it uses; empty is the CPU.

    Raises:
        DeviceUnavailableError: if there are fewer GPUs, or more than one is asked for.
        UnsupportedValueError: for other values, or a precision that the framework has not.

    >>> trainer = Trainer(max_epochs=3, num_gpus=1)                        # doctest: +SKIP
    >>> history = trainer.fit(net, batches, lr=0.1)                        # doctest: +SKIP
    >>> history['loss']                                                    # doctest: +SKIP
    [2.31, 0.52, 0.13]
    """

    def __init__(
        self,
        max_epochs: int,
        num_gpus: int = 0,
        gradient_clip_val: float = 0,
        *,
        backend: Backend | str | None = None,
        callback: Callable[[int, History], None] | None = None,
        progress: bool = False,
        accumulate: int = 1,
        precision: str = "model",
    ) -> None:
        self.backend = active_backend() if backend is None else get_backend(backend)
        self.max_epochs = whole_number(
            "train", "max_epochs", max_epochs, least=0, fix="max_epochs=1"
        )
        self.gradient_clip_val = gradient_clip_val
        self.accumulate, self.precision = accumulate, precision
        self.backend.framework.checked(
            Settings(
                gradient_clip_val=gradient_clip_val, accumulate=accumulate, precision=precision
            )
        )
        self.callback = callback
        self.progress = progress
        number = whole_number("train", "num_gpus", num_gpus, least=-1, fix="num_gpus=1")
        self.gpus = _gpus(self.backend, number)
        self.device: Device = self.gpus[0] if self.gpus else CPU
        self._learner: Learner | None = None

    @property
    def model(self) -> Any:
        """The model as it is after the last step; None before ``fit``.

        Go on with it: some frameworks move the model itself, and others make a new one.
        """
        if self._learner is None:
            return None
        self._learner.sync()
        return self._learner.parts["model"]

    # -- the book's hooks -----------------------------------------------------------------

    def prepare_model(self, model: Any) -> Any:
        """Move the model to the device, once and before anything else; to be overridden."""
        return self.backend.place(model, self.device)

    def prepare_batch(self, batch: Any) -> Any:
        """Move a batch to the device, at the boundary of the loop; to be overridden."""
        return self.backend.to(batch, self.device)

    def on_epoch_end(self, epoch: int, history: History) -> None:
        """Do nothing after an epoch; to be overridden, or given as ``callback``.

        Its changes of the model and the optimizer are in the checkpoint, which is saved afterwards.
        An exception in it ends the run; the checkpoint is then that of the epoch before.
        """
        if self.callback is not None:
            self.callback(epoch, history)

    # -- training -------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_data: Iterable[Any],
        val_data: Iterable[Any] | None = None,
        *,
        loss: Loss | None = None,
        optimizer: Any = None,
        lr: float | None = None,
        metrics: Sequence[Metric] = (),
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
    ) -> History:
        """Train a model.

        Args:
            model: one of the framework's; it is placed by ``prepare_model``.
            train_data: batches ``(X, y)``, to be gone through once per epoch: tuples, lists or
                dicts of tensors or NumPy arrays, from any iterable that can begin again. The
                target is the last of a tuple, and ``'y'`` of a dict, else the last of it, too.
                Several inputs of a dict are given by name, none left out before another one, if all
                keys are the model's (parameters of ``forward``, ``__call__`` or ``call``; names or
                keys of a functional model's inputs), else by position, in the order of the dict.
                A dict's ``'sample_weight'``, of shape ``(n,)`` or of more of the first axes of
                ``y``, are weights: the loss of the batch is the weighted mean, metrics are as ever,
                and a loss of your own needs a parameter of this name. (A model's own input of this
                name stays an input.)
            val_data: batches to evaluate the model on after each epoch.
            loss: ``'mse'``, ``'cross_entropy'``, ``'bce'``, or
                ``(prediction, y) -> scalar tensor``, which is called with ``y`` first if its first
                parameter is ``y_true``, as in Keras. None is the loss that a Keras model was
                compiled with, else ``'mse'``.
            optimizer: ``'sgd'``, ``'momentum'``, ``'adam'``, ``'adamw'``, ``'adagrad'``, which are
                built after the model is placed; or the framework's own, which is placed too. None
                is the one that a Keras model was compiled with, else ``'sgd'``.
            lr: the learning rate of an optimizer that is given by name; None is 0.01.
            metrics: ``'accuracy'``, or functions ``(prediction, y) -> scalar tensor``, averaged
                over the examples; or ``(y_true, y_pred)``, with these names. Objects that keep a
                running value, as Keras' and Gluon's do, are refused.
            checkpoint: a file that holds the state, at the beginning and after each epoch. An
                existing file is replaced, unless the run goes on from it.
            resume: go on from that file, if it exists, with the loss, the optimizer and the metrics
                that the run began with, and the batches in the order that they would have had. The
                file holds the order of a loader with ``state_dict`` and ``load_state_dict``, of
                torch's and Gluon's loaders, and of what is drawn from Python's and NumPy's random
                numbers. Data, or its ``sampler``, with ``set_epoch`` is told the number of each
                epoch. Other data, such as a shuffled ``tf.data.Dataset``, begins as it begins in
                any process. The file does not hold what a callback keeps, such as the count of a
                schedule, nor a dataset's or a worker process's own random numbers.

        Returns:
            The history: ``'loss'`` and each metric by name, with ``'val_'`` before it for
            ``val_data``; one float per epoch, the mean over the examples.

        Raises:
            UnsupportedValueError: for a loss, an optimizer or data that cannot be used.
            CheckpointError: if the file is not of such a run, or is broken.
        """
        functions = named_metrics(self.backend, metrics)
        _check_data(train_data, "train_data", self.max_epochs)
        if val_data is not None:
            _check_data(val_data, "val_data", self.max_epochs)
        # The optimizer is built after the model is placed: in a framework that moves by making new
        # tensors, one that is built before would hold the old tensors.
        learner = self.backend.learner(
            self.prepare_model(model),
            loss=loss,
            optimizer=optimizer,
            lr=lr,
            gradient_clip_val=self.gradient_clip_val,
            accumulate=self.accumulate,
            precision=self.precision,
        )
        self._learner = learner
        names = ["loss", *functions]
        if val_data is not None:
            names += [f"val_{name}" for name in names]
        check_names(names)
        run = Run(self.backend.framework, learner, train_data, names, checkpoint)
        try:
            if resume:
                run.resume(self.device, lambda: self._first_inputs(learner, train_data))
            else:
                run.save(self.device)
            with _progress_bar(self.progress, self.max_epochs, run.epoch) as show:
                for epoch in range(run.epoch, self.max_epochs):
                    begin_epoch(train_data, epoch)
                    found = self._epoch(learner, learner.step, train_data, functions)
                    learner.flush()
                    if val_data is not None:
                        after = self._epoch(learner, learner.evaluate, val_data, functions)
                        found |= {f"val_{name}": value for name, value in after.items()}
                    run.record(found)
                    show(run.epoch, ", ".join(f"{name} {found[name]:.4g}" for name in found))
                    if self.callback is not None or self._overrides("on_epoch_end"):
                        learner.sync()  # the user's model is as it is after the last step
                        self.on_epoch_end(epoch, run.history)
                    run.save(self.device)
        finally:
            # The user's own object has what was learned, also where an error ends the run.
            learner.sync()
        return run.history

    def _epoch(
        self,
        learner: Learner,
        step: Callable[[tuple[Any, ...], Any], tuple[Any, Any]],
        data: Iterable[Any],
        metrics: Mapping[str, Callable[[Any, Any], Any]],
    ) -> dict[str, float]:
        """Go through the data once; return the means over its examples.

        Only the batches are moved in here, and nothing is waited for: the numbers stay on the
        device until the end.
        """
        names, takes_mapping = learner.input_names, learner.takes_mapping
        # Where the losses are, also if a hook has moved the model.
        log = DeviceLog(self.backend, values=False)
        with closing(self._prepared(data)) as batches:
            for batch in batches:
                inputs, y = inputs_and_target(batch, names, takes_mapping)
                loss, prediction = step(inputs, y)
                y = unweighted(y)
                measured = {name: metric(prediction, y) for name, metric in metrics.items()}
                log.add(count_of(self.backend, y), loss=loss, **measured)
        means = log.means()
        if not means:
            raise _no_batch()
        return means

    def _first_inputs(self, learner: Learner, data: Iterable[Any]) -> tuple[Any, ...]:
        """Return the inputs of the first batch, on the device."""
        for batch in data:
            first = self.prepare_batch(batch)
            return inputs_and_target(first, learner.input_names, learner.takes_mapping)[0]
        raise _no_batch()

    def _prepared(self, data: Iterable[Any]) -> Generator[Any, None, None]:
        """Return the batches on the device: ahead of their use, unless the user prepares them."""
        if self.gpus and not self._overrides("prepare_batch"):
            return self.backend.prefetch(data, self.device)
        return moved_ahead(data, 0, self.prepare_batch)

    def _overrides(self, hook: str) -> bool:
        """Tell whether a hook is the user's, of a class or of this object."""
        return getattr(getattr(self, hook), "__func__", None) is not getattr(Trainer, hook)


@contextmanager
def _progress_bar(wanted: bool, epochs: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """Show a bar in the terminal; yield a function of the epochs done and a few words."""
    if not wanted:
        yield lambda _done, _words: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=epochs, completed=done, words="")
        yield lambda done, words: progress.update(task, completed=done, words=words)


def _gpus(backend: Backend, wanted: int) -> list[Device]:
    there = backend.num_gpus()
    number = there if wanted == -1 else wanted
    if number > min(there, 1):
        problem = "a model is trained on one device"
        if number > there:
            too_late = asked_for_too_late(number - 1)
            problem = f"{backend.name} has {gpus_in_words(there)} here{too_late}"
        raise DeviceUnavailableError(
            f"train on {gpus_in_words(number)}",
            problem,
            f"Trainer(max_epochs, num_gpus={min(there, 1)})",
            backend.devices(),
        )
    return [gpu(i) for i in range(number)]


def _no_batch() -> UnsupportedValueError:
    return UnsupportedValueError(
        "go through the data of an epoch",
        "there is no batch in it",
        "data has to be an iterable that begins again: a list or a loader, no generator",
    )


def _check_data(data: Any, name: str, max_epochs: int) -> None:
    """Check that the data is not empty, and can be gone through in each epoch.

    Raises:
        UnsupportedValueError: if it is not so.
    """
    if not is_iterable(data):
        raise UnsupportedValueError(
            f"train with {name}={describe(data)}",
            "it is no iterable of batches",
            f"{name}=[(X, y)], or a loader",
        )
    if max_epochs > 1 and isinstance(data, Iterator):
        raise UnsupportedValueError(
            f"go through {name} more than once",
            f"{describe(data)} is an iterator, which is used up after one epoch",
            f"{name}=list({name}), or a loader",
        )
    if max_epochs and not length_hint(data, 1):  # 1 also for what has no length
        raise UnsupportedValueError(
            f"go through {name}", "there is no batch in it", f"{name}=[(X, y)], or None for no data"
        )
