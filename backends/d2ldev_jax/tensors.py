"""Tensors: JAX's arrays, with workarounds for the contract.

- ``jax.device_put`` may share an aligned NumPy array's memory, also with ``may_alias=False``. A
  write to the NumPy array then changes JAX's: https://github.com/jax-ml/jax/issues/37830.
- ``jax.random`` has no state, and uses only the last 32 bits of a seed.
- A computation that needs too much memory fails after JAX has returned. The first reading of the
  array raises the error. On a GPU even zeros are a computation. So a large array is compared with
  the free memory first, and waited for. In jaxlib 0.12 a range of 2**40 numbers ends the process
  with a floating point exception.
- ``jax.device_put`` of one array takes three times as long as the function below it. So this module
  calls that function: https://github.com/jax-ml/jax/blob/main/jaxlib/py_array.cc. With its argument
  for a copy, it has read the host's memory when it returns, also a NumPy array's.
- ``jnp.from_dlpack`` raises no error for memory that does not begin at a multiple of 64 bytes, but
  copies it. So it does for dtypes that JAX has only with ``jax_enable_x64``:
  https://github.com/jax-ml/jax/issues/29810. Some releases misread memory that is not in C order:
  https://github.com/jax-ml/jax/issues/17784.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

# Private: ``jax.device_put`` of one array takes three times as long as these two.
from jax._src.config import explicit_device_put_scope
from jax._src.lib import xla_client

# Private: no public function tells whether a class is registered.
from jax._src.tree_util import _registry
from jax.core import ShapedArray

from d2ldev import Device, UnsupportedValueError
from d2ldev.framework import CPU, Container, Description, Tensor, Tensors, describe, description_of
from d2ldev_jax.devices import LONG, JaxDevices, is_initialized, parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The dtypes that JAX has only with ``jax_enable_x64``.
_WIDE = ("int64", "uint64", "float64", "complex128")
_NARROW = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e4m3b11fnuz", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu"),
)
# Functions and classes, which pytrees of JAX have among their leaves.
_FUNCTIONS = (
    *(FunctionType, BuiltinFunctionType, type, np.ufunc, jnp.ufunc),
    *(type(jax.jit(len)), jax.custom_jvp, jax.custom_vjp),
)
# The label of a node's static value, if it has no name.
_STATIC = "static"
_FLOAT32, _FLOAT64 = np.dtype("float32"), np.dtype("float64")

_LAST_32_BITS = 2**32 - 1
# Smaller arrays are made without a look at the free memory, which takes some microseconds.
LARGE = 2**24
# An array of fewer elements is smaller than ``LARGE``, for every dtype.
FEW = LARGE // 16
# The size of the groups in which arrays are stacked.
_GROUP = 32


class JaxTensors(Tensors):
    """JAX's arrays.

    Args:
        devices: the devices of the framework.
    """

    # In newer releases a tracer is an instance of ``jax.Array``, and its class is not a subclass.
    types = (jax.Array, jax.core.Tracer)
    plain_types = (np.dtype, type(jnp.float32), jax.Device, jax.sharding.Sharding, *_FUNCTIONS)

    def __init__(self, devices: JaxDevices) -> None:
        self._devices = devices
        # The device of each kind of memory and each native device of the arrays seen so far.
        self._seen: defaultdict[str | None, dict[jax.Device, Device]] = defaultdict(dict)
        # A draw without a seed folds its number into the root of this process. Threads can share a
        # count without a lock.
        self._root = int.from_bytes(os.urandom(4))
        self._draws = itertools.count()

    # -- asking -----------------------------------------------------------------------------------

    def device_of(self, x: Any) -> Device:
        # ``_look_up`` checks unusual arrays. Each array has its own sharding, and JAX compares
        # shardings in Python. The attributes of the sharding are private: the public set of its
        # devices takes twice as long. Without them ``_look_up`` answers.
        try:
            if not x.is_deleted():
                sharding = x.sharding
                return self._seen[sharding._memory_kind][sharding._device]
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        return self._look_up(x)

    def is_on(self, x: Tensor, device: Device) -> bool:
        # Operations keep to the device of a committed array only. As ``device_of`` in the usual
        # case, without its call. With the public names of these attributes, ``to`` takes a third
        # longer where nothing moves.
        try:
            if x._committed and not x.is_deleted():
                sharding = x._sharding
                return self._seen[sharding._memory_kind][sharding._device] is device
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        return self.device_of(x) is device and bool(x.committed)

    def _look_up(self, x: Any) -> Device:
        """Return the device of an array, or raise the reason why it has no device."""
        if isinstance(x, jax.core.Tracer):
            raise _refusal(
                f"a {x.dtype}{list(x.shape)} is traced by jit, grad or vmap, and has no memory yet",
                "ask outside of the traced function; inside, x = jax.device_put(x, "
                "backend.native('gpu:0')) moves it",
            )
        if not isinstance(x, jax.Array):
            raise _refusal(f"{describe(x)} is not a JAX array", "x = backend.asarray(x)")
        kind = f"the {x.dtype}{list(x.shape)}"
        if x.is_deleted():
            raise _refusal(
                f"{kind} was deleted, or donated to a function that has used up its memory",
                "keep a copy: x = backend.copy(x), before it is donated",
            )
        natives = x.sharding.device_set
        if len(natives) != 1:
            spread = ", ".join(sorted(map(str, natives)))
            raise _refusal(
                f"{kind} is spread over {len(natives)} devices: {spread}",
                "x = jax.device_put(x, backend.native('cpu')) brings it to one; x.sharding says "
                "which part is where",
            )
        native: Any = next(iter(natives))
        device = self._devices.from_native(native)
        if device is None:
            raise _refusal(
                f"{kind} is on {native}, which is not a CPU or GPU of this process",
                "x.addressable_shards are this process's parts of an array",
            )
        memory = x.sharding.memory_kind
        if device is not CPU and memory not in (None, native.default_memory().kind):
            raise _refusal(
                f"{kind} belongs to {device}, but its bytes are in the host's memory ({memory})",
                f"x = jax.device_put(x, backend.native('{device}')) brings them there",
            )
        self._seen[memory][native] = device
        return device

    @property
    def dtype_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The current dtypes of JAX: with ``jax_enable_x64`` it has those with 64 bits, too."""
        return (*_NARROW, *_WIDE) if jax.config.jax_enable_x64 else _NARROW

    @property
    def default_dtypes(self) -> tuple[str, str]:  # type: ignore[override]
        """The default dtypes of integers and floats."""
        return ("int64", "float64") if jax.config.jax_enable_x64 else ("int32", "float32")

    def dtype_of(self, x: Tensor) -> str:
        return _name_of(x.dtype)

    def dtype(self, name: str) -> np.dtype[Any] | None:
        if name in _WIDE and not jax.config.jax_enable_x64:
            raise UnsupportedValueError(
                f"use {name!r} as a dtype",
                "JAX has 64 bits only with jax_enable_x64",
                "jax.config.update('jax_enable_x64', True)",
            )
        return np.dtype(getattr(jnp, name))

    def address(self, x: Tensor) -> int:
        self.device_of(x)
        return int(x.unsafe_buffer_pointer())

    def live(self) -> list[Tensor]:
        """Return JAX's own list of arrays; of an array on several devices, its part on each."""
        if not is_initialized():  # the list would initialise it
            return []
        found: dict[int, Tensor] = {}  # JAX's list may contain the parts, too
        for platform in {native.platform for native in self._devices.places}:
            for x in jax.live_arrays(platform):
                if not x.is_deleted():
                    found.update((id(part), part) for part in parts_of(x))
        return list(found.values())

    def has_values(self, x: Tensor) -> bool:
        return not isinstance(x, jax.core.Tracer) and not x.is_deleted()

    def container_of(self, cls: type) -> Container | None:
        """Return how to walk a class that is registered with ``jax.tree_util``.

        Examples are ``FrozenDict``, and the data fields of ``flax.struct`` dataclasses.
        """
        if cls is partial:  # an activation with its options
            return _PARTIAL
        # d2ldev's own walk preserves more of Python's containers: the order of a dict, attributes.
        if cls not in _registry or issubclass(cls, (dict, list, tuple)):
            return None
        return Container(
            lambda x: [child for _, child in _children(x)],
            lambda x: [_label(path[0]) for path, _ in _children(x)],
            _rebuild,
            # The arrays of a sparse array may all have one length. It does not count examples.
            holds="pieces" if hasattr(cls, "todense") else "fields",
            # A mapping has no other values.
            saved=None
            if issubclass(cls, Mapping)
            else Container(
                lambda x: [*(child for _, child in _children(x)), *_static(x).values()],
                lambda x: [*(_label(path[0]) for path, _ in _children(x)), *_static(x)],
                _rebuild_with_static,
            ),
        )

    # -- making -----------------------------------------------------------------------------------

    def from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        if isinstance(obj, np.ndarray):
            # On the host JAX may share the memory, so that it gets a copy of its own.
            return self.adopt(obj.astype(dtype or obj.dtype, copy=is_on_the_host(native)), native)
        with jax.default_device(native):
            made = jnp.array(obj, dtype=dtype)
        return jax.device_put(made, native)  # this commits the array, and copies nothing

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        if dtype is None:
            # A traced array would get a weak type, which other types override.
            dtype = _float() if type(value) is float else jax.dtypes.result_type(value)
        # With only a device or a sharding, JAX makes the array on its default device and copies it.
        make = partial(jax.lax.full, shape, value, dtype, sharding=_alone(native))
        with jax.default_device(native):
            return self._compute(make, math.prod(shape) * np.dtype(dtype).itemsize, native)

    def arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        count = max(0, math.ceil((stop - start) / step))
        # JAX 0.6 makes the range on the device for one number, and in NumPy for three.
        if (start, step) == (0, 1):
            start, stop, step = stop, None, None
        with jax.default_device(native):
            make = partial(jnp.arange, start, stop, step, dtype, device=native)
            return self._compute(make, count * dtype.itemsize, native)

    def random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        dtype = dtype or _float()
        draw = jax.random.uniform if distribution == "uniform" else jax.random.normal
        if seed is None:
            first, second = self._root, next(self._draws)
        else:
            first, second = seed & _LAST_32_BITS, seed >> 32 & _LAST_32_BITS
        with jax.default_device(native):
            key = jax.random.key(first)
            if second:  # a small seed draws the same numbers as in JAX
                key = jax.random.fold_in(key, second)
        # This copies nothing. It commits the key, and all tensors computed from the key.
        key = jax.device_put(key, native)
        make = partial(draw, key, shape, dtype)
        return self._compute(make, math.prod(shape) * dtype.itemsize, native)

    def seed(self, seed: int) -> None:
        self._root, self._draws = seed, itertools.count()

    def astype(self, x: Tensor, dtype: Any) -> Tensor:
        if isinstance(x, jax.core.Tracer):
            return x.astype(dtype)
        device = self.device_of(x)  # refuses a tensor without memory, with the reason
        native = self._devices.native(device)
        return self._compute(
            lambda: jax.device_put(x.astype(dtype), native), x.size * dtype.itemsize, native
        )

    def _compute(self, make: Callable[[], Tensor], nbytes: int, native: jax.Device) -> Tensor:
        """Return an array of so many bytes. A traced array has no memory yet."""
        is_simple = nbytes < LARGE or _is_traced()
        return make() if is_simple else self._make(make, nbytes, native)

    def _make(self, make: Callable[[], Tensor], nbytes: int, native: jax.Device) -> Tensor:
        """Return an array of so many bytes, and wait for it if memory may run out.

        Raises:
            MemoryError: if the device has less free memory.
        """
        if nbytes < LARGE:
            return make()
        is_large = self._devices.is_large(nbytes, native)
        made = make()
        return jax.block_until_ready(made) if is_large else made

    # -- copying ----------------------------------------------------------------------------------

    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        # For JAX's transfer guards, this is an explicit transfer, as ``jax.device_put`` is.
        with explicit_device_put_scope():
            return [
                self._copy(x, native)
                if copy or x.committed or not self._is_there(x, native)
                else self._commit(x, native)
                for x in xs
            ]

    def _is_there(self, x: Tensor, native: jax.Device) -> bool:
        return self._devices.native(self.device_of(x)) is native

    def _commit(self, x: Tensor, native: jax.Device) -> Tensor:
        """Return a committed array in the memory of an uncommitted one."""
        if _is_of_keys(x):
            return jax.device_put(x, native)
        # Not ``jax.device_put``: in a traced function it would become an operation.
        return batched_device_put(x.aval, _alone(native), [x], [native], True, False)

    def _copy(self, x: Tensor, native: jax.Device) -> Tensor:
        if _is_of_keys(x) or len(x.sharding.device_set) > 1:
            return jax.device_put(x, native, may_alias=False)
        if x.size < FEW:  # further questions take longer
            return batched_device_put(x.aval, _alone(native), [x], [native], True, True)
        (source,) = x.sharding.device_set
        is_near = source.client is native.client or is_on_the_host(native)
        return self._send(x.aval, x, x.nbytes, native, is_copied=is_near or x.nbytes < LONG)

    def adopt(self, array: NDArray[Any], native: jax.Device) -> Tensor:
        """Return an array with the values of NumPy's. On the host they may share the memory."""
        aval, nbytes = ShapedArray(array.shape, array.dtype), array.nbytes
        with explicit_device_put_scope():
            if is_on_the_host(native):
                return batched_device_put(aval, _alone(native), [array], [native], True, False)
            return self._send(aval, array, nbytes, native, is_copied=nbytes < LONG)

    def _send(
        self, aval: Any, x: Any, nbytes: int, native: jax.Device, *, is_copied: bool
    ) -> Tensor:
        """Return a copy of JAX's or NumPy's array.

        Args:
            aval: JAX's description of its shape and dtype.
            x: the array.
            nbytes: its bytes.
            native: the device of the copy.
            is_copied: whether JAX reads the array before it returns. Otherwise it reads the array
                later. Nothing may write to the array until then.
        """
        make = partial(batched_device_put, aval, _alone(native), [x], [native], True, is_copied)
        return self._make(make, nbytes, native)

    def to_numpy(self, x: Tensor) -> NDArray[Any]:
        if isinstance(x, jax.core.Tracer) or x.is_deleted():
            self.device_of(x)  # refuses it, with the reason; not an array on several devices
        return np.array(numbers_of(x))

    def from_dlpack(self, x: Any) -> Tensor:
        if isinstance(x, self.types):
            # The protocol does not tell one CPU device from another.
            self.device_of(x)
            return x
        capsule = x.__dlpack__()  # unversioned: every framework has such a capsule
        memory = description_of(capsule)
        address = memory.address
        if not _is_in_the_order_of_c(memory):
            raise BufferError("JAX takes memory in C order, without gaps")
        made = jnp.from_dlpack(
            SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=x.__dlpack_device__)
        )
        if made.size and made.unsafe_buffer_pointer() != address:
            raise BufferError(
                f"JAX would copy it as {made.dtype}. It shares only its current dtypes, in memory "
                "that begins at a multiple of 64 bytes"
            )
        (native,) = made.devices()
        return jax.device_put(made, native)

    # -- for logs ---------------------------------------------------------------------------------

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        # JAX compiles a program for each new number of operands. Groups of one size need few
        # programs for any number of arrays, and few calls.
        level, size = list(xs), 1
        while len(level) > 1 or size == 1:
            # The last line cuts off the padding of the last group.
            level += level[-1:] * (-len(level) % _GROUP)
            level = [_stack(level[i : i + _GROUP]) for i in range(0, len(level), _GROUP)]
            size *= _GROUP
        stacked = level[0].reshape(size, *xs[0].shape)
        return jax.lax.slice_in_dim(stacked, 0, len(xs))  # an index takes three times as long

    def norm(self, x: Tensor) -> Tensor:
        return jnp.linalg.norm(x)


