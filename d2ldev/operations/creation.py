"""Tensors made on a device, with no detour: never made elsewhere and copied.

Source: D2L, section 6.7.2.1, "Storage on the GPU"; names and signatures are those of the Python
array API standard, 2024.12.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from d2ldev.errors import D2LDevError, UnsupportedValueError, describe, shown
from d2ldev.framework import DeviceLike, DType, Framework, Shape, Tensor
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations import devices
from d2ldev.operations.arguments import as_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Make = Callable[[tuple[int, ...], Any, Any], Tensor]
"""``(shape, native dtype or None, native device) -> tensor``."""


def require_tensor(framework: Framework, x: Any, attempted: str) -> None:
    """Raise an ``UnsupportedValueError`` unless ``x`` is a tensor of the framework."""
    if framework.kinds[type(x)] is not TENSOR:
        raise UnsupportedValueError(
            attempted,
            f"{describe(x)} is no tensor of the {framework.name} backend",
            "x = backend.asarray(x) makes a tensor",
        )


def dtype_of(framework: Framework, x: Tensor) -> str:
    """Return the name of a tensor's dtype; see ``Backend.dtype_of``."""
    require_tensor(framework, x, "tell the dtype of a tensor")
    return framework.tensors.dtype_of(x)


def made(
    framework: Framework,
    make: Make,
    shape: Shape,
    dtype: DType,
    device: DeviceLike,
    like: Tensor,
) -> Tensor:
    """Make a tensor of a shape; see ``Backend.zeros``."""
    native = None
    if dtype is None and like is None:
        try:  # noqa: SIM105  # ``suppress`` would cost 10 % of the call
            native = framework.known_natives.get(device)  # the common call, without a detour
        except Exception:  # noqa: S110  # not hashable, so no device: raised below
            pass
    if native is None:
        dtype, native = destination(framework, "make a tensor", dtype, device, like)
    if type(shape) is not tuple:
        shape = as_shape(shape)
    try:
        return make(shape, dtype, native)
    except Exception as error:
        attempted = f"make a tensor of shape {shape}"
        raise refused(framework, error, attempted, native) from error


def arange(
    framework: Framework,
    start: Any,
    stop: Any,
    step: Any,
    dtype: DType,
    device: DeviceLike,
    like: Tensor,
) -> Tensor:
    """Make a range of numbers; see ``Backend.arange``."""
    if stop is None:
        start, stop = 0, start
    dtype, native = destination(framework, "make a tensor", dtype, device, like)
    try:
        if step and (stop - start) / step <= 0:
            stop = start  # empty, as the standard says; torch raises
        return framework.tensors.arange(start, stop, step, dtype, native)
    except Exception as error:
        attempted = f"make the range from {shown(start)} to {shown(stop)} by {shown(step)}"
        raise refused(framework, error, attempted, native) from error


def random(
    framework: Framework,
    distribution: str,
    shape: Shape,
    seed: int | None,
    dtype: DType = None,
    device: DeviceLike = None,
    like: Tensor = None,
) -> Tensor:
    """Draw random numbers, ``'uniform'`` or ``'normal'`` ones; see ``Backend.rand``."""
    dtype, native = destination(framework, "make a random tensor", dtype, device, like)
    sizes = as_shape(shape)
    attempted = f"make a random tensor of shape {sizes} with seed {shown(seed)}"
    try:
        number = None if seed is None else operator.index(seed)
        return framework.tensors.random(distribution, sizes, number, dtype, native)
    except Exception as error:
        raise refused(framework, error, attempted, native) from error


def asarray(
    framework: Framework, obj: Any, dtype: DType, device: DeviceLike, like: Tensor
) -> Tensor:
    """Make a tensor with the values of ``obj``, which is no tensor; see ``Backend.asarray``."""
    attempted = "make a tensor of data"
    native_dtype, native = destination(framework, attempted, dtype, device, like)
    try:
        data = _checked_data(framework, obj, attempted)
        return framework.tensors.from_data(data, native_dtype, native)
    except UnsupportedValueError:
        raise
    except Exception as error:
        raise refused(framework, error, f"{attempted}, {describe(obj)}", native) from error


def dtype(framework: Framework, spec: DType) -> Any:
    """Return the framework's own dtype; see ``Backend.dtype``."""
    tensors = framework.tensors
    name = spec.removesuffix("_") if isinstance(spec, str) else tensors.dtype_name(spec)
    if name is not None and name in tensors.dtype_names:
        return tensors.dtype(name)
    if any(spec is tensors.dtype(known) for known in tensors.dtype_names):
        return spec
    fix = tensors.dtype_fix(name or "")
    raise UnsupportedValueError(
        f"use {shown(spec)} as a dtype",
        f"{framework.name} has no such dtype{' now' if fix else ''}",
        f"{fix}{', or ' if fix else ''}one of {', '.join(tensors.dtype_names)}",
    )


def destination(
    framework: Framework, attempted: str, dtype_spec: DType, device: DeviceLike, like: Tensor
) -> tuple[Any, Any]:
    """Return the native dtype (or None) and the native device of a new tensor."""
    if like is not None:
        if device is None:
            device = framework.tensors.device_of(like)
        if dtype_spec is None:
            dtype_spec = dtype_of(framework, like)
    native_dtype = None if dtype_spec is None else dtype(framework, dtype_spec)
    place = devices.current(framework) if device is None else device
    place = devices.existing(framework, place, attempted)
    return native_dtype, devices.native(framework, place, attempted)


def refused(framework: Framework, error: Exception, attempted: str, native: Any) -> D2LDevError:
    """Return d2ldev's error for a framework's exception: memory ran out, or it refuses a value."""
    if framework.devices.is_out_of_memory(error):
        return devices.out_of_memory(framework, error, attempted, native)
    return UnsupportedValueError(
        attempted,
        f"{framework.name} says: {type(error).__name__}: {error}",
        "sizes from 0 on, numbers in a rectangular nesting, and a dtype that holds them",
    )


def _checked_data(framework: Framework, obj: Any, attempted: str) -> Any:
    """Return numbers as they are, and everything else as a NumPy array that can be taken."""
    if isinstance(obj, (bool, int, float, complex)):
        return obj
    import numpy as np

    try:
        array: NDArray[Any] = np.asarray(obj)
    except Exception as error:  # ragged lists, and whatever an ``__array__`` raises
        raise UnsupportedValueError(
            attempted,
            f"NumPy makes no array of {describe(obj)} {error}",
            "pad a ragged list to one length, or make a tensor of each row",
        ) from error
    names = framework.tensors.dtype_names
    if framework.tensors.data_dtype(array.dtype.name) not in names:
        raise UnsupportedValueError(
            attempted,
            f"{describe(obj)} is an array of {array.dtype.name}, which {framework.name} has not",
            f"obj.astype('float32'), or another of {', '.join(names)}",
        )
    if isinstance(obj, (list, tuple)):
        return obj
    # The machine's byte order, no negative strides: what every framework can read.
    native_order: np.dtype[Any] = array.dtype.newbyteorder("=")
    return np.ascontiguousarray(array, native_order).reshape(array.shape)
