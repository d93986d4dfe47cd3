"""``Trainer``: the training loop that moves the model once, and each batch at the boundary.

Source: D2L, sections 3.2.4 and 6.7.3 (``Trainer``, ``prepare_batch``, ``prepare_model``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

import numpy as np

from d2ldev._backend import Backend, framework_of
from d2ldev.active import get_backend
from d2ldev.areas import Learner, TrainingSettings
from d2ldev.areas.abilities import require
from d2ldev.areas.group import join_group
from d2ldev.areas.parallel import gpu_of_process
from d2ldev.areas.precision import check_precision, set_precision
from d2ldev.areas.training import shard_refusal
from d2ldev.device import CPU, Device, gpu, gpus_in_words
from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError
from d2ldev.files.format.container import check_files
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations.arguments import flag, length_of, whole_number
from d2ldev.operations.devices import explain_late_request
from d2ldev.operations.learning import check_settings
from d2ldev.operations.prefetching import draw_outside
from d2ldev.options import (
    Keep,
    Loss,
    MatmulPrecisionName,
    Metric,
    NumGpus,
    Optimizer,
    Precision,
    Shard,
    Statistics,
)
from d2ldev.registry.selection import framework_of_loader
from d2ldev.settings import Peers
from d2ldev.settings import peers as launched
from d2ldev.training.callbacks import (
    HOOKS,
    check_callbacks,
    check_hooks,
    check_monitors,
    check_operands,
    check_schedules,
    notify,
)
from d2ldev.training.context import RunContext
from d2ldev.training.data import (
    ArrayLoader,
    check_data,
    inputs_to_predict,
)
from d2ldev.training.entry import Entry
from d2ldev.training.hooks import TrainerState, find_listeners, is_overridden, prepare_batch
from d2ldev.training.interruption import catch_interruption
from d2ldev.training.loops import Loop
from d2ldev.training.metrics import check_names, find_metrics
from d2ldev.training.module import (
    arguments_of,
    is_data_module,
    loader_of,
    own_settings,
    uncover_loss,
)
from d2ldev.training.progress import show_progress
from d2ldev.training.run import Run, Saving
from d2ldev.training.spawning import Outcome, result, train_in_processes
from d2ldev.training.team import ProcessGroup, SingleProcess, Team
from d2ldev.typing import Callback, DataModule, DeviceLike, History, T

if TYPE_CHECKING:
    from d2ldev.processes.group import Group


class _FitSettings(NamedTuple):
    """The arguments of ``fit`` beside the model and the data; see there."""

    loss: Loss | None
    optimizer: Optimizer | None
    lr: float | None
    metrics: Sequence[Metric]
    saving: Saving
    resume: bool

    def arguments(self) -> dict[str, Any]:
        """Return them for a call of ``fit``."""
        arguments = self._asdict()
        return {**arguments.pop("saving")._asdict(), **arguments}


class Trainer(TrainerState):
    """Train models of any framework on one device, on several GPUs, or in several processes.

    Several GPUs train one model together: the data yields the global batch, each GPU computes a
    shard of it, and the loss is the mean over all of it. So what is learned is what one GPU learns,
    to rounding. In PyTorch each of them needs a process, which ``fit`` starts for its length: see
    docs/several-gpus.md for what is sent there, and what comes back.

    The processes of a launch (``d2ldev launch``, torchrun) train one model in the same way, on any
    number of machines, each on the CPU or on ``gpu(LOCAL_RANK)``: see docs/several-machines.md.
    Rank 0 alone writes checkpoints and shows the progress. Hooks and callbacks are called in all,
    ``on_step_end`` with the loss of the shard.

    Args:
        max_epochs: how often the data is gone through.
        num_gpus: 0 is the CPU, 1 is ``gpu(0)``; ``'auto'``, or -1, is all that there are, else the
            CPU; in a process of a launch 0 or 1, and ``'auto'`` is the process's own GPU.
        gradient_clip_val: the largest global norm of the gradients; 0 is no clipping.
        backend: the framework's, or its name; None is the active one, and that of ``d2l`` for
            ``d2l.Trainer`` of ``from d2ldev.native import torch as d2l``.
        callbacks: called after each epoch with its number, from 0, and the history so far; or an
            object with ``on_epoch_end(epoch, history)``, ``on_step_end(step, loss)``, or both; or a
            list of such. What has ``state_dict`` and ``load_state_dict`` is in the checkpoint.
            An attribute ``trainer`` that is None becomes this trainer.
        enable_progress_bar: whether bars are shown in the terminal. Twice a second they wait
            for the loss.
        accumulate_grad_batches: how many batches make one step of the optimizer, with the mean of
            their gradients. The last step of an epoch is made with the batches that are left.
        precision: ``'bf16'`` or ``'fp16'``: the model computes in it, by the framework's own means;
            parameters, losses and metrics are float32. With ``'fp16'``, gradients are scaled, and a
            step in which they are too large is left out.
        matmul_precision: ``'highest'``, ``'high'`` or ``'medium'``: what products and convolutions
            of float32 are computed in during ``fit``, ``validate`` and ``predict``; see
            ``backend.matmul_precision``. None: as it is. A run may go on in another one.
        shard: ``'parameters'``: each of several GPUs, or of the processes of a launch, holds a
            shard of the parameters and of the optimizer's state, in PyTorch and in JAX. The model
            itself is whole, and on the CPU, where ``fit`` leaves it. One GPU has nothing to share.
        batch_norm: where several GPUs or processes train: ``'global'`` if batch normalizations have
            the statistics of the whole batch, ``'local'`` if they have those of a GPU's shard. A
            model whose layers have the others is refused. None: what the framework does.

    Attributes:
        gpus: the GPUs that it uses; empty is the CPU.
        epoch, train_batch_idx, val_batch_idx: the number of the epoch that runs, and how many
            batches were trained and evaluated on, for the plots of D2L's ``Module``.
        should_stop: set to True, in a hook, a callback or another thread, it ends the run after
            the step, or after the epoch if that was its last step. Of several processes all end
            after the same step. ``fit`` begins with False.
        history: that of ``fit``, as far as it is; also after an error.
        train_dataloader, val_dataloader, num_train_batches, num_val_batches: the data of ``fit``,
            and how many batches it has: 0 if it does not say.

    A subclass, or the book's ``@add_to_class(Trainer)``, may have an ``__init__`` of its own that
    sets ``max_epochs``, and ``gpus`` to devices of any spelling.

    Raises:
        DeviceUnavailableError: if there are fewer GPUs.
        UnsupportedValueError: for other values, for a precision that the framework has not, or for
            several GPUs where it trains on one, or in a process of a launch.

    >>> trainer = Trainer(max_epochs=3, num_gpus=1)                        # doctest: +SKIP
    >>> history = trainer.fit(net, batches, lr=0.1)                        # doctest: +SKIP
    >>> history['loss']                                                    # doctest: +SKIP
    [2.31, 0.52, 0.13]
    """

    # For those whose ``__init__`` is the book's, which does not call this one's.
    max_epochs: int
    gradient_clip_val: float = 0
    callbacks: Callback | Sequence[Callback] | None = None
    enable_progress_bar: bool = False
    accumulate_grad_batches: int = 1
    precision: Precision = "model"
    matmul_precision: MatmulPrecisionName | None = None
    shard: Shard | None = None
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
        shard: Shard | None = None,
        batch_norm: Statistics | None = None,
    ) -> None:
        self.backend = get_backend(type(self).backend if backend is None else backend)
        self.max_epochs = whole_number(
            "train", "max_epochs", max_epochs, least=0, fix="max_epochs=1"
        )
        self.gradient_clip_val = gradient_clip_val
        self.accumulate_grad_batches, self.precision = accumulate_grad_batches, precision
        self.matmul_precision = matmul_precision
        self.shard, self.batch_norm = shard, batch_norm
        check_settings(framework_of(self.backend), TrainingSettings(**self._settings_of_steps()))
        self._check_matmul_precision()
        self.callbacks = callbacks
        self.enable_progress_bar = flag("train", "enable_progress_bar", enable_progress_bar)
        is_auto = isinstance(num_gpus, str) and num_gpus == "auto"
        fix = "num_gpus=1, or num_gpus='auto' for all that there are"
        asked = -1 if is_auto else num_gpus
        number = whole_number("train", "num_gpus", asked, least=-1, fix=fix)
        peers = launched()
        self.gpus = (
            _gpus(self.backend, number) if peers is None else _gpu_of(self.backend, number, peers)
        )

    def __repr__(self) -> str:
        # A subclass with an ``__init__`` of its own may not have them yet.
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
        # Without the steps of the last run, which only this process can take.
        return {**vars(self), "_learner": None, "_model": None}

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Make the arguments of the method that calls this attributes, as in D2L's section 3.2.1.

        Args:
            ignore: the names of those that are left out, as all with a leading underscore are.
        """
        for name, value in arguments_of(sys._getframe(1), ignore).items():
            setattr(self, name, value)

    def _settings_of_steps(self) -> dict[str, Any]:
        """Return what the trainer, and not ``fit``, says of each step."""
        return {
            "gradient_clip_val": self.gradient_clip_val,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "precision": self.precision,
            "shard": self.shard,
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
        metrics: Sequence[Metric] = (),
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int | None = None,
        keep: Keep = "last",
    ) -> History:
        """Train a model.

        Ctrl-C ends the run after the step, or at once where a batch is waited for: the model is as
        it is then, the history has the epochs that are done, and the checkpoint is the last one
        that was saved. Pressed twice, it raises; in a process of a launch it raises at once, and
        all others end.

        Args:
            model: one of the framework's; it is placed by ``prepare_model``. Of a D2L ``Module``,
                ``training_step(batch)`` gives the loss of a step, ``validation_step(batch)``, if it
                has one, that of a batch of ``val_data`` (NaN if it returns nothing), and
                ``configure_optimizers()``, called after the model is placed, the optimizer;
                ``model.trainer`` is this trainer. They are called at each step, those of an
                ``nnx.Module`` as traced by ``jax.jit``, and the book's of a linen module with
                ``(params, batch, state)``. Without ``training_step``, a model with
                ``configure_optimizers`` is trained with its ``loss(prediction, y)``.
            train_data: batches ``(X, y)``, to be gone through once per epoch: tuples, lists or
                dicts of tensors or NumPy arrays, from any iterable that can begin again; or a D2L
                ``DataModule``, whose ``train_dataloader()`` and ``val_dataloader()`` are called
                once. Several GPUs or processes split lists of a batch like arrays, if they have an
                item for each example, and ``d2ldev.Broadcast(value)`` is the same for all: see
                docs/several-gpus.md. The target is the last of a tuple, and ``'y'`` of a dict, else
                its last.
                Several inputs of a dict are given by name, none left out before another one, if all
                keys are the model's (parameters of ``forward``, ``__call__`` or ``call``; names or
                keys of a functional model's inputs), else by position, in the order of the dict.
                A dict's ``'sample_weight'``, of shape ``(n,)`` or of more of the first axes of
                ``y``, are weights: the loss of the batch is the weighted mean, 0 if all weights
                are; metrics are not weighted, and a loss of your own needs a parameter of this
                name. (A model's own input of this name stays an input.) Floats are cast to the
                dtype of the model, if it has one, and integers stay.
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
                that the run began with, and the batches in the order that they would have had:
                docs/resuming.md says of which data and random numbers the file holds the state.
                Data, its ``sampler`` and its ``batch_sampler`` with ``set_epoch`` are told the
                number of each epoch.
            checkpoint_every: number of batches after each of which the state is saved, too; with
                ``accumulate_grad_batches``, as soon as the step of the batch has ended. A run that
                goes on within an epoch draws its batches again, and leaves out those that are done.
            keep: ``'last'``; or ``'best'``, which saves the state after an epoch only if its
                ``'val_loss'``, without ``val_data`` its ``'loss'``, is less than any before.

        Returns:
            The history: ``'loss'`` and each metric by name, with ``'val_'`` before it for
            ``val_data``; one float per epoch, the mean over the examples. It is empty where a
            ``fit_epoch`` of the user's, as in D2L's section 3.4, runs the epochs: it finds what
            the book's finds, ``optim`` included.

        Raises:
            UnsupportedValueError: for a loss, an optimizer, data or a hook that cannot be used. For
                a label that is neither a class nor -100, with the loss ``'cross_entropy'``: after
                its step, or at the end of the epoch if the label is on a GPU before the step. The
                model is as it has learned from the other labels.
            CheckpointError: if the file is not of such a run, or is broken.
            PeerLostError: if another process of the launch is lost: it has ended, or has given no
                sign for ``D2LDEV_PEER_TIMEOUT`` seconds, which are 60 unless it is set.
        """
        if result() is None:  # else the process that has started this one may have set it again
            self.should_stop = False
        self.history = {}
        callbacks = self._check_callbacks()
        resume = flag("train", "resume", resume)
        find_metrics(self.backend, metrics)
        saving = Saving(checkpoint, checkpoint_every, keep).check()
        settings = _FitSettings(loss, optimizer, lr, metrics, saving, resume)
        if hasattr(self, "fit_epoch"):
            with self._set_matmul_precision():
                return self._fit_by_the_book(model, train_data, val_data, callbacks, settings)
        with self._open_run(model, train_data, val_data, callbacks, settings) as context:
            for self.epoch in context.epochs():
                found = context.train_epoch()
                if not found:  # the run ends within the epoch
                    break
                found |= context.validate()
                if context.is_interrupted:
                    break
                context.end_epoch(found)
        context.raise_failure()
        return self.history

    def _check_callbacks(self) -> list[Callback]:
        """Return the callbacks, which can be called; those with an attribute for it get this."""
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
        """Prepare a run for the block that goes through its epochs; hand the model back after it.

        Args:
            model, train_data, val_data: see ``fit``.
            callbacks: those of the trainer.
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
        team = SingleProcess() if group is None else ProcessGroup(framework, group)
        needs_processes = framework.parallel.process_per_device
        has_processes = group is None and len(self.gpus) > 1 and needs_processes
        if has_processes or group is not None:
            check_files("train in several processes")  # they send each other what files hold
        outcome: Outcome | None = None
        # From here on Ctrl-C is noted: an exception could fall into a callback of the framework's,
        # such as JAX's after each garbage collection, where Python discards it.
        with ExitStack() as stack:
            stack.enter_context(self._set_matmul_precision())
            interruption = stack.enter_context(catch_interruption(group is None))
            if has_processes:
                # What is sent to other processes is on the host.
                model, optimizer = self.backend.place((model, settings.optimizer), CPU)
                settings = settings._replace(optimizer=optimizer)
                data = (model, train_data, val_data)
                outcome = stack.enter_context(
                    train_in_processes(self, data, settings.arguments(), interruption)
                )
                settings = settings._replace(saving=Saving(outcome.state), resume=True)
            stack.enter_context(team.work())
            train_data, val_data = self._find_data(train_data, val_data)
            gpus = self.gpus if outcome is None else self.gpus[:1]
            learner = self._make_learner(model, settings, gpus, group, team)
            check_schedules(callbacks, learner.settings.optimizer)
            functions = find_metrics(self.backend, settings.metrics) or self._own_metrics(learner)
            loop = Loop(self, learner, functions, callbacks, interruption, team)
            run = self._make_run(loop, settings.saving, train_data, val_data)
            epochs = self.max_epochs if outcome is None else 0
            error = None if outcome is None else outcome.error
            context = RunContext(loop, run, train_data, val_data, epochs, error)
            with self._hand_over(context):
                self._begin_or_resume(context, settings.resume, is_handed_over=outcome is not None)
                is_shown = self.enable_progress_bar and team.is_first
                with show_progress(is_shown, self.max_epochs, run.epoch) as context.progress:
                    yield context
            learner.sync()
            self.model = learner.model  # a learner is the only one that uses its optimizer

    def _make_learner(
        self,
        model: Any,
        settings: _FitSettings,
        gpus: Sequence[DeviceLike],
        group: Group | None,
        team: Team,
    ) -> Learner:
        """Place the model, and return its learner."""
        model = self._model_to_train(model, group)
        team.meet(model)
        # The optimizer is built after the model is placed: in a framework that moves by making
        # new tensors, one that is built before would hold the old tensors.
        own = self._own_settings(model, settings.loss, settings.optimizer, settings.metrics)
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
        """Return the run of a loop, after its processes have compared their settings."""
        names = ["loss", *loop.metrics]
        if val_data is not None:
            names += [f"val_{name}" for name in names]
        check_names(names)
        check_monitors(loop.callbacks, names)
        learner, team = loop.learner, loop.team
        run = Run(self.backend, learner, train_data, names, loop.callbacks, saving, team)
        team.begin(learner, names, self.max_epochs, saving)
        self.history = run.history
        return run

    def _begin_or_resume(self, context: RunContext, resume: bool, *, is_handed_over: bool) -> None:
        """Save the state before the first epoch, or go on from the state that is there."""
        run = context.run
        if resume:
            run.resume(
                self.device,
                lambda: context.loop.entry.first_inputs(context.train_data),
                is_handed_over=is_handed_over,
            )
            self.history = run.history
        elif not context.is_interrupted:  # the user may want the file that is there
            run.save(self.device)

    @contextmanager
    def _hand_over(self, context: RunContext) -> Iterator[None]:
        """Give what a block learns to the process that has started this one, if one has.

        The user's own object has it, too, also where an error ends the block.
        """
        loop, path = context.loop, result()
        try:
            yield
            loop.team.end()
            if path is not None:
                context.run.hand_over(path, self.device)
        except BaseException:
            loop.learner.leave()
            if path is not None:
                with suppress(Exception):  # it would hide the error that ends the run
                    context.run.hand_over_rest(path, self.device)
            raise

    def _model_to_train(self, model: Any, group: Group | None) -> Any:
        """Return the model where it is trained, or on the CPU if each device gets a shard of it."""
        is_sharded = self.shard is not None and (group is not None or len(self.gpus) > 1)
        if is_sharded and not is_overridden(self, "prepare_model"):
            return self.backend.place(model, CPU)
        return self._find_prepared_model(model)

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
            callbacks: those of the trainer.
            settings: the other arguments of ``fit``, which are refused.
        """
        usual = TrainingSettings()._asdict()
        given = {
            "loss=": settings.loss is not None,
            "optimizer=": settings.optimizer is not None,
            "lr=": settings.lr is not None,
            "metrics=": bool(settings.metrics),
            "checkpoint=": settings.saving.checkpoint is not None,
            "resume=": settings.resume,
            "enable_progress_bar=": self.enable_progress_bar,
            "num_gpus=": len(self.gpus) > 1,
            **{f"{n}=": x != usual[n] for n, x in self._settings_of_steps().items()},
            "gradient_clip_val=": False,  # the book's ``fit_epoch`` uses it
            "on_step_end": bool(find_listeners(self, callbacks, "on_step_end")),
        }
        if ignored := ", ".join(name for name, is_given in given.items() if is_given):
            raise _refusal(ignored, "your fit_epoch", f"leave out {ignored}, or the fit_epoch")
        check_monitors(callbacks, ())
        self._find_data(train_data, val_data)
        model = self._find_prepared_model(model)
        self.model = model
        if isinstance(getattr(model, "trainer", None), Trainer | None):
            model.trainer = self  # also where another one trained it before
        uncover_loss(model)
        self.optim = model.configure_optimizers()
        taken: list[Any] = []
        source = draw_outside(framework_of(self.backend), self.train_dataloader)
        batches = (prepare_batch(self, batch) for batch in _note(source, taken))
        framework_of(self.backend).training.begin_module(model, self.optim, batches)
        data = self.train_dataloader
        # Data that begins only once has not the batch any more that was looked at.
        if taken and self.max_epochs == 1 and iter(data) is iter(data):
            self.train_dataloader = chain(taken, data)
        for epoch in range(self.max_epochs):
            self.epoch = epoch
            self.fit_epoch()  # type: ignore[attr-defined]
            notify(find_listeners(self, callbacks, "on_epoch_end"), epoch, {})
            if self.should_stop:
                break
        return {}

    def _find_data(
        self, train_data: Iterable[Any] | DataModule, val_data: Iterable[Any] | None
    ) -> tuple[Iterable[Any], Iterable[Any] | None]:
        """Return the batches of a run, which are those of a ``DataModule`` if one is given."""
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
        """Return data of which each process of a launch reads its own shard only.

        ``fit`` takes any data, of which each process reads all and computes a shard. Reading less
        is worth it where examples are read from files or changed on the way. No example is left
        out, and none is seen twice.

        Args:
            data: an ``ArrayLoader``; a ``DataLoader`` of PyTorch's or of Gluon's that chooses its
                examples by number, or of a class derived from it, without an ``__iter__`` of its
                own; or a ``tf.data.Dataset`` of batches, which TensorFlow's threads
                make whole, and of which the process's shard alone comes out.

        Returns:
            For ``fit`` alone: a loader with as many batches, in the same order. Without a launch,
            the data itself.

        Raises:
            UnsupportedValueError: for other data.

        >>> trainer.fit(net, trainer.shard_data(batches))                  # doctest: +SKIP
        """
        if (peers := launched()) is None:
            return data
        if isinstance(data, ArrayLoader):
            return data.shard(peers.rank, peers.world_size)
        framework = framework_of_loader(data, "sharded_types")
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
        functions = find_metrics(self.backend, metrics)
        with self._besides("validate", model):
            batches = loader_of(data, "val_dataloader")
            prepared = self._prepare_for_use(model, batches, "validate")
            settings = self._own_settings(prepared, loss, "sgd", metrics)
            del settings["optimizer"]  # of that name, so that the model configures none
            learner = self._evaluator(prepared, **settings)
            self.val_batch_idx = 0
            self.num_val_batches = length_of(batches, 0)
            # For a model whose training_step measures, where nothing was trained.
            self.num_train_batches = self.num_train_batches or self.num_val_batches
            try:
                functions = functions or self._own_metrics(learner)
                return Loop(self, learner, functions).evaluate(batches)
            finally:
                learner.sync()

    def predict(self, model: Any, data: Iterable[Any] | DataModule) -> list[Any]:
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
        with self._besides("predict", model):
            source = loader_of(data, "predict_dataloader", "val_dataloader")
            learner = self._evaluator(self._prepare_for_use(model, source, "predict"), loss="mse")
            names, takes_mapping = learner.input_names, learner.takes_mapping
            entry = Entry(self, learner)
            try:
                with closing(entry.draw(source)) as batches:
                    found = []
                    for batch in batches:
                        inputs = inputs_to_predict(entry.arrive(batch), names, takes_mapping)
                        found.append(learner.predict(inputs))
                    return found
            finally:
                learner.sync()

    @contextmanager
    def _besides(self, verb: str, model: Any) -> Iterator[None]:
        """Leave a run as it is, in whose callback this may be; its errors name this call.

        A model that another trainer has trained is this one's meanwhile: the parameters of a linen
        module are in the state of its trainer.
        """
        trainer = getattr(model, "trainer", None)
        is_lent = isinstance(trainer, Trainer)
        if is_lent:
            model.trainer = self
        names = ("_learner", "_model", "val_batch_idx", "num_val_batches", "num_train_batches")
        kept = {name: getattr(self, name) for name in names}
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
            vars(self).update(kept)
            if is_lent:
                model.trainer = trainer

    def _set_matmul_precision(self) -> AbstractContextManager[Any]:
        """Return the block in which a model is trained or used."""
        precision = self._check_matmul_precision()
        if precision is None:
            return nullcontext()
        return set_precision(framework_of(self.backend), precision)

    def _check_matmul_precision(self) -> str | None:
        if self.matmul_precision is None:
            return None
        attempted = "train with this matmul_precision"
        fix = "Trainer(max_epochs, matmul_precision='highest')"
        framework = framework_of(self.backend)
        return check_precision(framework, self.matmul_precision, attempted, fix)

    def _evaluator(self, model: Any, **settings: Any) -> Learner:
        """Return the learner of a prepared model that is not trained."""
        return self.backend.learner(model, **settings, precision=self.precision, is_trained=False)

    def _prepare_for_use(self, model: Any, data: Iterable[Any], verb: str) -> Any:
        """Return a model that is not trained, as ``prepare_model`` returned it."""
        if model is None:
            raise UnsupportedValueError(
                f"{verb} None",
                "it is no model; before fit, trainer.model is None",
                f"trainer.{verb}(net, batches)",
            )
        is_array = (
            isinstance(data, np.ndarray)
            or framework_of(self.backend).state.kinds[type(data)] is TENSOR
        )
        if is_array:
            raise UnsupportedValueError(
                f"{verb} with an array",
                "data is an iterable of batches",
                f"trainer.{verb}(net, [batch]), or ArrayLoader(X, batch_size=32)",
            )
        check_data(data, "data", 1)
        return self._find_prepared_model(model)

    def _own_settings(self, model: Any, *given: Any) -> dict[str, Any]:
        operands = framework_of(self.backend).training.step_operands(model)
        return own_settings(model, *given, trainer=self, operands=operands)

    def _own_metrics(self, learner: Learner) -> Mapping[str, Callable[[Any, Any], Any]]:
        """Return the metrics that the model itself has, where its prediction is known."""
        if learner.settings.methods is not None:
            return {}
        own = framework_of(self.backend).training.metrics(learner.model)
        return find_metrics(self.backend, own)


