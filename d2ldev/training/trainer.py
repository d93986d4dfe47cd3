"""``Trainer``: the training loop that moves the model once, and each batch at the boundary.

Source: D2L, sections 3.2.4 and 6.7.3 (``Trainer``, ``prepare_batch``, ``prepare_model``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from itertools import chain
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev._backend import Backend, framework_of
from d2ldev.active import get_backend
from d2ldev.contract import Learner, TrainingSettings
from d2ldev.contract.abilities import check_precision, require, set_precision
from d2ldev.contract.parallel import gpu_of_process
from d2ldev.contract.training import shard_refusal
from d2ldev.device import CPU, Device, gpu, gpus_in_words
from d2ldev.distributed.membership import join_group
from d2ldev.distributed.spawning import Outcome, find_result_path, train_in_processes
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError
from d2ldev.files.format.container import check_files
from d2ldev.operations.arguments import flag, length_of, whole_number
from d2ldev.operations.devices import explain_late_request, offer_virtual_gpus
from d2ldev.operations.prefetching import draw_outside
from d2ldev.options import (
    Loss,
    MatmulPrecisionName,
    Metrics,
    Mode,
    NumGpus,
    Optimizer,
    Precision,
    Statistics,
)
from d2ldev.registry.selection import framework_of_loader
from d2ldev.settings import Peers
from d2ldev.settings import peers as find_peers
from d2ldev.training.array_loader import ArrayLoader
from d2ldev.training.callbacks import (
    HOOKS,
    check_callbacks,
    check_hooks,
    check_monitors,
    check_operands,
    notify,
    run_schedules,
)
from d2ldev.training.context import RunContext
from d2ldev.training.data import check_batches, check_data, empty_data_refusal
from d2ldev.training.feed import Feed
from d2ldev.training.hooks import TrainerState, call_prepare_batch, find_listeners, is_overridden
from d2ldev.training.interruption import catch_interruption
from d2ldev.training.learning import check_settings, needs_processes
from d2ldev.training.loggers import find_loggers_of_runs
from d2ldev.training.loops import Loop
from d2ldev.training.metrics import check_names, find_metrics
from d2ldev.training.module import (
    METHODS,
    find_loader,
    find_own_settings,
    has_state_outside,
    is_data_module,
    read_arguments,
    restore_loss,
)
from d2ldev.training.progress import VIEW, open_view, show_progress
from d2ldev.training.rates import RATE, find_rate
from d2ldev.training.run import Run, Saving
from d2ldev.training.team import ProcessGroup, Team
from d2ldev.typing import Callback, DataModule, DeviceLike, History, T

if TYPE_CHECKING:
    from d2ldev.contract.group import Group


class _FitSettings(NamedTuple):
    """The arguments of ``fit`` beside the model and the data; see there."""

    loss: Loss | None
    optimizer: Optimizer | None
    lr: float | None
    metrics: Metrics
    saving: Saving
    resume: bool

    def to_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``fit``."""
        arguments = self._asdict()
        return {**arguments.pop("saving")._asdict(), **arguments}


