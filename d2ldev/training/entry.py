"""How a batch enters a loop: what happens to it on the host, on its way, and on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from d2ldev._backend import framework_of
from d2ldev.areas import Learner, Sharded
from d2ldev.areas.training import Labels
from d2ldev.errors import UnsupportedValueError, warn
from d2ldev.nesting.kinds import TENSOR
from d2ldev.nesting.walk import Flattened, flatten_changing, leaves, unwrap_broadcasts
from d2ldev.operations.floats import Cast, dtype_of_model
from d2ldev.operations.labels import has_labels, look_at
from d2ldev.operations.prefetching import device_batches, draw_outside
from d2ldev.operations.steps import takes_target
from d2ldev.training.data import (
    check_target,
    count_of,
    drop_weights,
    empty_data_refusal,
    has_tensors_alone,
    inputs_alone,
    inputs_and_target,
)
from d2ldev.training.hooks import TrainerState, is_overridden, prepare_batch
from d2ldev.training.interruption import shield
from d2ldev.training.team import Counts, SingleProcess, Team

# How many batches are on their way to a GPU while one is computed with.
_DEPTH = 2


class Operands(NamedTuple):
    """What a learner computes with, of a batch.

    Args:
        inputs: of the model.
        y: the target.
        counts: what the batch counts.
    """

    inputs: tuple[Any, ...]
    y: Any
    counts: Counts


class Entry:
    """The way of the batches of an epoch into the steps of a learner.

    Args:
        trainer: whose batches they are.
        learner: computes with them.
        team: the processes that compute with portions of each batch.
    """

    def __init__(self, trainer: TrainerState, learner: Learner, team: Team | None = None) -> None:
        self._trainer, self._learner = trainer, learner
        self._team = SingleProcess() if team is None else team
        self._backend = trainer.backend
        self._framework = framework_of(trainer.backend)
        self._kinds = self._framework.state.kinds
        self._has_labels = has_labels(learner.settings)
        # A batch that the user prepares may have other labels than the one that was drawn.
        self._is_prepared = is_overridden(trainer, "prepare_batch")
        settings = learner.settings
        self._has_target = takes_target(settings.loss)
        self._is_plain = self._has_target and settings.methods is None and not self._is_prepared
        # What the host has seen of each batch on its way: its labels, and whether it has marks.
        self._seen: deque[tuple[Labels | None, bool]] = deque()
        self._cast: Cast | None = None
        self._dtype: str | None = None
        self._has_warned = self._is_pipeline = self._is_built = False
        # Whether all floats of the batches were seen on the host, and stay as they are.
        self._is_complete = True

    def draw(
        self,
        data: Iterable[Any],
        *,
        is_trained: bool = False,
        count_to_draw: Callable[[], int] | None = None,
    ) -> Generator[Any, None, None]:
        """Return the batches of an epoch on the device, each of which ``take`` takes.

        Args:
            data: the batches of the epoch.
            is_trained: whether the model is trained on them.
            count_to_draw: see ``device_batches``.
        """
        self._seen.clear()
        if self._cast is None:  # a model gets its dtype with its first batch, at the latest
            self._dtype = dtype_of_model(self._framework, self._learner.model)
            if self._dtype is not None:
                self._cast = Cast(self._framework, self._dtype)
        self._team.begin_data(is_trained=is_trained)
        is_pipeline = isinstance(data, self._framework.training.pipeline_types)
        self._is_pipeline = is_pipeline and not self._team.splits
        self._is_complete = self._cast is None or not (self._is_pipeline or self._cast.has_met_data)
        trainer, is_prepared = self._trainer, self._is_prepared
        return device_batches(
            self._framework,
            shield(data),
            None if is_prepared else trainer.device,
            _DEPTH if trainer.gpus and not is_prepared else 0,
            prepare=None if self._is_pipeline else self._look,
            count_to_draw=count_to_draw,
        )

    def take(self, number: int, batch: Any) -> Operands:
        """Return the operands of a batch, and tell the learner what the host has seen of it.

        Args:
            number: the position of the batch in the epoch, from 0.
            batch: drawn by ``draw``.
        """
        kinds = self._kinds
        labels, has_marks = self._seen.popleft() if self._seen else (None, None)
        if (
            self._is_plain
            and self._is_complete
            and type(batch) is tuple
            and len(batch) == 2
            and kinds[type(batch[0])] is TENSOR
            and kinds[type(batch[1])] is TENSOR
        ):  # the common batch
            inputs, y = batch[:1], batch[1]
            examples = count_of(self._backend, y)
        else:
            inputs, y, examples = self._take_apart(*self._receive(batch, has_marks))
        counts = self._team.count(self._learner, number, y, examples, labels)
        self._learner.labels = None if self._is_prepared else labels
        return Operands(inputs, y, counts)

    def arrive(self, batch: Any) -> Any:
        """Return a drawn batch on the device, with the floats of the model and without marks."""
        _, has_marks = self._seen.popleft() if self._seen else (None, None)
        batch, has_marks = self._receive(batch, has_marks)
        return unwrap_broadcasts(batch, self._kinds) if has_marks else batch

    def _receive(self, batch: Any, has_marks: bool | None) -> tuple[Any, bool]:
        """Return a drawn batch with the floats of the model, and whether it has marks.

        Args:
            batch: on the device, unless the user brings it there.
            has_marks: whether the host has seen a ``Broadcast`` in it; None if it was not walked.
        """
        if self._is_prepared:
            batch = prepare_batch(self._trainer, batch)
        elif has_marks is not None and self._is_complete:
            return batch, has_marks
        flat = self._walk(batch)
        return (batch, False) if flat is None else (flat.unflatten({}), flat.has_marks)

    def first_inputs(self, data: Iterable[Any]) -> tuple[Any, ...]:
        """Return the inputs of the first batch, on the device."""
        for first in draw_outside(self._framework, data):
            (batch,) = self.draw([first])
            batch = self.arrive(batch)
            if self._learner.settings.methods is None and not self._has_target:
                return inputs_alone(batch, *self._names)
            return inputs_and_target(batch, *self._names)[0]
        raise empty_data_refusal()

    def _look(self, batch: Any) -> Any:
        """Cast the floats of a batch on the host, look at its labels, and select a portion.

        Returns:
            The batch. Or its leaves if it was walked for them, so that its move needs no other
            walk.
        """
        is_sharded = isinstance(batch, Sharded)
        flat = self._walk(batch.operands if is_sharded else batch)
        has_marks = flat is not None and flat.has_marks
        self._is_complete = self._cast is None or not self._cast.has_met_data
        if flat is not None and (self._is_prepared or self._team.splits or is_sharded):
            operands, flat = flat.unflatten({}), None
            if is_sharded:
                operands = Sharded(operands, batch.number, batch.length, batch.content)
            batch = operands
        self._seen.append((self._labels(batch) if self._has_labels else None, has_marks))
        return self._team.select(batch) if flat is None else flat

    def _walk(self, batch: Any) -> Flattened | None:
        """Return the leaves of a batch with the floats of the model.

        Returns:
            None for a batch that stays as it is, and has no containers within.

        Raises:
            UnsupportedValueError: for a container that cannot be taken apart, and for containers in
                too many places. JAX would end the process, and MXNet would not come to an end.
        """
        cast = self._cast
        if cast.keeps(batch) if cast is not None else has_tensors_alone(batch, self._kinds):
            return None
        flat = flatten_changing(batch, self._kinds, "train on a batch")
        if flat is None:
            return None
        if not flat.has_few_places:
            for _ in leaves(batch, self._kinds, "", "train on a batch"):
                pass
        if cast is not None:
            cast.convert(flat)
            self._warn(cast)
        return flat

    def _warn(self, cast: Cast) -> None:
        """Warn once of floats that are cast."""
        if cast.others and not self._has_warned:
            self._has_warned = True
            if self._team.is_first:
                warn(
                    f"data of {' and '.join(cast.others)} is cast to {self._dtype}, as the model "
                    f"is; to cast it once: X.astype({self._dtype!r}) before the batches are made"
                )

    def _labels(self, batch: Any) -> Labels | None:
        """Return what the host sees of the labels of a batch."""
        if isinstance(batch, Sharded):
            batch = batch.operands
        waits = self._team.splits
        if type(batch) is tuple and len(batch) == 2:  # the common batch
            return look_at(self._framework, batch[1], is_drawn=True, waits=waits)
        try:
            _, y = inputs_and_target(batch, *self._names)
        except UnsupportedValueError:  # raised again where the batch is computed with
            return None
        return look_at(self._framework, y, is_drawn=True, waits=waits)

    @cached_property
    def _names(self) -> tuple[Sequence[str], bool]:
        """What the model calls its inputs, and whether it takes a mapping of them."""
        return self._learner.input_names, self._learner.takes_mapping

    def _take_apart(self, batch: Any, has_marks: bool) -> tuple[tuple[Any, ...], Any, int]:
        """Return the inputs of a batch, its target, and the number of its examples.

        Args:
            batch: on the device.
            has_marks: whether a ``Broadcast`` may be in it.
        """
        learner, backend, names = self._learner, self._backend, self._names
        if learner.settings.methods is not None:
            if not self._is_built and not learner.is_built:
                learner.build(unwrap_broadcasts(inputs_and_target(batch, *names)[0], self._kinds))
            self._is_built = True
            return (self._unwrap(batch, has_marks),), None, count_of(backend, batch)
        if not self._has_target:
            inputs = inputs_alone(batch, *names)
            return self._unwrap(inputs, has_marks), None, count_of(backend, inputs)
        inputs, y = inputs_and_target(batch, *names)
        check_target(y, learner.settings.loss, self._kinds)
        fields = {"inputs": dict(enumerate(inputs)), "y": y}
        number = count_of(backend, drop_weights(y), fields)
        return *self._unwrap((inputs, y), has_marks), number

    def _unwrap(self, operands: Any, has_marks: bool) -> Any:
        """Return operands as the learner takes them."""
        if not has_marks or self._learner.takes_marks:
            return operands
        return unwrap_broadcasts(operands, self._kinds)
