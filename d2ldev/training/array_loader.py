"""``ArrayLoader``: batches of NumPy arrays."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from d2ldev._backend import Backend
from d2ldev.active import backend_of
from d2ldev.contract import Sharded
from d2ldev.contract.training import bounds
from d2ldev.device import CPU
from d2ldev.errors import CheckpointError, UnsupportedValueError, describe, quote
from d2ldev.operations.arguments import flag, whole_number
from d2ldev.operations.parallel import content_of
from d2ldev.typing import HasShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

# NumPy's seeding takes the square of the length of a seed.
_SEED_BITS = 128


class ArrayLoader:
    """Load batches of arrays, as often as you iterate over it.

    Args:
        arrays: NumPy arrays, or tensors of any backend on the CPU. All have the same length, the
            number of examples. NumPy arrays are not copied; the values of tensors are, once.
        batch_size: the number of examples in a batch; the last batch has the remaining ones.
        shuffle: whether each epoch has its own order. The order depends only on ``seed`` and on the
            number of the epoch. It is the same in every version of NumPy.
        seed: the seed of the order, a non-negative integer of at most 128 bits. None takes one from
            the operating system, and ``state_dict`` holds it. Processes that train together use the
            seed of rank 0.
        drop_last: whether to skip a last batch that is not full.

    Yields:
        Tuples with one item for each array, of the array's type. Tensors are new. NumPy arrays are
        copies if the loader shuffles, and otherwise views: a write changes the array.

    Raises:
        UnsupportedValueError: for any other argument.

    >>> import numpy as np
    >>> loader = ArrayLoader(np.arange(5), np.arange(5) * 10, batch_size=3)
    >>> [y.tolist() for x, y in loader], len(loader)
    ([[0, 10, 20], [30, 40]], 2)
    """

    def __init__(
        self,
        *arrays: HasShape,
        batch_size: int,
        shuffle: bool = False,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        if not arrays:
            raise UnsupportedValueError(
                "make batches of arrays", "there are none", "ArrayLoader(X, y, batch_size=32)"
            )
        self._columns = tuple(_column(array, number) for number, array in enumerate(arrays))
        lengths = [len(column.values) for column in self._columns]
        if len(set(lengths)) > 1:
            raise UnsupportedValueError(
                "make batches of arrays",
                f"their lengths are {', '.join(map(str, lengths))}",
                "ArrayLoader(X, y, batch_size=32) with len(X) == len(y)",
            )
        self._batch_size = _whole("batch_size", batch_size, least=1)
        self._shuffle = flag("make batches", "shuffle", shuffle)
        self._drop_last = flag("make batches", "drop_last", drop_last)
        random_seed = int(np.random.PCG64().random_raw()) >> 1  # every file format takes 63 bits
        self._seed = random_seed if seed is None else _check_seed(seed)
        self._rank, self._size = 0, 1
        # The number of epochs that began, with the current one. A run that resumes after it, or
        # within it, takes the next.
        self._epoch = 0

    def __repr__(self) -> str:
        number, examples = len(self._columns), len(self._columns[0].values)
        arrays = "1 array" if number == 1 else f"{number} arrays"
        options = f"batch_size={self._batch_size}, shuffle={self._shuffle}"
        options += f", seed={self._seed}" if self._shuffle else ""
        options += ", drop_last=True" if self._drop_last else ""
        shard = f", shard {self._rank} of {self._size}" if self._size > 1 else ""
        return f"ArrayLoader({arrays} of {examples} examples, {options}{shard})"

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        examples = len(self._columns[0].values)
        full, left = divmod(examples, self._batch_size)
        return full + (left > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the batches of an epoch; it begins with its first batch, not with the call."""
        epoch = self._epoch
        self._epoch += 1
        order = self._order(epoch) if self._shuffle else None
        for number in range(len(self)):
            begin = number * self._batch_size
            length = min(self._batch_size, len(self._columns[0].values) - begin)
            start, stop = bounds(length, self._rank, self._size)
            # A process without examples computes with the first one.
            rows = slice(begin + start, begin + stop) if stop > start else slice(begin, begin + 1)
            indices = rows if order is None else order[rows]
            batch: Any = tuple(column.select(indices) for column in self._columns)
            if self._size > 1:
                whole = range(begin, begin + length) if order is None else order[begin:][:length]
                batch = Sharded(batch, stop - start, length, content_of(whole))
            yield batch

    def shard(self, rank: int, size: int) -> ArrayLoader:
        """Return a loader of one process's shard of each batch; see ``Trainer.shard_data``.

        Args:
            rank: the number of the process, from 0.
            size: how many processes there are.

        Raises:
            UnsupportedValueError: for any other number.

        >>> loader = ArrayLoader(np.arange(5), batch_size=4)
        >>> loader.shard(1, 2)
        ArrayLoader(1 array of 5 examples, batch_size=4, shuffle=False, shard 1 of 2)
        """
        size = _whole("size", size, least=1)
        rank = _whole("rank", rank, least=0)
        if rank >= size:
            raise UnsupportedValueError(
                f"make batches for rank {quote(rank)} of {quote(size)}",
                f"they are numbered from 0 to {quote(size - 1)}",
                f"loader.shard({quote(size - 1)}, {quote(size)})",
            )
        other = copy.copy(self)
        vars(other).update(_rank=rank, _size=size)
        return other

    def state_dict(self) -> dict[str, int]:
        """Return the next epoch and the seed, for ``load_state_dict``.

        >>> loader = ArrayLoader(np.arange(5), batch_size=2, shuffle=True, seed=7)
        >>> loader.state_dict()
        {'seed': 7, 'epoch': 0}
        """
        return {"seed": self._seed, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the seed and the next epoch of this loader, or of another run's loader.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            CheckpointError: if ``state`` is not from ``state_dict``.

        >>> loader = ArrayLoader(np.arange(5), batch_size=2, shuffle=True)
        >>> loader.load_state_dict({'seed': 7, 'epoch': 3})
        >>> loader.state_dict()
        {'seed': 7, 'epoch': 3}
        """
        try:
            seed = _check_seed(state["seed"])
            epoch = _whole("epoch", state["epoch"], least=0)
            if epoch >= 2**63:
                raise ValueError("the epoch has more than 63 bits")
        except Exception as error:  # a wrong state may raise anything
            raise CheckpointError(
                "restore the order of an ArrayLoader",
                f"{describe(state)} is not from its state_dict",
                "loader.load_state_dict(loader.state_dict())",
            ) from error
        self._seed, self._epoch = seed, epoch

    def _order(self, epoch: int) -> NDArray[np.intp]:
        # Raw numbers are the same in every version of NumPy, unlike ``permutation``:
        # https://numpy.org/neps/nep-0019-rng-policy.html
        seed = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        numbers = np.random.PCG64(seed).random_raw(len(self._columns[0].values))
        return np.argsort(np.asarray(numbers), kind="stable")


class _Column(NamedTuple):
    """One of the arrays.

    Args:
        values: its values, as a NumPy array.
        backend: the backend of its tensor; None for a NumPy array.
        dtype: the name of the tensor's dtype.
    """

    values: NDArray[Any]
    backend: Backend | None
    dtype: str | None

    def select(self, indices: slice | NDArray[np.intp]) -> Any:
        rows = self.values[indices]
        if self.backend is None:
            return rows
        return self.backend.asarray(rows, dtype=self.dtype, device=CPU)


def _column(array: HasShape, number: int) -> _Column:
    attempted = f"make batches of the array at {number}"
    if isinstance(array, np.ndarray):
        column = _Column(array, None, None)
    else:
        try:
            backend = backend_of(array)
            device = backend.device_of(array)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(
                attempted,
                f"{describe(array)} is neither a NumPy array nor a tensor with values",
                "np.asarray(x) for a list",
            ) from error
        if device is not CPU:
            raise UnsupportedValueError(
                attempted,
                f"it is on {device}, and its batches are made on the CPU",
                "backend.to(x, 'cpu'); the Trainer moves each batch to the model's device",
                [device],
            )
        column = _Column(backend.to_numpy(array), backend, backend.dtype_of(array))
    if column.values.ndim == 0:
        raise UnsupportedValueError(
            attempted, "it has no axis to divide", "give it one: x.reshape(1)"
        )
    return column


def _whole(name: str, value: Any, least: int) -> int:
    return whole_number("make batches", name, value, least=least, fix=f"{name}={least}")


def _check_seed(value: Any) -> int:
    number = _whole("seed", value, least=0)
    if number.bit_length() > _SEED_BITS:
        raise UnsupportedValueError(
            "make batches", f"the seed has more than {_SEED_BITS} bits", "seed=0"
        )
    return number
