"""Callbacks, the checks of their hooks, and their states in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf
from numbers import Real
from typing import Any, Protocol

import numpy as np

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.operations.arguments import class_refusal, whole_number
from d2ldev.options import MODES, PERIODS, Mode, Period, problem_of
from d2ldev.typing import Callback, History, Scheduler, T

HOOKS = ("on_step_end", "on_epoch_end")
# Words in the names of hooks, in Keras, in Lightning, and in misspelt names.
_HOOK_WORDS = {
    *("backward", "batch", "begin", "checkpoint", "end", "epoch", "exception", "fit", "grad"),
    *("start", "step", "test", "train", "training", "val", "validation"),
}


class _Stops(Protocol):
    """A trainer, as ``EarlyStopping`` uses it."""

    should_stop: bool


class NeedsHistory(ABC):
    """A callback that reads numbers of the history."""

    @abstractmethod
    def check_names(self, names: Collection[str]) -> None:
        """Raise an UnsupportedValueError if a history with these names lacks its number.

        Args:
            names: the names in the history of the run.
        """


def find_sign(attempted: str, monitor: Any, mode: Any, call: str) -> int:
    """Return 1 if a number of the history should fall, and -1 if it should rise.

    Args:
        attempted: the operation, for the error.
        monitor: the name of the number.
        mode: ``'min'``, ``'max'``, or None for a loss.
        call: the beginning of the call that takes them, such as ``'EarlyStopping('``.

    Raises:
        UnsupportedValueError: for any other value, and for None with another number than a loss.
    """
    problem = ""
    if not isinstance(monitor, str):
        problem = f"monitor is {describe(monitor)} and not a name"
    elif mode is not None and (problem := problem_of(mode, MODES)):
        problem = f"mode is {describe(mode)} and {problem}"
    elif mode is None and monitor not in ("loss", "val_loss"):
        problem = f"it is unknown whether {monitor!r} should fall or rise"
    if problem:
        shown = monitor if isinstance(monitor, str) else "val_loss"
        fix = f"{call}monitor={shown!r}, mode='max'), or mode='min'"
        raise UnsupportedValueError(attempted, problem, fix)
    return -1 if mode == "max" else 1


class Schedule(NeedsHistory):
    """Step a PyTorch scheduler during a run, and keep its state in the checkpoint.

    Schedulers of Keras, Optax and MXNet belong to the optimizer, which steps them itself. None of
    them counts a step that ``precision='fp16'`` skips, and neither does this one.

    Args:
        scheduler: an object with ``step()``. Its ``state_dict`` and ``load_state_dict`` are used if
            it has them.
        per: ``'epoch'`` or ``'step'``: when to call ``scheduler.step``. A step is a step of the
            optimizer: ``scheduler.optimizer.register_step_post_hook`` tells which ones were taken.
        metric: the name of a number in the history for ``scheduler.step(number)``, such as
            ``ReduceLROnPlateau`` takes. It needs ``per='epoch'``. None calls ``scheduler.step()``.

    Raises:
        UnsupportedValueError: for any other argument.

    >>> import torch                                                       # doctest: +SKIP
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)              # doctest: +SKIP
    >>> schedule = Schedule(torch.optim.lr_scheduler.StepLR(optimizer, 10)) # doctest: +SKIP
    >>> Trainer(30, callbacks=schedule).fit(net, data, optimizer=optimizer) # doctest: +SKIP
    """

    def __init__(
        self, scheduler: Scheduler, per: Period = "epoch", metric: str | None = None
    ) -> None:
        if isinstance(scheduler, type):
            raise class_refusal(f"step {describe(scheduler)}", scheduler)
        problem = ""
        if not callable(getattr(scheduler, "step", None)):
            problem = f"{describe(scheduler)} has no step()"
        elif problem := problem_of(per, PERIODS):
            problem = f"per is {describe(per)} and {problem}"
        elif metric is not None and per == "step":
            problem = "a metric is known after an epoch, and not after a step"
        if problem:
            fix = "Schedule(torch.optim.lr_scheduler.StepLR(optimizer, 10), per='epoch')"
            if not callable(getattr(scheduler, "step", None)):
                fix += "; an optimizer of Keras, Optax or MXNet takes its schedule itself"
            raise UnsupportedValueError("step a scheduler", problem, fix)
        self.scheduler: Any = scheduler  # a protocol has no optional methods
        self._per, self._metric = per, metric
        # Whether the optimizer has taken its last step; None if nobody watches it.
        self._is_taken: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no run.
        return {**vars(self), "_is_taken": None}

    # Only the hook that it needs is there: the Trainer would call the other one in vain.

    @property
    def on_step_end(self) -> Callable[[int, Any], None]:
        """Step the scheduler after a step. With ``per='epoch'`` there is no such hook."""
        return self._hook("step", self._after_step)

    @property
    def on_epoch_end(self) -> Callable[[int, History], None]:
        """Step the scheduler after an epoch. With ``per='step'`` there is no such hook."""
        return self._hook("epoch", self._after_epoch)

    def _hook(self, per: Period, hook: T) -> T:
        if self._per != per:
            raise AttributeError(f"{self!r} has no hook for each {per}")
        return hook

    def __repr__(self) -> str:
        metric = "" if self._metric is None else f", metric={self._metric!r}"
        return f"Schedule({type(self.scheduler).__name__}, per={self._per!r}{metric})"

    def check_names(self, names: Collection[str]) -> None:
        """Check that a history with these names has the metric.

        Args:
            names: the names in the history of the run.

        Raises:
            UnsupportedValueError: if the metric is not one of them.
        """
        if self._metric is not None and self._metric not in names:
            name = next(iter(names), None)
            fix = f"Schedule(scheduler, metric={name!r})"
            raise history_refusal(f"step a scheduler by {self._metric!r}", names, fix)

    @contextmanager
    def _watch_steps(self) -> Iterator[None]:
        """Learn within a block which steps the optimizer takes, and not step after the others.

        A scaler of float16 skips a step with infinite gradients.
        """
        optimizer: Any = getattr(self.scheduler, "optimizer", None)
        if self._per != "step" or not hasattr(optimizer, "register_step_post_hook"):
            yield
            return
        self._is_taken = False
        handle = optimizer.register_step_post_hook(self._note_step)
        try:
            yield
        finally:
            handle.remove()
            self._is_taken = None

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        # A scaler lets a fused optimizer skip the step itself.
        self._is_taken = not getattr(optimizer, "found_inf", False)

    def _after_step(self, _step: int, _loss: Any) -> None:
        if self._is_taken is not False:
            self.scheduler.step()
        if self._is_taken:
            self._is_taken = False

    def _after_epoch(self, _epoch: int, history: History) -> None:
        if self._metric is not None:
            self.scheduler.step(history[self._metric][-1])
        else:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; an empty dict without one."""
        return self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler's state.

        Args:
            state: what ``state_dict`` returned.
        """
        if state:
            self.scheduler.load_state_dict(state)


class EarlyStopping(NeedsHistory):
    """Stop a run that no longer improves.

    After each epoch it counts from the whole history, so it keeps no state. A run that resumes
    continues the count. All processes of a launch have the same history, and stop together. The
    model stays as after the last epoch: ``fit(..., best='best.safetensors')`` keeps the best one.

    Args:
        monitor: the name of the number in the history that should improve.
        patience: how many epochs in a row may pass without an improvement, at least 1.
        min_delta: the best value has to improve by more than this. NaN is never an improvement.
        mode: ``'min'`` for a number that should fall, ``'max'`` for one that should rise. A loss
            should fall, so None is for ``'loss'`` and ``'val_loss'``.

    Raises:
        UnsupportedValueError: for an invalid value. Before the first epoch, if the history will not
            have the number.

    >>> X, y = np.zeros((8, 2), 'float32'), np.zeros((8, 1), 'float32')
    >>> trainer = d2ldev.Trainer(100, callbacks=EarlyStopping('loss', patience=3))
    >>> history = trainer.fit(backend.mlp([2, 1]), [(X, y)])
    >>> len(history['loss'])                            # one best epoch, and three others
    4
    """

    trainer: _Stops | None = None

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode | None = None,
    ) -> None:
        attempted = "stop a run early"
        sign = find_sign(attempted, monitor, mode, "EarlyStopping(")
        problem = ""
        if not isinstance(min_delta, Real) or not 0 <= min_delta < inf:
            problem = f"min_delta is {describe(min_delta)} and not a number from 0"
        if problem:
            raise UnsupportedValueError(attempted, problem, "EarlyStopping(min_delta=0.0)")
        self.monitor, self.min_delta = monitor, float(min_delta)
        self.mode: Mode = "min" if sign == 1 else "max"
        self.patience = whole_number(
            attempted, "patience", patience, least=1, fix="EarlyStopping(patience=3)"
        )

    def __repr__(self) -> str:
        return (
            f"EarlyStopping(monitor={self.monitor!r}, patience={self.patience}, "
            f"min_delta={self.min_delta}, mode={self.mode!r})"
        )

    def check_names(self, names: Collection[str]) -> None:
        """Check that a history with these names has the monitored number.

        Args:
            names: the names in the history of the run.

        Raises:
            UnsupportedValueError: if the number is not one of them.
        """
        if self.monitor not in names:
            others = "fit(..., val_data=...), or " if "loss" in names else ""
            fix = f"{others}EarlyStopping(monitor={next(iter(names), None)!r})"
            raise history_refusal(f"stop a run early by {self.monitor!r}", names, fix)

    def on_epoch_end(self, _epoch: int, history: History) -> None:
        """Tell the trainer to stop after ``patience`` epochs without an improvement.

        Args:
            epoch: the number of the epoch, from 0.
            history: the history so far.

        Raises:
            UnsupportedValueError: if no trainer has the callback.
        """
        if self.trainer is None:
            raise UnsupportedValueError(
                "stop a run early",
                "it belongs to no trainer",
                "Trainer(..., callbacks=EarlyStopping())",
            )
        sign = 1 if self.mode == "min" else -1
        best, epochs_without = inf, 0
        for value in history[self.monitor]:
            is_better = sign * value < best - self.min_delta
            best, epochs_without = (sign * value, 0) if is_better else (best, epochs_without + 1)
        if epochs_without >= self.patience:
            self.trainer.should_stop = True


def history_refusal(attempted: str, names: Collection[str], fix: str) -> UnsupportedValueError:
    """Return the error for a number that the history will not have."""
    listing = ", ".join(names) or "nothing: fit_epoch is your own"
    return UnsupportedValueError(attempted, f"the history has {listing}", fix)


def check_callbacks(callbacks: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return the callbacks as a list.

    Args:
        callbacks: None, a callback, or a list or tuple of callbacks.

    Raises:
        UnsupportedValueError: for any other object, or a hook that the Trainer does not call.
    """
    if callbacks is None:
        return []
    several: Any = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    for each in several:
        attempted = f"call {describe(each)} during training"
        fix = "Trainer(..., callbacks=lambda epoch, history: print(epoch))"
        if isinstance(each, type):
            raise class_refusal(attempted, each, "callbacks")
        if not callable(each) and not any(hasattr(each, hook) for hook in HOOKS):
            if hasattr(each, "step"):
                fix = "Trainer(..., callbacks=Schedule(scheduler, per='epoch'))"
            raise UnsupportedValueError(
                attempted, f"it is not a function, and has neither {' nor '.join(HOOKS)}", fix
            )
        check_hooks(each, attempted)
        if hasattr(each, "state_dict") != hasattr(each, "load_state_dict"):
            raise UnsupportedValueError(
                attempted,
                "it has one of state_dict and load_state_dict",
                "define both, or neither",
            )
    return list(several)


