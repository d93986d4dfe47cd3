"""What happens to a batch when it enters a loop, while its data is still on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import Learner, Sharded
from d2ldev.framework.training import Labels
from d2ldev.operations.labels import has_labels, seen
from d2ldev.operations.prefetching import closed_after
from d2ldev.training.data import inputs_and_target
from d2ldev.training.hooks import Hooks
from d2ldev.training.interruption import spared


class Entry:
    """The batches of an epoch as the data has them, before they are copied to a device.

    Args:
        trainer: whose batches they are.
        learner: which computes with them.
        waits: whether labels on a device are brought over, because the batch is split on the host.
    """

    def __init__(self, trainer: Hooks, learner: Learner, *, waits: bool) -> None:
        self._trainer, self._learner, self._waits = trainer, learner, waits
        self._framework = trainer.backend.framework
        self._seen: deque[Labels | None] = deque()

    def of(self, data: Iterable[Any]) -> Iterable[Any]:
        """Return the data, each batch of which is looked at when it is drawn."""
        is_pipeline = isinstance(data, self._framework.training.pipeline_types)
        if not has_labels(self._learner.settings) or (
            is_pipeline and self._trainer.gpus and not self._waits
        ):
            return data
        return self._looked_at(data)

    def _looked_at(self, data: Iterable[Any]) -> Iterator[Any]:
        with closed_after(spared(data)) as source:
            for batch in source:
                self._seen.append(self._labels(batch))
                # Nothing is kept while the batch is in use.
                drawn = [batch]
                del batch
                yield drawn.pop()

    def next(self) -> Labels | None:
        """Return what the host has seen of the labels of the next batch, if anything."""
        return self._seen.popleft() if self._seen else None

    def _labels(self, batch: Any) -> Labels | None:
        if isinstance(batch, Sharded):
            batch = batch.operands
        if type(batch) is tuple and len(batch) == 2:  # the common batch
            return seen(self._framework, batch[1], waits=self._waits)
        learner = self._learner
        try:
            _, y = inputs_and_target(batch, learner.input_names, learner.takes_mapping)
        except UnsupportedValueError:  # raised again where the batch is computed with
            return None
        return seen(self._framework, y, waits=self._waits)
