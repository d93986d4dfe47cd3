"""Loaders that read one process's shard of each batch."""

from __future__ import annotations

import copyreg
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


class Workers:
    """The workers of a loader, which persist with the dataset of an earlier epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def set_epoch(self, _epoch: int) -> None:
        """End the workers; the next iteration starts others, with the dataset as it is."""
        vars(self._loader).update(_iterator=None)


def reduce(loader: DataLoader[Any]) -> Any:
    """Return how ``pickle`` rebuilds a loader, without its workers; see ``Parallel.reduce``.

    torch refuses to pickle workers that persist.
    """
    cls = type(loader)
    if cls.__reduce__ is not object.__reduce__ or cls.__getstate__ is not object.__getstate__:
        return NotImplemented
    return copyreg.__newobj__, (cls,), dict(vars(loader), _iterator=None)  # type: ignore[attr-defined]
