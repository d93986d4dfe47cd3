"""The loops over the batches of an epoch: of training, and of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from d2ldev._backend import framework_of
from d2ldev.areas import Learner
from d2ldev.nesting.walk import unwrap_broadcasts
from d2ldev.operations.prefetching import draw_outside
from d2ldev.training.data import drop_weights, empty_data_refusal
from d2ldev.training.entry import Entry
from d2ldev.training.hooks import TrainerState, find_listeners
from d2ldev.training.interruption import END, Interruption, shield
from d2ldev.training.log import BatchedDeviceLog, DeviceLog
from d2ldev.training.order import begin_epoch
from d2ldev.training.progress import Progress
from d2ldev.training.run import Run
from d2ldev.training.team import Counts, SingleProcess, Team
from d2ldev.typing import Callback


@dataclass(frozen=True)
class Loop:
    """What goes through the batches of an epoch.

    Only the batches are moved in it, and nothing is waited for: the numbers stay on the device
    until the end.

    Args:
        trainer: whose batches it counts.
        learner: what is trained, or only evaluated.
        metrics: name -> ``(prediction, y) -> scalar tensor``.
        callbacks: those of the trainer, whose ``on_step_end`` is called.
        interruption: of the run, which ends the loop after a step.
        team: the processes that train.
    """

    trainer: TrainerState
    learner: Learner
    metrics: Mapping[str, Callable[[Any, Any], Any]]
    callbacks: Sequence[Callback] = ()
    interruption: Interruption = field(default_factory=Interruption)
    team: Team = field(default_factory=SingleProcess)

    @cached_property
    def entry(self) -> Entry:
        """The way of the batches into the learner."""
        return Entry(self.trainer, self.learner, self.team)

    def train(self, data: Iterable[Any], run: Run, progress: Progress | None) -> dict[str, float]:
        """Train for an epoch; return the means over its examples, or nothing if it ends early.

        Between two batches it looks whether the run is to end: after the last one nothing is left
        out, and the epoch counts.
        """
        begin_epoch(data, run.epoch)
        trainer, learner, team, entry = self.trainer, self.learner, self.team, self.entry
        team.begin_epoch(run.epoch, trainer.device, (data, trainer.val_dataloader))
        # It takes the device of the first loss, because a hook may have moved the model.
        log = BatchedDeviceLog(trainer.backend)
        listeners = find_listeners(trainer, self.callbacks, "on_step_end")
        draw, is_group = self.interruption.draw, team.splits
        if progress is not None:
            progress.begin_epoch(trainer.num_train_batches or None)
        number, count_to_draw, is_stopped = 0, run.count_to_draw(), False
        if run.is_within or count_to_draw is not None:
            data = draw_outside(framework_of(trainer.backend), shield(data))
            number = run.go_on_within(data, log)
        with closing(entry.draw(data, is_trained=True, count_to_draw=count_to_draw)) as batches:
            while (batch := draw(batches)) is not END:
                # Gradients that wait for a step of the optimizer would be lost.
                if (
                    (is_group or trainer.should_stop)
                    and not learner.pending
                    and team.stops(trainer.should_stop)
                ):
                    trainer.should_stop = is_stopped = True
                    break
                inputs, y, counts = entry.take(number, batch)
                loss, prediction = learner.step(inputs, y)
                self._log(log, counts, loss, prediction, y)
                number += 1
                if progress is not None:
                    progress.step(number, counts.examples, log)
                if listeners and not learner.pending:
                    team.notify(listeners, run.step, loss)
                run.step += 1
                trainer.train_batch_idx += 1
                if count_to_draw is not None:
                    run.save_within(number, log, trainer.device)
        team.end_batches()
        if learner.pending:
            learner.flush()
            team.notify(listeners, run.step - 1, loss)
        learner.check_labels()
        learner.end_epoch()
        if is_stopped or self.interruption.is_pressed:
            return {}
        means = self._means(log)
        if progress is not None:
            progress.end_batches(means["loss"])
        return means

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Go through the data without training; return what ``train`` does."""
        log = BatchedDeviceLog(self.trainer.backend)
        entry, learner, draw = self.entry, self.learner, self.interruption.draw
        number = 0
        with closing(entry.draw(data)) as batches:
            while (batch := draw(batches)) is not END:
                inputs, y, counts = entry.take(number, batch)
                loss, prediction = learner.evaluate(inputs, y)
                if loss is None:  # a ``validation_step`` has logged it itself
                    counts, loss = Counts(0, 0, 0, 0), float("nan")
                self._log(log, counts, loss, prediction, y)
                number += 1
                self.trainer.val_batch_idx += 1
        learner.check_labels()
        return {} if self.interruption.is_pressed else self._means(log)

    def _log(self, log: DeviceLog, counts: Counts, loss: Any, prediction: Any, y: Any) -> None:
        """Log the loss and the metrics of a batch."""
        if not self.metrics:
            log.add(counts.in_loss, loss=loss)
            return
        y = unwrap_broadcasts(drop_weights(y), framework_of(self.trainer.backend).state.kinds)
        measured = {name: metric(prediction, y) for name, metric in self.metrics.items()}
        _, in_loss, in_metrics, in_accuracy = counts
        if in_loss == in_metrics == in_accuracy:
            log.add(in_loss, loss=loss, **measured)
            return
        log.add(in_loss, loss=loss)
        for name, value in measured.items():
            is_accuracy = self.metrics[name] == self.trainer.backend.accuracy
            log.add(in_accuracy if is_accuracy else in_metrics, **{name: value})

    def _means(self, log: DeviceLog) -> dict[str, float]:
        means = self.team.means(log)
        if not means:
            raise empty_data_refusal()
        return means
