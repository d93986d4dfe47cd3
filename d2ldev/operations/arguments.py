"""Arguments that are the same for every backend: checked here, once for all."""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from d2ldev.errors import UnsupportedValueError, describe, shown


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple.

    Args:
        shape: an integer, or a sequence of them; text is none.

    Raises:
        UnsupportedValueError: for anything else.

    >>> as_shape(3), as_shape([2, 3])
    ((3,), (2, 3))
    """
    try:
        if isinstance(shape, Sequence) and not isinstance(shape, (str, bytes, bytearray)):
            return tuple(operator.index(size) for size in shape)
        return (operator.index(shape),)
    except TypeError:
        raise UnsupportedValueError(
            f"make a tensor of shape {shown(shape)}",
            "a shape is an integer or a sequence of integers",
            "backend.zeros((2, 3))",
        ) from None


def whole_number(attempted: str, name: str, value: Any, *, least: int, fix: str) -> int:
    """Return an argument that counts something, as an integer of Python's.

    Args:
        attempted: what it is for: ``'train'``.
        name: of the argument.
        value: as it was given; a truth value is no number.
        least: the smallest that makes sense.
        fix: a line that is right.

    Raises:
        UnsupportedValueError: if it is none, or smaller.

    >>> whole_number('train', 'max_epochs', 3, least=0, fix='max_epochs=1')
    3
    """
    is_truth = type(value).__name__ in ("bool", "bool_")  # NumPy's too, which need not be imported
    try:
        number = least - 1 if is_truth else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise UnsupportedValueError(
            f"{attempted} with {name}={describe(value)}", f"it is an integer, {least} or more", fix
        )
    return number


def checked_mlp(
    sizes: Iterable[int], activation: str, seed: int, activations: Collection[str]
) -> tuple[list[int], int]:
    """Return the sizes and the seed of ``Backend.mlp`` as integers of Python's.

    Args:
        sizes, activation, seed: as they were given to ``mlp``.
        activations: the names that the backend knows.

    Raises:
        UnsupportedValueError: for fewer than two sizes or such that are no positive integers,
            an activation that is not known, or a seed that is no integer.

    >>> checked_mlp((3, 1), 'relu', 0, {'relu'})
    ([3, 1], 0)
    """
    problem = ""
    try:
        numbers = [operator.index(size) for size in sizes]
        number = operator.index(seed)
    except TypeError as error:
        numbers, number, problem = [], 0, str(error)
    if isinstance(sizes, (str, bytes)) or len(numbers) < 2 or min(numbers) < 1:
        problem = problem or "it takes two sizes at least, which count from 1"
    elif not isinstance(activation, str) or activation not in activations:
        problem = f"the activations are {', '.join(map(repr, activations))}"
    if problem:
        raise UnsupportedValueError(
            f"make an MLP of sizes {shown(sizes)} with {shown(activation)} and seed {shown(seed)}",
            problem,
            "net = backend.mlp([20, 64, 1], activation='relu', seed=0)",
        )
    return numbers, number


def as_path(path: object, verb: str) -> str:
    """Return the path of a file, to ``save`` to or ``load`` from, as text.

    Raises:
        UnsupportedValueError: if it is none.
    """
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        text = ""
    if not text or "\0" in text:
        raise UnsupportedValueError(
            f"{verb} parameters",
            f"{describe(path)} is no path of a file",
            f"backend.{verb}(..., 'net.safetensors')",
        )
    return text


def is_iterable(data: object) -> bool:
    """Tell whether something can be gone through in a ``for`` loop.

    ``iter(data)`` is not asked: with it a loader draws random numbers and starts its workers.
    """
    return hasattr(data, "__iter__") or hasattr(data, "__getitem__")