def numbers_of(x: Tensor) -> Tensor:
    """Return the numbers of random keys; any other array is returned as it is."""
    return jax.random.key_data(x) if _is_of_keys(x) else x


def _is_of_keys(x: Tensor) -> bool:
    """Return whether an array holds random keys: JAX's own dtype, and not one of NumPy's."""
    return not isinstance(x.dtype, np.dtype)


@cache  # NumPy builds the name in Python, which takes ten times as long as this cache
def _name_of(dtype: Any) -> str:
    return str(dtype.name)


def _refusal(problem: str, fix: str) -> UnsupportedValueError:
    return UnsupportedValueError("tell the device of a tensor", problem, fix)


def _float() -> np.dtype[Any]:
    """Return the default dtype of floats."""
    return _FLOAT64 if jax.config.jax_enable_x64 else _FLOAT32


# ``(aval, sharding, arrays, devices, is_committed, is_copy)``. With ``is_copy`` the array is always
# in new memory, and the host's memory was read at the return.
batched_device_put: Callable[..., Tensor] = xla_client.batched_device_put


@cache
def _alone(native: jax.Device) -> jax.sharding.SingleDeviceSharding:
    """Return the sharding of an array on one device."""
    return jax.sharding.SingleDeviceSharding(native)


def is_on_the_host(native: jax.Device) -> bool:
    """Return whether a device uses the host's memory, which JAX may share with NumPy."""
    return bool(native.platform == "cpu")


