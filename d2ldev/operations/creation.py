"""Tensors made on a device, with no detour: never made elsewhere and copied.

Source: D2L, section 6.7.2.1, "Storage on the GPU"; names and signatures are those of the Python
array API standard, 2024.12.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from d2ldev.device import CPU
from d2ldev.errors import D2LDevError, UnsupportedValueError, describe, shown
from d2ldev.operations.arguments import as_shape
from d2ldev.operations.moving import Moving
from d2ldev.primitives import DeviceLike, DType, Shape, Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Creation(Moving):
    """The part of the contract that makes tensors."""

    def asarray(
        self, obj: Any, *, dtype: DType = None, device: DeviceLike = None, like: Tensor = None
    ) -> Tensor:
        """A tensor with the values of ``obj``.

        Args:
            obj: a number, a nesting of lists, a NumPy array or scalar, anything with
                ``__array__``, or a tensor of this backend. NumPy memory is never aliased.
            dtype: None keeps NumPy's, and is the framework's default for numbers.
            device: None is the scope's device, else the CPU; a tensor stays where it is.
            like: a tensor that gives dtype and device where they are not given.

        Returns:
            A new tensor; a tensor that already is as asked for comes back itself.

        Raises:
            UnsupportedValueError: for object arrays, strings, ragged lists, and dtypes that
                the framework does not have.
            DeviceUnavailableError, OutOfDeviceMemoryError: see ``zeros``.
        """
        attempted = "make a tensor of data"
        if isinstance(obj, self.tensor_types):
            return self._convert(obj, dtype, device, like)
        native_dtype, native = self._destination(attempted, dtype, device, like)
        try:
            return self._from_data(self._checked_data(obj, attempted), native_dtype, native)
        except UnsupportedValueError:
            raise
        except Exception as error:
            raise self._refused(error, f"{attempted}, {describe(obj)}", native) from error

    def zeros(
        self,
        shape: Shape,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """A tensor of zeros, made on the device.

        Args:
            shape: an integer or a sequence of them.
            dtype: None is the framework's default, float32.
            device: None is the scope's device, else the CPU.
            like: a tensor that gives dtype and device where they are not given.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if the device's memory does not suffice.
            InvalidDeviceError, UnsupportedValueError: for what is no device or no dtype.
        """
        return self._made(self._zeros, shape, dtype, device, like)

    def ones(
        self,
        shape: Shape,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """A tensor of ones, made on the device; see ``zeros``."""
        return self._made(self._ones, shape, dtype, device, like)

    def full(
        self,
        shape: Shape,
        fill_value: float | complex,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """A tensor filled with a number, made on the device; see ``zeros``.

        ``dtype=None`` is the framework's default for that number, as in ``asarray``.
        """

        def make(shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
            return self._full(shape, fill_value, dtype, native)

        return self._made(make, shape, dtype, device, like)

    def arange(
        self,
        start: float,
        stop: float | None = None,
        step: float = 1,
        *,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """The numbers ``start, start + step, ...`` up to ``stop``, made on the device.

        Args:
            start: the first number; the only one given is ``stop``, and it starts from 0.
            stop: not included.
            step: the distance of two neighbours.
            dtype, device, like: see ``zeros``; None is the framework's default for the numbers.

        Returns:
            A tensor of shape ``(ceil((stop - start) / step),)``.
        """
        if stop is None:
            start, stop = 0, start
        dtype, native = self._destination("make a tensor", dtype, device, like)
        try:
            if step and (stop - start) / step <= 0:
                stop = start  # empty, as the standard says; torch raises
            return self._arange(start, stop, step, dtype, native)
        except Exception as error:
            attempted = f"make the range from {shown(start)} to {shown(stop)} by {shown(step)}"
            raise self._refused(error, attempted, native) from error

    def rand(
        self,
        shape: Shape,
        *,
        seed: int | None = None,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """Random numbers, uniform in [0, 1), made on the device; see ``zeros``.

        Args:
            seed: None draws from the framework's own random state. With a seed, that state
                is left alone, and the same seed gives the same numbers on the same device.
        """
        return self._randomly("uniform", shape, seed, dtype, device, like)

    def randn(
        self,
        shape: Shape,
        *,
        seed: int | None = None,
        dtype: DType = None,
        device: DeviceLike = None,
        like: Tensor = None,
    ) -> Tensor:
        """Random numbers, normal with mean 0 and deviation 1; see ``rand``."""
        return self._randomly("normal", shape, seed, dtype, device, like)

    def _made(
        self,
        make: Callable[[tuple[int, ...], Any, Any], Tensor],
        shape: Shape,
        dtype: DType,
        device: DeviceLike,
        like: Tensor,
    ) -> Tensor:
        native = None
        if dtype is None and like is None:
            try:  # noqa: SIM105  # ``suppress`` would cost 10 % of the call
                native = self._natives.get(device)  # the common call, without a detour
            except Exception:  # noqa: S110  # not hashable, so no device: said below
                pass
        if native is None:
            dtype, native = self._destination("make a tensor", dtype, device, like)
        if type(shape) is not tuple:
            shape = as_shape(shape)
        try:
            return make(shape, dtype, native)
        except Exception as error:
            raise self._refused(error, f"make a tensor of shape {shape}", native) from error

    def _randomly(
        self,
        distribution: str,
        shape: Shape,
        seed: int | None,
        dtype: DType,
        device: DeviceLike,
        like: Tensor,
    ) -> Tensor:
        dtype, native = self._destination("make a random tensor", dtype, device, like)
        sizes = as_shape(shape)
        attempted = f"make a random tensor of shape {sizes} with seed {shown(seed)}"
        try:
            number = None if seed is None else operator.index(seed)
            return self._random(distribution, sizes, number, dtype, native)
        except Exception as error:
            raise self._refused(error, attempted, native) from error

    def dtype(self, spec: DType) -> Any:
        """The framework's own dtype for a name, its own dtype, or NumPy's.

        Raises:
            UnsupportedValueError: if the framework does not have it.
        """
        # NumPy's dtypes have a ``name``, its scalar classes a ``__name__``, in NumPy 1 ``bool_``.
        name = spec if isinstance(spec, str) else getattr(spec, "name", None)
        if not isinstance(name, str):
            name = getattr(spec, "__name__", None)
        if isinstance(name, str) and (name := name.removesuffix("_")) in self.dtype_names:
            return self._native_dtype(name)
        if any(spec is self._native_dtype(name) for name in self.dtype_names):
            return spec
        raise UnsupportedValueError(
            f"use {shown(spec)} as a dtype",
            f"{self.name} has no such dtype",
            f"one of {', '.join(self.dtype_names)}",
        )

    def _refused(self, error: Exception, attempted: str, native: Any) -> D2LDevError:
        """What an exception of the framework's means: memory ran out, or it refuses a value."""
        if self._is_out_of_memory(error):
            return self._out_of_memory(error, attempted, native)
        return UnsupportedValueError(
            attempted,
            f"{self.name} says: {type(error).__name__}: {error}",
            "sizes from 0 on, numbers in a rectangular nesting, and a dtype that holds them",
        )

    def _destination(
        self, attempted: str, dtype: DType, device: DeviceLike, like: Tensor
    ) -> tuple[Any, Any]:
        """The native dtype (or None) and the native device of a new tensor."""
        if like is not None:
            if device is None:
                device = self.device_of(like)
            if dtype is None:
                dtype = self.dtype_of(like)
        if device is None:
            device = self._scope.get() or CPU
        return (
            None if dtype is None else self.dtype(dtype),
            self._existing(device, attempted)[1],
        )

    def _convert(self, x: Tensor, dtype: DType, device: DeviceLike, like: Tensor) -> Tensor:
        """``asarray`` of a tensor: nothing happens that was not asked for."""
        if like is not None:
            dtype = self.dtype_of(like) if dtype is None else dtype
            device = self.device_of(like) if device is None else device
        if device is not None:
            x = self.to(x, device)
        wanted = None if dtype is None else self.dtype(dtype)
        if wanted is None or wanted is self._native_dtype(self.dtype_of(x)):
            return x
        try:
            return self._astype(x, wanted)
        except Exception as error:
            attempted = f"convert a tensor of {self.dtype_of(x)} to {wanted}"
            raise self._refused(error, attempted, self._native(self.device_of(x))) from error

    def _checked_data(self, obj: Any, attempted: str) -> Any:
        """Numbers as they are; anything that NumPy has to read as an array that can be taken."""
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
        if self._data_dtype(array.dtype.name) not in self.dtype_names:
            raise UnsupportedValueError(
                attempted,
                f"{describe(obj)} is an array of {array.dtype.name}, which {self.name} has not",
                f"obj.astype('float32'), or another of {', '.join(self.dtype_names)}",
            )
        if isinstance(obj, (list, tuple)):
            return obj
        # The machine's byte order, no negative strides: what every framework can read.
        native_order: np.dtype[Any] = array.dtype.newbyteorder("=")
        return np.ascontiguousarray(array, native_order).reshape(array.shape)