def _note(batches: Iterable[Any], taken: list[Any]) -> Iterator[Any]:
    """Yield batches, each of which is in a list from then on."""
    for batch in batches:
        taken.append(batch)
        yield batch


def _gpus(backend: Backend, wanted: int) -> list[Device]:
    there = backend.num_gpus()
    number = there if wanted == -1 else wanted
    if number > there:
        raise DeviceUnavailableError(
            f"train on {gpus_in_words(number)}",
            f"{backend.name} has {gpus_in_words(there)} here{explain_late_request(number - 1)}",
            f"Trainer(max_epochs, num_gpus={there})",
            backend.devices(),
        )
    if number > 1:
        fix = "Trainer(max_epochs, num_gpus=1), or D2LDEV_BACKEND=jax"
        require(
            framework_of(backend), "train on several GPUs", f"train on {gpus_in_words(number)}", fix
        )
    return [gpu(i) for i in range(number)]


def _gpu_of(backend: Backend, wanted: int, peers: Peers) -> list[Device]:
    """Return the device of one of the processes of a launch; empty is the CPU."""
    there = backend.num_gpus()
    if wanted == 0 or (wanted == -1 and not there):
        return []
    attempted = f"train on {gpus_in_words(wanted if wanted > 0 else there)} in each process"
    if wanted > 1:
        raise UnsupportedValueError(
            attempted,
            f"this process is one of {peers.world_size}, and each has one GPU",
            f"Trainer(max_epochs, num_gpus=1), and d2ldev launch --processes {wanted}",
        )
    index = gpu_of_process(there, peers.local_rank)
    if index >= there:
        raise DeviceUnavailableError(
            f"train on {gpu(index)} in the process with LOCAL_RANK={peers.local_rank}",
            f"{backend.name} has {gpus_in_words(there)} here",
            f"d2ldev launch --processes {max(there, 1)}, or Trainer(max_epochs, num_gpus=0)",
            backend.devices(),
        )
    return [gpu(index)]


def _refusal(what: str, loop: str, fix: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"train with {what}", f"{loop} would ignore it", fix)
