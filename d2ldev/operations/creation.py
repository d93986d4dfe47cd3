"""Tensors made on a device, with no detour: never made elsewhere and copied.

Source: D2L, section 6.7.2.1, "Storage on the GPU"; names and signatures come from the Python
array API standard, 2024.12.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from math import prod
from numbers import Number
from typing import TYPE_CHECKING, Any

from d2ldev.contract import DeviceLike, DTypeLike, Framework, Shape, Tensor
from d2ldev.errors import (
    D2LDevError,
    NotBegunError,
    UnsupportedValueError,
    describe,
    quote,
    text_of,
)
from d2ldev.nesting.kinds import TENSOR
from d2ldev.operations import devices, values
from d2ldev.operations.arguments import MOST_ELEMENTS, as_shape
from d2ldev.operations.other_backends import of_another_backend
from d2ldev.options import nearest

if TYPE_CHECKING:
    from numpy.typing import NDArray

Make = Callable[[tuple[int, ...], Any, Any], Tensor]
"""``(shape, native dtype or None, native device) -> tensor``."""

# Python's kinds of numbers. One that comes later holds those before it, as ``[True, 2, 0.5]`` does.
# The data of 64 bits, each with what it becomes in a framework that has none.
_NARROW = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}
_NUMBERS = (bool, int, float, complex)
_PLAIN_NUMBERS = frozenset(_NUMBERS)
_SEQUENCES = (list, tuple, range)
# The largest integer up to which float64 has all of them.
_EXACT = 2**53
# Every default dtype of floats has the floats that are smaller.
_SMALL = 6e4


def require_tensor(framework: Framework, x: Any, attempted: str) -> None:
    """Raise an ``UnsupportedValueError`` unless ``x`` is a tensor of the framework."""
    if framework.state.kinds[type(x)] is not TENSOR:
        fix = "x = backend.asarray(x) makes a tensor"
        raise of_another_backend(framework, attempted, x) or UnsupportedValueError(
            attempted, f"{describe(x)} is not a tensor of the {framework.name} backend", fix
        )


def dtype_of(framework: Framework, x: Tensor) -> str:
    """Return the name of a tensor's dtype; see ``Backend.dtype_of``."""
    require_tensor(framework, x, "tell the dtype of a tensor")
    return framework.tensors.dtype_of(x)


