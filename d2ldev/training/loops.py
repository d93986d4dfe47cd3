"""The loops over the batches of an epoch, to train and to evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from d2ldev._backend import framework_of
from d2ldev.contract import Learner
from d2ldev.nesting.walk import unwrap_broadcasts
from d2ldev.operations.prefetching import draw_outside
from d2ldev.training.data import drop_weights, empty_data_refusal
from d2ldev.training.feed import Feed
from d2ldev.training.hooks import TrainerState, find_listeners
from d2ldev.training.interruption import END, Interruption, shield
from d2ldev.training.learning import accuracy
from d2ldev.training.log import BatchedDeviceLog, DeviceLog
from d2ldev.training.metrics import Measure
from d2ldev.training.order import begin_epoch
from d2ldev.training.progress import Progress
from d2ldev.training.run import Run
from d2ldev.training.running_metrics import RunningMetric, RunningMetrics
from d2ldev.training.team import Counts, Team
from d2ldev.typing import Callback


@dataclass(frozen=True)
class Loop:
    """The loops over the batches of an epoch, to train and to evaluate.

    A loop moves the batches alone, and waits for nothing. The numbers stay on the device until the
    end of the epoch.

    Args:
        trainer: the trainer that counts the batches.
        learner: the learner of the model.
        metrics: name -> ``(prediction, y) -> scalar tensor``, or a running metric.
        callbacks: the trainer's callbacks, for ``on_step_end``.
        interruption: the state of Ctrl-C, which ends the loop after a step.
        team: the processes that train.
    """

    trainer: TrainerState
    learner: Learner
    metrics: Mapping[str, Measure]
    callbacks: Sequence[Callback] = ()
    interruption: Interruption = field(default_factory=Interruption)
    team: Team = field(default_factory=Team)

    @cached_property
    def running(self) -> RunningMetrics:
        """The metrics that keep a running value."""
        loss = self.learner.settings.loss
        return RunningMetrics(self.trainer.backend, self.metrics, self.team, loss)

    @cached_property
    def feed(self) -> Feed:
        """The batches for the learner."""
        return Feed(self.trainer, self.learner, self.team)

    def train(self, data: Iterable[Any], run: Run, progress: Progress | None) -> dict[str, float]:
        """Train for an epoch; return the means over its examples, or ``{}`` if it ends early.

        A request to stop ends the epoch between two batches. After the last batch the epoch is
        complete, and counts.
        """
        begin_epoch(data, run.epoch)
        self.running.begin()
        trainer, learner, team, feed = self.trainer, self.learner, self.team, self.feed
        team.begin_epoch(run.epoch, trainer.device, (data, trainer.val_dataloader))
        # A hook may have moved the model, so the log takes the device of the first loss.
        log = BatchedDeviceLog(trainer.backend)
        listeners = find_listeners(trainer, self.callbacks, "on_step_end")
        draw_next, is_group = self.interruption.draw_next, team.splits
        if progress is not None:
            progress.begin_epoch(trainer.num_train_batches or None)
        number, count_to_draw, is_stopped = 0, run.count_to_draw(), False
        if run.is_within_epoch:
            self.running.check_saving()
        if run.is_within_epoch or count_to_draw is not None:
            data = draw_outside(framework_of(trainer.backend), shield(data))
            number = run.resume_epoch(data, log)
        with closing(feed.draw(data, is_trained=True, count_to_draw=count_to_draw)) as batches:
            while (batch := draw_next(batches)) is not END:
                # A stop between the batches of one step would lose their gradients.
                if (
                    (is_group or trainer.should_stop)
                    and not learner.pending
                    and team.stops(trainer.should_stop)
                ):
                    trainer.should_stop = is_stopped = True
                    break
                inputs, y, compared, counts = feed.make_operands(number, batch)
                learner.batch = number
                loss, prediction = learner.step(inputs, y)
                if feed.is_at_first:
                    learner.check_labels()
                self._log(log, counts, loss, prediction, compared)
                number += 1
                if progress is not None:
                    progress.step(number, counts.examples, log)
                if listeners and not learner.pending:
                    team.notify(listeners, run.step, loss)
                run.step += 1
                trainer.train_batch_idx += 1
                if count_to_draw is not None:
                    run.save_within_epoch(number, log, trainer.device)
        team.end_batches()
        is_within_step = learner.pending > 0
        learner.flush()
        if is_within_step:
            team.notify(listeners, run.step - 1, loss)
        learner.check_labels()
        if is_stopped or self.interruption.is_pressed:
            return {}
        means = self._means(log, number)
        if progress is not None:
            progress.end_batches(means["loss"])
        return means

    def evaluate(self, data: Iterable[Any]) -> dict[str, float]:
        """Evaluate the model on data; return the means over the examples."""
        log = BatchedDeviceLog(self.trainer.backend)
        feed, learner, draw_next = self.feed, self.learner, self.interruption.draw_next
        number = 0
        self.running.begin()
        with closing(feed.draw(data)) as batches:
            while (batch := draw_next(batches)) is not END:
                inputs, y, compared, counts = feed.make_operands(number, batch)
                learner.batch = number
                loss, prediction = learner.evaluate(inputs, y)
                if feed.is_at_first:
                    learner.check_labels()
                if loss is not None:  # else ``validation_step`` returned nothing
                    self._log(log, counts, loss, prediction, compared)
                number += 1
                self.trainer.val_batch_idx += 1
        learner.check_labels()
        if self.interruption.is_pressed:
            return {}
        return {"loss": float("nan"), **self._means(log, number)}

    def _log(self, log: DeviceLog, counts: Counts, loss: Any, prediction: Any, y: Any) -> None:
        """Log the loss and the metrics of a batch; ``y`` is what the metrics compare with."""
        # A process without an example has computed with those of another one.
        own, weight = counts.in_loss, self.learner.weight
        in_loss = own if weight is None or not own else weight
        if not self.metrics:
            log.add(in_loss, loss=loss)
            return
        framework = framework_of(self.trainer.backend)
        y = unwrap_broadcasts(drop_weights(y), framework.state.kinds)
        if self.running:
            self.running.update(prediction, y, has_examples=counts.in_metrics > 0)
        values, weights = {}, {}
        for name, metric in self.metrics.items():
            if isinstance(metric, RunningMetric):
                continue
            if metric == self.trainer.backend.accuracy:
                values[name], number = accuracy(framework, prediction, y)
                weights[name] = number if counts.in_metrics else 0.0
            else:
                values[name], weights[name] = metric(prediction, y), counts.in_metrics
        log.add(in_loss, loss=loss)
        for name, value in values.items():
            log.add(weights[name], **{name: value})

    def _means(self, log: DeviceLog, number: int) -> dict[str, float]:
        if not number:
            raise empty_data_refusal()
        numbers = self.team.means(log)
        if self.running:
            numbers |= self.running.compute()
        return {name: numbers[name] for name in ("loss", *self.metrics) if name in numbers}
