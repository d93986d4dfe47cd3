"""The places of a learner's arrays: one device, several devices, or several processes.

A step is always one program for the whole batch. If the arrays are on several devices, XLA splits
the program, and adds up the gradients of the shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from d2ldev import Broadcast
from d2ldev.framework import Portion, Tensor, bounds

if TYPE_CHECKING:
    from d2ldev.framework import Group


class OneDevice:
    """The model's device.

    Args:
        native: JAX's device.
    """

    takes_marks = False
    """Whether ``shard_batch`` takes ``Broadcast``."""

    def __init__(self, native: jax.Device) -> None:
        self._native = native

    def replicate(self, arrays: Any) -> Any:
        """Return a nesting of arrays on the devices of a step, whole on each."""
        return jax.device_put(arrays, self._native)

    def replicate_first(self, arrays: Any) -> Any:
        """Return rank 0's arrays on the devices of a step, whole on each."""
        return self.broadcast_first(self.replicate(arrays))

    def broadcast_first(self, arrays: Any) -> Any:
        """Return rank 0's arrays in all processes, for arrays from ``replicate``."""
        return arrays

    def shard_batch(self, batch: Any, portion: Portion | None) -> Any:
        """Return a batch on the devices of a step.

        Args:
            batch: the batch, on this process's first device.
            portion: this process's shard of the whole batch, if several processes train.
        """
        return batch

    def take_local(self, results: Any) -> Any:
        """Return replicated results on this process's first device."""
        return results

    def take_shard(self, results: Any, portion: Portion | None) -> Any:
        """Return a prediction for this process's batch, on this process's first device."""
        return self.take_local(results)

    def take_weight(self, weight: Any, portion: Portion | None) -> Any:
        """Return this process's share of the weight of a loss, on its first device."""
        return self.take_local(weight)

    def prepare_alone(
        self, arrays: list[Any], batch: Any, portion: Portion | None
    ) -> tuple[list[Any], Any]:
        """Return the model's arrays and a batch for a program of this process only."""
        return arrays, self.shard_batch(batch, portion)


class SeveralDevices(OneDevice):
    """Several devices of this process.

    Args:
        natives: JAX's devices.
        native: the first of them, which has the model.
    """

    takes_marks = True

    def __init__(self, natives: Sequence[jax.Device], native: jax.Device) -> None:
        super().__init__(native)
        self._size = len(natives)
        self._split, self._whole = _make_shardings(natives)

    def replicate(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self._whole)

    def shard_batch(self, batch: Any, portion: Portion | None) -> Any:
        """Return a batch with a shard of its examples on each device.

        JAX splits only evenly. If the batch does not divide evenly, each device has the whole
        batch, and all compute the same.
        """
        leaves, structure = _flatten_batch(batch)
        marked = {i: x.value for i, x in enumerate(leaves) if type(x) is Broadcast}
        if marked:
            leaves = [None if i in marked else x for i, x in enumerate(leaves)]
        ranks = [0 if x is None else jnp.ndim(x) for x in leaves]  # 0 of a number
        lengths = {len(x) for x, rank in zip(leaves, ranks, strict=True) if rank}
        is_even = len(lengths) == 1 and not lengths.pop() % self._size
        places = [self._split if is_even and rank else self._whole for rank in ranks]
        found = jax.device_put(leaves, places)
        for i, value in marked.items():
            found[i] = jax.device_put(value, self._whole)
        return jax.tree.unflatten(structure, found)

    def take_local(self, results: Any) -> Any:
        return jax.device_put(results, self._native)


