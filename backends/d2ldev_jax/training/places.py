"""Where the arrays of a learner are: on a device, on several of a process, or of several processes.

A step is one program for the whole batch wherever it runs: of arrays that are on several devices
XLA makes the program of each, and adds up the gradients of their parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from d2ldev.framework import Portion, Tensor
from d2ldev.framework.training import bounds
from d2ldev.nesting.containers import Broadcast

if TYPE_CHECKING:
    from d2ldev.processes.group import Group


class OneDevice:
    """The device where the model is.

    Args:
        native: JAX's device.
    """

    takes_marks = False
    """Whether ``shard_batch`` takes ``Broadcast``."""
    split: NamedSharding | None = None
    """Of the batch, over the devices that hold parts of the parameters; None if all are whole."""

    def __init__(self, native: jax.Device) -> None:
        self._native = native

    def place_arrays(self, arrays: list[Any]) -> list[Any]:
        """Return arrays of the model or the optimizer as a step takes them."""
        return self.replicate(arrays)

    def bring_home(self, arrays: list[Any]) -> list[Any]:
        """Return these arrays as they are put into the user's own model."""
        return self.take_local(arrays)

    def replicate(self, arrays: Any) -> Any:
        """Return a nesting of the model's arrays as a step takes them, the same on all devices."""
        return jax.device_put(arrays, self._native)

    def place_first_arrays(self, arrays: list[Any]) -> list[Any]:
        """Return rank 0's arrays of the model or the optimizer, in the form for a step."""
        return self.broadcast_first(self.place_arrays(arrays))

    def broadcast_first(self, arrays: Any) -> Any:
        """Return the arrays of the first process, of those that ``replicate`` has returned."""
        return arrays

    def shard_batch(self, batch: Any, portion: Portion | None) -> Any:
        """Return a batch as a step takes it.

        Args:
            batch: on this process's first device.
            portion: what of the whole batch that is, where several processes train.
        """
        return batch

    def take_local(self, results: Any) -> Any:
        """Return what is the same on all devices, on this process's first."""
        return results

    def take_part(self, results: Any, portion: Portion | None) -> Any:
        """Return a prediction, on this process's first device, for the batch given."""
        return self.take_local(results)

    def prepare_alone(
        self, arrays: list[Any], batch: Any, portion: Portion | None
    ) -> tuple[list[Any], Any]:
        """Return the model's arrays and a batch for a program of this process alone."""
        return arrays, self.shard_batch(batch, portion)


class SeveralDevices(OneDevice):
    """Several devices of this process.

    Args:
        natives: JAX's devices.
        home: the one where the user's own model is.
    """

    takes_marks = True

    def __init__(self, natives: Sequence[jax.Device], home: jax.Device) -> None:
        super().__init__(natives[0])
        self._home, self._size = home, len(natives)
        self._split, self._whole = _make_shardings(natives)

    def replicate(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self._whole)

    def bring_home(self, arrays: list[Any]) -> list[Any]:
        return jax.device_put(arrays, self._home)

    def shard_batch(self, batch: Any, portion: Portion | None) -> Any:
        """Return a batch with a part of its examples on each device.

        JAX splits evenly only. A batch that cannot be, such as the last one of an epoch, is whole
        on each device, which compute the same.
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


class ShardedDevices(SeveralDevices):
    """Several devices of this process, each of which holds a part of the model's arrays."""

    def __init__(self, natives: Sequence[jax.Device], home: jax.Device) -> None:
        super().__init__(natives, home)
        self.split = self._split

    def place_arrays(self, arrays: list[Any]) -> list[Any]:
        return jax.device_put(arrays, [find_sharding(self._split, x) for x in arrays])


def find_sharding(split: NamedSharding, x: Tensor) -> NamedSharding:
    """Return how an array is spread over the devices of a batch.

    The first axis is split that the devices can share evenly, as JAX asks for. An array without one
    is whole on each.
    """
    mesh = split.mesh
    axes = [axis for axis, length in enumerate(x.shape) if length and not length % mesh.size]
    return NamedSharding(
        mesh, PartitionSpec(*[None] * axes[0], *split.spec) if axes else PartitionSpec()
    )