def _is_traced() -> bool:
    """Return whether JAX traces a function now: a new array is a part of it, without memory."""
    with jax.transfer_guard("allow"):  # this zero is not the user's transfer
        return isinstance(jnp.zeros(()), jax.core.Tracer)


@jax.jit
def _stack(xs: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(xs)


def _is_in_the_order_of_c(memory: Description) -> bool:
    """Return whether memory is in C order, without gaps."""
    expected = 1
    for i in reversed(range(memory.ndim if memory.strides else 0)):
        if memory.shape[i] > 1 and memory.strides[i] != expected:
            return 0 in memory.shape[: memory.ndim]
        expected *= memory.shape[i]
    return True


def _children(x: Any) -> list[tuple[Any, Any]]:
    """Return the direct children of JAX's node, with their keys."""
    children: list[tuple[Any, Any]] = jax.tree_util.tree_flatten_with_path(
        x, is_leaf=lambda child: child is not x
    )[0]
    return children


def _rebuild(old: Any, new: list[Any]) -> Any:
    structure = jax.tree.structure(old, is_leaf=lambda child: child is not old)
    return jax.tree.unflatten(structure, new)


_PARTIAL = Container(
    lambda x: [*x.args, *x.keywords.values()],
    lambda x: [*range(len(x.args)), *x.keywords],
    lambda old, new: partial(
        old.func,
        *new[: len(old.args)],
        **dict(zip(old.keywords, new[len(old.args) :], strict=True)),
    ),
)


def _node_data(x: Any) -> Any:
    """Return the data of a node besides its children."""
    return jax.tree.structure(x, is_leaf=lambda child: child is not x).node_data()[1]


def _static(x: Any) -> dict[str, Any]:
    """Return the static values of a node by name: JAX treats them as a part of its type.

    Functions and other values that no file can hold are left out. The program makes them again.
    """
    if is_dataclass(type(x)):
        names = {_label(path[0]) for path, _ in _children(x)}
        values = {each.name: getattr(x, each.name, None) for each in fields(x)}
        found = {name: value for name, value in values.items() if name not in names}
        return {name: x for name, x in found.items() if x is None or _is_plain(x)}
    data = _node_data(x)
    found = data if isinstance(data, dict) else {_STATIC: data}
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(x: Any) -> bool:
    if type(x) in (tuple, list):
        return all(map(_is_plain, x))
    return isinstance(x, np.generic) or type(x) in (bool, int, float, complex, str, bytes)


def _rebuild_with_static(old: Any, new: list[Any]) -> Any:
    static = _static(old)
    count = len(new) - len(static)
    made, values = _rebuild(old, new[:count]), dict(zip(static, new[count:], strict=True))
    if values == static:
        return made
    if is_dataclass(type(old)):
        for name, value in values.items():
            object.__setattr__(made, name, value)  # a frozen dataclass refuses ``setattr``
        return made
    data = _node_data(old)
    data = {**data, **values} if isinstance(data, dict) else values[_STATIC]
    return _registry[type(old)].from_iter(data, new[:count])


def _label(key: Any) -> object:
    """Return the key, the index or the attribute's name from one of JAX's keys."""
    found = [getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)]
    return found[0] if found else key
