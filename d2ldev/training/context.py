"""What ``fit`` holds while it goes through its epochs."""

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
    """A run of ``fit`` on its way through the epochs.

    Args:
        loop: goes through the batches of an epoch.
        run: how far the run is, and its checkpoint.
        train_data, val_data: the batches to train and to evaluate on.
        max_epochs: how many epochs the run has; 0 where other processes have trained.
        error: what was raised in another process that has trained; None is nothing.
        progress: what is shown; None is nothing.
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
        """Yield the numbers of the epochs that are left, until the run is to end."""
        for epoch in range(self.run.epoch, self.max_epochs):
            if self._is_over or self.is_interrupted:
                return
            yield epoch

    def train_epoch(self) -> dict[str, float]:
        """Train for an epoch; return its numbers, or nothing if the run ends within it."""
        return self.loop.train(self.train_data, self.run, self.progress)

    def validate(self) -> dict[str, float]:
        """Return the numbers of the model on ``val_data``, named as the history names them."""
        if self.val_data is None:
            return {}
        return {f"val_{name}": value for name, value in self.loop.evaluate(self.val_data).items()}

    def end_epoch(self, found: dict[str, float]) -> None:
        """Record an epoch, call ``on_epoch_end``, and save the state of the run.

        Args:
            found: the numbers of the epoch.
        """
        loop, run, trainer = self.loop, self.run, self.loop.trainer
        run.record(found)
        if self.progress is not None:
            self.progress.end_epoch(run.epoch, found)
        listeners = find_listeners(trainer, loop.callbacks, "on_epoch_end")
        if listeners:
            loop.learner.sync()  # the user's model is as it is after the last step
        loop.team.notify(listeners, trainer.epoch, run.history)
        self._is_over = loop.team.stops_after_epoch(trainer.should_stop)
        if not loop.team.has_failed:
            run.save(trainer.device)
        if self._is_over:
            trainer.should_stop = True

    def raise_failure(self) -> None:
        """Raise the error that has ended the run elsewhere, after the model is handed back."""
        # Not in the block of the run: a generator turns ``StopIteration`` into another error.
        self.loop.team.raise_failure()
        if self.error is not None:
            raise self.error
