"""Several devices: split batches, and replicate objects.

Source: D2L, sections 13.5 and 13.6.
"""

from __future__ import annotations

import types
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from d2ldev.contract import Framework, Sharded, TrainingSettings
from d2ldev.contract.training import bounds, shard_refusal
from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.kinds import OBJECT
from d2ldev.nesting.walk import flatten, unwrap_broadcasts
from d2ldev.operations import moving, placing
from d2ldev.operations.examples import Whole
from d2ldev.typing import Inputs


def split(framework: Framework, batch: Any, devices: Sequence[Device]) -> list[Any]:
    """Return a shard of a batch for each device, on it; see ``Backend.split``."""
    return [shard.operands for shard in _split_batch(framework, batch, devices)]


class BatchShard(NamedTuple):
    """What a device has of a batch.

    Args:
        operands: the nesting, on the device.
        number: how many examples of the batch are in it.
        share: ``number``, divided by the number of examples in the batch: from 0 to 1.
    """

    operands: Any
    number: int
    share: float


def shard_batch(
    framework: Framework,
    model: Any,
    settings: TrainingSettings,
    operands: tuple[Inputs, Any],
    devices: Sequence[Device],
    *,
    is_filled: bool = False,
) -> list[BatchShard]:
    """Return a shard of a batch for each device, with its share of the examples.

    The share is the shard's weight in the mean over the batch if all examples count alike. With a
    ``Weighted`` target, or while ``may_leave_out(learner)``, the weight is another. It is the sum
    of the weights of the shard's counted labels, divided by the sum over the batch.

    Values in a ``Broadcast`` are whole in each shard, without the mark. Only a learner with
    ``takes_marks = True`` is given the marks.

    Args:
        framework: whose batch it is.
        model: the model that is trained.
        settings: of the training.
        operands: the inputs and the target, as ``Learner.step`` has them. A shard has the same.
        devices: they exist.
        is_filled: whether a shard without examples has the first ones of the batch, so that a model
            can compute with it.

    Raises:
        UnsupportedValueError: if its tensors do not agree in a number of examples, or it has none.
    """
    inputs, y = operands
    is_batch = settings.methods is not None
    # The inputs are not a sequence of examples, whatever their number.
    is_named = isinstance(inputs, Mapping)
    given: Any = inputs if is_named else dict(enumerate(inputs))
    fields = given[0] if is_batch else {"inputs": given, "y": y}
    shards = _split_batch(framework, fields, devices, model, is_filled=is_filled)
    if not shards[0].number:
        raise empty_batch_refusal()
    if is_batch:
        return [shard._replace(operands=((shard.operands,), None)) for shard in shards]
    parts = [shard.operands["inputs"] for shard in shards]
    found = parts if is_named else [tuple(part.values()) for part in parts]
    return [
        shard._replace(operands=(part, shard.operands["y"]))
        for part, shard in zip(found, shards, strict=True)
    ]


def empty_batch_refusal() -> UnsupportedValueError:
    """Return the error of a batch without examples."""
    return UnsupportedValueError(
        "split a batch", "it has no examples", "leave empty batches out of the data"
    )


def _split_batch(
    framework: Framework,
    batch: Any,
    devices: Sequence[Device],
    model: Any = None,
    *,
    is_filled: bool = False,
) -> list[BatchShard]:
    whole = Whole(framework, batch, f"split a batch over {len(devices)} devices")
    shards = []
    for number, device in enumerate(devices):
        operands, count = whole.shard(number, len(devices), is_filled=is_filled, model=model)
        share = count / whole.length if whole.length else 0.0
        there = moving.to(framework, operands, device)
        if whole.has_marks:
            there = unwrap_broadcasts(there, framework.state.kinds)
        shards.append(BatchShard(there, count, share))
    return shards


