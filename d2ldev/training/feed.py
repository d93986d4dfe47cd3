"""``Feed``: the batches of an epoch, from the data to the operands of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import cached_property
from math import prod
from typing import Any

from d2ldev._backend import framework_of
from d2ldev.contract import Learner, Sharded
from d2ldev.contract.training import Signature, TargetRule, separate
from d2ldev.errors import warn
from d2ldev.nesting.kinds import is_pair
from d2ldev.nesting.walk import Flattened, flatten, leaves, unwrap_broadcasts
from d2ldev.operations.prefetching import device_batches, draw_outside
from d2ldev.training.data import (
    axis_refusal,
    check_target,
    count_of,
    drop_weights,
    empty_data_refusal,
    length_of_first_axis,
)
from d2ldev.training.floats import Cast, dtype_of_model
from d2ldev.training.functions import takes_target
from d2ldev.training.hooks import TrainerState, call_prepare_batch, is_overridden
from d2ldev.training.interruption import shield
from d2ldev.training.objective import is_named
from d2ldev.training.team import Counts, Team
from d2ldev.typing import Inputs

# How many batches are on their way to a GPU during a step.
_DEPTH = 2


class Feed:
    """The batches of an epoch, from the data to the operands of a step.

    Args:
        trainer: the trainer, with its device and its ``prepare_batch``.
        learner: the learner that takes the operands.
        team: the processes that train, each with a portion of each batch.
    """

    def __init__(self, trainer: TrainerState, learner: Learner, team: Team | None = None) -> None:
        self._trainer, self._learner = trainer, learner
        self._team = Team() if team is None else team
        self._backend = trainer.backend
        self._framework = framework_of(trainer.backend)
        self._kinds = self._framework.state.kinds
        self._is_named = is_named(learner.settings)
        self._is_overridden = is_overridden(trainer, "prepare_batch")
        settings = learner.settings
        has_target = takes_target(settings.loss)
        self._rule: TargetRule = "compared" if has_target else "none"
        self._is_plain = has_target and settings.methods is None and not self._is_overridden
        # Whether each batch on its way has a ``Broadcast``.
        self._scans: deque[bool] = deque()
        self._number = 0  # of the batches so far
        self._cast: Cast | None = None
        self._dtype: str | None = None
        # Whether the floats of all batches are cast: the first batch with floats decides. Until
        # then a batch is cast as well.
        self._is_cast = self._is_decided = False
        self._has_warned = self._is_built = False

    def draw(
        self,
        data: Iterable[Any],
        *,
        is_trained: bool = False,
        count_to_draw: Callable[[], int] | None = None,
    ) -> Generator[Any, None, None]:
        """Return the batches of an epoch on the device, for ``make_operands``.

        Args:
            data: the batches of the epoch.
            is_trained: whether they are for training.
            count_to_draw: see ``device_batches``.
        """
        self._scans.clear()
        if self._cast is None:  # a lazy model has no dtype before its first batch
            self._dtype = dtype_of_model(self._framework, self._learner.sync()["model"])
            if self._dtype is not None:
                self._cast = Cast(self._framework, self._dtype)
        self._team.begin_data(is_trained=is_trained)
        self._is_cast, self._is_decided = self._cast is not None, False
        trainer = self._trainer
        return device_batches(
            self._framework,
            shield(data),
            None if self._is_overridden else trainer.device,
            _DEPTH if trainer.gpus and not self._is_overridden else 0,
            prepare=self._prepare_on_host,
            count_to_draw=count_to_draw,
        )

    def make_operands(self, number: int, batch: Any) -> tuple[Inputs, Any, Any, Counts]:
        """Return the operands of a step.

        Args:
            number: the position of the batch in the epoch, from 0.
            batch: a batch of ``draw``.

        Returns:
            The inputs of the model, the target, and what metrics compare with: the target, or the
            whole batch with ``loss='model'``. Then the weights of the batch in the means.
        """
        compared: Any
        has_marks = self._scans.popleft() if self._scans else None
        self._number += 1
        if self._is_plain and self._is_complete and is_pair(batch, self._kinds):
            inputs, y = batch[:1], batch[1]
            compared, examples = y, length_of_first_axis(y)
        else:
            inputs, y, compared, examples = self._split(*self._finish(batch, has_marks))
        each = 1
        if self._is_named and len(shape := drop_weights(y).shape) != 1:
            if not len(shape):
                raise axis_refusal(drop_weights(y))
            each = prod(shape[1:])
        counts = self._team.count(self._learner, number, examples, each)
        return inputs, y, compared, counts

    @property
    def is_at_first(self) -> bool:
        """Whether the operands made last are those of the first batch."""
        return self._number == 1

    def prepare(self, batch: Any) -> Any:
        """Return a batch of ``draw`` with the dtype of the model, and without ``Broadcast``."""
        has_marks = self._scans.popleft() if self._scans else None
        batch, has_marks = self._finish(batch, has_marks)
        return unwrap_broadcasts(batch, self._kinds) if has_marks else batch

    def _finish(self, batch: Any, has_marks: bool | None) -> tuple[Any, bool]:
        """Return a batch with the dtype of the model, and whether it has a ``Broadcast``.

        Args:
            batch: a batch on the device, or on the host for the user's ``prepare_batch``.
            has_marks: whether the host found a ``Broadcast`` in it; None if it did not look.
        """
        if self._is_overridden:
            batch = call_prepare_batch(self._trainer, batch)
        elif has_marks is not None and self._is_complete:
            return batch, has_marks
        flat = None if self._stays(batch) else self._walk(batch)
        return (batch, False) if flat is None else (flat.unflatten({}), flat.has_marks)

    def first_inputs(self, data: Iterable[Any]) -> Inputs:
        """Return the inputs of the first batch, on the device."""
        for first in draw_outside(self._framework, data):
            (batch,) = self.draw([first])
            return separate(self.prepare(batch), self._signature, self._rule, self._kinds)[0]
        raise empty_data_refusal()

    def inputs_to_predict(self, batch: Any) -> Inputs:
        """Return the inputs of a batch of ``draw``, without its target if it has one.

        The target is ``'y'`` of a mapping, or the last item of a tuple with two or more items.
        """
        return separate(self.prepare(batch), self._signature, "left out", self._kinds)[0]

    def _prepare_on_host(self, batch: Any) -> Any:
        """Cast the floats of a batch on the host, and select a portion.

        Returns:
            The batch, or its leaves after a walk: the move to the device then needs no other walk.
        """
        is_sharded = isinstance(batch, Sharded)
        operands = batch.operands if is_sharded else batch
        flat = None if self._stays(operands) else self._walk(operands)
        has_marks = flat is not None and flat.has_marks
        if flat is not None and (self._is_overridden or self._team.splits or is_sharded):
            operands, flat = flat.unflatten({}), None
            if is_sharded:
                operands = Sharded(operands, batch.number, batch.length, batch.content)
            batch = operands
        self._scans.append(has_marks)
        return self._team.select(batch) if flat is None else flat

    def _walk(self, batch: Any) -> Flattened | None:
        """Return the leaves of a batch, with the dtype of the model.

        Returns:
            The leaves; None if there are none.

        Raises:
            UnsupportedValueError: for a container of an unknown kind, and for too many places of
                containers. JAX would crash, and MXNet would never end.
        """
        cast = self._cast
        flat = flatten(batch, self._kinds, "train on a batch")
        if not flat.tensors and not flat.others:
            return None
        if flat.is_shared:
            for _ in leaves(batch, self._kinds, "", "train on a batch"):
                pass
        if cast is not None and self._is_cast:
            is_cast = cast.convert(flat)
            self._warn(cast)
            may_decide = not self._is_decided and self._is_complete and not self._is_overridden
            if may_decide and is_cast is not None:
                self._is_cast, self._is_decided = is_cast, True
        return flat

    def _stays(self, batch: Any) -> bool:
        """Return whether a batch needs no cast, and has no containers within."""
        return not self._is_cast and is_pair(batch, self._kinds)

    @property
    def _is_complete(self) -> bool:
        """Whether the host sees all floats of a batch before it moves."""
        return self._cast is None or not self._cast.has_met_data

    def _warn(self, cast: Cast) -> None:
        """Warn once of a cast."""
        if cast.others and not self._has_warned:
            self._has_warned = True
            if self._team.is_first:
                warn(
                    f"data of {' and '.join(cast.others)} is cast to {self._dtype}, as the model "
                    f"is; to cast it once: X.astype({self._dtype!r}) before the batches are made"
                )

    @cached_property
    def _signature(self) -> Signature:
        """The inputs of the model."""
        return self._learner.signature

    def _split(self, batch: Any, has_marks: bool) -> tuple[Inputs, Any, Any, int]:
        """Return the inputs of a batch, its target, what metrics compare with, and its examples.

        Args:
            batch: a batch on the device.
            has_marks: whether a ``Broadcast`` may be in it.
        """
        learner, backend, kinds = self._learner, self._backend, self._kinds
        if learner.settings.methods is not None:
            if not self._is_built and not learner.is_built:
                inputs, _ = separate(batch, self._signature, self._rule, self._kinds)
                learner.build(unwrap_broadcasts(inputs, kinds))
            self._is_built = True
            return (self._unwrap(batch, has_marks),), None, None, count_of(backend, batch)
        inputs, y = separate(batch, self._signature, self._rule, self._kinds)
        if self._rule == "none":
            whole = batch if learner.settings.loss == "model" else None
            number = count_of(backend, inputs)
            return self._unwrap(inputs, has_marks), None, whole, number
        check_target(y, learner.settings.loss, kinds)
        given = inputs if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        number = count_of(backend, drop_weights(y), {"inputs": given, "y": y})
        inputs, y = self._unwrap((inputs, y), has_marks)
        return inputs, y, y, number

    def _unwrap(self, operands: Any, has_marks: bool) -> Any:
        """Return operands with the values of ``Broadcast``, unless the learner takes the marks."""
        if not has_marks or self._learner.takes_marks:
            return operands
        return unwrap_broadcasts(operands, self._kinds)