def shape_of(x: Tensor, attempted: str, *, is_known: bool = True) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Args:
        x: the tensor.
        attempted: what fails if it has none.
        is_known: whether each length has to be a number. Else None stands for another one: rows of
            several lengths, or a function that is traced.

    Raises:
        UnsupportedValueError: if it has none: nested tensors, and parameters that wait for one.
    """
    try:
        sizes = tuple(x.shape)
        if all(isinstance(size, int) for size in sizes):
            return sizes
        if not is_known:
            lengths: tuple[Any, ...] = tuple(x if isinstance(x, int) else None for x in sizes)
            return lengths
        problem = f"its shape is {quote(sizes)}"
    except Exception as error:  # each kind of tensor says it in its own way
        problem = f"it has no shape: {quote(text_of(error))}"
    raise UnsupportedValueError(
        attempted, problem, "give a dense tensor of a dtype in backend.dtype_names"
    )


def make_tensor(
    framework: Framework,
    make: Make,
    shape: Shape,
    dtype: DTypeLike | None,
    device: DeviceLike,
    like: Tensor,
) -> Tensor:
    """Make a tensor of a shape; see ``Backend.zeros``."""
    native = None
    if dtype is None and like is None:
        try:  # noqa: SIM105  # ``suppress`` would cost 10 % of the call
            native = framework.state.known_natives.get(device)  # the common call, without a detour
        except Exception:  # noqa: S110  # not hashable, so no device: raised below
            pass
    if native is None:
        dtype, native = destination(framework, "make a tensor", dtype, device, like)
    try:
        if type(shape) is not tuple or not 0 < prod(shape) <= MOST_ELEMENTS:
            shape = as_shape(shape)
        return make(shape, dtype, native)
    except (NotBegunError, UnsupportedValueError):
        raise
    except Exception as error:
        attempted = f"make a tensor of shape {quote(shape)}"
        fix = "backend.zeros((2, 3), dtype='float32'), of another shape or dtype"
        raise refusal(framework, error, attempted, native, fix) from error


def make_like(
    framework: Framework, make: Make, x: Tensor, dtype: DTypeLike | None, device: DeviceLike
) -> Tensor:
    """Make a tensor of the shape of another one; see ``Backend.zeros_like``."""
    attempted = "make a tensor like another one"
    require_tensor(framework, x, attempted)
    return make_tensor(framework, make, shape_of(x, attempted), dtype, device, x)


def arange(
    framework: Framework,
    start: Any,
    stop: Any,
    step: Any,
    dtype: DTypeLike | None,
    device: DeviceLike,
    like: Tensor,
) -> Tensor:
    """Make a range of numbers; see ``Backend.arange``."""
    if stop is None:
        start, stop = 0, start
    dtype, native = destination(framework, "make a tensor", dtype, device, like)
    if not type(start) is type(stop) is type(step) is int:
        attempted = f"make the range from {quote(start)} to {quote(stop)} by {quote(step)}"
        start, stop, step = (_as_number(number, attempted) for number in (start, stop, step))
    are_integers = type(start) is type(stop) is type(step) is int
    if dtype is None:
        dtype = _default_dtype(framework, int if are_integers else float)
    try:
        if step and (stop - start) / step <= 0:
            stop = start  # empty, as the standard says; torch raises
        elif not are_integers:
            for number in _landmarks(start, stop, step):
                values.check_number(framework, number, dtype, "make a range of numbers")
        else:
            numbers = range(start, stop, step)
            for number in (start, numbers[-1]):
                values.check_number(framework, number, dtype, "make a range of numbers")
            if max(-start, -stop, -step, start, stop, step) > _EXACT:
                array = _count_exactly(numbers)
                if array is not None:
                    return framework.tensors.from_data(array, dtype, native)
        return framework.tensors.arange(start, stop, step, dtype, native)
    except (NotBegunError, UnsupportedValueError):
        raise
    except Exception as error:
        attempted = f"make the range from {quote(start)} to {quote(stop)} by {quote(step)}"
        fix = "backend.arange(0, 10, 2, dtype='int32'), with other numbers or another dtype"
        raise refusal(framework, error, attempted, native, fix) from error


def _landmarks(start: float, stop: float, step: float) -> list[float]:
    """Return the first two numbers of a range and the last one: a dtype has all, or not these."""
    last = math.ceil((stop - start) / step) - 1
    return [start + number * step for number in (0, min(1, last), last)]


def _count_exactly(numbers: range) -> NDArray[Any] | None:
    """Return integers of 64 bits, which frameworks count in floats; None for others, and too many.

    Made on the host: no framework has exact arithmetic for all of them on its devices.
    """
    import numpy as np

    least, greatest = sorted((numbers[0], numbers[-1]))
    dtype = np.uint64 if least >= 0 else np.int64
    limits = np.iinfo(dtype)
    count = abs((greatest - least) // numbers.step) + 1
    if least < limits.min or greatest > limits.max or count > _EXACT:
        return None
    steps = np.arange(count, dtype=np.uint64)  # modulo 2**64, as everything is here
    return (steps * np.uint64(numbers.step % 2**64) + np.uint64(numbers[0] % 2**64)).view(dtype)


def full(
    framework: Framework,
    shape: Shape,
    value: Any,
    dtype: DTypeLike | None,
    device: DeviceLike,
    like: Tensor,
) -> Tensor:
    """Make a tensor filled with a number; see ``Backend.full``."""
    return make_tensor(framework, _filler(framework, value), shape, dtype, device, like)


def full_like(
    framework: Framework, x: Tensor, value: Any, dtype: DTypeLike | None, device: DeviceLike
) -> Tensor:
    """Make a tensor of the shape of another one; see ``Backend.full_like``."""
    return make_like(framework, _filler(framework, value), x, dtype, device)


def _filler(framework: Framework, value: Any) -> Make:
    """Return a function that fills a tensor with a number, if its dtype holds it."""

    def make(shape: tuple[int, ...], dtype: Any, native: Any) -> Tensor:
        number, attempted = value, "make a tensor"
        if type(value) is not float or dtype is not None or not -_SMALL < value < _SMALL:
            if type(value).__module__ == "numpy":
                if dtype is None:
                    dtype = _data_dtype(framework, value, value, attempted)
                number = value.item()
            if framework.state.kinds[type(number)] is TENSOR:
                if dtype is not None:
                    values.check_tensor(framework, number, dtype, attempted)
            elif isinstance(number, Number):
                if not isinstance(number, _NUMBERS):  # a fraction, a decimal number
                    number = float(number)  # type: ignore[arg-type]
                dtype = _dtype_of_number(framework, number, dtype, attempted)
                if type(number) is int and abs(number) >= 2**63:
                    # Some frameworks take no larger integer for a float.
                    number = values.as_float(framework, number, dtype)
            else:
                # TensorFlow ends the process where a nesting is deep.
                raise UnsupportedValueError(
                    attempted, f"{describe(value)} is not a number", "backend.full((2, 3), 1.0)"
                )
        return framework.tensors.full(shape, number, dtype, native)

    return make


def random(
    framework: Framework,
    distribution: str,
    shape: Shape,
    seed: int | None,
    dtype: DTypeLike | None = None,
    device: DeviceLike = None,
    like: Tensor = None,
) -> Tensor:
    """Draw random numbers, ``'uniform'`` or ``'normal'`` ones; see ``Backend.rand``."""
    dtype, native = destination(framework, "make a random tensor", dtype, device, like)
    try:
        number = None if seed is None else operator.index(seed)
        return framework.tensors.random(distribution, as_shape(shape), number, dtype, native)
    except (NotBegunError, UnsupportedValueError):
        raise
    except Exception as error:
        attempted = f"make a random tensor of shape {quote(shape)} with seed {quote(seed)}"
        fix = "backend.rand((2, 3), seed=0, dtype='float32'): an integer seed, and a float dtype"
        raise refusal(framework, error, attempted, native, fix) from error


def asarray(
    framework: Framework,
    obj: Any,
    dtype: DTypeLike | None,
    device: DeviceLike,
    copy: bool | None,
    like: Tensor,
) -> Tensor:
    """Make a tensor with the values of ``obj``, which is not a tensor; see ``Backend.asarray``."""
    attempted = "make a tensor of data"
    if copy is not None and not copy:
        raise UnsupportedValueError(
            f"{attempted} with copy=False",
            f"{describe(obj)} is not a tensor of the {framework.name} backend, and its memory is "
            "never aliased",
            "x = backend.from_dlpack(x) shares its memory"
            if hasattr(obj, "__dlpack__")
            else "leave copy out: backend.asarray(obj)",
        )
    native_dtype, native = destination(framework, attempted, dtype, device, like)
    try:
        if type(obj) in _NUMBERS:
            native_dtype = _dtype_of_number(framework, obj, native_dtype, attempted)
            return framework.tensors.from_data(obj, native_dtype, native)
        array, native_dtype = _check_array(framework, obj, native_dtype, attempted)
        return framework.tensors.from_data(array, native_dtype, native)
    except UnsupportedValueError as error:
        if hasattr(obj, "__array__"):
            raise
        raise of_another_backend(framework, attempted, obj) or error from error.__cause__
    except NotBegunError:
        raise
    except Exception as error:
        fix = "backend.asarray(obj, dtype='float32'), or another dtype that holds its values"
        raise refusal(framework, error, f"{attempted}, {describe(obj)}", native, fix) from error


def dtype(framework: Framework, spec: DTypeLike) -> Any:
    """Return the framework's own dtype; see ``Backend.dtype``."""
    tensors = framework.tensors
    name = _name_of_dtype(spec)
    if name in tensors.dtype_names:
        return tensors.dtype(name)
    for each in map(tensors.dtype, tensors.dtype_names):
        if type(spec) is type(each) and spec == each:  # a tensor may have a dtype object of its own
            return each
    fix, names = values.find_switch(tensors, name), tensors.dtype_names
    raise UnsupportedValueError(
        f"use {quote(spec)} as a dtype",
        f"{framework.name} has no such dtype{' as it is set up' if fix else ''}; it has "
        f"{', '.join(names)}",
        fix or f"dtype={nearest(spec, names) or 'float32'!r}",
    )