class Trainer(TrainerState):
    """Train models of any framework on one device, on several GPUs, or in several processes.

    The Trainer moves the model once, and each batch when the loop reaches it.

    Several GPUs train one model together. The data yields the global batch, and each GPU computes a
    shard of it. The loss is the mean over the global batch. So the model learns the same as on one
    GPU, to rounding. Batch normalization, dropout and some losses of your own are exceptions:
    docs/explanation/what-several-gpus-change.md has the table. PyTorch needs a process for each
    GPU. ``fit`` starts these processes and ends them: docs/guides/several-gpus.md says what it
    sends, and what comes back.

    The processes of a launch (``d2ldev launch``, torchrun) train one model in the same way, on any
    number of machines: docs/guides/several-machines.md. Each process computes on the CPU or on
    ``gpu(LOCAL_RANK)``. Only rank 0 writes checkpoints and shows the progress. Every process calls
    the hooks and callbacks; ``on_step_end`` gets the loss of the process's own shard.

    Args:
        max_epochs: the number of passes through the data.
        num_gpus: 0 is the CPU, and 1 is ``gpu(0)``. ``'auto'`` or -1 is all GPUs, or the CPU
            without a GPU. A process of a launch takes 0 or 1, and ``'auto'`` is its own GPU.
        gradient_clip_val: the largest global norm of the gradients; 0 does not clip.
        backend: a backend or its name. None is the active backend. For ``d2l.Trainer`` of ``from
            d2ldev.native import torch as d2l``, None is the backend of ``d2l``.
        callbacks: a callback, or a list of callbacks. A callback is a function of ``(epoch,
            history)``, called after each epoch; epochs count from 0. Or it is an object with
            ``on_epoch_end(epoch, history)``, ``on_step_end(step, loss)``, or both. The checkpoint
            holds the state of an object with ``state_dict`` and ``load_state_dict``. The Trainer
            sets an attribute ``trainer`` that is None to itself.
        enable_progress_bar: whether to show bars in the terminal, or a line in a notebook. They
            wait for the loss twice a second. A pipe or a file gets nothing.
        accumulate_grad_batches: how many batches make one step of the optimizer, with the mean of
            their gradients. The last step of an epoch takes the remaining batches.
        precision: ``'bf16'`` or ``'fp16'``: the model computes in it, by the framework's own means.
            Parameters, losses and metrics stay float32. ``'fp16'`` scales the gradients, and skips
            a step whose gradients are too large. Lightning's names say the same: ``'bf16-mixed'``,
            ``'16-mixed'`` and ``'16'``; ``'32-true'`` and ``'32'`` change nothing.
        matmul_precision: ``'highest'``, ``'high'`` or ``'medium'``: the precision of float32
            products and convolutions during ``fit``, ``validate`` and ``predict``. None leaves it
            as it is. A run may resume with another one. See ``backend.matmul_precision``.
        batch_norm: the statistics of batch normalization on several GPUs or processes.
            ``'global'`` is for the whole batch, ``'local'`` for the shard of a GPU. A model whose
            layers use the other one is refused. With None the model's layers decide.

    Attributes:
        gpus: the GPUs that it uses; empty for the CPU.
        epoch, train_batch_idx, val_batch_idx: the number of the current epoch, of the batches
            trained on, and of the batches evaluated on. The plots of D2L's ``Module`` read them.
        should_stop: True ends the run after the current step, or after the epoch if that step was
            its last. A hook, a callback or another thread may set it. All processes end after the
            same step. ``fit`` sets it to False first.
        history: the history of the last ``fit`` so far, also after an error.
        train_dataloader, val_dataloader: the data of ``fit``.
        num_train_batches, num_val_batches: how many batches the data has; 0 if it has no length.

    A subclass, or the book's ``@add_to_class(Trainer)``, may have its own ``__init__``. It sets
    ``max_epochs``, and may set ``gpus`` to devices, strings or the framework's device objects.

    Raises:
        DeviceUnavailableError: if there are fewer GPUs.
        UnsupportedValueError: for an invalid value, or a precision that the framework lacks. For
            several GPUs in a process of a launch, or where the framework trains on one.

    >>> X = np.random.default_rng(0).normal(size=(64, 2)).astype('float32')
    >>> y = X @ np.array([[2.0], [-3.4]], dtype='float32')
    >>> trainer = Trainer(max_epochs=3, num_gpus=1)
    >>> history = trainer.fit(backend.mlp([2, 1]), d2ldev.ArrayLoader(X, y, batch_size=8), lr=0.1)
    >>> len(history['loss']), history['loss'][-1] < history['loss'][0]
    (3, True)
    """

    # The book's ``__init__`` does not call this class's.
    max_epochs: int
    gradient_clip_val: float = 0
    callbacks: Callback | Sequence[Callback] | None = None
    enable_progress_bar: bool = False
    accumulate_grad_batches: int = 1
    precision: Precision = "model"
    matmul_precision: MatmulPrecisionName | None = None
    batch_norm: Statistics | None = None

    def __init__(
        self,
        max_epochs: int,
        num_gpus: NumGpus = 0,
        gradient_clip_val: float = 0,
        *,
        backend: Backend | str | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        enable_progress_bar: bool = False,
        accumulate_grad_batches: int = 1,
        precision: Precision = "model",
        matmul_precision: MatmulPrecisionName | None = None,
        batch_norm: Statistics | None = None,
    ) -> None:
        self.backend = get_backend(type(self).backend if backend is None else backend)
        self.max_epochs = whole_number(
            "train", "max_epochs", max_epochs, least=0, fix="max_epochs=1"
        )
        self.gradient_clip_val = gradient_clip_val
        self.accumulate_grad_batches, self.precision = accumulate_grad_batches, precision
        self.matmul_precision = matmul_precision
        self.batch_norm = batch_norm
        settings = TrainingSettings(**self._settings_of_steps())
        self.precision = check_settings(framework_of(self.backend), settings).precision
        self._check_matmul_precision()
        self.callbacks = callbacks
        self.enable_progress_bar = flag("train", "enable_progress_bar", enable_progress_bar)
        is_auto = isinstance(num_gpus, str) and num_gpus == "auto"
        fix = "num_gpus=1, or num_gpus='auto' for all that there are"
        number = -1 if is_auto else num_gpus
        number = whole_number("train", "num_gpus", number, least=-1, fix=fix)
        peers = find_peers()
        self.gpus = (
            _find_gpus(self.backend, number)
            if peers is None
            else _find_gpu_of_process(self.backend, number, peers)
        )

    def __repr__(self) -> str:
        # A subclass with its own ``__init__`` may not have set it yet.
        epochs = getattr(self, "max_epochs", None)
        gpus = ", ".join(map(str, self.gpus)) or "cpu"
        others = [
            f", {name}={value!r}"
            for name, value in self._settings_of_steps().items()
            if value != TrainingSettings()._asdict()[name]
        ]
        options = f"max_epochs={epochs}, on {gpus}{''.join(others)}"
        return f"<{type(self).__name__}({options}) of the {self.backend.name} backend>"

    def __getstate__(self) -> dict[str, Any]:
        # The learner of the last run belongs to this process.
        return {**vars(self), "_learner": None, "_model": None}

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Store the arguments of the calling method as attributes, as in D2L's section 3.2.1.

        Args:
            ignore: names to leave out. Names with a leading underscore are always left out.

        >>> class Quiet(Trainer):
        ...     def __init__(self, max_epochs, note=''):
        ...         self.save_hyperparameters()
        >>> Quiet(3, note='first').note
        'first'
        """
        for name, value in read_arguments(sys._getframe(1), ignore).items():
            setattr(self, name, value)

    def _settings_of_steps(self) -> dict[str, Any]:
        """Return the settings of a step that belong to the trainer, not to ``fit``."""
        return {
            "gradient_clip_val": self.gradient_clip_val,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "precision": self.precision,
            "batch_norm": self.batch_norm,
        }

    # -- training -------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_data: Iterable[Any] | DataModule,
        val_data: Iterable[Any] | None = None,
        *,
        loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        lr: float | None = None,
        metrics: Metrics = (),
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int | None = None,
        best: str | PathLike[str] | None = None,
        monitor: str | None = None,
        mode: Mode | None = None,
    ) -> History:
        """Train a model.

        Several GPUs or processes give the numbers of one, to rounding. The exceptions see the whole
        batch: batch normalization, dropout, some losses and metrics of your own. See the table in
        docs/explanation/what-several-gpus-change.md.

        Ctrl-C ends the run after the current step, or at once while it waits for a batch. The model
        stays as it is then, and the history has the complete epochs. The checkpoint is the last one
        saved. A second Ctrl-C raises ``KeyboardInterrupt``. In a process of a launch the first one
        raises, and all other processes end.

        Args:
            model: a model of the framework; ``prepare_model`` places it. A D2L ``Module`` may have
                three methods of its own. ``training_step(batch)`` returns the loss of a step.
                ``validation_step(batch)`` returns the loss of a batch of ``val_data``; None counts
                as NaN. ``configure_optimizers()`` returns the optimizer, once the model is placed.
                ``model.trainer`` is this trainer. ``jax.jit`` traces the steps of an
                ``nnx.Module``; a linen module's take ``(params, batch, state)``, as in the book.
                Without ``training_step``, the loss is the model's ``loss(prediction, y)`` if it has
                ``configure_optimizers``.
            train_data: batches ``(X, y)`` of tensors or NumPy arrays, as tuples, lists or dicts.
                Any iterable that can start again for each epoch works. So does a D2L
                ``DataModule``: ``fit`` calls its ``train_dataloader()`` and ``val_dataloader()``
                once.

                The target is the last item of a tuple. A mapping gives the inputs by name, in any
                order. Its target is ``'y'``, or else the one key that names no input. A single key
                goes to a model that needs one input. Any other key is an error. Names come from the
                parameters of ``forward``, ``__call__`` or ``call``, or from a functional model's
                inputs. ``(mapping, y)`` is a mapping of inputs and the target.

                ``'sample_weight'`` in a dict weights the examples, with shape ``(n,)`` or the
                first axes of ``y``. The loss is the weighted mean, or 0 if all weights are 0.
                Metrics ignore the weights. A loss function of your own needs a parameter
                ``sample_weight``. If the model has an input of this name, it is that input.

                Floats are cast to the dtype of the model, and integers stay. Several GPUs or
                processes split a list like an array if it has an item for each example.
                ``d2ldev.Broadcast(value)`` is the same for all: see docs/guides/split-batches.md.
            val_data: batches to evaluate the model on after each epoch.
            loss: ``'mse'``, ``'cross_entropy'``, ``'bce'``, or a function ``(prediction, y) ->
                scalar tensor``. If its first parameter has the name of a target, such as
                ``y_true``, it gets ``y`` first. A function of the prediction alone goes with
                batches without a target: ``X``, ``(X,)``, or several inputs. ``'model'`` is the
                loss that the model computes from its labels, and returns as ``loss``. None is the
                model's own loss or that of a compiled Keras model, else ``'mse'``.
            optimizer: ``'sgd'``, ``'momentum'``, ``'adam'``, ``'adamw'`` or ``'adagrad'``, built
                after the model is placed. Or the framework's own optimizer, which is placed too.
                None is the model's own optimizer or that of a compiled Keras model, else ``'sgd'``.
            lr: the learning rate of a named optimizer; None is 0.01. An optimizer object has its
                own, so ``lr`` is an error then.
            metrics: ``'accuracy'``, or functions ``(prediction, y) -> scalar tensor``, averaged
                over the examples. A function of ``(y_true, y_pred)`` works too, as for ``loss``.
                With ``loss='model'`` they are functions of the model's output and the batch.
                Objects that keep a running value, such as those of torchmetrics, Keras and NNX,
                are measured over the epoch. So is ``EpochMetric(function)``, which gets all
                predictions and labels. A dict gives metrics their names in the history. See
                docs/guides/metrics.md.
            checkpoint: a file for the state of the run, saved at the start and after each epoch. A
                new run replaces an existing file.
            resume: continue from the checkpoint if the file exists. The loss, the optimizer and the
                metrics must be the same. The batches come in the order of the first run. See
                docs/resuming.md for the data and random numbers whose state the file holds. Data,
                its ``dataset``, ``sampler`` and ``batch_sampler`` get ``set_epoch(epoch)`` if they
                have it.
            checkpoint_every: also save the state after this many batches. With
                ``accumulate_grad_batches`` it waits for the end of the step. A run that resumes
                within an epoch draws the batches of that epoch again, and skips the ones done.
            best: a file for the state after the best epoch so far, with or without a
                ``checkpoint``. A run that resumes without this file compares the epochs from then
                on. If the number is NaN in every epoch, the file has the untrained model.
            monitor: the name of the number in the history that is best in that epoch. None is
                ``'val_loss'``, or ``'loss'`` without ``val_data``.
            mode: ``'min'`` for a number that should fall, ``'max'`` for one that should rise. None
                is for a loss, which should fall.

        Returns:
            The history: a dict with one float for each epoch, the mean over the examples. Its keys
            are ``'loss'`` and the name of each metric, with ``'val_'`` in front for ``val_data``.
            ``'lr'`` is the learning rate at the end of the epoch, before ``on_epoch_end``. It is
            that of PyTorch's first parameter group. It is absent if the optimizer does not show
            it, as one of optax without ``optax.inject_hyperparams``. ``history.plot()`` draws the
            others. If you define ``fit_epoch``, as in D2L's section 3.4, it runs the epochs, and
            the history is empty. It finds the book's attributes, such as ``optim``.

        Raises:
            UnsupportedValueError: for a loss, an optimizer, data or a hook that cannot be used. For
                a label that is neither a class nor -100, with ``'cross_entropy'``. For the first
                batch the error comes after its step, and for others at the end of the epoch. The
                model has learned from the other labels.
            CheckpointError: if the file is broken, or belongs to another kind of run.
            PeerLostError: if another process of the launch ends, or gives no sign of life for
                ``D2LDEV_PEER_TIMEOUT`` seconds (60 by default).

        >>> X, y = np.ones((8, 2), 'float32'), np.zeros((8, 1), 'float32')
        >>> net = backend.mlp([2, 4, 1])
        >>> trainer = Trainer(max_epochs=2, num_gpus=1)
        >>> history = trainer.fit(net, [(X, y)], [(X, y)], optimizer='adam', checkpoint='run.st')
        >>> sorted(history)
        ['loss', 'lr', 'val_loss']
        """
        # In a process that ``fit`` started, the parent may have set it already.
        if find_result_path() is None:
            self.should_stop = False
        self.history = History()
        if not is_overridden(self, "prepare_data"):
            check_batches(framework_of(self.backend), "fit", model, train_data, val_data)
        callbacks = self._check_callbacks()
        resume = flag("train", "resume", resume)
        find_metrics(self.backend, metrics)
        saving = Saving(checkpoint, checkpoint_every, best, monitor, mode).check()
        settings = _FitSettings(loss, optimizer, lr, metrics, saving, resume)
        if hasattr(self, "fit_epoch"):
            with self._set_matmul_precision():
                return self._fit_by_the_book(model, train_data, val_data, callbacks, settings)
        with self._open_run(model, train_data, val_data, callbacks, settings) as context:
            for self.epoch in context.epochs():
                numbers = context.train_epoch()
                if not numbers:  # the run ends within the epoch
                    break
                numbers |= context.validate()
                if context.is_interrupted:
                    break
                context.end_epoch(numbers)
        context.raise_failure()
        return self.history

    def _check_callbacks(self) -> list[Callback]:
        """Check the callbacks, and set their attribute ``trainer``; return them as a list."""
        check_hooks(self, f"train with the {type(self).__name__}")
        callbacks = check_callbacks(self.callbacks)
        for hook in HOOKS:
            for listener in find_listeners(self, callbacks, hook):
                check_operands(listener, hook)
        each: Any
        for each in callbacks:
            if isinstance(getattr(each, "trainer", ""), Trainer | None):
                each.trainer = self
        return callbacks

    @contextmanager
    def _open_run(
        self,
        model: Any,
        train_data: Iterable[Any] | DataModule,
        val_data: Iterable[Any] | None,
        callbacks: Sequence[Callback],
        settings: _FitSettings,
    ) -> Iterator[RunContext]:
        """Prepare a run for a block with its epochs, and return the model to the user after it.

        Args:
            model, train_data, val_data: see ``fit``.
            callbacks: the trainer's callbacks.
            settings: the other arguments of ``fit``.
        """
        if hasattr(self, "clip_gradients"):
            raise _refusal(
                "a clip_gradients of your own",
                "d2ldev's loop",
                "leave it out: Trainer(max_epochs, gradient_clip_val=1) clips by itself",
            )
        framework = framework_of(self.backend)
        group = join_group(framework)
        team = Team() if group is None else ProcessGroup(framework, group)
        has_processes = group is None and len(self.gpus) > 1 and needs_processes(framework)
        if has_processes or group is not None:
            check_files("train in several processes")  # they send files to each other
        outcome: Outcome | None = None
        # From here on Ctrl-C sets a flag. Python would discard an exception in a callback of the
        # framework, such as JAX's after each garbage collection.
        with ExitStack() as stack:
            stack.enter_context(self._set_matmul_precision())
            interruption = stack.enter_context(catch_interruption(group is None))
            if has_processes:
                # Only host memory can be sent to other processes.
                optimizer = settings.optimizer
                if isinstance(optimizer, type):  # the framework refuses it, with its own line
                    model = self.backend.place(model, CPU)
                else:
                    model, optimizer = self.backend.place((model, optimizer), CPU)
                settings = settings._replace(optimizer=optimizer)
                data = (model, train_data, val_data)
                listeners = find_loggers_of_runs(callbacks)
                view = stack.enter_context(open_view(self.enable_progress_bar, self.max_epochs))
                if view is not None:
                    listeners[VIEW] = view
                outcome = stack.enter_context(
                    train_in_processes(
                        self,
                        data,
                        settings.to_arguments(),
                        lambda: interruption.is_pressed,
                        listeners,
                    )
                )
                settings = settings._replace(saving=Saving(outcome.state), resume=True)
            stack.enter_context(team.work())
            train_data, val_data = self._find_data(train_data, val_data)
            gpus = self.gpus if outcome is None else self.gpus[:1]
            learner = self._make_learner(model, settings, gpus, group, team)
            stack.enter_context(run_schedules(callbacks, learner.settings.optimizer))
            functions = find_metrics(self.backend, settings.metrics, learner.settings.loss)
            loop = Loop(self, learner, functions, callbacks, interruption, team)
            if settings.saving.checkpoint_every is not None:
                loop.running.check_saving()
            run = self._make_run(loop, settings.saving, train_data, val_data)
            epochs = self.max_epochs if outcome is None else 0
            error = None if outcome is None else outcome.error
            context = RunContext(loop, run, train_data, val_data, epochs, error)
            with self._report_to_parent(context):
                self._begin_or_resume(
                    context, settings.resume, is_from_processes=outcome is not None
                )
                # The processes of several GPUs have shown it.
                is_shown = self.enable_progress_bar and team.is_first and outcome is None
                with show_progress(is_shown, self.max_epochs, run.epoch) as context.progress:
                    yield context
            self.model = learner.sync()[
                "model"
            ]  # a learner is the only one that uses its optimizer

    def _make_learner(
        self,
        model: Any,
        settings: _FitSettings,
        gpus: Sequence[DeviceLike],
        group: Group | None,
        team: Team,
    ) -> Learner:
        """Return the learner of a model, which is placed first."""
        model = self._call_prepare_model(model)
        team.compare_models(model)
        # Only now is the optimizer built. Some frameworks move a model by making new tensors, and
        # an older optimizer would hold the old ones.
        own = find_own_settings(
            model, settings.loss, settings.optimizer, settings.metrics, trainer=self
        )
        self._learner = self.backend.learner(
            model,
            **own,
            lr=settings.lr,
            **self._settings_of_steps(),
            devices=gpus or None,
            group=group,
        )
        return self._learner

    def _make_run(
        self,
        loop: Loop,
        saving: Saving,
        train_data: Iterable[Any],
        val_data: Iterable[Any] | None,
    ) -> Run:
        """Return the run of a loop, once the processes have compared their settings."""
        names = ["loss", *loop.metrics]
        if val_data is not None:
            names += [f"val_{name}" for name in names]
        if find_rate(framework_of(self.backend), loop.learner) is not None:
            names.append(RATE)
        check_names(names)
        check_monitors(loop.callbacks, names)
        saving.check_names(names)
        learner, team = loop.learner, loop.team
        run = Run(self.backend, learner, train_data, names, loop.callbacks, saving, team)
        team.begin_run(learner, names, self.max_epochs, saving)
        self.history = run.history
        return run

    def _begin_or_resume(
        self, context: RunContext, resume: bool, *, is_from_processes: bool
    ) -> None:
        """Save the state before the first epoch, or resume from the saved state."""
        run = context.run
        if resume:
            run.resume(self.device, context.loop.feed, is_from_processes=is_from_processes)
            self.history = run.history
        elif not context.is_interrupted:  # the user may want to keep the old file
            run.save(self.device)

    @contextmanager
    def _report_to_parent(self, context: RunContext) -> Iterator[None]:
        """Send what the model learns in a block to the parent process, if ``fit`` started this one.

        The user's own object has it, too, also if an error ends the block.
        """
        loop, path = context.loop, find_result_path()
        try:
            yield
            loop.team.end_run()
            if path is not None:
                context.run.save_to(path, self.device)
        except BaseException:
            loop.learner.sync()
            if path is not None:
                with suppress(Exception):  # another error would hide the first one
                    context.run.save_after_error_to(path, self.device)
            raise

    def _fit_by_the_book(
        self,
        model: Any,
        train_data: Iterable[Any] | DataModule,
        val_data: Iterable[Any] | None,
        callbacks: Sequence[Callback],
        settings: _FitSettings,
    ) -> History:
        """Run the user's own epochs, as ``Trainer.fit`` of D2L's section 3.2.4 does.

        Args:
            model, train_data, val_data: see ``fit``.
            callbacks: the trainer's callbacks.
            settings: the other arguments of ``fit``, which are refused if they are set.
        """
        usual = TrainingSettings()._asdict()
        is_set = {
            "loss=": settings.loss is not None,
            "optimizer=": settings.optimizer is not None,
            "lr=": settings.lr is not None,
            "metrics=": bool(settings.metrics),
            "checkpoint=": settings.saving.checkpoint is not None,
            "best=": settings.saving.best is not None,
            "resume=": settings.resume,
            "enable_progress_bar=": self.enable_progress_bar,
            "num_gpus=": len(self.gpus) > 1,
            **{f"{name}=": x != usual[name] for name, x in self._settings_of_steps().items()},
            "gradient_clip_val=": False,  # the book's ``fit_epoch`` uses it
            "on_step_end": bool(find_listeners(self, callbacks, "on_step_end")),
        }
        if ignored := ", ".join(name for name in is_set if is_set[name]):
            raise _refusal(ignored, "your fit_epoch", f"leave out {ignored}, or the fit_epoch")
        check_monitors(callbacks, ())
        self._find_data(train_data, val_data)
        model = self._call_prepare_model(model)
        self.model = model
        if isinstance(getattr(model, "trainer", None), Trainer | None):
            model.trainer = self  # also if another trainer was there before
        restore_loss(model)
        self.optim = model.configure_optimizers()
        if has_state_outside(model):
            self._make_state(model)
        for epoch in range(self.max_epochs):
            self.epoch = epoch
            self.fit_epoch()  # type: ignore[attr-defined]
            notify(find_listeners(self, callbacks, "on_epoch_end"), epoch, History())
            if self.should_stop:
                break
        return History()

    def _make_state(self, model: Any) -> None:
        """Set ``self.state`` for a model that holds no parameters, from the first batch."""
        data = self.train_dataloader
        first = next(draw_outside(framework_of(self.backend), data), None)
        if first is None:
            raise empty_data_refusal()
        learner = self.backend.learner(model, optimizer=self.optim, methods=METHODS)
        learner.build(call_prepare_batch(self, first)[:-1])
        # An iterator does not yield the first batch again.
        if self.max_epochs == 1 and iter(data) is iter(data):
            self.train_dataloader = chain([first], data)

    def _find_data(
        self, train_data: Iterable[Any] | DataModule, val_data: Iterable[Any] | None
    ) -> tuple[Iterable[Any], Iterable[Any] | None]:
        """Return the batches of a run; a ``DataModule`` has its own."""
        data: Any = train_data
        self.train_dataloader, self.val_dataloader = data, val_data
        if is_data_module(train_data) or is_overridden(self, "prepare_data"):
            self.prepare_data(train_data)
            if val_data is not None:
                self.val_dataloader = val_data
        check_data(self.train_dataloader, "train_data", self.max_epochs)
        if self.val_dataloader is not None:
            check_data(self.val_dataloader, "val_data", self.max_epochs)
        self.num_train_batches = length_of(self.train_dataloader, 0)
        self.num_val_batches = length_of(self.val_dataloader, 0)
        self.epoch = self.train_batch_idx = self.val_batch_idx = 0
        return self.train_dataloader, self.val_dataloader

    def shard_data(self, data: Iterable[T]) -> Iterable[T]:
        """Let each process of a launch read only its own shard of the data.

        Otherwise each process reads all the data that ``fit`` gets, and computes with a shard. Use
        this if it is expensive to read or to transform an example. The processes together read each
        example once.

        Args:
            data: an ``ArrayLoader``, or a ``DataLoader`` of PyTorch or Gluon that selects examples
                by index. A subclass may not define ``__iter__``. Or a ``tf.data.Dataset`` of
                batches: TensorFlow still makes whole batches, and each process takes its shard.

        Returns:
            A loader for ``fit`` only, with as many batches in the same order. Without a launch,
            ``data`` itself.

        Raises:
            UnsupportedValueError: for other data.

        >>> X, y = np.ones((8, 2), 'float32'), np.zeros((8, 1), 'float32')
        >>> data = Trainer(1).shard_data(d2ldev.ArrayLoader(X, y, batch_size=4))
        >>> len(data)
        2
        """
        if (peers := find_peers()) is None:
            return data
        if isinstance(data, ArrayLoader):
            return data.shard(peers.rank, peers.world_size)
        framework = framework_of_loader(data)
        if framework is None:
            raise shard_refusal(data)
        loader: Iterable[T] = framework.training.shard_loader(data, peers.rank, peers.world_size)
        return loader

    # -- using a model --------------------------------------------------------------------

    def validate(
        self,
        model: Any,
        data: Iterable[Any] | DataModule,
        *,
        loss: Loss | None = None,
        metrics: Metrics = (),
    ) -> dict[str, float]:
        """Measure the loss and the metrics of a model, in evaluation mode, without changing it.

        Args:
            model: see ``fit``. All of its parameters may be frozen.
            data: batches ``(X, y)``, or a ``DataModule`` with ``val_dataloader()``.
            loss, metrics: see ``fit``.

        Returns:
            ``'loss'`` and the name of each metric, with its value over the examples.

        Raises:
            UnsupportedValueError: for a model, a loss, a metric or data that cannot be used.

        >>> X, y = np.zeros((8, 2), 'float32'), np.ones((8, 1), 'float32')
        >>> Trainer(1).validate(backend.mlp([2, 1]), [(X, y)])
        {'loss': 1.0}
        """
        find_metrics(self.backend, metrics)
        with self._keep_run("validate", model):
            batches = find_loader(data, "val_dataloader")
            prepared = self._prepare_for_use(model, batches, "validate")
            settings = find_own_settings(prepared, loss, "sgd", metrics, trainer=self)
            del settings["optimizer"]  # a name keeps the model from configuring its own
            learner = self._make_evaluator(prepared, **settings)
            self.val_batch_idx = 0
            self.num_val_batches = length_of(batches, 0)
            # ``training_step`` may plot without a training before it.
            self.num_train_batches = self.num_train_batches or self.num_val_batches
            try:
                functions = find_metrics(self.backend, metrics, learner.settings.loss)
                return Loop(self, learner, functions).evaluate(batches)
            finally:
                learner.sync()

    def predict(self, model: Any, data: Iterable[Any] | DataModule) -> list[Any]:
        """Return the predictions of a model, in evaluation mode, without changing it.

        Args:
            model: see ``fit``. All of its parameters may be frozen.
            data: batches as in ``fit``. The target of ``(X, y)``, or the key ``'y'``, is left out.
                A batch without a target is ``X``, ``(X,)``, or a mapping of inputs. Several inputs
                without a target are ``(X1, X2, None)``. Or a ``DataModule`` with
                ``predict_dataloader()``, or else ``val_dataloader()``.

        Returns:
            The model's prediction for each batch, on the device.

        Raises:
            UnsupportedValueError: for a model or data that cannot be used.

        >>> X = np.ones((8, 2), 'float32')
        >>> (prediction,) = Trainer(1, num_gpus=1).predict(backend.mlp([2, 1]), [X])
        >>> prediction.shape, backend.device_of(prediction)
        ((8, 1), Device('gpu', 0))
        """
        with self._keep_run("predict", model):
            source = find_loader(data, "predict_dataloader", "val_dataloader")
            learner = self._make_evaluator(
                self._prepare_for_use(model, source, "predict"), loss="mse"
            )
            feed = Feed(self, learner)
            try:
                with closing(feed.draw(source)) as batches:
                    return [learner.predict(feed.inputs_to_predict(batch)) for batch in batches]
            finally:
                learner.sync()

    @contextmanager
    def _keep_run(self, verb: str, model: Any) -> Iterator[None]:
        """Restore the state of a run after a call in its callback; errors name the call.

        The model's attribute ``trainer`` is this trainer meanwhile. The trainer of a linen module
        keeps the module's parameters.

        Args:
            verb: the name of the call, for errors.
            model: its model.
        """
        trainer = getattr(model, "trainer", None)
        has_trainer = isinstance(trainer, Trainer)
        if has_trainer:
            model.trainer = self
        names = ("_learner", "_model", "val_batch_idx", "num_val_batches", "num_train_batches")
        state = {name: getattr(self, name) for name in names}
        try:
            with self._set_matmul_precision():
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
            vars(self).update(state)
            if has_trainer:
                model.trainer = trainer

    def _set_matmul_precision(self) -> AbstractContextManager[Any]:
        """Return a block with the trainer's precision of products."""
        precision = self._check_matmul_precision()
        if precision is None:
            return nullcontext()
        return set_precision(framework_of(self.backend), precision)

    def _check_matmul_precision(self) -> str | None:
        if self.matmul_precision is None:
            return None
        attempted = "train with this matmul_precision"
        fix = "matmul_precision='highest'"
        framework = framework_of(self.backend)
        return check_precision(framework, self.matmul_precision, attempted, fix)

    def _make_evaluator(self, model: Any, **settings: Any) -> Learner:
        """Return the learner of a placed model, to evaluate it only."""
        return self.backend.learner(model, **settings, precision=self.precision, is_trained=False)

    def _prepare_for_use(self, model: Any, data: Iterable[Any], verb: str) -> Any:
        """Check a model and its data, and place the model to evaluate it."""
        if model is None:
            raise UnsupportedValueError(
                f"{verb} None",
                "None is not a model; before fit, trainer.model is None",
                f"trainer.{verb}(net, batches)",
            )
        check_batches(framework_of(self.backend), verb, model, data)
        check_data(data, "data", 1)
        return self._call_prepare_model(model)


