"""Arguments that are the same for every backend: checked here, once for all."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from d2ldev.errors import UnsupportedValueError, describe, quote, text_of
from d2ldev.program import spell

MOST_ELEMENTS = 2**63 - 1
"""The most elements of a tensor: frameworks count them in 64 bits, and some abort beyond."""

MOST_AXES = 254
"""The most axes of a tensor in any framework: TensorFlow's."""


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Args:
        shape: an integer, or a sequence of integers, such as the shape of a tensor. Text is
            invalid.

    Raises:
        UnsupportedValueError: for anything else, and negative sizes.
        MemoryError: for more than ``MOST_ELEMENTS``.

    >>> as_shape(3), as_shape([2, 3])
    ((3,), (2, 3))
    """
    try:
        given = islice(shape, MOST_AXES + 1) if _is_sequence(shape) else (shape,)
        sizes = tuple(operator.index(size) for size in given)
    except Exception as error:  # whatever a value's own ``__index__`` raises
        raise _shape_refusal(shape, "a shape is an integer or a sequence of integers") from error
    if min(sizes, default=0) < 0:
        raise _shape_refusal(shape, "each size must be 0 or more")
    if len(sizes) > MOST_AXES:
        raise _shape_refusal(shape, f"a tensor has at most {MOST_AXES} axes")
    # Zeros included: frameworks multiply the others first.
    if math.prod([size or 1 for size in sizes]) > MOST_ELEMENTS:
        raise MemoryError(f"a tensor has at most {MOST_ELEMENTS} elements")
    return sizes


def _is_sequence(value: Any) -> bool:
    """Return whether a value may be a sequence of sizes.

    TensorFlow's ``TensorShape`` has the methods of a sequence, but is not a ``Sequence``.
    """
    if isinstance(value, Sequence):  # first, because nearly every shape is a tuple
        return not isinstance(value, (str, bytes, bytearray))
    cls = type(value)
    has_items = hasattr(cls, "__getitem__") and hasattr(cls, "__len__")
    return has_items and not hasattr(cls, "__index__") and not isinstance(value, Mapping)


def _shape_refusal(shape: object, problem: str) -> UnsupportedValueError:
    attempted = f"make a tensor of shape {quote(shape)}"
    return UnsupportedValueError(attempted, problem, "shape=(2, 3), or shape=6")


def whole_number(attempted: str, name: str, value: Any, *, least: int, fix: str) -> int:
    """Return an argument that counts something, as a Python integer.

    Args:
        attempted: the purpose: ``'train'``.
        name: of the argument.
        value: the user's value. A truth value is not a number.
        least: the smallest valid value.
        fix: a line that works.

    Raises:
        UnsupportedValueError: if the value is not an integer, or smaller.

    >>> whole_number('train', 'max_epochs', 3, least=0, fix='max_epochs=1')
    3
    """
    is_truth = type(value).__name__ in ("bool", "bool_")  # NumPy's too, which need not be imported
    try:
        number = least - 1 if is_truth else operator.index(value)
    except Exception:  # whatever a value's own ``__index__`` raises
        number = least - 1
    if number < least:
        raise UnsupportedValueError(
            f"{attempted} with {name}={describe(value)}",
            f"it must be an integer, {least} or more",
            fix,
        )
    return number


def class_refusal(attempted: str, cls: type, argument: str = "") -> UnsupportedValueError:
    """Return the error of a class that was given in the place of an object of it.

    Args:
        attempted: the current operation.
        cls: the class.
        argument: the keyword of the call that takes the object; empty for one by position.
    """
    import inspect  # a fifth of the time that ``import d2ldev`` takes

    name = spell(cls) or cls.__name__
    try:
        parameters = [*inspect.signature(cls).parameters.values()]
    except (TypeError, ValueError):  # Python does not know those of some classes
        parameters = []
    needed = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    line = f"{name}({', '.join(needed)})"
    fix = f"{argument}={line}" if argument else f"{line} in the place of {name}"
    problem = f"it is a class, and not an object of it: {cls.__name__}"
    return UnsupportedValueError(attempted, problem, fix)


def flag(attempted: str, name: str, value: Any) -> bool:
    """Return an argument that is ``True`` or ``False``, NumPy's too, as Python's.

    Raises:
        UnsupportedValueError: for anything else, such as None, or ``'no'``, which would be true.

    >>> flag('load parameters', 'strict', False)
    False
    """
    if type(value) is bool or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise UnsupportedValueError(
        f"{attempted} with {name}={describe(value)}",
        "it must be True or False",
        f"{name}=True, or {name}=False",
    )


def as_path(path: object, method: str) -> str:
    """Return the path of a file, to ``save`` to, or to ``load`` or ``load_into`` from, as text.

    Raises:
        UnsupportedValueError: if the path is invalid.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
        os.fsencode(text)  # half of a surrogate pair names no file
    except Exception:  # whatever a class's own ``__fspath__`` raises
        text = ""
    # Else "net.safetensors/" would replace the file "net.safetensors".
    is_folder = os.path.basename(text) in ("", os.curdir, os.pardir)
    if is_folder or "\0" in text:
        raise UnsupportedValueError(
            f"{method.partition('_')[0]} parameters",
            f"{describe(path)} is not the path of a file",
            {
                "save": "backend.save(obj, 'net.safetensors')",
                "save_best": "best='best.safetensors'",
                "save_checkpoint": "checkpoint='run.safetensors'",
                "load": "backend.load('net.safetensors')",
                "load_into": "backend.load_into(obj, 'net.safetensors')",
            }[method],
        )
    return text


def is_iterable(data: object) -> bool:
    """Tell whether batches can be drawn from something in a ``for`` loop: from text they cannot.

    ``iter(data)`` is called for arrays alone, because it makes a loader draw random numbers and
    start its workers.
    """
    if isinstance(data, (str, bytes, bytearray, memoryview)):
        return False
    cls = type(data)
    if any(hasattr(cls, name) for name in ("__array__", "__dlpack__", "dtype")):
        try:
            next(iter(data), None)  # type: ignore[call-overload]
        except Exception:  # it has no axis, or its class does not do it
            return False
    # Of the type, as in Python: a class is not iterable if its objects are.
    return hasattr(cls, "__iter__") or hasattr(cls, "__getitem__")


def length_of(data: object, unknown: int) -> int:
    """Return the number of batches of data, if the data has a length.

    Args:
        data: any iterable.
        unknown: the result for data without a length.

    Raises:
        UnsupportedValueError: if the length is invalid, such as a negative one.

    >>> length_of([1, 2], 0), length_of(map(abs, []), 0)
    (2, 0)
    """
    try:
        return operator.length_hint(data, unknown)
    except OverflowError:  # a range may be longer than Python's lengths
        return sys.maxsize
    except (TypeError, ValueError) as error:
        raise UnsupportedValueError(
            f"go through {describe(data)}",
            f"its length is invalid: {text_of(error)}",
            "give its __len__ the number of batches, or leave it out",
        ) from error