class ShardSampler:
    """The numbers of one process's examples of each batch, for a loader that chooses by number.

    Args:
        batches: yields the numbers of the examples of each batch.
        rank, size: the number of the process, from 0, and how many there are.

    Attributes:
        sampler: that of ``batches``, whose generator the order depends on.
        set_epoch: that of ``batches``, if they have it.
        counts: for each batch drawn so far, the number of its own examples, the number of all
            examples, and their ``content_of``.
    """

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size
        self.sampler = getattr(batches, "sampler", None)
        if hasattr(batches, "set_epoch"):
            self.set_epoch = batches.set_epoch
        self.counts: deque[tuple[int, int, str]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()
        for numbers in self._batches:
            start, stop = bounds(len(numbers), self._rank, self._size)
            self.counts.append((stop - start, len(numbers), content_of(numbers)))
            # A process without examples computes with the first one.
            yield numbers[start:stop] if stop > start else numbers[:1]

    def __len__(self) -> int:
        return len(self._batches)


class ShardedLoader:
    """What comes first among the bases of a loader that ``shard_copy`` returns.

    It shares workers and whatever a user has added with the other loader, which lives as long and
    ends them.
    """

    _sampler: ShardSampler
    _whole: Any

    def __init_subclass__(cls) -> None:
        """Leave out that of the user's class, which may want arguments or count its subclasses."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():  # type: ignore[misc]
            yield Sharded(batch, *self._sampler.counts.popleft())

    def __del__(self) -> None:
        """Leave out that of the other loader, which needs what both share."""


def shard_copy(loader: Any, known: type, sampler: ShardSampler, **attributes: Any) -> Any:
    """Return a loader that reads one process's shard of each batch, and yields ``Sharded``.

    It has the class of the other loader, with all that a user has added, and its attributes.

    Args:
        loader: of a framework's class or of one that is derived from it.
        known: the framework's class.
        sampler: the numbers that it is to read.
        attributes: those that are other than the loader's, such as where it has ``sampler``.

    Raises:
        UnsupportedValueError: for a loader that reads a shard already. Also for a class with its
            own ``__iter__``, which may leave out some of the chosen batches.
    """
    own = type(loader)
    if isinstance(loader, ShardedLoader):
        raise UnsupportedValueError(
            f"shard {describe(loader)}",
            "it reads a shard already",
            "trainer.fit(net, data), with this loader as it is",
        )
    if own.__iter__ is not known.__iter__:  # type: ignore[attr-defined]
        raise shard_refusal(
            loader, f"the __iter__ of {own.__name__} is its own, and may yield other batches"
        )
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    cls = types.new_class(own.__name__, (ShardedLoader, own), exec_body=lambda x: x.update(names))
    other: Any = object.__new__(cls)
    # Not its own ``__getstate__``, which may leave out what cannot be pickled.
    state: Any = object.__getstate__(loader)
    plain, slots = state if isinstance(state, tuple) else (state, {})
    # Not by ``setattr``: the framework's class and the user's may refuse that after ``__init__``.
    vars(other).update({**plain, **attributes}, _sampler=sampler, _whole=loader)
    for name, value in slots.items():
        object.__setattr__(other, name, value)
    return other


def content_of(numbers: Any) -> str:
    """Return a text that is the same in all processes with the same examples in one order.

    Args:
        numbers: the numbers or names of the examples of all processes.
    """
    # As plain numbers: an array that is long would be shortened.
    plain = numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)
    return f"numbered {zlib.crc32(repr(plain).encode()):08x}"


def replicate(framework: Framework, obj: Any, devices: Sequence[Device]) -> list[Any]:
    """Return a copy of an object for each device, on it; see ``Backend.replicate``."""
    kinds = framework.state.kinds
    copies = []
    attempted = f"replicate {type(obj).__name__}"
    for device in devices:
        flat = flatten(obj, kinds, attempted)
        for leaf in flat.others.values():
            if kinds[type(leaf)] is not OBJECT:  # it would be the same object on each device
                raise moving.leaf_refusal(framework, attempted, leaf, flat.name_of(leaf))
        models = {key: framework.parallel.twin(x) for key, x in flat.others.items()}
        tensors = list(flat.tensors.values())
        new = moving.copy(framework, tensors, device)
        whole = flat.unflatten({**models, **dict(zip(flat.tensors, new, strict=True))})
        copies.append(placing.place(framework, whole, device) if models else whole)
    return copies
