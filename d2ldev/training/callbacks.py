"""Callbacks: what is called during a run, and what of it is in the checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from numbers import Real
from typing import Any, Protocol

import numpy as np

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.operations.arguments import whole_number
from d2ldev.options import MODES, PERIODS, Mode, Period, problem_of
from d2ldev.typing import Callback, History, Scheduler

HOOKS = ("on_step_end", "on_epoch_end")
# What the names of hooks are made of, in Keras, Lightning, and slips of the pen.
_OF_HOOKS = {
    *("backward", "batch", "begin", "checkpoint", "end", "epoch", "exception", "fit", "grad"),
    *("start", "step", "test", "train", "training", "val", "validation"),
}


class _Stops(Protocol):
    """A trainer, as ``EarlyStopping`` uses it."""

    should_stop: bool


class NeedsHistory(ABC):
    """A callback that looks at numbers of the history."""

    @abstractmethod
    def check_names(self, names: Collection[str]) -> None:
        """Raise an UnsupportedValueError if a history with these names lacks what it needs."""


class Schedule(NeedsHistory):
    """A callback that steps the framework's own scheduler, whose state is in the checkpoint.

    For PyTorch's. Those of Keras, optax and MXNet belong to the optimizer, which steps them itself.

    Args:
        scheduler: an object with ``step()``; its ``state_dict`` and ``load_state_dict`` are used.
        per: ``'epoch'`` or ``'step'``, after each of which it makes a step.
        metric: the name of the number in the history that ``scheduler.step(number)`` takes, as
            that of ``ReduceLROnPlateau``; with ``per='epoch'`` only. None calls ``step()``.

    Raises:
        UnsupportedValueError: for any other argument.

    >>> schedule = Schedule(StepLR(optimizer, 10), per='epoch')            # doctest: +SKIP
    >>> Trainer(30, callbacks=schedule).fit(net, data, optimizer=optimizer) # doctest: +SKIP
    """

    def __init__(
        self, scheduler: Scheduler, per: Period = "epoch", metric: str | None = None
    ) -> None:
        problem = ""
        if not callable(getattr(scheduler, "step", None)):
            problem = f"{describe(scheduler)} has no step()"
        elif problem := problem_of(per, PERIODS):
            problem = f"per is {describe(per)} and {problem}"
        elif metric is not None and per == "step":
            problem = "a metric is known after an epoch, and not after a step"
        if problem:
            fix = "Schedule(torch.optim.lr_scheduler.StepLR(optimizer, 10), per='epoch')"
            raise UnsupportedValueError("step a scheduler", problem, fix)
        self.scheduler: Any = scheduler  # a protocol has no optional methods
        self._per, self._metric = per, metric
        # It has the one hook that does something: the other one would be called in vain.
        if per == "step":
            self.on_step_end = lambda _step, _loss: scheduler.step()
        else:
            self.on_epoch_end = self._after_epoch

    def __repr__(self) -> str:
        metric = "" if self._metric is None else f", metric={self._metric!r}"
        return f"Schedule({type(self.scheduler).__name__}, per={self._per!r}{metric})"

    def check_names(self, names: Collection[str]) -> None:
        """Check that a history with these names has the metric."""
        if self._metric is not None and self._metric not in names:
            name = next(iter(names), None)
            fix = f"Schedule(scheduler, metric={name!r})"
            raise history_refusal(f"step a scheduler by {self._metric!r}", names, fix)

    def _after_epoch(self, _epoch: int, history: History) -> None:
        if self._metric is not None:
            self.scheduler.step(history[self._metric][-1])
        else:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state; empty if it has none."""
        return self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring the scheduler back to a state."""
        if state:
            self.scheduler.load_state_dict(state)


class EarlyStopping(NeedsHistory):
    """A callback that ends a run which no longer improves.

    It counts anew from the history after each epoch. So it needs no state: a run that is resumed
    counts on, and all processes of a launch, which have one history, end together. The model is
    that of the last epoch: ``fit(..., checkpoint=..., keep='best')`` keeps the best one.

    Args:
        monitor: the name of the number in the history that is to improve.
        patience: after how many epochs in a row without an improvement the run ends, 1 or more.
        min_delta: by more than this the best value has to improve. NaN is never an improvement.
        mode: ``'min'`` if the number is to become less, ``'max'`` if it is to become greater.

    Raises:
        UnsupportedValueError: for other values; before the first epoch, if the history will not
            have the number.

    >>> Trainer(100, callbacks=EarlyStopping('val_loss', patience=5))      # doctest: +SKIP
    """

    trainer: _Stops | None = None

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Mode = "min",
    ) -> None:
        attempted = "stop a run early"
        problem = ""
        if not isinstance(monitor, str):
            problem = f"monitor is {describe(monitor)} and no name"
        elif not isinstance(min_delta, Real) or not 0 <= min_delta < inf:
            problem = f"min_delta is {describe(min_delta)} and no number from 0"
        elif problem := problem_of(mode, MODES):
            problem = f"mode is {describe(mode)} and {problem}"
        if problem:
            fix = "EarlyStopping(monitor='val_loss', patience=3, min_delta=0.0, mode='min')"
            raise UnsupportedValueError(attempted, problem, fix)
        self.monitor, self.min_delta, self.mode = monitor, float(min_delta), mode
        self.patience = whole_number(
            attempted, "patience", patience, least=1, fix="EarlyStopping(patience=3)"
        )

    def __repr__(self) -> str:
        return (
            f"EarlyStopping(monitor={self.monitor!r}, patience={self.patience}, "
            f"min_delta={self.min_delta}, mode={self.mode!r})"
        )

    def check_names(self, names: Collection[str]) -> None:
        """Check that a history with these names has the monitored number."""
        if self.monitor not in names:
            others = "fit(..., val_data=...), or " if "loss" in names else ""
            fix = f"{others}EarlyStopping(monitor={next(iter(names), None)!r})"
            raise history_refusal(f"stop a run early by {self.monitor!r}", names, fix)

    def on_epoch_end(self, _epoch: int, history: History) -> None:
        """Tell the trainer to stop after ``patience`` epochs without an improvement."""
        if self.trainer is None:
            raise UnsupportedValueError(
                "stop a run early",
                "no trainer calls this",
                "Trainer(..., callbacks=EarlyStopping())",
            )
        sign = 1 if self.mode == "min" else -1
        best, waited = inf, 0
        for value in history[self.monitor]:
            is_better = sign * value < best - self.min_delta
            best, waited = (sign * value, 0) if is_better else (best, waited + 1)
        if waited >= self.patience:
            self.trainer.should_stop = True


def history_refusal(attempted: str, names: Collection[str], fix: str) -> UnsupportedValueError:
    """Return the error of what needs a number that the history will not have."""
    found = ", ".join(names) or "nothing: fit_epoch is your own"
    return UnsupportedValueError(attempted, f"the history has {found}", fix)


def check_callbacks(given: Callback | Sequence[Callback] | None) -> list[Callback]:
    """Return the callbacks as a list.

    Args:
        given: None, a callback, or a list or tuple of them.

    Raises:
        UnsupportedValueError: for what is no callback, or has hooks that nobody calls.
    """
    if given is None:
        return []
    several: Any = given if isinstance(given, (list, tuple)) else [given]
    callbacks: list[Callback] = list(several)
    for each in callbacks:
        attempted = f"call {describe(each)} during training"
        fix = "Trainer(..., callbacks=lambda epoch, history: print(epoch))"
        if isinstance(each, type):
            raise UnsupportedValueError(
                attempted, "it is a class", f"Trainer(..., callbacks={each.__name__}())"
            )
        if not callable(each) and not any(hasattr(each, hook) for hook in HOOKS):
            if hasattr(each, "step"):
                fix = "Trainer(..., callbacks=Schedule(scheduler, per='epoch'))"
            raise UnsupportedValueError(
                attempted, f"it is no function, and has neither {' nor '.join(HOOKS)}", fix
            )
        check_hooks(each, attempted)
        if hasattr(each, "state_dict") != hasattr(each, "load_state_dict"):
            raise UnsupportedValueError(
                attempted,
                "it has one of state_dict and load_state_dict",
                "define both, or neither",
            )
    return callbacks


def check_hooks(obj: Any, attempted: str) -> None:
    """Raise an UnsupportedValueError if an object has a hook that the Trainer does not call."""
    ignored = [
        name
        for name in dir(obj)
        if name.startswith("on_")
        and name not in HOOKS
        and _OF_HOOKS.intersection(name.split("_"))
        and callable(getattr(obj, name, None))
    ]
    if ignored:
        raise UnsupportedValueError(
            attempted,
            f"nobody calls its {', '.join(ignored)}",
            f"def {HOOKS[0]}(self, step, loss), or def {HOOKS[1]}(self, epoch, history)",
        )


def check_operands(listener: Callable[..., Any], hook: str) -> None:
    """Raise an UnsupportedValueError if a hook cannot be called with what the Trainer gives it.

    Args:
        listener: what is called.
        hook: as which of ``HOOKS``.
    """
    import inspect  # not before it is needed: only training asks

    try:
        inspect.signature(listener).bind(None, None)
    except ValueError:  # what is written in C need not say
        return
    except TypeError as error:
        operands = "step, loss" if hook == "on_step_end" else "epoch, history"
        raise UnsupportedValueError(
            f"call {describe(listener)} during training",
            f"it cannot be called with ({operands}): {error}",
            f"def {hook}(self, {operands}), or a function of ({operands})",
        ) from error


def check_schedules(callbacks: Sequence[Callback], optimizer: Any) -> None:
    """Raise an UnsupportedValueError if a schedule changes another optimizer than a run's own.

    Args:
        callbacks: among which the schedules are.
        optimizer: an object, or a name.
    """
    for each in callbacks:
        if isinstance(each, Schedule):
            scheduled = getattr(each.scheduler, "optimizer", optimizer)
            if scheduled is not optimizer:
                raise UnsupportedValueError(
                    f"step {describe(each.scheduler)} during training",
                    f"it changes another optimizer than {describe(optimizer)} which trains",
                    "fit(..., optimizer=scheduler.optimizer)",
                )


def check_monitors(callbacks: Sequence[Callback], names: Collection[str]) -> None:
    """Raise an UnsupportedValueError if a callback needs a number that the history will not have.

    Args:
        callbacks: among which some look at the history.
        names: of the numbers that the history will have.
    """
    for each in callbacks:
        if isinstance(each, NeedsHistory):
            each.check_names(names)


def notify(listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
    """Call the listeners of a hook.

    Raises:
        UnsupportedValueError: if one returns ``True``, as if that ended the run. ``False`` is what
            ``lambda epoch, history: epoch == 3 and save()`` returns, too.
    """
    for listener in listeners:
        answer = listener(*operands)
        if answer is not None and isinstance(answer, (bool, np.bool_)) and answer:
            raise UnsupportedValueError(
                f"go on after {describe(listener)} during training",
                "it returned True, and nobody looks at what a callback returns",
                "trainer.should_stop = True ends the run; else return nothing",
            )


def list_listeners(callbacks: Sequence[Callback], hook: str) -> list[Callable[..., Any]]:
    """Return what is called for a hook, in order; a function is called for ``on_epoch_end``."""
    listeners = []
    for each in callbacks:
        is_function = hook == "on_epoch_end" and callable(each)
        listener: Any = getattr(each, hook, each if is_function else None)
        if listener is not None:
            listeners.append(listener)
    return listeners


def check_states(callbacks: Sequence[Any], saved: Sequence[Any]) -> Callable[[], None]:
    """Return a function that gives callbacks their states: all of them, or none.

    Args:
        callbacks: those with ``state_dict``.
        saved: what it has returned, for each of them.

    Raises:
        CheckpointError: if they are those of other callbacks. The function raises it, too.
    """
    if len(saved) != len(callbacks):
        raise _refusal(
            f"{len(callbacks)} of them have a state, and in the run {len(saved)} had one"
        )

    def put() -> None:
        before = [each.state_dict() for each in callbacks]
        try:
            for each, state in zip(callbacks, saved, strict=True):
                each.load_state_dict(state)
        except Exception as error:
            for each, state in zip(callbacks, before, strict=True):
                each.load_state_dict(state)
            raise _refusal(f"one refuses its state: {error!r}") from error

    return put


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(
        "go on with the callbacks of a run",
        problem,
        "Trainer(..., callbacks=...) with the callbacks that the run began with, in their order",
    )
