"""Loaders that read one process's part of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from d2ldev.framework import Sharded
from d2ldev.framework.training import shard_refusal
from d2ldev.operations.parallel import PartSampler


class ShardedLoader(DataLoader[Any]):
    """The batches of another loader, of which one process reads its examples only.

    Args:
        loader: the other loader, which chooses its examples by number.
        rank, size: the number of the process, from 0, and how many there are.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int) -> None:
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            raise shard_refusal(loader)
        self._parts = PartSampler(loader.batch_sampler, rank, size)
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
