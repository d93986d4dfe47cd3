"""Which values a dtype holds: one rule for ``full``, ``asarray`` and ``arange``.

Frameworks cut 0.25 to 0 for an integer dtype, take integers modulo ``2**n``, and read 2 as True.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2ldev.contract import Framework, Tensor
from d2ldev.contract.tensors import Tensors
from d2ldev.errors import UnsupportedValueError, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GREATEST: dict[str, float] = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float64": (2 - 2.0**-52) * 2.0**1023,
    "complex64": (2 - 2.0**-23) * 2.0**127,
    "complex128": (2 - 2.0**-52) * 2.0**1023,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2fnuz": 57344.0,
}
# What a user would take for a number that another dtype does not hold, the first that holds it.
_USUAL = ("int32", "int64", "uint64", "float32", "float64", "complex64", "complex128")


def check_number(framework: Framework, number: Any, native_dtype: Any, attempted: str) -> None:
    """Refuse one of Python's numbers that a dtype does not hold.

    Args:
        framework: whose dtype it is.
        number: a bool, an integer, a float or a complex number.
        native_dtype: the framework's own.
        attempted: for a message.

    Raises:
        UnsupportedValueError: if it does not.
    """
    integers, floats = _reach(framework.tensors, native_dtype)
    kind = type(number)
    if (kind is int and 0 <= number < integers) or (kind is float and -floats < number < floats):
        return  # the common ones, at a tenth of the cost of making a tensor
    name = name_of(framework.tensors, native_dtype)
    if not _holds(name, number):
        raise _refusal(framework, number, name, attempted)


def check_array(
    framework: Framework, array: NDArray[Any], native_dtype: Any, attempted: str, *, is_list: bool
) -> None:
    """Refuse data with a number that a dtype does not hold.

    An array may be rounded to infinity in a narrower float, as by NumPy's ``astype``.

    Args:
        framework, native_dtype, attempted: see ``check_number``.
        array: the data, of numbers or of Python's integers as objects.
        is_list: whether it stands for numbers that the user wrote as Python's.

    Raises:
        UnsupportedValueError: with the first number of that kind.
    """
    import numpy as np

    given = _KINDS[array.dtype.kind]
    _, floats = _reach(framework.tensors, native_dtype)
    if given == _FLOAT and floats and (not is_list or np.vdot(array, array) < floats):
        return  # the sum of the squares is in reach, and so is each number
    name = name_of(framework.tensors, native_dtype)
    wanted = _kind(name)
    if not array.size or not (given > wanted or is_list or given == wanted == _INTEGER):
        return
    found = _find_misfit(array, given, name, wanted)
    if found is not None:
        raise _refusal(framework, found, name, attempted)


def exact(
    framework: Framework, integers: NDArray[Any], native_dtype: Any, attempted: str
) -> NDArray[Any]:
    """Return Python's integers of any size as an array, none of them rounded on the way to a dtype.

    Args:
        framework, native_dtype, attempted: see ``check_number``.
        integers: as objects.

    Raises:
        UnsupportedValueError: with the first one that the dtype does not hold.
    """
    check_array(framework, integers, native_dtype, attempted, is_list=True)
    name = name_of(framework.tensors, native_dtype)
    return integers.astype(name if _kind(name) == _INTEGER else "float64")


def as_float(framework: Framework, number: int, native_dtype: Any) -> float:
    """Return an integer as a float, unless it is for a dtype of integers."""
    return number if _kind(name_of(framework.tensors, native_dtype)) == _INTEGER else float(number)


def check_tensor(framework: Framework, x: Tensor, native_dtype: Any, attempted: str) -> None:
    """Refuse a tensor as a number for a dtype of another kind: its value is not waited for.

    Raises:
        UnsupportedValueError: for a float in a dtype of integers, and the like.
    """
    given, name = framework.tensors.dtype_of(x), name_of(framework.tensors, native_dtype)
    if _kind(given) > _kind(name):
        raise UnsupportedValueError(
            attempted,
            f"the value is a tensor of {given}, which does not fit into {name}",
            f"backend.asarray(value, dtype={name!r}), which cuts it off",
        )


# The kinds of dtypes; a later one has the numbers before it.
_BOOL, _INTEGER, _FLOAT, _COMPLEX = range(4)
# Those of NumPy's, in which objects are Python's integers.
_KINDS = {"b": _BOOL, "i": _INTEGER, "u": _INTEGER, "O": _INTEGER, "f": _FLOAT, "c": _COMPLEX}


def _kind(name: str) -> int:
    if name == "bool":
        return _BOOL
    if name.startswith("complex"):
        return _COMPLEX
    return _FLOAT if is_float(name) else _INTEGER


def is_float(name: str) -> bool:
    """Return whether a dtype of this name, such as ``'bfloat16'``, is of real floats."""
    return name.startswith(("float", "bfloat"))


# Dicts: torch's compiler warns of the caches of functools.
_names: dict[tuple[Any, Any], str] = {}
_reaches: dict[str, tuple[float, float]] = {}


def find_switch(tensors: Tensors, name: str) -> str:
    """Return the line that makes a missing dtype available; empty if there is none."""
    try:
        tensors.dtype(name)
    except UnsupportedValueError as error:
        return error.fix
    except Exception:  # each framework raises its own error
        return ""
    return ""


def name_of(tensors: Tensors, native_dtype: Any) -> str:
    """Return the name of a native dtype."""
    key = (type(tensors), native_dtype)
    name = _names.get(key)
    if name is None:
        name = next(name for name in tensors.dtype_names if tensors.dtype(name) is native_dtype)
        _names[key] = name
    return name


def _reach(tensors: Tensors, native_dtype: Any) -> tuple[float, float]:
    """Return up to where a dtype surely has each integer from 0, and each float."""
    name = name_of(tensors, native_dtype)
    reach = _reaches.get(name)
    if reach is None:
        if name == "bool" or _kind(name) == _INTEGER:
            reach = (2 if name == "bool" else _limits(name)[1]), 0.0
        else:
            reach = (_GREATEST.get(name, 0.0),) * 2
        _reaches[name] = reach
    return reach


def _limits(name: str) -> tuple[int, int]:
    """Return the least and the greatest number of a dtype of integers, such as ``'uint8'``."""
    bits = int(name.removeprefix("u").removeprefix("int"))
    return (0, 2**bits - 1) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _holds(name: str, number: Any) -> bool:
    """Tell whether a dtype has a number, to rounding; infinity and NaN are floats."""
    kind = _kind(name)
    if isinstance(number, complex):
        return kind == _COMPLEX and _holds(name, number.real) and _holds(name, number.imag)
    if kind == _BOOL:
        return number in (0, 1)
    if kind == _INTEGER:
        least, greatest = _limits(name)
        return bool(least <= number <= greatest) and number == int(number)
    return not _GREATEST.get(name, float("inf")) < abs(number) < float("inf")


def _find_misfit(array: NDArray[Any], given: int, name: str, wanted: int) -> Any:
    """Return a number of an array that a dtype does not hold; None if there is none.

    Args:
        array: the data.
        given: the kind of its dtype.
        name: the name of the dtype that may not hold it.
        wanted: the kind of that dtype.
    """
    import numpy as np

    if given == _COMPLEX and wanted == _COMPLEX:
        found = (_find_misfit(each, _FLOAT, name, _FLOAT) for each in (array.real, array.imag))
        return next((each for each in found if each is not None), None)
    wrong: Any = False
    if given == _COMPLEX:
        wrong = np.ones(array.shape, bool)
    elif wanted == _BOOL:
        wrong = (array != 0) & (array != 1)
    elif given == _FLOAT and wanted == _INTEGER:
        wrong = array != np.trunc(array)  # NaN too
    if np.any(wrong):
        return _plain(array[wrong][0])
    if wanted >= _FLOAT and given == _FLOAT:
        array = array[np.isfinite(array)]
    extremes = [_plain(array.min()), _plain(array.max())] if array.size else []
    return next((each for each in extremes if not _holds(name, each)), None)


def _plain(number: Any) -> Any:
    """Return a number of NumPy's as Python's."""
    return number.item() if hasattr(number, "item") else number


def _refusal(framework: Framework, number: Any, name: str, attempted: str) -> UnsupportedValueError:
    tensors, fix = framework.tensors, "another dtype"
    # Of the same kind or a wider one: a float stays a float.
    for wide in (each for each in _USUAL if _kind(each) >= _kind(name)):
        switch = find_switch(tensors, wide)
        if _holds(wide, number) and (wide in tensors.dtype_names or switch):
            is_there = wide in tensors.dtype_names
            fix = f"dtype={wide!r}" if is_there else f"{switch}, and dtype={wide!r}"
            break
    return UnsupportedValueError(attempted, f"{quote(number)} does not fit into {name}", fix)
