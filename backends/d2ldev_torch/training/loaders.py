"""Loaders that read one process's shard of each batch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from d2ldev.framework import ShardSampler, shard_copy, shard_refusal


def shard_loader(loader: DataLoader[Any], rank: int, size: int) -> DataLoader[Any]:
    """Return a loader for one process, which reads only its own examples.

    Args:
        loader: chooses its examples by number.
        rank, size: the number of the process, from 0, and the number of processes.

    Raises:
        UnsupportedValueError: for any other kind of loader.
    """
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise shard_refusal(loader)
    if loader.num_workers and not loader.in_order:
        raise shard_refusal(loader, "with in_order=False its batches come in any order")
    sampler = ShardSampler(loader.batch_sampler, rank, size)
    # The workers of the other loader may persist.
    other: DataLoader[Any] = shard_copy(
        loader, DataLoader, sampler, batch_sampler=sampler, _iterator=None
    )
    return other
