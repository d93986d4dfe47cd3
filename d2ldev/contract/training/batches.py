"""What a step of training gets of a batch, and what each of several processes reads of one."""

from __future__ import annotations

from typing import Any, NamedTuple

from d2ldev.errors import UnsupportedValueError, describe


class Weighted(NamedTuple):
    """A target whose examples count differently: the loss is their weighted mean, or 0.

    Args:
        y: the target.
        weights: numbers of shape ``(n,)``, or of more of the first axes of ``y``. A sequence may
            have one for each step.
    """

    y: Any
    weights: Any


class WeightedLoss(NamedTuple):
    """A loss of your own, as a sum and its weight: the loss is their quotient.

    It is exact if several batches make a step, on several GPUs, in several processes, and in the
    history. A loss that returns a mean counts by the examples of its batch.

    Args:
        sum: the sum of the losses of a batch, a scalar tensor.
        weight: the sum of their weights, such as the number of labels that count. A scalar tensor
            or a number, from 0. It is a constant: it has no gradient.

    >>> def loss(prediction, y):
    ...     counts = y >= 0
    ...     losses = F.cross_entropy(prediction, y.clamp(min=0), reduction='none')
    ...     return d2ldev.WeightedLoss((losses * counts).sum(), counts.sum())
    """

    sum: Any
    weight: Any


NO_LABEL = -100
"""The label that ``'cross_entropy'`` and ``accuracy`` leave out, as in torch."""


class Portion(NamedTuple):
    """The shard of a batch in one of several processes.

    Args:
        number: how many examples. If 0, the operands are the first ones of the batch, so that the
            model can compute.
        length: how many examples the batch has.
    """

    number: int
    length: int


class Sharded:
    """The shard of a batch that one process reads; the data of ``Trainer.shard_data`` yields it.

    Args:
        operands: its shard, or the first example of the batch if it has none.
        number, length: see ``Portion``.
        content: what is the same in all processes that have read the same batch.
    """

    def __init__(self, operands: Any, number: int, length: int, content: str = "") -> None:
        self.operands, self.number, self.length = operands, number, length
        self.content = content


def bounds(length: int, rank: int, size: int, least: int = 1) -> tuple[int, int]:
    """Return where one process's or device's shard of a batch begins and ends.

    Where the shards cannot be equal, the first ones have an example more.

    Args:
        length: how many examples the batch has.
        rank: the number of the process or device, from 0.
        size: how many there are.
        least: how many examples a shard has at least, unless it has none or the batch has fewer.
            For it the last shards are empty.

    >>> [bounds(5, rank, 3) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [bounds(5, rank, 3, least=2) for rank in range(3)]
    [(0, 3), (3, 5), (5, 5)]
    """
    number = max(1, min(size, length // least))
    fewer, more = divmod(length, number)
    # The shards after the last one begin and end where it ends.
    start, stop = (min(length, i * fewer + min(i, more)) for i in (rank, rank + 1))
    return start, stop


def shard_refusal(
    loader: object, problem: str = "nobody knows its examples before they are read"
) -> UnsupportedValueError:
    """Return the error for data from which a process cannot read its shard alone."""
    return UnsupportedValueError(
        f"shard {describe(loader)}",
        problem,
        "trainer.fit(net, data): each process reads the batches and takes its shard of them",
    )