def _name_of_dtype(spec: Any) -> str:
    """Return the name that a user's dtype has; empty for none."""
    # NumPy's dtypes have a ``name``, its scalar classes a ``__name__``, in NumPy 1 ``bool_``.
    names = (spec, getattr(spec, "name", None), getattr(spec, "__name__", None))
    return next((name.removesuffix("_") for name in names if isinstance(name, str)), "")


def destination(
    framework: Framework,
    attempted: str,
    dtype_spec: DTypeLike | None,
    device: DeviceLike,
    like: Tensor,
) -> tuple[Any, Any]:
    """Return the native dtype (or None) and the native device of a new tensor."""
    if like is not None:
        require_tensor(framework, like, attempted)
        if device is None:
            device = framework.tensors.device_of(like)
        if dtype_spec is None:
            dtype_spec = framework.tensors.dtype_of(like)
    native_dtype = None if dtype_spec is None else dtype(framework, dtype_spec)
    place = devices.current(framework) if device is None else device
    place = devices.resolve(framework, place, attempted)
    return native_dtype, devices.native(framework, place, attempted)


def refusal(
    framework: Framework, error: Exception, attempted: str, native: Any, fix: str
) -> D2LDevError:
    """Return d2ldev's error for a framework's exception: memory ran out, or it refuses a value."""
    if framework.devices.is_out_of_memory(error):
        return devices.out_of_memory(framework, error, attempted, native)
    return UnsupportedValueError(
        attempted,
        f"{framework.name} says: {type(error).__name__}: {text_of(error)}",
        fix,
        [framework.devices.from_native(native)],
    )


