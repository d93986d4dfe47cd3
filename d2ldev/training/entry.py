"""What happens to a batch when it enters a loop, while its data is still on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from d2ldev.errors import UnsupportedValueError, warn
from d2ldev.framework import Learner, Sharded
from d2ldev.framework.training import Labels
from d2ldev.operations.floats import Cast, dtype_of_model
from d2ldev.operations.labels import has_labels, look_at
from d2ldev.operations.prefetching import closed_after
from d2ldev.training.data import inputs_and_target
from d2ldev.training.hooks import Hooks
from d2ldev.training.interruption import spared


class Entry:
    """The batches of an epoch as the data has them, before they are copied to a device.

    Args:
        trainer: whose batches they are.
        learner: which computes with them.
        splits: whether each batch is split on the host: labels on a device are brought over then.
        is_first: whether this process says what is cast.
    """

    def __init__(
        self, trainer: Hooks, learner: Learner, *, splits: bool = False, is_first: bool = True
    ) -> None:
        self._trainer, self._learner = trainer, learner
        self._splits, self._is_first = splits, is_first
        self._framework = trainer.backend.framework
        self._has_labels = has_labels(learner.settings)
        self._seen: deque[Labels | None] = deque()
        self._cast: Cast | None = None
        self._dtype: str | None = None
        self._is_said = self._is_pipeline = False

    def of(self, data: Iterable[Any]) -> Iterable[Any]:
        """Return the data of an epoch, each batch of which is prepared when it is drawn."""
        self._seen.clear()
        if self._cast is None:  # a model gets its dtype with its first batch, at the latest
            self._dtype = dtype_of_model(self._framework, self._learner.model)
            if self._dtype is not None:
                self._cast = Cast(self._framework, self._dtype)
        is_pipeline = isinstance(data, self._framework.training.pipeline_types)
        self._is_pipeline = is_pipeline and not self._splits
        return data if self._is_pipeline else self._looked_at(data)

    def arrived(self, batch: Any) -> Any:
        """Return a batch that is on the device, and was changed since ``of`` has seen it."""
        cast = self._cast
        return batch if cast is None or cast.keeps(batch) else self._with_floats(batch, cast)

    @property
    def is_complete(self) -> bool:
        """Return whether ``of`` has seen all floats of the batches, as ``to`` leaves them.

        It has not where the framework's own pipeline draws them, or makes tensors of other data.
        """
        return self._cast is None or not (self._is_pipeline or self._cast.has_met_data)

    def _looked_at(self, data: Iterable[Any]) -> Iterator[Any]:
        cast, has_labels = self._cast, self._has_labels
        with closed_after(spared(data)) as source:
            for batch in source:
                if cast is not None and not cast.keeps(batch):
                    batch = self._with_floats(batch, cast)
                if has_labels:
                    self._seen.append(self._labels(batch))
                # Nothing is kept while the batch is in use.
                drawn = [batch]
                del batch
                yield drawn.pop()

    def _with_floats(self, batch: Any, cast: Cast) -> Any:
        if isinstance(batch, Sharded):
            operands = cast(batch.operands)
            if operands is not batch.operands:
                batch = Sharded(operands, batch.number, batch.length, batch.content)
        else:
            batch = cast(batch)
        if cast.others and not self._is_said:
            self._is_said = True
            if self._is_first:
                warn(
                    f"data of {' and '.join(cast.others)} is cast to {self._dtype}, as the model "
                    f"is; to cast it once: X.astype({self._dtype!r}) before the batches are made"
                )
        return batch

    def next(self) -> Labels | None:
        """Return what the host has seen of the labels of the next batch, if anything."""
        return self._seen.popleft() if self._seen else None

    def _labels(self, batch: Any) -> Labels | None:
        if isinstance(batch, Sharded):
            batch = batch.operands
        if type(batch) is tuple and len(batch) == 2:  # the common batch
            return look_at(self._framework, batch[1], is_drawn=True, waits=self._splits)
        learner = self._learner
        try:
            _, y = inputs_and_target(batch, learner.input_names, learner.takes_mapping)
        except UnsupportedValueError:  # raised again where the batch is computed with
            return None
        return look_at(self._framework, y, is_drawn=True, waits=self._splits)