def check_hooks(obj: Any, attempted: str) -> None:
    """Raise an UnsupportedValueError if an object has a hook that the Trainer does not call.

    Args:
        obj: a callback, or the Trainer.
        attempted: the operation, for the error.
    """
    ignored = [
        name
        for name in dir(obj)
        if name.startswith("on_")
        and name not in HOOKS
        and _HOOK_WORDS.intersection(name.split("_"))
        and callable(getattr(obj, name, None))
    ]
    if ignored:
        raise UnsupportedValueError(
            attempted,
            f"the Trainer does not call its {', '.join(ignored)}",
            f"def {HOOKS[0]}(self, step, loss), or def {HOOKS[1]}(self, epoch, history)",
        )


def check_operands(listener: Callable[..., Any], hook: str) -> None:
    """Raise an UnsupportedValueError if a hook cannot be called with the Trainer's arguments.

    Args:
        listener: the function to call.
        hook: one of ``HOOKS``.
    """
    import inspect  # only training needs it

    try:
        inspect.signature(listener).bind(None, None)
    except ValueError:  # a function written in C may have no signature
        return
    except TypeError as error:
        operands = "step, loss" if hook == "on_step_end" else "epoch, history"
        raise UnsupportedValueError(
            f"call {describe(listener)} during training",
            f"it cannot be called with ({operands}): {error}",
            f"def {hook}(self, {operands}), or a function of ({operands})",
        ) from error


