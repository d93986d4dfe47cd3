"""Loaders that read one process's part of each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from d2ldev.framework import Sharded
from d2ldev.framework.training import bounds, refused_shard


class ShardedLoader(DataLoader[Any]):
    """The batches of another loader, of which one process reads its examples only.

    Args:
        loader: the other loader, which chooses its examples by number.
        rank, size: the number of the process, from 0, and how many there are.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int) -> None:
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            raise refused_shard(loader)
        self._parts = _Parts(loader.batch_sampler, rank, size)
        super().__init__(
            loader.dataset,
            batch_sampler=self._parts,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield Sharded(batch, *self._parts.counts.popleft())


class _Parts(Sampler[list[int]]):
    """The numbers of one process's examples of each batch.

    Attributes:
        sampler: that of the other loader, whose generator the order depends on.
        counts: how many examples of each batch drawn so far are its own, and how many it has.
    """

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size
        self.sampler = getattr(batches, "sampler", None)
        self.counts: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        for numbers in self._batches:
            start, stop = bounds(len(numbers), self._rank, self._size)
            self.counts.append((stop - start, len(numbers)))
            # A process without examples computes with the first one.
            yield numbers[start:stop] or numbers[:1]

    def __len__(self) -> int:
        return len(self._batches)