def _as_number(number: Any, attempted: str) -> int | float:
    """Return a number of a range as Python's, also one of NumPy's or a scalar tensor."""
    try:
        if isinstance(number, (str, bytes, bytearray)):  # which ``float`` would read
            raise TypeError
        try:
            return operator.index(number)
        except Exception:  # TensorFlow's scalars raise an ``AttributeError``
            return float(number)
    except Exception as error:  # whatever a value's own ``__float__`` raises
        raise UnsupportedValueError(
            attempted, f"{describe(number)} is not a real number", "backend.arange(0, 10, 2)"
        ) from error


def _default_dtype(framework: Framework, cls: type) -> Any:
    """Return the native dtype that Python's numbers of a kind get."""
    tensors = framework.tensors
    if issubclass(cls, int):
        return tensors.dtype("bool" if issubclass(cls, bool) else tensors.default_dtypes[0])
    floats = tensors.default_dtypes[1]
    if issubclass(cls, float):
        return tensors.dtype(floats)
    # Not every framework has them.
    return dtype(framework, "complex128" if floats == "float64" else "complex64")


def _dtype_of_number(framework: Framework, number: Any, dtype: Any, attempted: str) -> Any:
    """Return the native dtype of a number, None for its default, which holds it."""
    if dtype is None:
        dtype = _default_dtype(framework, type(number))
    values.check_number(framework, number, dtype, attempted)
    return dtype


