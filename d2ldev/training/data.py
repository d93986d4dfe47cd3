"""Data: ``ArrayLoader``, and the inputs and the target of a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from d2ldev._backend import Backend, framework_of
from d2ldev.active import backend_of
from d2ldev.areas import Sharded, Weighted
from d2ldev.areas.training import bounds
from d2ldev.device import CPU
from d2ldev.errors import CheckpointError, UnsupportedValueError, describe, quote
from d2ldev.nesting.kinds import TENSOR, Kinds
from d2ldev.nesting.walk import flatten
from d2ldev.operations.arguments import flag, is_iterable, length_of, whole_number
from d2ldev.operations.examples import number_of_examples
from d2ldev.operations.parallel import content_of
from d2ldev.typing import Array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TENSORS = {TENSOR}
# NumPy's seeding takes the square of the length of a seed.
_SEED_BITS = 128


class ArrayLoader:
    """Batches of arrays, to be gone through again and again.

    Args:
        arrays: NumPy arrays, which stay where they are, or tensors of any backend on the CPU,
            whose values are copied once; all of one length, the number of examples.
        batch_size: how many examples a batch has; the last one has what is left.
        shuffle: whether each epoch has an order of its own. The order depends only on ``seed`` and
            the number of the epoch, whatever else is drawn, and is the same in every version of
            NumPy.
        seed: of the order, an integer of at most 128 bits that is not negative; None draws one from
            the operating system, which ``state_dict`` holds. Processes that train together take the
            seed of the first one.
        drop_last: whether a last batch that is not full is left out.

    Yields:
        Tuples with one entry for each array, of the same kind as it. NumPy arrays are copies if the
        loader shuffles, else views: writing into a view writes into the array. Tensors are new.

    Raises:
        UnsupportedValueError: for any other argument.

    >>> import numpy as np
    >>> loader = ArrayLoader(np.arange(5), np.arange(5) * 10, batch_size=3)
    >>> [y.tolist() for x, y in loader], len(loader)
    ([[0, 10, 20], [30, 40]], 2)
    """

    def __init__(
        self,
        *arrays: Array,
        batch_size: int,
        shuffle: bool = False,
        seed: int | None = 0,
        drop_last: bool = False,
    ) -> None:
        if not arrays:
            raise UnsupportedValueError(
                "make batches of arrays", "none is given", "ArrayLoader(X, y, batch_size=32)"
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
        drawn = int(np.random.PCG64().random_raw()) >> 1  # the largest that every format takes
        self._seed = drawn if seed is None else _seed(seed)
        self._rank, self._size = 0, 1
        # How many epochs were begun. The current one counts, so that a run that goes on after it,
        # or within it, goes on with the next.
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
        """Go through an epoch, which begins with its first batch and not with this call."""
        epoch = self._epoch
        self._epoch += 1
        order = self._order(epoch) if self._shuffle else None
        for number in range(len(self)):
            begin = number * self._batch_size
            length = min(self._batch_size, len(self._columns[0].values) - begin)
            start, stop = bounds(length, self._rank, self._size)
            # A process without examples computes with the first one.
            rows = slice(begin + start, begin + stop) if stop > start else slice(begin, begin + 1)
            chosen = rows if order is None else order[rows]
            batch: Any = tuple(column.batch(chosen) for column in self._columns)
            if self._size > 1:
                whole = range(begin, begin + length) if order is None else order[begin:][:length]
                batch = Sharded(batch, stop - start, length, content_of(whole))
            yield batch

    def shard(self, rank: int, size: int) -> ArrayLoader:
        """Return a loader that reads one process's shard of each batch; see ``Trainer.shard``.

        Args:
            rank, size: the number of the process, from 0, and how many there are.

        Raises:
            UnsupportedValueError: if they are no such numbers.
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
        """Return the next epoch and the seed, for ``load_state_dict``."""
        return {"seed": self._seed, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where this loader, or the loader of another run, was: with its seed too.

        Raises:
            CheckpointError: if it is no such state.
        """
        try:
            seed = _seed(state["seed"])
            epoch = _whole("epoch", state["epoch"], least=0)
            if epoch >= 2**63:
                raise ValueError("an epoch that nobody has reached")
        except Exception as error:  # whatever is in its place
            raise CheckpointError(
                "go on with the order of an ArrayLoader",
                f"{describe(state)} is none of its states",
                "loader.load_state_dict(loader.state_dict())",
            ) from error
        self._seed, self._epoch = seed, epoch

    def _order(self, epoch: int) -> NDArray[np.intp]:
        # The raw numbers of a bit generator are the same in every version of NumPy, which its
        # ``permutation`` need not be: https://numpy.org/neps/nep-0019-rng-policy.html
        seed = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        numbers = np.random.PCG64(seed).random_raw(len(self._columns[0].values))
        return np.argsort(np.asarray(numbers), kind="stable")


class _Column(NamedTuple):
    """One of the arrays.

    Args:
        values: in NumPy's memory.
        backend: whose tensor it was; None is NumPy.
        dtype: the tensor's, by name.
    """

    values: NDArray[Any]
    backend: Backend | None
    dtype: str | None

    def batch(self, chosen: slice | NDArray[np.intp]) -> Any:
        rows = self.values[chosen]
        if self.backend is None:
            return rows
        return self.backend.asarray(rows, dtype=self.dtype, device=CPU)


def _column(array: Array, number: int) -> _Column:
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
                f"{describe(array)} is no NumPy array and no tensor with values",
                "np.asarray(x) makes an array of a list",
            ) from error
        if device is not CPU:
            raise UnsupportedValueError(
                attempted,
                f"it is on {device}, and its batches are made on the CPU",
                "backend.to(x, 'cpu'); the Trainer moves each batch to where the model is",
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


def _seed(value: Any) -> int:
    number = _whole("seed", value, least=0)
    if number.bit_length() > _SEED_BITS:
        raise UnsupportedValueError(
            "make batches", f"the seed has more than {_SEED_BITS} bits", "seed=0"
        )
    return number


# -- the data of an epoch ---------------------------------------------------------------------


def check_data(data: Any, name: str, max_epochs: int) -> None:
    """Check that the data is not empty, and can be gone through in each epoch.

    Raises:
        UnsupportedValueError: if it is not so.
    """
    if not is_iterable(data):
        raise UnsupportedValueError(
            f"go through {name}={describe(data)}",
            "it is not an iterable of batches",
            f"{name}=[(X, y)], or a loader",
        )
    if max_epochs > 1 and isinstance(data, Iterator):
        raise UnsupportedValueError(
            f"go through {name} more than once",
            f"{describe(data)} is an iterator, which is used up after one epoch",
            f"{name}=list({name}), or a loader",
        )
    if max_epochs and not length_of(data, 1):  # 1 also for what has no length
        raise UnsupportedValueError(
            f"go through {name}", "there is no batch in it", f"{name}=[(X, y)], or None for no data"
        )


def empty_data_refusal() -> UnsupportedValueError:
    """Return the error of data that is over before it has begun."""
    return UnsupportedValueError(
        "go through the data of an epoch",
        "there is no batch in it",
        "data has to be an iterable that begins again: a list or a loader, no generator",
    )


# -- batches ----------------------------------------------------------------------------------


def has_tensors_alone(batch: Any, kinds: Kinds) -> bool:
    """Return whether a batch is a tuple of tensors, as most are."""
    return type(batch) is tuple and _TENSORS.issuperset(map(kinds.__getitem__, map(type, batch)))


def inputs_and_target(
    batch: Any, names: Sequence[str] = (), takes_mapping: bool = False
) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs of the model, and the target of its prediction.

    Args:
        batch: ``(X, y)``, or more inputs before ``y``; or a mapping whose ``'y'``, else whose
            last value, is the target. Several inputs of a mapping are given by name, if all of
            them are among the names, else in the order of the mapping. Its ``'sample_weight'`` are
            the weights of the examples, unless the model has an input of that name.
        names: what the model calls its inputs, in order; empty if it does not say.
        takes_mapping: whether it is called with one mapping that has these keys.

    Raises:
        UnsupportedValueError: if it lacks an input or the target, an input is left out before
            another one, or there are more than the model takes.
    """
    if isinstance(batch, Mapping):
        values, weights = _weights_apart(batch, names)
        target = values.pop("y") if "y" in values else (values.popitem()[1] if values else None)
        target = target if weights is None else Weighted(target, weights)
        fields = (*_by_name(values, names, takes_mapping), target)
    else:
        fields = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    if len(fields) < 2:
        raise UnsupportedValueError(
            f"train on a batch, {describe(batch)}",
            "a batch has inputs and a target",
            "yield (X, y) from the data, or override Trainer.prepare_batch",
        )
    fix = "yield (X, y) from data, or {'x': X, 'y': y}"
    return _not_too_many(fields[:-1], names, "a batch has one target beside them", fix), fields[-1]


def inputs_alone(
    batch: Any, names: Sequence[str] = (), takes_mapping: bool = False
) -> tuple[Any, ...]:
    """Return the inputs of a batch without a target: an input, a tuple, or a mapping of them.

    Args:
        batch, names, takes_mapping: see ``inputs_and_target``.

    Raises:
        UnsupportedValueError: if it has no input, lacks one before another one, or has more than
            the model takes, such as a target.
    """
    inputs: Iterable[Any] = batch if isinstance(batch, (list, tuple)) else (batch,)
    if isinstance(batch, Mapping):
        values, weights = _weights_apart(batch, names)
        if weights is not None:
            raise UnsupportedValueError(
                "weigh the examples of a batch",
                "its loss is called with the prediction alone",
                "loss=lambda prediction, y, sample_weight: ...",
            )
        inputs = _by_name(values, names, takes_mapping)
    if not (found := tuple(inputs)):
        raise UnsupportedValueError(
            f"call a model with a batch, {describe(batch)}", "it is empty", "yield (X,) from data"
        )
    fix = "yield (X,) from data, or loss=lambda prediction, y: ..."
    return _not_too_many(found, names, "nothing here takes a target", fix)


def _not_too_many(
    inputs: tuple[Any, ...], names: Sequence[str], besides: str, fix: str
) -> tuple[Any, ...]:
    """Return the inputs; Keras' own models would leave those out that they do not take."""
    if names and len(inputs) > len(names):
        raise UnsupportedValueError(
            f"call a model with the {len(inputs)} inputs of a batch",
            f"it takes {', '.join(map(repr, names))}, and {besides}",
            fix,
        )
    return inputs


def inputs_to_predict(
    batch: Any, names: Sequence[str] = (), takes_mapping: bool = False
) -> tuple[Any, ...]:
    """Return the inputs of a batch that may have a target, which is left out.

    A target is the last of a tuple of two or more, and of a mapping as ``inputs_and_target`` has
    it, unless all of its keys are names of the model's inputs.

    Raises:
        UnsupportedValueError: as ``inputs_alone``.
    """
    has_target = isinstance(batch, (list, tuple)) and len(batch) > 1
    if isinstance(batch, Mapping):
        batch, _ = _weights_apart(batch, names)
        has_target = len(batch) > 1 and not all(key in names for key in batch)
    if has_target:
        return inputs_and_target(batch, names, takes_mapping)[0]
    return inputs_alone(batch, names, takes_mapping)


def _weights_apart(batch: Mapping[Any, Any], names: Sequence[str]) -> tuple[dict[Any, Any], Any]:
    """Return a batch without the weights of its examples, and the weights; None if it has none."""
    values = dict(batch)
    return values, None if "sample_weight" in names else values.pop("sample_weight", None)


def _by_name(values: dict[Any, Any], names: Sequence[str], takes_mapping: bool) -> Iterable[Any]:
    """Return inputs in the order of their names, if these are the model's, else as they are."""
    if not values or not all(key in names for key in values):
        return values.values()
    if takes_mapping:
        return (values,)
    if len(values) == 1:
        return values.values()
    given = [name in values for name in names]
    ordered = names[: len(names) - given[::-1].index(True)]
    missing = [name for name in ordered if name not in values]
    if missing:
        everything = ", ".join(f"{name!r}: ..." for name in ordered)
        raise UnsupportedValueError(
            f"call a model with {', '.join(map(repr, values))}",
            f"it takes {', '.join(map(repr, missing))} before {ordered[-1]!r}, which a batch lacks",
            f"yield {{{everything}, 'y': y}}, or a tuple of all of them and y",
        )
    return [values[name] for name in ordered]


def check_target(y: Any, loss: Any, kinds: Kinds) -> None:
    """Check that what d2ldev's own losses compute with has a shape.

    Args:
        y: the target, as ``inputs_and_target`` returns it; that of a loss of the user's may be
            anything, but for the weights.
        loss: a name, or a function.
        kinds: what each type is.

    Raises:
        UnsupportedValueError: if it has none.
    """
    tensors = [("sample_weight", y.weights)] if isinstance(y, Weighted) else []
    if isinstance(loss, str):
        tensors.append(("y", drop_weights(y)))
    for name, x in tensors:
        if kinds[type(x)] is not TENSOR and not hasattr(x, "shape"):
            raise UnsupportedValueError(
                f"train on a batch whose {name} is {describe(x)}",
                "it is no array of numbers",
                f"yield {name} as a NumPy array or a tensor, or give a loss of your own",
            )


def drop_weights(y: Any) -> Any:
    """Return a target without the weights of its examples."""
    return y.y if isinstance(y, Weighted) else y


def count_of(backend: Backend, y: Any, batch: Any = None) -> int:
    """Return how many examples a batch has: the length of its target's first axis, else 1.

    For a target that is a nesting, the whole batch tells; if it does not, the first tensor in it.

    Args:
        backend: whose tensors are in it.
        y: the target, or all that there is.
        batch: what ``y`` is a field of.
    """
    framework = framework_of(backend)
    kinds = framework.state.kinds
    if kinds[type(y)] is not TENSOR:
        found = number_of_examples(framework, y if batch is None else batch)
        if found is not None:
            return found
        flat = flatten(y, kinds, "count the examples of a batch")
        y = next(iter((*flat.tensors.values(), *flat.others.values())), None)
    shape = tuple(getattr(y, "shape", ()))
    return int(shape[0]) if shape else 1
