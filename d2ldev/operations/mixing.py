"""Helpers for ``strict`` of the backends: the error, a call's operands, replaced functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any

from d2ldev.contract import Framework, Tensor
from d2ldev.device import CPU, Device
from d2ldev.errors import DeviceMismatchError, UnsupportedValueError
from d2ldev.nesting.kinds import TENSOR

_NONE: Mapping[str, Any] = MappingProxyType({})

# What Python can assign to: not the ``dense_0/kernel`` of a variable of Keras.
_EXPRESSION = re.compile(r"[A-Za-z_]\w*(\[[^]]*\]|\.\w+)*")

Name = str | int | tuple[str | int, ...]
Operand = tuple[Name, Device]
"""The name of an operation's operand, or else its index in the call, and its device.

The name of a tensor in a list has the indices in the lists after it: ``(0, 2)``, ``("xs", 2)``.
"""

_BY_BACKEND = "{x} = backend.to({x}, '{device}')"


def mismatch(
    operation: str, operands: Iterable[Operand], *, move: str = _BY_BACKEND
) -> DeviceMismatchError:
    """Return the error of an operation whose operands are on different devices.

    Args:
        operation: its name, such as ``'add'``.
        operands: the name and the device of each tensor among the operands. An operand without a
            name in the user's program has its index in the call.
        move: the line that moves the operand ``{x}`` to ``{device}``, where the operand ``{y}`` is.

    >>> print(mismatch('add', [(0, Device('gpu', 0)), (1, Device('cpu'))]))
    cannot run add: Expected all tensors to be on the same device, but found operand 1 on gpu:0, ...
      devices: gpu:0, cpu
      fix: x = backend.to(x, 'gpu:0'), where x is operand 2 of add
    """
    listed = [(_title_of(name), device) for name, device in operands]
    # Most often a model is on a GPU and its batch is elsewhere. The operands of the batch are
    # fewer, or have no name.
    counts = Counter(device for _, device in listed if device is not CPU)
    named = Counter(device for name, device in listed if not _is_index(name))
    target = max(counts, key=lambda device: (counts[device], named[device]), default=CPU)
    elsewhere = dict.fromkeys(name for name, device in listed if device is not target)
    there = next(name for name, device in listed if device is target)
    lines = [_line_of(operation, name, there, target, move) for name in elsewhere]
    return DeviceMismatchError(
        f"run {operation}",
        # The words are PyTorch's, because libraries look for them in an error.
        "Expected all tensors to be on the same device, but found "
        + ", ".join(f"{name} on {device}" for name, device in listed),
        "; ".join(dict.fromkeys(lines)),
        dict.fromkeys(device for _, device in listed),
    )


def _title_of(name: Name) -> str:
    """Return how messages call an operand: ``'x'``, ``'operand 1'``, ``'operand 1[2]'``."""
    first, *items = name if isinstance(name, tuple) else (name,)
    title = f"operand {first + 1}" if isinstance(first, int) else first
    return title + "".join(f"[{i}]" for i in items)


def _is_index(name: str) -> bool:
    return name.startswith("operand ")


def _line_of(operation: str, name: str, there: str, target: Device, move: str) -> str:
    """Return the line that moves one operand."""
    if _is_index(name):
        where = f", where x is {name} of {operation}" + (
            f", and y {there}" if "{y}" in move else ""
        )
        return move.format(x="x", y="y", device=target) + where
    if not _EXPRESSION.fullmatch(name):
        return f"model = backend.place(model, '{target}')"
    if "{y}" not in move or _EXPRESSION.fullmatch(there):
        return move.format(x=name, y=there, device=target)
    return move.format(x=name, y="y", device=target) + f", where y is {there} of {operation}"


def operands_of(
    framework: Framework, arguments: Sequence[Any], keywords: Mapping[str, Any] = _NONE
) -> list[Operand]:
    """Return the names and devices of the tensors among the arguments; see ``locate_tensors``."""
    return [(name, device) for name, _, device in locate_tensors(framework, arguments, keywords)]


def locate_tensors(
    framework: Framework, arguments: Sequence[Any], keywords: Mapping[str, Any] = _NONE
) -> list[tuple[Name, Tensor, Device]]:
    """Return the tensors among the arguments of an operation: name, tensor, device.

    Those in lists and tuples too, as ``concat`` takes them. A tensor that is not on one device,
    such as a traced one, is left out.
    """
    found: list[tuple[Name, Tensor, Device]] = []
    named: list[tuple[str | int, Any]] = [*enumerate(arguments), *keywords.items()]
    for name, value in named:
        _collect(framework, (name,), value, found)
    return found


def _collect(
    framework: Framework,
    name: tuple[str | int, ...],
    value: Any,
    found: list[tuple[Name, Tensor, Device]],
) -> None:
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _collect(framework, (*name, i), item, found)
    elif framework.state.kinds[type(value)] is TENSOR:
        with suppress(UnsupportedValueError):
            found.append((name, value, framework.tensors.device_of(value)))


def replace(replacements: Iterable[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Replace functions of modules, classes and objects, all of them or none.

    Args:
        replacements: the owner, the name, and the replacement.

    Returns:
        A function that puts the original objects back.
    """
    with ExitStack() as replaced:
        for owner, name, function in replacements:
            before = vars(owner)[name]
            setattr(owner, name, function)
            replaced.callback(setattr, owner, name, before)
        return replaced.pop_all().close