def _check_array(
    framework: Framework, obj: Any, native_dtype: Any, attempted: str
) -> tuple[NDArray[Any], Any]:
    """Return data as a NumPy array that can be taken, and the native dtype; None is the array's."""
    import numpy as np

    try:
        if isinstance(obj, (list, tuple)):
            _check_size(obj)
        array: NDArray[Any] = np.asarray(obj)
    except Exception as error:  # ragged lists, and whatever an ``__array__`` raises
        raise UnsupportedValueError(
            attempted,
            f"NumPy cannot make an array of {describe(obj).removesuffix(',')}: {text_of(error)}",
            "pad a ragged list to one length, or make a tensor of each row",
        ) from error
    classes = _classes_in(obj) if isinstance(obj, _SEQUENCES) else {type(obj)}
    is_list = classes <= _PLAIN_NUMBERS or (
        type(obj) is not np.ndarray and all(issubclass(c, (*_NUMBERS, np.generic)) for c in classes)
    )
    if is_list and not any(issubclass(cls, np.generic) for cls in classes):
        # Python's numbers alone, which NumPy would make as wide as it can.
        kinds = {next(kind for kind in _NUMBERS if issubclass(cls, kind)) for cls in classes}
        kind = max(kinds, key=_NUMBERS.index, default=float)
        if native_dtype is None:
            native_dtype = _default_dtype(framework, kind)
    if native_dtype is not None and array.size and array.dtype.kind not in "bi":
        are_integers = all(issubclass(cls, (int, np.integer)) for cls in classes)
        if are_integers and not isinstance(obj, np.generic):
            # NumPy makes floats or objects of numbers from 2**63 on that stand among smaller ones.
            array = values.exact(framework, np.array(obj, object), native_dtype, attempted)
    if native_dtype is not None and array.dtype.kind in "biufc":
        values.check_array(framework, array, native_dtype, attempted, is_list=is_list)
    own_dtype = _data_dtype(framework, obj, array, attempted)
    if native_dtype is None and array.dtype.name not in framework.tensors.dtype_names:
        native_dtype = own_dtype
        values.check_array(framework, array, native_dtype, attempted, is_list=False)
    # Every framework can read the machine's byte order without negative strides. Some look for the
    # class of an integer, and ``numpy.longlong`` is another class than int64.
    plain: np.dtype[Any] = array.dtype.newbyteorder("=")
    if plain.kind in "iu":
        plain = np.dtype(plain.name)
    return np.ascontiguousarray(array, plain).reshape(array.shape), native_dtype


def _data_dtype(framework: Framework, obj: Any, array: Any, attempted: str) -> Any:
    """Return the native dtype that an array's values get if none is asked for.

    A framework without 64 bits gets their 32: JAX.
    """
    tensors, name = framework.tensors, array.dtype.name
    if name not in tensors.dtype_names:
        name = _NARROW.get(name, name)
    if name not in tensors.dtype_names:
        fix = "backend.asarray([2.5]): a number, an array, or nested lists of numbers"
        if hasattr(obj, "astype"):
            fix = "backend.asarray(obj.astype('float32'))"
        elif array.shape:
            fix = "backend.asarray(np.asarray(obj, 'float32'))"
        elif array.dtype == object and hasattr(obj, "__iter__"):
            # A set or a generator is one object to NumPy.
            fix = "backend.asarray(list(obj))"
        raise UnsupportedValueError(
            attempted,
            f"NumPy makes an array of dtype {array.dtype.name} of {describe(obj)} and "
            f"{framework.name} has only {', '.join(tensors.dtype_names)}",
            fix,
        )
    return tensors.dtype(name)


def _check_size(sequence: Any) -> None:
    """Refuse nested sequences with more elements than fit anywhere, which NumPy would go through.

    Sequences in sequences may be shared, so that few of them make very many elements.
    """
    elements = 1
    for _ in range(64):  # as many axes as NumPy has
        if not isinstance(sequence, (list, tuple)) or not sequence:
            return
        elements *= len(sequence)
        if elements > 2**40:
            raise ValueError(f"(more than {2**40} elements)")
        sequence = sequence[0]


def _classes_in(sequence: Any) -> set[type]:
    """Return the classes of all that is in nested sequences, at the speed of C."""
    if isinstance(sequence, range):
        return {int}
    classes = set(map(type, sequence))
    if any(issubclass(cls, _SEQUENCES) for cls in classes):
        inner = [_classes_in(x) for x in sequence if isinstance(x, _SEQUENCES)]
        classes = {cls for cls in classes if not issubclass(cls, _SEQUENCES)}.union(*inner)
    return classes
