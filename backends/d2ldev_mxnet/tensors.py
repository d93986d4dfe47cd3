"""Tensors: MXNet's NumPy arrays. Arrays of the older class are accepted, too.

Random numbers with a seed come from NumPy, and are copied. MXNet has one generator for each device,
without a way to read or restore its state. So a seed would change the user's next numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from d2ldev import Device, UnsupportedValueError, gpu
from d2ldev.framework import ON_CPU, ON_CUDA, Devices, Tensor, Tensors, describe
from d2ldev_mxnet.framework import NumPySemantics, NumPyShapes, mx

_NDArray = mx.nd.NDArray
_DENSE = frozenset({_NDArray, mx.np.ndarray})
_library = mx.base._LIB
# It reads two numbers. ``PyDLL`` keeps Python's lock: to release it takes a tenth of the call.
_get_context = ctypes.PyDLL(None, handle=_library._handle).MXNDArrayGetContext
# MXNet passes numbers to its operators as doubles.
_EXACT = 2**53
# The wheels are built without ``USE_INT64_TENSOR_SIZE``.
_TOO_MANY = 2**31
# With more elements, the 8 us to allocate memory first are below 2 % of the time to write them.
_FEW = 2**20


class MXNetTensors(Tensors):
    """MXNet's arrays."""

    types = (_NDArray,)  # ``mx.np.ndarray`` is a subclass
    plain_types = (mx.Context, np.dtype)
    dtype_names = ("bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64")

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        # The device of each context that a tensor was seen in: its type and id in 64 bits.
        self._contexts: dict[int, Device] = {}

    # -- asking -----------------------------------------------------------------------------------

    def device_of(self, x: Any) -> Device:
        if isinstance(x, _NDArray):
            # ``x.ctx`` costs twice as much, most of it for an object that is thrown away.
            context = ctypes.c_int64()
            _get_context(x.handle, ctypes.byref(context), ctypes.byref(context, 4))
            device = self._contexts.get(context.value)
            if device is not None:
                return device
            device = self._devices.from_native(x.ctx)
            if device is not None:
                self._contexts[context.value] = device
                return device
        raise UnsupportedValueError(
            "tell the device of a tensor",
            f"{describe(x)} is not an MXNet array on a device of d2ldev",
            "x = backend.asarray(x) makes a tensor; a Symbol has no device until it is bound",
        )

    def dtype_of(self, x: Tensor) -> str:
        return _name_of(x.dtype)

    def dtype(self, name: str) -> Any:
        return getattr(mx.np, name)

    def address(self, x: Tensor) -> int:
        return address_of(x)

    def nbytes(self, x: Tensor) -> int:
        return math.prod(x.shape) * int(np.dtype(x.dtype).itemsize)  # a sparse one has no ``size``

    # -- making -----------------------------------------------------------------------------------

    def from_data(self, obj: Any, dtype: Any, native: Any) -> Tensor:
        data = np.asarray(obj)
        x = _empty(data.shape, data.dtype if dtype is None else dtype, native)
        with NumPyShapes():
            # It returns when the values are copied, so that nothing of ``obj`` is read later.
            x._sync_copyfrom(data)
        return x

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, native: Any) -> Tensor:
        dtype = dtype or "float32"
        if isinstance(value, (int, np.integer)) and abs(int(value)) > _EXACT:
            return self.from_data(np.full(shape, value, dtype), dtype, native)
        with NumPyShapes():
            return mx.np.full(shape, value, dtype=dtype, out=_empty(shape, dtype, native))

    # A few zeros or ones without taking their memory first, which would cost a third of the call.

    def zeros(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if 0 < math.prod(shape) < _FEW and shape:
            return mx.np.zeros(shape, dtype, ctx=native)
        return super().zeros(shape, dtype, native)

    def ones(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        if 0 < math.prod(shape) < _FEW and shape:
            return mx.np.ones(shape, dtype, ctx=native)
        return super().ones(shape, dtype, native)

    def empty(self, shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        return _empty(shape, dtype or "float32", native)

    def arange(self, start: Any, stop: Any, step: Any, dtype: Any, native: Any) -> Tensor:
        x = _empty((math.ceil((stop - start) / step),), dtype, native)
        with NumPyShapes():
            # The operator below ``mx.np.arange``, which itself cannot write into memory that is
            # given.
            return mx.nd.numpy._internal.arange(
                start=start, stop=stop, step=step, dtype=np.dtype(dtype).name, ctx=native, out=x
            )

    def random(
        self, distribution: str, shape: tuple[int, ...], seed: int | None, dtype: Any, native: Any
    ) -> Tensor:
        dtype, is_uniform = dtype or "float32", distribution == "uniform"
        with NumPyShapes():
            if seed is not None:
                generator = np.random.Generator(np.random.PCG64(seed % 2**64))
                wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
                draw = generator.random if is_uniform else generator.standard_normal
                x = self.from_data(draw(shape, wide), dtype, native)
            else:
                draw = mx.np.random.uniform if is_uniform else mx.np.random.normal
                x = draw(0.0, 1.0, shape, dtype=dtype, ctx=native, out=_empty(shape, dtype, native))
            if is_uniform and x.dtype == np.float16:
                # Numbers just below 1 are rounded to 1, which is not in the interval.
                x = mx.np.minimum(x, 1 - 2**-11, out=x)
        return x

    def seed(self, seed: int) -> None:
        mx.random.seed(seed)

    def astype(self, x: Tensor, dtype: Any) -> Tensor:
        with NumPyShapes():
            return x.astype(dtype)

    # -- copying ----------------------------------------------------------------------------------

    def transfer(self, xs: list[Tensor], native: Any, *, copy: bool) -> list[Tensor]:
        with NumPyShapes():
            return [x.copyto(_empty_like(x, native) if type(x) in _DENSE else native) for x in xs]

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        with NumPyShapes():
            array: np.ndarray[Any, Any] = x.asnumpy()
        return array

    def from_dlpack(self, x: Any) -> Tensor:
        if isinstance(x, _NDArray):
            # In a capsule an array would lose its context, and its place in the engine's queue.
            return x.as_np_ndarray().detach()
        kind, index = x.__dlpack_device__()
        # MXNet would believe the memory of a device that it does not have.
        is_card = kind == ON_CUDA and self._devices.platform(gpu(index)) == "cuda"
        if kind != ON_CPU and not (is_card and index < self._devices.count()):
            raise BufferError(f"MXNet has no device of DLPack's type {int(kind)} and index {index}")
        with NumPyShapes():
            # An unversioned capsule has no flag for read-only memory, so that its owner refuses.
            return mx.nd.from_dlpack(x.__dlpack__()).as_np_ndarray()

    def dlpack_of(self, x: Tensor) -> Any:
        return Exported(x)

    # -- for logs ---------------------------------------------------------------------------------

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        with NumPySemantics():
            return mx.np.stack(xs)

    def norm(self, x: Tensor) -> Tensor:
        with NumPySemantics():
            return mx.np.linalg.norm(x)

    def detach(self, x: Tensor) -> Tensor:
        return x.detach()


class Exported:
    """An array of MXNet with the methods of DLPack's protocol, which came after it."""

    def __init__(self, x: Any) -> None:
        self._array = x

    def __dlpack_device__(self) -> tuple[int, int]:
        context = self._array.ctx
        # MXNet's capsules number the CPU's contexts, too.
        return (ON_CUDA if context.device_type == "gpu" else ON_CPU, context.device_id)

    def __dlpack__(self, **_: Any) -> Any:
        # MXNet returns when no queued operation reads or writes the memory. So the consumer's
        # stream need not wait. The capsules are unversioned.
        return self._array.to_dlpack_for_write()


def address_of(x: Any) -> int:
    """Return the address of an array's memory, when its queued operations are done.

    Without the wait, MXNet's engine and this call could each allocate memory for a new array. The
    operation would write into the one, and readers would get the other, which has no values.
    """
    x.wait_to_read()
    pointer = ctypes.c_void_p()
    mx.base.check_call(_library.MXNDArrayGetData(x.handle, ctypes.byref(pointer)))
    return pointer.value or 0


@cache  # NumPy builds the name in Python, which takes ten times as long as this cache
def _name_of(dtype: Any) -> str:
    return str(np.dtype(dtype).name)


def _empty(shape: tuple[int, ...], dtype: Any, native: Any) -> Any:
    """Return an array with memory, and without values.

    MXNet's operators allocate memory when they run, after the call. An error for lack of memory
    would then appear in any later call. So this function allocates the memory at once.
    """
    try:
        return mx.np.empty(shape, dtype=dtype, ctx=native)
    except Exception as error:  # of several kinds, some from before MXNet is called
        if math.prod(shape) < _TOO_MANY:
            raise
        raise MemoryError(
            f"no more than {_TOO_MANY - 1} elements fit into an array of MXNet's wheels"
        ) from error


def _empty_like(x: Any, native: Any) -> Any:
    """Return an array like another as ``_empty`` does, in half of the time.

    Shape and dtype go from one call of MXNet's to the next, and never become Python's.
    """
    ndim, shape, dtype = ctypes.c_int(), ctypes.POINTER(ctypes.c_int)(), ctypes.c_int()
    made = mx.base.NDArrayHandle()
    mx.base.check_call(
        _library.MXNDArrayGetShapeEx(x.handle, ctypes.byref(ndim), ctypes.byref(shape))
    )
    mx.base.check_call(_library.MXNDArrayGetDType(x.handle, ctypes.byref(dtype)))
    place = (native.device_typeid, native.device_id)
    mx.base.check_call(
        _library.MXNDArrayCreateEx(shape, ndim, *place, 0, dtype, ctypes.byref(made))
    )
    return type(x)(made)
