"""``RunContext``: the objects of one ``fit``, and the steps of its loop over the epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from d2ldev.training.hooks import find_listeners
from d2ldev.training.loops import Loop
from d2ldev.training.progress import Progress
from d2ldev.training.run import Run


@dataclass
class RunContext:
    """The objects of one ``fit``, and the steps of its loop over the epochs.

    Args:
        loop: the loops over the batches of an epoch.
        run: the state of the run, and its checkpoint.
        train_data, val_data: the batches to train and to evaluate on.
        max_epochs: the number of epochs; 0 if other processes trained.
        error: the error of another process that trained; None without an error.
        progress: the progress to show; None shows nothing.
    """

    loop: Loop
    run: Run
    train_data: Iterable[Any]
    val_data: Iterable[Any] | None
    max_epochs: int
    error: BaseException | None = None
    progress: Progress | None = None
    _is_over: bool = False

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self.loop.interruption.is_pressed

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, until the run has to end."""
        for epoch in range(self.run.epoch, self.max_epochs):
            if self._is_over or self.is_interrupted:
                return
            yield epoch

    def train_epoch(self) -> dict[str, float]:
        """Train for an epoch; return its numbers, or an empty dict if the run ends within it."""
        return self.loop.train(self.train_data, self.run, self.progress)

    def validate(self) -> dict[str, float]:
        """Return the numbers of the model on ``val_data``, with their names in the history."""
        if self.val_data is None:
            return {}
        return {f"val_{name}": value for name, value in self.loop.evaluate(self.val_data).items()}

    def end_epoch(self, numbers: dict[str, float]) -> None:
        """Record an epoch, call ``on_epoch_end``, and save the state of the run.

        Args:
            numbers: the numbers of the epoch.
        """
        loop, run, trainer = self.loop, self.run, self.loop.trainer
        run.record(numbers)
        if self.progress is not None:
            self.progress.end_epoch(run.epoch, numbers)
        listeners = find_listeners(trainer, loop.callbacks, "on_epoch_end")
        if listeners:
            loop.learner.sync()  # the callback sees the model after the last step
        loop.team.notify(listeners, trainer.epoch, run.history)
        self._is_over = loop.team.stops_after_epoch(trainer.should_stop)
        if not loop.team.has_failed:
            run.save(trainer.device)
        if self._is_over:
            trainer.should_stop = True

    def raise_failure(self) -> None:
        """Raise the error of a hook or of another process, once the user has the model."""
        # Not within the block of the run: a generator replaces ``StopIteration``.
        self.loop.team.raise_failure()
        if self.error is not None:
            raise self.error
