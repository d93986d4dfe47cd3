"""``Trainer``: the training loop that moves the model once, and each batch at the boundary.

Source: D2L, sections 3.2.4 and 6.7.3 (``Trainer``, ``prepare_batch``, ``prepare_model``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from operator import length_hint
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from d2ldev.active import active_backend, get_backend
from d2ldev.active import backend as handle
from d2ldev.backend import Backend
from d2ldev.device import CPU, Device, gpu, gpus_in_words
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError, describe
from d2ldev.framework import DeviceLike, Learner, Loss, Settings
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations.arguments import is_iterable, whole_number
from d2ldev.operations.devices import asked_for_too_late
from d2ldev.operations.prefetching import moved_ahead
from d2ldev.operations.steps import takes_target
from d2ldev.training.callbacks import (
    History,
    check_hooks,
    check_schedules,
    checked_callbacks,
    listeners,
)
from d2ldev.training.data import (
    count_of,
    inputs_alone,
    inputs_and_target,
    inputs_to_predict,
    unweighted,
)
from d2ldev.training.interruption import Interruption, interruptible, spared
from d2ldev.training.log import DeviceLog
from d2ldev.training.metrics import Metric, check_names, named_metrics
from d2ldev.training.module import is_data_module, loader_of, own_settings
from d2ldev.training.order import begin_epoch
from d2ldev.training.progress import Progress, shown
from d2ldev.training.run import Run, Saving


class Trainer:
    """Train models of any framework on one device.

    Args:
        max_epochs: how often the data is gone through.
        num_gpus: 0 is the CPU, 1 is ``gpu(0)``, -1 is all that there are.
        gradient_clip_val: the largest global norm of the gradients; 0 is no clipping.
        backend: the framework's, or its name; None is the active one.
        callback: called after each epoch with its number, from 0, and the history so far; or an
            object with ``on_epoch_end(epoch, history)``, ``on_step_end(step, loss)``, or both; or a
            list of such. What has ``state_dict`` and ``load_state_dict`` is in the checkpoint.
        progress: whether bars are shown in the terminal. Twice a second they wait for the loss.
        accumulate: how many batches make one step of the optimizer, with the mean of their
            gradients: with batches of one size, the step on all of them in one. The last step of an
            epoch is made with the batches that are left, so that nothing waits for the next epoch.
        precision: ``'bf16'`` or ``'fp16'``: the model computes in it, by the framework's own means;
            parameters, losses and metrics are float32. With ``'fp16'``, gradients are scaled, and a
            step in which they are too large is left out.

    Attributes:
        gpus: the GPUs that it uses; empty is the CPU.
        epoch, train_batch_idx, val_batch_idx: the number of the epoch that runs, and how many
            batches were trained and evaluated on, for the plots of D2L's ``Module``.
        train_dataloader, val_dataloader, num_train_batches, num_val_batches: the data of ``fit``,
            and how many batches it has: 0 if it does not say.

    A subclass, or the book's ``@add_to_class(Trainer)``, may have an ``__init__`` of its own that
    sets ``max_epochs``, and ``gpus`` to devices of any spelling.

    Raises:
        DeviceUnavailableError: if there are fewer GPUs, or more than one is asked for.
        UnsupportedValueError: for other values, or a precision that the framework has not.

    >>> trainer = Trainer(max_epochs=3, num_gpus=1)                        # doctest: +SKIP
    >>> history = trainer.fit(net, batches, lr=0.1)                        # doctest: +SKIP
    >>> history['loss']                                                    # doctest: +SKIP
    [2.31, 0.52, 0.13]
    """

    # For those whose ``__init__`` is the book's, which does not call this one's.
    backend: Backend = handle
    max_epochs: int
    gpus: Sequence[Any] = ()
    gradient_clip_val: float = 0
    callback: Any = None
    progress: bool = False
    accumulate: int = 1
    precision: str = "model"
    epoch = train_batch_idx = val_batch_idx = num_train_batches = num_val_batches = 0
    _learner: Learner | None = None
    _model: Any = None

    def __init__(
        self,
        max_epochs: int,
        num_gpus: int = 0,
        gradient_clip_val: float = 0,
        *,
        backend: Backend | str | None = None,
        callback: Any = None,
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

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Make the arguments of the method that calls this attributes, as in D2L's section 3.2.1.

        Args:
            ignore: the names of those that are left out, as all with a leading underscore are.
        """
        for name, value in sys._getframe(1).f_locals.items():
            if name not in {*ignore, "self"} and not name.startswith("_"):
                setattr(self, name, value)

    @property
    def device(self) -> Device:
        """The device that it trains on: the first of ``gpus``, else the CPU."""
        return self.backend.device(self.gpus[0]) if self.gpus else CPU

    @device.setter
    def device(self, device: DeviceLike) -> None:
        place = self.backend.device(device)
        self.gpus = [] if place is CPU else [place]

    @property
    def model(self) -> Any:
        """The model as it is after the last step; None before ``fit``.

        Go on with it: some frameworks move the model itself, and others make a new one. A
        ``prepare_model`` that returns nothing sets it to what is to be trained, as the book's does.
        """
        if self._learner is None:
            return self._model
        self._learner.sync()
        return self._learner.parts["model"]

    @model.setter
    def model(self, model: Any) -> None:
        self._model, self._learner = model, None

    # -- the book's hooks -----------------------------------------------------------------

    def prepare_data(self, data: Any) -> None:
        """Get the loaders of a ``DataModule``, once and before anything else; to be overridden."""
        self.train_dataloader = data.train_dataloader()
        self.val_dataloader = data.val_dataloader() if hasattr(data, "val_dataloader") else None

    def prepare_model(self, model: Any) -> Any:
        """Move the model to the device, once, before the first batch; to be overridden."""
        return self.backend.place(model, self.device)

    def prepare_batch(self, batch: Any) -> Any:
        """Move a batch to the device, at the boundary of the loop; to be overridden."""
        return self.backend.to(batch, self.device)

    def on_step_end(self, step: int, loss: Any) -> None:
        """Do nothing after a step of the optimizer; to be overridden, or that of a callback.

        ``self.model`` is the model after it; in JAX, the user's own object is brought up to date
        when the epoch ends.

        Args:
            step: the number of its batch in the run, from 0; with ``accumulate``, of its last one.
            loss: of that batch before the step, a scalar tensor on the device. To read it waits for
                the device.
        """

    def on_epoch_end(self, epoch: int, history: History) -> None:
        """Do nothing after an epoch; to be overridden, or given as ``callback``.

        Its changes of the model and the optimizer are in the checkpoint, which is saved afterwards.
        An exception in it ends the run; the checkpoint is then that of the epoch before.
        """

    # -- training -------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_data: Any,
        val_data: Iterable[Any] | None = None,
        *,
        loss: Loss | None = None,
        optimizer: Any = None,
        lr: float | None = None,
        metrics: Sequence[Metric] = (),
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int | None = None,
        keep: str = "last",
    ) -> History:
        """Train a model.

        Ctrl-C ends the run after the step, or at once where a batch is waited for: the model is as
        it is then, the history has the epochs that are done, and the checkpoint is the last one
        that was saved. Pressed twice, it raises.

        Args:
            model: one of the framework's; it is placed by ``prepare_model``. Of a D2L ``Module``,
                which has ``training_step(batch)``, this method gives the loss of a step, and
                ``validation_step(batch)``, if it has one, that of a batch of ``val_data``: NaN if
                it returns nothing. They are called at each step, in JAX as traced by ``jax.jit``;
                ``model.trainer`` is this trainer. ``configure_optimizers()``, called after the
                model is placed, gives the optimizer. Without ``training_step``, a model with
                ``configure_optimizers`` is trained with its ``loss(prediction, y)``.
            train_data: batches ``(X, y)``, to be gone through once per epoch: tuples, lists or
                dicts of tensors or NumPy arrays, from any iterable that can begin again. The
                target is the last of a tuple, and ``'y'`` of a dict, else the last of it, too.
                Several inputs of a dict are given by name, none left out before another one, if all
                keys are the model's (parameters of ``forward``, ``__call__`` or ``call``; names or
                keys of a functional model's inputs), else by position, in the order of the dict.
                A dict's ``'sample_weight'``, of shape ``(n,)`` or of more of the first axes of
                ``y``, are weights: the loss of the batch is the weighted mean, 0 if all weights
                are, metrics are as ever, and a loss of your own needs a parameter of this name. (A
                model's own input of this name stays an input.) Or a D2L ``DataModule``, whose
                ``train_dataloader()`` and ``val_dataloader()`` are called once.
            val_data: batches to evaluate the model on after each epoch.
            loss: ``'mse'``, ``'cross_entropy'``, ``'bce'``, or
                ``(prediction, y) -> scalar tensor``, which is called with ``y`` first if its first
                parameter is ``y_true``, as in Keras. To a loss that can be called with a prediction
                alone, ``prediction -> scalar tensor``, belong batches without a target: ``X``,
                ``(X,)``, or all inputs. None is the model's own, a Keras model's the one that it
                was compiled with, else ``'mse'``.
            optimizer: ``'sgd'``, ``'momentum'``, ``'adam'``, ``'adamw'``, ``'adagrad'``, which are
                built after the model is placed; or the framework's own, which is placed too. None
                is the model's own, a Keras model's the one that it was compiled with, else
                ``'sgd'``.
            lr: the learning rate of an optimizer that is given by name; None is 0.01. It is refused
                beside an object, which has its own.
            metrics: ``'accuracy'``, or functions ``(prediction, y) -> scalar tensor``, averaged
                over the examples; or ``(y_true, y_pred)``, with these names. Objects that keep a
                running value, as Keras' and Gluon's do, are refused. Without any, those that a
                Keras model was compiled with and that are means over examples.
            checkpoint: a file that holds the state, at the beginning and after each epoch. An
                existing file is replaced, unless the run goes on from it.
            resume: go on from that file, if it exists, with the loss, the optimizer and the metrics
                that the run began with, and the batches in the order that they would have had. The
                file holds the order of a loader with ``state_dict`` and ``load_state_dict``, of
                torch's and Gluon's loaders, and of what is drawn from Python's and NumPy's random
                numbers. Data, or its ``sampler``, with ``set_epoch`` is told the number of each
                epoch. Other data, such as a shuffled ``tf.data.Dataset``, begins as it begins in
                any process. The file does not hold what a callback without ``state_dict`` keeps,
                nor a dataset's or a worker process's own random numbers.
            checkpoint_every: number of batches after each of which the state is saved, too; with
                ``accumulate``, as soon as the step that the batch belongs to has ended. A run that
                goes on within an epoch draws its batches again, and leaves out those that are done.
            keep: ``'last'``; or ``'best'``, which saves the state after an epoch only if its
                ``'val_loss'``, without ``val_data`` its ``'loss'``, is less than any before.

        Returns:
            The history: ``'loss'`` and each metric by name, with ``'val_'`` before it for
            ``val_data``; one float per epoch, the mean over the examples. It is empty where a
            ``fit_epoch`` of the user's, as in D2L's section 3.4, runs the epochs: it finds what
            the book's finds, ``optim`` included.

        Raises:
            UnsupportedValueError: for a loss, an optimizer, data or a hook that cannot be used.
            CheckpointError: if the file is not of such a run, or is broken.
        """
        check_hooks(self, f"train with the {type(self).__name__}")
        callbacks = checked_callbacks(self.callback)
        functions = named_metrics(self.backend, metrics)
        saving = Saving(checkpoint, checkpoint_every, keep).checked()
        if hasattr(self, "fit_epoch"):
            given = {
                "loss": loss is not None,
                "optimizer": optimizer is not None,
                "lr": lr is not None,
                "metrics": bool(metrics),
                "checkpoint": checkpoint is not None,
                "resume": resume,
                "progress": self.progress,
                "accumulate": self.accumulate != 1,
                "precision": self.precision != "model",
            }
            _check_own_epoch(given, self._listeners(callbacks, "on_step_end"))
        elif hasattr(self, "clip_gradients"):
            raise _ignored("clip_gradients", "leave it out: gradient_clip_val clips by itself")
        train_data, val_data = self._data(train_data, val_data)
        model = self._prepared_model(model)
        if hasattr(self, "fit_epoch"):
            return self._fit_by_the_book(model, callbacks)
        # The optimizer is built after the model is placed: in a framework that moves by making new
        # tensors, one that is built before would hold the old tensors.
        learner = self.backend.learner(
            model,
            **own_settings(model, loss, optimizer, metrics, trainer=self),
            lr=lr,
            gradient_clip_val=self.gradient_clip_val,
            accumulate=self.accumulate,
            precision=self.precision,
        )
        check_schedules(callbacks, learner.settings.optimizer)
        self._learner = learner
        functions = functions or self._own_metrics(learner)
        names = ["loss", *functions]
        if val_data is not None:
            names += [f"val_{name}" for name in names]
        check_names(names)
        run = Run(self.backend.framework, learner, train_data, names, callbacks, saving)
        on_step_end = self._listeners(callbacks, "on_step_end")
        on_epoch_end = self._listeners(callbacks, "on_epoch_end")
        try:
            if resume:
                run.resume(self.device, lambda: self._first_inputs(learner, train_data))
            else:
                run.save(self.device)
            with (
                shown(self.progress, self.max_epochs, run.epoch) as progress,
                interruptible() as interruption,
            ):
                loop = _Loop(functions, progress, on_step_end, interruption)
                for epoch in range(run.epoch, self.max_epochs):
                    if interruption.is_pressed:
                        break
                    self.epoch = epoch
                    found = self._train(learner, run, train_data, loop)
                    if val_data is not None and not interruption.is_pressed:
                        after = self._evaluate(learner, val_data, loop)
                        found |= {f"val_{name}": value for name, value in after.items()}
                    if interruption.is_pressed:
                        break
                    run.record(found)
                    progress.end_epoch(run.epoch, found)
                    if on_epoch_end:
                        learner.sync()  # the user's model is as it is after the last step
                    for listener in on_epoch_end:
                        listener(epoch, run.history)
                    run.save(self.device)
        finally:
            # The user's own object has what was learned, also where an error ends the run.
            learner.sync()
        return run.history

    def _fit_by_the_book(self, model: Any, callbacks: Sequence[Any]) -> History:
        """Run the user's own epochs, as ``Trainer.fit`` of D2L's section 3.2.4 does."""
        self.model = model
        if not hasattr(model, "trainer"):
            model.trainer = self
        self.optim = model.configure_optimizers()
        for epoch in range(self.max_epochs):
            self.epoch = epoch
            self.fit_epoch()  # type: ignore[attr-defined]
            for listener in self._listeners(callbacks, "on_epoch_end"):
                listener(epoch, {})
        return {}

    def _train(
        self, learner: Learner, run: Run, data: Iterable[Any], loop: _Loop
    ) -> dict[str, float]:
        """Train for an epoch; return the means over its examples, or nothing after Ctrl-C.

        Only the batches are moved in here, and nothing is waited for: the numbers stay on the
        device until the end.
        """
        begin_epoch(data, run.epoch)
        # Where the losses are, also if a hook has moved the model.
        log = DeviceLog(self.backend, values=False)
        operands = self._operands(learner)
        batches = self._from_where_it_was(data, run, log)
        loop.progress.begin_epoch(self.num_train_batches or None)
        with closing(batches):
            for number, batch in loop.interruption.until_pressed(batches):
                inputs, y, count = operands(batch)
                loss, prediction = learner.step(inputs, y)
                log.add(count, loss=loss, **loop.measured(prediction, y))
                loop.progress.step(number + 1, count, log)
                if not learner.pending:
                    loop.end_step(run.step, loss)
                run.step += 1
                self.train_batch_idx += 1
                run.save_within(number + 1, log, self.device)
        if learner.pending:
            learner.flush()
            loop.end_step(run.step - 1, loss)
        if loop.interruption.is_pressed:
            return {}
        means = _means(log)
        loop.progress.end_batches(means["loss"])
        return means

    def _from_where_it_was(
        self, data: Iterable[Any], run: Run, log: DeviceLog
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of each batch in the epoch and the batch on the device."""
        if not run.is_within and run.until_saved() is None:
            with closing(self._prepared(data)) as batches:
                yield from enumerate(batches)
            return
        # Up to a step after which the state is saved nothing is drawn ahead: it would be drawn
        # again by a run that goes on from there, from other random numbers.
        source = iter(spared(data))
        try:
            number = run.go_on_within(source, log)
            is_over = False
            while not is_over:
                wanted = run.until_saved()
                before = number
                with closing(self._prepared(islice(source, wanted))) as part:
                    for batch in part:
                        yield number, batch
                        number += 1
                is_over = number - before != wanted
        finally:
            if isinstance(source, Generator):
                source.close()

    def _evaluate(self, learner: Learner, data: Iterable[Any], loop: _Loop) -> dict[str, float]:
        """Go through the data without training; return what ``_train`` does."""
        log = DeviceLog(self.backend, values=False)
        operands = self._operands(learner)
        with closing(self._prepared(data)) as batches:
            for batch in loop.interruption.until_pressed(batches):
                inputs, y, count = operands(batch)
                loss, prediction = learner.evaluate(inputs, y)
                if loss is None:  # a ``validation_step`` has logged it itself
                    count, loss = 0, float("nan")
                log.add(count, loss=loss, **loop.measured(prediction, y))
                self.val_batch_idx += 1
        return {} if loop.interruption.is_pressed else _means(log)

    # -- using a model --------------------------------------------------------------------

    def validate(
        self,
        model: Any,
        data: Any,
        *,
        loss: Loss | None = None,
        metrics: Sequence[Metric] = (),
    ) -> dict[str, float]:
        """Measure a model on data, without dropout, and without changing it.

        Args:
            model: see ``fit``. None of its parameters needs a gradient.
            data: batches ``(X, y)``, or a ``DataModule``, whose ``val_dataloader()`` is taken.
            loss, metrics: see ``fit``.

        Returns:
            ``'loss'`` and each metric by name, the mean over the examples.

        Raises:
            UnsupportedValueError: for a model, a loss, a metric or data that cannot be used.

        >>> trainer.validate(net, batches, metrics=['accuracy'])           # doctest: +SKIP
        {'loss': 0.13, 'accuracy': 0.96}
        """
        functions = named_metrics(self.backend, metrics)
        with self._besides("validate"):
            batches = loader_of(data, "val_dataloader")
            prepared = self._prepared_for_use(model, batches, "validate")
            learner = self._evaluator(
                prepared, **own_settings(prepared, loss, "sgd", metrics, trainer=self)
            )
            self.val_batch_idx = 0
            self.num_val_batches = length_hint(batches, 0)
            # For a model whose training_step measures, where nothing was trained.
            self.num_train_batches = self.num_train_batches or self.num_val_batches
            try:
                return self._evaluate(learner, batches, _Loop(functions or self._own_metrics(learner)))
            finally:
                learner.sync()

    def predict(self, model: Any, data: Any) -> list[Any]:
        """Return the predictions of a model, without dropout, and without changing it.

        Args:
            model: see ``fit``. None of its parameters needs a gradient.
            data: batches, as ``fit`` has them: the target of ``(X, y)`` is left out. One without a
                target is ``X``, ``(X,)``, or a dict all of whose keys are the model's inputs;
                several inputs without one are ``(X1, X2, None)``. Or a ``DataModule``, whose
                ``predict_dataloader()``, else ``val_dataloader()``, is taken.

        Returns:
            What the model returns for each batch, on the device.

        Raises:
            UnsupportedValueError: for a model or data that cannot be used.

        >>> trainer.predict(net, ArrayLoader(X, batch_size=32))            # doctest: +SKIP
        """
        with self._besides("predict"):
            source = loader_of(data, "predict_dataloader", "val_dataloader")
            learner = self._evaluator(self._prepared_for_use(model, source, "predict"), loss="mse")
            names, takes_mapping = learner.input_names, learner.takes_mapping
            try:
                with closing(self._prepared(source)) as batches:
                    inputs = (inputs_to_predict(batch, names, takes_mapping) for batch in batches)
                    return [learner.predict(each) for each in inputs]
            finally:
                learner.sync()

    @contextmanager
    def _besides(self, verb: str) -> Iterator[None]:
        """Leave a run as it is, in whose callback this may be; its errors name this call."""
        names = ("_learner", "_model", "val_batch_idx", "num_val_batches", "num_train_batches")
        kept = {name: getattr(self, name) for name in names}
        try:
            yield
        except UnsupportedValueError as error:
            first, _, rest = error.attempted.partition(" ")
            if first != "train":
                raise
            attempted = f"{verb} {rest}"
            raise UnsupportedValueError(
                attempted, error.problem, error.fix, error.devices
            ) from error
        finally:
            vars(self).update(kept)

    def _evaluator(self, model: Any, **settings: Any) -> Learner:
        """Return the learner of a prepared model that is not trained."""
        return self.backend.learner(model, **settings, precision=self.precision, is_trained=False)

    def _prepared_for_use(self, model: Any, data: Any, verb: str) -> Any:
        """Return a model that is not trained, as ``prepare_model`` returned it."""
        if model is None:
            raise UnsupportedValueError(
                f"{verb} None",
                "it is no model; before fit, trainer.model is None",
                f"trainer.{verb}(net, batches)",
            )
        is_array = (
            isinstance(data, np.ndarray) or self.backend.framework.kinds[type(data)] is TENSOR
        )
        if is_array:
            raise UnsupportedValueError(
                f"{verb} with an array",
                "data is an iterable of batches",
                f"trainer.{verb}(net, [batch]), or ArrayLoader(X, batch_size=32)",
            )
        _check_data(data, "data", 1)
        return self._prepared_model(model)

    def _own_metrics(self, learner: Learner) -> Mapping[str, Callable[[Any, Any], Any]]:
        """Return the metrics that the model itself has, where its prediction is known."""
        if learner.settings.methods is not None:
            return {}
        own = self.backend.framework.training.metrics(learner.parts["model"])
        return named_metrics(self.backend, own)

    def _operands(self, learner: Learner) -> Callable[[Any], tuple[tuple[Any, ...], Any, int]]:
        """Return ``batch -> (inputs, y, number of examples)``, for ``learner.step``."""
        backend, names, takes_mapping = self.backend, learner.input_names, learner.takes_mapping
        is_built = learner.settings.methods is None or learner.is_built

        def of_the_model(batch: Any) -> tuple[tuple[Any, ...], Any, int]:
            inputs = inputs_alone(batch, names, takes_mapping)
            return inputs, None, count_of(backend, inputs)

        def of_the_loss(batch: Any) -> tuple[tuple[Any, ...], Any, int]:
            inputs, y = inputs_and_target(batch, names, takes_mapping)
            return inputs, y, count_of(backend, unweighted(y))

        def of_its_methods(batch: Any) -> tuple[tuple[Any, ...], Any, int]:
            nonlocal is_built
            if not is_built:
                learner.build(inputs_and_target(batch, names, takes_mapping)[0])
                is_built = True
            return (batch,), None, count_of(backend, batch)

        if learner.settings.methods is not None:
            return of_its_methods
        return of_the_loss if takes_target(learner.settings.loss) else of_the_model

    def _first_inputs(self, learner: Learner, data: Iterable[Any]) -> tuple[Any, ...]:
        """Return the inputs of the first batch, on the device."""
        for batch in data:
            first, names = self._prepared_batch(batch), learner.input_names
            if learner.settings.methods is None and not takes_target(learner.settings.loss):
                return inputs_alone(first, names, learner.takes_mapping)
            return inputs_and_target(first, names, learner.takes_mapping)[0]
        raise _no_batch()

    # -- hooks ----------------------------------------------------------------------------

    def _data(self, train_data: Any, val_data: Any) -> tuple[Iterable[Any], Iterable[Any] | None]:
        """Return the batches of a run, which are those of a ``DataModule`` if one is given."""
        self.train_dataloader, self.val_dataloader = train_data, val_data
        if is_data_module(train_data) or self._overrides("prepare_data"):
            self.prepare_data(train_data)
            if val_data is not None:
                self.val_dataloader = val_data
        _check_data(self.train_dataloader, "train_data", self.max_epochs)
        if self.val_dataloader is not None:
            _check_data(self.val_dataloader, "val_data", self.max_epochs)
        self.num_train_batches = length_hint(self.train_dataloader, 0)
        self.num_val_batches = length_hint(self.val_dataloader, 0)
        self.epoch = self.train_batch_idx = self.val_batch_idx = 0
        return self.train_dataloader, self.val_dataloader

    def _prepared_model(self, model: Any) -> Any:
        """Return what ``prepare_model`` returned, or has set ``self.model`` to, as the book's."""
        self._model = None
        prepared = self.prepare_model(model)
        if prepared is None:
            prepared = self._model
        if prepared is None:
            raise UnsupportedValueError(
                f"train {describe(model)}",
                f"{type(self).__name__}.prepare_model returned None, and has set no self.model",
                "return the model from it, placed: return self.backend.place(model, self.device)",
            )
        return prepared

    def _prepared_batch(self, batch: Any) -> Any:
        prepared = self.prepare_batch(batch)
        if prepared is None:
            raise UnsupportedValueError(
                f"train on a batch, {describe(batch)}",
                f"{type(self).__name__}.prepare_batch returned None",
                "return the batch from it: return self.backend.to(batch, self.device)",
            )
        return prepared

    def _prepared(self, data: Iterable[Any]) -> Generator[Any, None, None]:
        """Return the batches on the device: ahead of their use, unless the user prepares them."""
        source = spared(data)
        if self.gpus and not self._overrides("prepare_batch"):
            return self.backend.prefetch(source, self.device)
        return moved_ahead(source, 0, self._prepared_batch)

    def _overrides(self, hook: str) -> bool:
        """Tell whether a hook is the user's: of a class, of this object, or patched onto this."""
        return getattr(getattr(self, hook), "__func__", None) is not _HOOKS[hook]

    def _listeners(self, callbacks: Sequence[Any], hook: str) -> list[Callable[..., Any]]:
        own = [getattr(self, hook)] if self._overrides(hook) else []
        return [*own, *listeners(callbacks, hook)]


# As they are before any user patches the class, as the book's ``add_to_class`` does.
_HOOKS = {
    name: getattr(Trainer, name)
    for name in ("prepare_data", "prepare_model", "prepare_batch", "on_step_end", "on_epoch_end")
}


class _Loop(NamedTuple):
    """What a loop over batches does besides.

    Args:
        metrics: name -> ``(prediction, y) -> scalar tensor``.
        progress: where the batches are counted.
        on_step_end: what is called after a step.
        interruption: of the run, which ends the loop after a step.
    """

    metrics: Mapping[str, Callable[[Any, Any], Any]]
    progress: Progress = Progress()
    on_step_end: Sequence[Callable[[int, Any], None]] = ()
    interruption: Interruption = Interruption()

    def end_step(self, step: int, loss: Any) -> None:
        """Call what is called after a step of the optimizer."""
        for listener in self.on_step_end:
            listener(step, loss)

    def measured(self, prediction: Any, y: Any) -> dict[str, Any]:
        """Return the metrics of a batch."""
        y = unweighted(y)
        return {name: metric(prediction, y) for name, metric in self.metrics.items()}


def _means(log: DeviceLog) -> dict[str, float]:
    means = log.means()
    if not means:
        raise _no_batch()
    return means


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


def _check_own_epoch(given: Mapping[str, bool], on_step_end: Sequence[Any]) -> None:
    """Check that nothing was asked for that a ``fit_epoch`` of the user's would ignore."""
    ignored = [f"{name}=" for name, is_given in given.items() if is_given]
    ignored += ["on_step_end"] if on_step_end else []
    if ignored:
        raise _ignored(
            ", ".join(ignored), "leave it out, or the fit_epoch: d2ldev's own loop knows it"
        )


def _ignored(what: str, fix: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"train with {what} and the loop that there is", "nobody would look at it", fix
    )


def _check_data(data: Any, name: str, max_epochs: int) -> None:
    """Check that the data is not empty, and can be gone through in each epoch.

    Raises:
        UnsupportedValueError: if it is not so.
    """
    if not is_iterable(data):
        raise UnsupportedValueError(
            f"go through {name}={describe(data)}",
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