def _find_gpus(backend: Backend, wanted: int) -> list[Device]:
    there = backend.num_gpus()
    number = there if wanted == -1 else wanted
    if number > there:
        raise DeviceUnavailableError(
            f"train on {gpus_in_words(number)}",
            f"{backend.name} has {gpus_in_words(there)} here{explain_late_request(number - 1)}",
            f"num_gpus={there}" + offer_virtual_gpus(framework_of(backend), number),
            backend.devices(),
        )
    if number > 1:
        fix = "num_gpus=1, or D2LDEV_BACKEND=jax"
        require(
            framework_of(backend), "train on several GPUs", f"train on {gpus_in_words(number)}", fix
        )
    return [gpu(i) for i in range(number)]


def _find_gpu_of_process(backend: Backend, wanted: int, peers: Peers) -> list[Device]:
    """Return the GPU of this process of a launch; an empty list is the CPU."""
    there = backend.num_gpus()
    if wanted == 0 or (wanted == -1 and not there):
        return []
    attempted = f"train on {gpus_in_words(wanted if wanted > 0 else there)} in each process"
    if wanted > 1:
        raise UnsupportedValueError(
            attempted,
            f"this process is one of {peers.world_size}, and each has one GPU",
            f"num_gpus=1, and d2ldev launch --processes {wanted}",
        )
    index = gpu_of_process(there, peers.local_rank)
    if index >= there:
        raise DeviceUnavailableError(
            f"train on {gpu(index)} in the process with LOCAL_RANK={peers.local_rank}",
            f"{backend.name} has {gpus_in_words(there)} here",
            f"d2ldev launch --processes {max(there, 1)}, or num_gpus=0",
            backend.devices(),
        )
    return [gpu(index)]


def _refusal(what: str, loop: str, fix: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"train with {what}", f"{loop} would ignore it", fix)
