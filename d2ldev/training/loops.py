"""The loops over the batches of an epoch: of training, and of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

from d2ldev.framework import Learner
from d2ldev.nesting.kinds import TENSOR
from d2ldev.nesting.walk import unwrap_broadcasts
from d2ldev.operations.prefetching import draw_outside
from d2ldev.operations.steps import takes_target
from d2ldev.training.data import (
    check_target,
    count_of,
    empty_data_refusal,
    inputs_alone,
    inputs_and_target,
    unweighted,
)
from d2ldev.training.entry import Entry
from d2ldev.training.hooks import Hooks
from d2ldev.training.interruption import Interruption, spared
from d2ldev.training.log import DeviceLog, LogOfLoop
from d2ldev.training.order import begin_epoch
from d2ldev.training.progress import Progress
from d2ldev.training.run import Run
from d2ldev.training.team import Alone, Counted


@dataclass(frozen=True)
class Loop:
    """What goes through the batches of an epoch.

    Only the batches are moved in it, and nothing is waited for: the numbers stay on the device
    until the end.

    Args:
        trainer: whose batches it counts.
        prepared: makes the generator of the batches on the device.
        learner: what is trained, or only evaluated.
        metrics: name -> ``(prediction, y) -> scalar tensor``.
        on_step_end: what is called after a step of the optimizer.
        interruption: of the run, which ends the loop after a step.
        team: the processes that train.
        is_as_drawn: whether batches are computed with as they are drawn, and only moved.
    """

    trainer: Hooks
    prepared: Callable[[Iterable[Any]], Generator[Any, None, None]]
    learner: Learner
    metrics: Mapping[str, Callable[[Any, Any], Any]]
    on_step_end: Sequence[Callable[[int, Any], None]] = ()
    interruption: Interruption = field(default_factory=Interruption)
    team: Alone = field(default_factory=Alone)
    is_as_drawn: bool = True

    def train(self, data: Iterable[Any], run: Run, progress: Progress | None) -> dict[str, float]:
        """Train for an epoch; return the means over its examples, or nothing if it ends early.

        Between two batches it looks whether the run is to end: after the last one nothing is left
        out, and the epoch counts.
        """
        begin_epoch(data, run.epoch)
        trainer, learner, team = self.trainer, self.learner, self.team
        entry = self._entry
        team.begin_epoch(run.epoch, trainer.device, (data, trainer.val_dataloader))
        # It takes the device of the first loss, because a hook may have moved the model.
        log = LogOfLoop(trainer.backend)
        operands, is_as_drawn = self._operands, self.is_as_drawn
        is_saved = run.until_saved() is not None
        if progress is not None:
            progress.begin_epoch(trainer.num_train_batches or None)
        numbered: Iterator[tuple[int, Any]]
        if run.is_within or is_saved:
            numbered = drawn = self._from_where_it_was(data, run, log, entry)
        else:
            drawn = self.prepared(team.parts(entry.of(data)))
            numbered = enumerate(drawn)
        is_stopped = False
        with closing(drawn):
            for number, batch in self.interruption.until_pressed(numbered):
                # Gradients that wait for a step of the optimizer would be lost.
                if not learner.pending and team.stops(trainer.should_stop):
                    trainer.should_stop = is_stopped = True
                    break
                if not (is_as_drawn and entry.is_complete):
                    batch = entry.arrived(batch)
                inputs, y, count = operands(batch)
                labels = entry.next()
                counted = team.counted(learner, number, y, count, labels)
                learner.labels = labels if is_as_drawn else None
                loss, prediction = learner.step(inputs, y)
                self._add(log, counted, loss, prediction, y)
                if progress is not None:
                    progress.step(number + 1, counted.examples, log)
                if self.on_step_end and not learner.pending:
                    self._end_step(run.step, loss)
                run.step += 1
                trainer.train_batch_idx += 1
                if is_saved:
                    run.save_within(number + 1, log, trainer.device)
        team.end_batches()
        if learner.pending:
            learner.flush()
            self._end_step(run.step - 1, loss)
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
        log = LogOfLoop(self.trainer.backend)
        entry, learner, operands = self._entry, self.learner, self._operands
        is_as_drawn = self.is_as_drawn
        parts = self.team.parts(entry.of(data), is_trained=False)
        with closing(self.prepared(parts)) as batches:
            for number, batch in enumerate(self.interruption.until_pressed(batches)):
                if not (is_as_drawn and entry.is_complete):
                    batch = entry.arrived(batch)
                inputs, y, count = operands(batch)
                labels = entry.next()
                counted = self.team.counted(learner, number, y, count, labels)
                learner.labels = labels if is_as_drawn else None
                loss, prediction = learner.evaluate(inputs, y)
                if loss is None:  # a ``validation_step`` has logged it itself
                    counted, loss = Counted(0, 0, 0, 0), float("nan")
                self._add(log, counted, loss, prediction, y)
                self.trainer.val_batch_idx += 1
        learner.check_labels()
        return {} if self.interruption.is_pressed else self._means(log)

    @cached_property
    def _entry(self) -> Entry:
        team = self.team
        return Entry(self.trainer, self.learner, splits=team.splits, is_first=team.is_first)

    def first_inputs(self, data: Iterable[Any]) -> tuple[Any, ...]:
        """Return the inputs of the first batch, on the device."""
        learner = self.learner
        for first in draw_outside(self.trainer.backend.framework, data):
            (batch,) = self.prepared(self._entry.of([first]))
            batch = unwrap_broadcasts(batch, self.trainer.backend.framework.state.kinds)
            if learner.settings.methods is None and not takes_target(learner.settings.loss):
                return inputs_alone(batch, learner.input_names, learner.takes_mapping)
            return inputs_and_target(batch, learner.input_names, learner.takes_mapping)[0]
        raise empty_data_refusal()

    def _from_where_it_was(
        self, data: Iterable[Any], run: Run, log: DeviceLog, entry: Entry
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the number of each batch in the epoch and the batch on the device."""
        # Up to a step after which the state is saved nothing is drawn ahead: it would be drawn
        # again by a run that goes on from there, from other random numbers.
        with closing(draw_outside(self.trainer.backend.framework, spared(data))) as source:
            number = run.go_on_within(source, log)
            parts = iter(self.team.parts(entry.of(source)))
            is_over = False
            while not is_over:
                wanted = run.until_saved()
                before = number
                with closing(self.prepared(islice(parts, wanted))) as part:
                    for batch in part:
                        yield number, batch
                        number += 1
                is_over = number - before != wanted

    @cached_property
    def _operands(self) -> Callable[[Any], tuple[tuple[Any, ...], Any, int]]:
        """Return ``batch -> (inputs, y, number of examples)``, for ``learner.step``."""
        backend, learner = self.trainer.backend, self.learner
        kinds = backend.framework.state.kinds
        names, takes_mapping = learner.input_names, learner.takes_mapping
        is_checked = False

        def as_taken(operands: Any) -> Any:
            return operands if learner.takes_marks else unwrap_broadcasts(operands, kinds)

        def of_the_model(batch: Any) -> tuple[tuple[Any, ...], Any, int]:
            inputs = inputs_alone(batch, names, takes_mapping)
            return as_taken(inputs), None, count_of(backend, inputs)

        def of_the_loss(batch: Any) -> tuple[tuple[Any, ...], Any, int]:
            if type(batch) is tuple and len(batch) == 2 and kinds[type(batch[1])] is TENSOR:
                # The common batch.
                inputs, y = batch[:1], batch[1]
                if kinds[type(batch[0])] is not TENSOR:
                    inputs = as_taken(inputs)
                return inputs, y, count_of(backend, y)
            inputs, y = inputs_and_target(batch, names, takes_mapping)
            check_target(y, learner.settings.loss, kinds)
            number = count_of(backend, unweighted(y), {"inputs": dict(enumerate(inputs)), "y": y})
            return *as_taken((inputs, y)), number

        def of_its_methods(batch: Any) -> tuple[tuple[Any, ...], Any, int]:
            nonlocal is_checked
            if not is_checked and not learner.is_built:
                inputs = inputs_and_target(batch, names, takes_mapping)[0]
                learner.build(unwrap_broadcasts(inputs, kinds))
            is_checked = True
            return (as_taken(batch),), None, count_of(backend, batch)

        if learner.settings.methods is not None:
            return of_its_methods
        return of_the_loss if takes_target(learner.settings.loss) else of_the_model

    def _add(self, log: DeviceLog, counted: Counted, loss: Any, prediction: Any, y: Any) -> None:
        """Log the loss and the metrics of a batch."""
        if not self.metrics:
            log.add(counted.in_loss, loss=loss)
            return
        y = unwrap_broadcasts(unweighted(y), self.trainer.backend.framework.state.kinds)
        measured = {name: metric(prediction, y) for name, metric in self.metrics.items()}
        _, in_loss, in_metrics, in_accuracy = counted
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

    def _end_step(self, step: int, loss: Any) -> None:
        self.team.notify(self.on_step_end, step, loss)