class SeveralProcesses(OneDevice):
    """One device in each of several processes, which all run the same programs.

    JAX's arrays are spread over all of these devices, and this process reads its own part.

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
        self._spread = jax.jit(lambda xs: xs, out_shardings=self._whole)
        self._firsts = jax.jit(lambda xs: [x[0] for x in xs], out_shardings=self._whole)
        self._joined = jax.jit(partial(_join_rows, self._size), static_argnums=0)

    def replicate(self, arrays: Any) -> Any:
        return jax.tree.map(
            self._make_replicated, jax.device_put(self.take_local(arrays), self._native)
        )

    def broadcast_first(self, arrays: Any) -> Any:
        leaves, structure = jax.tree.flatten(self.take_local(arrays))
        own = [self._make_sharded(self._size, x[None]) for x in leaves]
        return jax.tree.unflatten(structure, self._firsts(own))

    def shard_batch(self, batch: Any, portion: Portion | None) -> Any:
        """Return the whole batch, of which this process has a part on its device.

        One that cannot be split evenly is whole on each device, as in ``SeveralDevices``.
        """
        assert portion is not None
        leaves, structure = _flatten_batch(batch)
        marked = {i: x.value for i, x in enumerate(leaves) if type(x) is Broadcast}
        parts = {i: x for i, x in enumerate(leaves) if i not in marked and jnp.ndim(x)}
        if portion.length % self._size:
            number = -(-portion.length // self._size)
            rows = [
                self._make_sharded(self._size * number, x)
                for x in _fill_up(number, list(parts.values()))
            ]
            found = self._joined(portion.length, rows)
        else:
            found = [self._make_sharded(portion.length, x) for x in parts.values()]
        wholes = dict(zip(parts, found, strict=True))
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

    def take_part(self, results: Any, portion: Portion | None) -> Any:
        return jax.tree.map(partial(self._take_own_rows, portion), results)

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
        if not x.is_fully_replicated:  # XLA chooses how results are spread
            x = self._spread(x)
        return x.addressable_data(0)

    def _take_own_rows(self, portion: Portion | None, x: Tensor) -> Tensor:
        if x.is_fully_addressable:  # a program of this process alone has made it
            return x
        if x.sharding.is_equivalent_to(self._split, x.ndim):
            return x.addressable_data(0)
        x = self._take_local(x)
        assert portion is not None
        if not x.ndim or len(x) != portion.length:
            return x
        start, stop = bounds(portion.length, self._rank, self._size)
        return x[start:stop] if portion.number else x[:1]


class ShardedProcesses(SeveralProcesses):
    """A device of each of several processes, which holds a part of the model's arrays.

    What is whole on a device for a moment is one array.

    Args:
        group: the processes.
        native: JAX's device in this one.
        home: where the user's own model is, whole.
    """

    def __init__(self, group: Group, native: jax.Device, home: jax.Device) -> None:
        super().__init__(group, native)
        self.split = self._split
        self._home = home

    def place_arrays(self, arrays: list[Any]) -> list[Any]:
        return [self._take_own_part(x, find_sharding(self._split, x)) for x in arrays]

    def place_first_arrays(self, arrays: list[Any]) -> list[Any]:
        found = []
        for x in arrays:
            own = self._make_sharded(self._size, jax.device_put(x, self._native)[None])
            found.append(jax.block_until_ready(_make_spreader(find_sharding(self._split, x))(own)))
        return found

    def bring_home(self, arrays: list[Any]) -> list[Any]:
        return [
            jax.block_until_ready(jax.device_put(self._take_local(x), self._home)) for x in arrays
        ]

    def prepare_alone(
        self, arrays: list[Any], batch: Any, portion: Portion | None
    ) -> tuple[list[Any], Any]:
        """Return what all processes evaluate together: none of them has all of the model."""
        return arrays, self.shard_batch(batch, portion)

    def _take_own_part(self, x: Tensor, sharding: NamedSharding) -> Tensor:
        rows = sharding.addressable_devices_indices_map(x.shape)[self._native]
        part = jax.device_put(x[rows], self._native)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [part])


@cache
def _make_spreader(sharding: NamedSharding) -> Any:
    """Return a function that spreads the first of several arrays."""
    return jax.jit(lambda xs: xs[0], out_shardings=sharding)


def _is_marked(x: Any) -> bool:
    return type(x) is Broadcast


def _unwrap(x: Any) -> Any:
    return x.value if type(x) is Broadcast else x


def _flatten_batch(batch: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a batch, of which ``Broadcast`` is one, and its structure."""
    return jax.tree.flatten(batch, is_leaf=_is_marked)


def _make_shardings(natives: Sequence[jax.Device]) -> tuple[NamedSharding, NamedSharding]:
    """Return how arrays are spread over devices: split by their first axis, and whole on each."""
    # The default of the axes' type is not the same in all versions of JAX.
    mesh = Mesh(np.array(natives), ("batch",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())


@partial(jax.jit, static_argnums=0)
def _fill_up(number: int, parts: list[Tensor]) -> list[Tensor]:
    """Return parts of a batch with so many rows, of which they have one less at most."""
    return [jnp.concatenate([x, x[: number - len(x)]]) for x in parts]


def _join_rows(size: int, length: int, parts: list[Tensor]) -> list[Tensor]:
    """Return tensors of so many rows, of which each process has its part and has filled it up."""
    number = -(-length // size)
    starts = [bounds(length, rank, size) for rank in range(size)]
    rows = [rank * number + i for rank, (a, b) in enumerate(starts) for i in range(b - a)]
    return [x[np.array(rows)] for x in parts]