@contextmanager
def run_schedules(callbacks: Sequence[Callback], optimizer: Any) -> Iterator[None]:
    """Let schedules see within a block which steps an optimizer takes.

    Args:
        callbacks: all callbacks of the run.
        optimizer: the run's optimizer, an object or a name.

    Raises:
        UnsupportedValueError: if a schedule changes another optimizer than the run's own.
    """
    schedules = [each for each in callbacks if isinstance(each, Schedule)]
    for each in schedules:
        if getattr(each.scheduler, "optimizer", optimizer) is not optimizer:
            raise UnsupportedValueError(
                f"step {describe(each.scheduler)} during training",
                f"it changes another optimizer than {describe(optimizer)} which trains",
                "fit(..., optimizer=scheduler.optimizer)",
            )
    with ExitStack() as stack:
        for each in schedules:
            stack.enter_context(each._watch_steps())
        yield


def check_monitors(callbacks: Sequence[Callback], names: Collection[str]) -> None:
    """Raise an UnsupportedValueError if a callback needs a number that the history will not have.

    Args:
        callbacks: all callbacks of the run.
        names: the names of the numbers in the history.
    """
    for each in callbacks:
        if isinstance(each, NeedsHistory):
            each.check_names(names)


def notify(listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
    """Call the listeners of a hook.

    Raises:
        UnsupportedValueError: if one returns ``True``, as if that ended the run. ``False`` is fine:
            ``lambda epoch, history: epoch == 3 and save()`` returns it.
    """
    for listener in listeners:
        answer = listener(*operands)
        if answer is not None and isinstance(answer, (bool, np.bool_)) and answer:
            raise UnsupportedValueError(
                f"go on after {describe(listener)} during training",
                "it returned True, and the Trainer ignores the value that a callback returns",
                "trainer.should_stop = True to end the run, or return nothing",
            )


def list_listeners(callbacks: Sequence[Callback], hook: str) -> list[Callable[..., Any]]:
    """Return the functions to call for a hook, in order. A function is an ``on_epoch_end``."""
    listeners = []
    for each in callbacks:
        is_function = hook == "on_epoch_end" and callable(each)
        listener: Any = getattr(each, hook, each if is_function else None)
        if listener is not None:
            listeners.append(listener)
    return listeners


def check_states(callbacks: Sequence[Any], saved: Sequence[Any]) -> Callable[[], None]:
    """Return a function that restores the states of all callbacks, or of none of them.

    Args:
        callbacks: the callbacks with ``state_dict``.
        saved: the result of each ``state_dict``.

    Raises:
        CheckpointError: if the states are of other callbacks. The function raises it, too.
    """
    if len(saved) != len(callbacks):
        raise _refusal(f"{len(callbacks)} of them have a state, and the run had {len(saved)}")

    def restore() -> None:
        before = [each.state_dict() for each in callbacks]
        try:
            for each, state in zip(callbacks, saved, strict=True):
                each.load_state_dict(state)
        except Exception as error:
            for each, state in zip(callbacks, before, strict=True):
                each.load_state_dict(state)
            raise _refusal(f"one refuses its state: {error!r}") from error

    return restore


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(
        "go on with the callbacks of a run",
        problem,
        "Trainer(..., callbacks=...) with the callbacks that the run began with, in their order",
    )