class SeveralProcesses(OneDevice):
    """One device in each of several processes. All processes run the same programs.

    JAX's arrays are spread over all of these devices. Each process reads its own shard.

    Args:
        group: the processes.
        native: JAX's device in this process.
    """

    takes_marks = True

    def __init__(self, group: Group, native: jax.Device) -> None:
        super().__init__(native)
        self._rank, self._size = group.rank, group.size
        known = {device.id: device for device in native.client.devices()}
        natives = [known[number] for number in group.gather("the devices", native.id)]
        self._split, self._whole = _make_shardings(natives)

    def replicate(self, arrays: Any) -> Any:
        return jax.tree.map(
            self._make_replicated, jax.device_put(self.take_local(arrays), self._native)
        )

    def broadcast_first(self, arrays: Any) -> Any:
        leaves, structure = jax.tree.flatten(self.take_local(arrays))
        own = [self._make_sharded(self._size, x[None]) for x in leaves]
        return jax.tree.unflatten(structure, _make_chooser(self._whole)(own))

    def shard_batch(self, batch: Any, portion: Portion | None) -> Any:
        """Return the whole batch, with this process's shard on its device.

        As in ``SeveralDevices``, each device has the whole batch if JAX cannot split it evenly.
        """
        assert portion is not None
        leaves, structure = _flatten_batch(batch)
        marked = {i: x.value for i, x in enumerate(leaves) if type(x) is Broadcast}
        shards = {i: x for i, x in enumerate(leaves) if i not in marked and jnp.ndim(x)}
        if portion.length % self._size:
            number = -(-portion.length // self._size)
            rows = [
                self._make_sharded(self._size * number, x)
                for x in _fill_up(number, list(shards.values()))
            ]
            found = _join_rows(self._size, portion.length, rows)
        else:
            found = [self._make_sharded(portion.length, x) for x in shards.values()]
        wholes = dict(zip(shards, found, strict=True))
        for i, value in marked.items():
            wholes[i] = jax.tree.map(self._put_on_all, value)
        others = (wholes.get(i, x) for i, x in enumerate(leaves))
        return jax.tree.unflatten(structure, others)

    def prepare_alone(
        self, arrays: list[Any], batch: Any, portion: Portion | None
    ) -> tuple[list[Any], Any]:
        if any(type(x) is Broadcast for x in _flatten_batch(batch)[0]):
            batch = jax.tree.map(_unwrap, batch, is_leaf=_is_marked)
        return self.take_local(arrays), batch

    def take_local(self, results: Any) -> Any:
        return jax.tree.map(self._take_local, results)

    def take_shard(self, results: Any, portion: Portion | None) -> Any:
        return jax.tree.map(partial(self._take_own_rows, portion), results)

    def take_weight(self, weight: Any, portion: Portion | None) -> Any:
        if weight is None or weight.is_fully_addressable:  # of a program of this process only
            return weight
        assert portion is not None
        return self._take_local(weight) * (portion.number / portion.length)

    def _put_on_all(self, x: Any) -> Any:
        return self._make_replicated(jax.device_put(x, self._native)) if jnp.ndim(x) else x

    def _make_replicated(self, x: Tensor) -> Tensor:
        return jax.make_array_from_single_device_arrays(x.shape, self._whole, [x])

    def _make_sharded(self, length: int, x: Tensor) -> Tensor:
        shape = (length, *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._split, [x])

    def _take_local(self, x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        if not x.is_fully_replicated:  # XLA chooses the sharding of a result
            x = _make_replicator(self._whole)(x)
        return x.addressable_data(0)

    def _take_own_rows(self, portion: Portion | None, x: Tensor) -> Tensor:
        """Return the rows of a result that this process's rows of the batch gave.

        A result without a row for each example of the batch is returned whole.
        """
        if x.is_fully_addressable:  # the result of a program of this process only
            return x
        if x.sharding.is_equivalent_to(self._split, x.ndim):
            return x.addressable_data(0)
        x = self._take_local(x)
        assert portion is not None
        if not x.ndim or len(x) != portion.length:
            return x
        start, stop = bounds(portion.length, self._rank, self._size)
        return x[start:stop] if portion.number else x[:1]


# JAX compiles a function again for each new function object, so that these are kept by sharding.
@cache
def _make_replicator(whole: NamedSharding) -> Any:
    """Return a function that replicates an array on all devices."""
    return jax.jit(lambda x: x, out_shardings=whole)


@cache
def _make_chooser(whole: NamedSharding) -> Any:
    """Return a function that replicates the first process's array of each in a list."""
    return jax.jit(lambda xs: [x[0] for x in xs], out_shardings=whole)


def _is_marked(x: Any) -> bool:
    return type(x) is Broadcast


def _unwrap(x: Any) -> Any:
    return x.value if type(x) is Broadcast else x


def _flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a batch, and its structure; a ``Broadcast`` is a leaf."""
    return jax.tree.flatten(batch, is_leaf=_is_marked)


def _make_shardings(natives: Sequence[jax.Device]) -> tuple[NamedSharding, NamedSharding]:
    """Return two shardings over devices: split by the first axis, and whole on each."""
    # The default type of an axis is not the same in all versions of JAX.
    mesh = Mesh(np.array(natives), ("batch",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())


@partial(jax.jit, static_argnums=0)
def _fill_up(number: int, shards: list[Tensor]) -> list[Tensor]:
    """Return shards of a batch with ``number`` rows each; a shard may lack one row."""
    return [jnp.concatenate([x, x[: number - len(x)]]) for x in shards]


@partial(jax.jit, static_argnums=(0, 1))
def _join_rows(size: int, length: int, shards: list[Tensor]) -> list[Tensor]:
    """Return tensors of ``length`` rows, without the rows that ``_fill_up`` has added.

    Args:
        size: the number of processes.
        length: the number of rows.
        shards: the tensors, with each process's shard on its device.
    """
    number = -(-length // size)
    starts = [bounds(length, rank, size) for rank in range(size)]
    rows = [rank * number + i for rank, (a, b) in enumerate(starts) for i in range(b - a)]
    return [x[np.array(rows)] for x in shards]
