"""Between MXNet and NumPy: copies in both directions, and numbers that MXNet cannot make itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from d2ldev_mxnet.framework import NumPyShapes, mx
from d2ldev_mxnet.memory import memory_of_the_machine

# MXNet hands numbers to its operators as doubles.
_EXACT = 2**53
# They are built without ``USE_INT64_TENSOR_SIZE``.
_TOO_MANY = 2**31


def from_data(obj: Any, dtype: Any, context: Any) -> Any:
    """A new array with the values of a number, nested lists, or a NumPy array."""
    data = np.asarray(obj)
    if dtype is None:
        python_float = data.dtype == np.float64 and not hasattr(obj, "dtype")
        dtype = "float32" if python_float else data.dtype
    x = empty(data.shape, dtype, context)
    with NumPyShapes():
        # It returns when the values are copied, so that nothing of ``obj`` is read later.
        x._sync_copyfrom(data)
    return x


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """The values of an array, wherever it is, in an array of its own."""
    with NumPyShapes():
        array: np.ndarray[Any, Any] = x.asnumpy()
    return array


def empty(shape: tuple[int, ...], dtype: Any, context: Any) -> Any:
    """An array with its memory, but without values.

    MXNet's operators take their memory when they run, after the call: that there is too little
    would come out at any later call. Here it is taken at once, and operators are given it.
    """
    try:
        return mx.np.empty(shape, dtype=dtype, ctx=context)
    except Exception as error:  # of several kinds, some from before MXNet is called
        if math.prod(shape) < _TOO_MANY:
            raise
        problem = f"no more than {_TOO_MANY - 1} elements fit into an array of MXNet's wheels"
        if math.prod(shape) * np.dtype(dtype).itemsize > memory_of_the_machine():
            raise MemoryError(problem) from error
        raise ValueError(problem) from error


def is_exact(*numbers: Any) -> bool:
    """Whether MXNet's operators take these numbers without rounding them."""
    return not any(isinstance(n, (int, np.integer)) and abs(int(n)) > _EXACT for n in numbers)


def number_dtype(*numbers: Any) -> str:
    """The dtype of numbers that came without one: MXNet would make all of them float32."""
    if all(isinstance(number, (bool, np.bool_)) for number in numbers):
        return "bool"
    integers = all(isinstance(number, (int, np.integer, np.bool_)) for number in numbers)
    return "int64" if integers else "float32"


def seeded(distribution: str, shape: tuple[int, ...], seed: int, dtype: Any) -> Any:
    """Random numbers from NumPy, for a seed.

    MXNet's generators are one to each device, and their state can be neither read nor put back,
    so that to seed one is to change what the user draws from it next. NumPy's numbers go
    straight into the device's memory.
    """
    generator = np.random.Generator(np.random.PCG64(seed % 2**64))
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    if distribution == "normal":
        return generator.standard_normal(shape, wide).astype(dtype)
    if np.dtype(dtype) == np.float16:
        # Rounded to 11 bits, a float32 just below 1 would be 1.
        return (generator.integers(0, 2**11, shape) / 2**11).astype(dtype)
    return generator.random(shape, wide)


def full(shape: tuple[int, ...], value: int, dtype: Any, context: Any) -> Any:
    """A tensor filled with a number that MXNet would round."""
    return from_data(np.full(shape, value, dtype), dtype, context)


def arange(start: Any, stop: Any, step: Any, dtype: Any, context: Any) -> Any:
    """A range of numbers that MXNet would round."""
    return from_data(np.arange(start, stop, step, dtype=dtype), dtype, context)
