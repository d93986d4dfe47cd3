"""Helpers for ``strict`` of the backends: the error, a call's operands, replaced functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from d2ldev.contract import Framework, Tensor
from d2ldev.device import CPU, Device
from d2ldev.errors import DeviceMismatchError, UnsupportedValueError
from d2ldev.nesting.kinds import OBJECT, TENSOR, Kind
from d2ldev.operations.inventory import list_named_tensors
from d2ldev.program import Operation, find_operation
from d2ldev.registry.selection import frameworks_in_use, packages_of

_NONE: Mapping[str, Any] = MappingProxyType({})

# What Python can assign to: not the ``dense_0/kernel`` of a variable of Keras.
_EXPRESSION = re.compile(r"[A-Za-z_]\w*(\[[^]]*\]|\.\w+)*")

Name = str | int | tuple[str | int, ...]
Operand = tuple[Name, Device]
"""The name of an operation's operand, or else its index in the call, and its device.

The name of a tensor in a list has the indices in the lists after it: ``(0, 2)``, ``("xs", 2)``.
"""

_BY_BACKEND = "{x} = backend.to({x}, '{device}')"
_BY_PLACE = "{x} = backend.place({x}, '{device}')"


class _Found(NamedTuple):
    """An operand in an error.

    Args:
        title: how the message calls it.
        device: its device.
        moved: what the line that fixes it moves: a name of the program, ``title`` most often.
        line: the line, if it is not the framework's own for a tensor.
    """

    title: str
    device: Device
    moved: str
    line: str = ""


def mismatch(
    operation: str,
    operands: Iterable[Operand],
    *,
    framework: Framework | None = None,
    move: str = _BY_BACKEND,
) -> DeviceMismatchError:
    """Return the error of an operation whose operands are on different devices.

    It names the operands as the line of the program does that runs now. If the line does not show
    them, it says which operands they are.

    Args:
        operation: its name, such as ``'add'``.
        operands: the name and the device of each tensor among the operands. An operand without a
            name in the user's program has its index in the call.
        framework: whose tensors they are; None asks each framework in use.
        move: the line that moves the operand ``{x}`` to ``{device}``, where the operand ``{y}`` is.

    >>> print(mismatch('add', [(0, Device('gpu', 0)), (1, Device('cpu'))]))
    cannot run add: Expected all tensors to be on the same device, but found operand 1 on gpu:0, ...
      devices: gpu:0, cpu
      fix: x = backend.to(x, 'gpu:0'), where x is operand 2 of add
    """
    given = list(operands)
    titles = [(_title_of(name), device) for name, device in given]
    frameworks = frameworks_in_use() if framework is None else [framework]
    found = _find_in_program(frameworks, [device for _, device in given]) or [
        _Found(title, device, title) for title, device in titles
    ]
    # Most often a model is on a GPU and its batch is elsewhere. The operands of the batch are
    # fewer, or have no name.
    counts = Counter(each.device for each in found if each.device is not CPU)
    named = Counter(each.device for each in found if not _is_index(each.title))
    target = max(counts, key=lambda device: (counts[device], named[device]), default=CPU)
    there = next(each for each in found if each.device is target)
    lines = [_line_of(operation, each, there, move) for each in found if each.device is not target]
    return DeviceMismatchError(
        f"run {operation}",
        # The words are PyTorch's, because libraries look for them in an error.
        "Expected all tensors to be on the same device, but found "
        + ", ".join(f"{each.title} on {each.device}" for each in found),
        "; ".join(dict.fromkeys(lines)),
        dict.fromkeys(each.device for each in found),
    )


def _find_in_program(frameworks: Sequence[Framework], devices: Sequence[Device]) -> list[_Found]:
    """Return the operands in the line that runs now; empty if it does not show these devices."""
    of_frameworks = [each for framework in frameworks for each in packages_of(framework.name)]
    modules = [cls.__module__ for framework in frameworks for cls in type(framework).__mro__]
    of_backends = {module.partition(".")[0] for module in modules} - {"d2ldev"}
    operation = find_operation(of_backends.union(of_frameworks))
    if operation is None:
        return []
    found: list[tuple[str, str, list[Device], str]] = []
    for node in operation.operands():
        text = operation.text_of(node)
        try:
            value = operation.evaluate(node)
        except Exception:  # the result of a call is unknown, and a property may raise anything
            found.append((text, _find_source(frameworks, operation, node), [], ""))
            continue
        there, line = _inspect(frameworks, value)
        found += [(text, text, there, line)] if there else []
    # An operator has the operands that the line shows. A call may do something else with them.
    is_sure = not operation.is_call or any(there for _, _, there, _ in found)
    if (
        is_sure
        and len(found) == len(devices)
        and all(
            device in (there or devices)
            for device, (_, _, there, _) in zip(devices, found, strict=True)
        )
    ):
        return [
            _Found(text, device, moved, line)
            for device, (text, moved, _, line) in zip(devices, found, strict=True)
        ]
    if {*devices} == {device for _, _, there, _ in found for device in there}:
        return [
            _Found(text, device, moved, line)
            for text, moved, there, line in found
            for device in there
        ]
    return []


def _inspect(frameworks: Sequence[Framework], value: Any) -> tuple[list[Device], str]:
    """Return the devices of a value, and the line that moves it if it is not a tensor."""
    for framework in frameworks:
        kind, device_of = framework.state.kinds[type(value)], framework.tensors.device_of
        with suppress(Exception):  # a value that holds something else
            if kind is TENSOR:
                return [device_of(value)], ""
            if kind is OBJECT or not isinstance(kind, Kind):
                tensors = [x for _, x in list_named_tensors(framework, value)]
                line = _BY_PLACE if callable(value) else _BY_BACKEND
                return list(dict.fromkeys(map(device_of, tensors))), line
    return [], ""


def _find_source(frameworks: Sequence[Framework], operation: Operation, node: Any) -> str:
    """Return the only tensor that an expression is computed from, or else the expression."""

    def is_tensor(value: Any) -> bool:
        return any(each.state.kinds[type(value)] is TENSOR for each in frameworks)

    texts = {*operation.find_values(node, is_tensor)}
    return texts.pop() if len(texts) == 1 else f"({operation.text_of(node)})"


def _title_of(name: Name) -> str:
    """Return how messages call an operand: ``'x'``, ``'operand 1'``, ``'operand 1[2]'``."""
    first, *items = name if isinstance(name, tuple) else (name,)
    title = f"operand {first + 1}" if isinstance(first, int) else first
    return title + "".join(f"[{i}]" for i in items)


def _is_index(name: str) -> bool:
    return name.startswith("operand ")


def _line_of(operation: str, found: _Found, there: _Found, move: str) -> str:
    """Return the line that moves one operand to where another one is."""
    target = there.device
    is_named = _EXPRESSION.fullmatch(there.moved) and not there.line
    if found.line or (not is_named and not _is_index(there.title)):
        move = found.line or _BY_BACKEND
    if _is_index(found.title):
        where = f", where x is {found.title} of {operation}" + (
            f", and y {there.title}" if "{y}" in move else ""
        )
        return move.format(x="x", y="y", device=target) + where
    if not _EXPRESSION.fullmatch(found.moved):
        if not found.moved.startswith("("):
            return f"model = backend.place(model, '{target}')"
        return f"backend.to({found.title}, '{target}') in the place of {found.title}"
    if "{y}" not in move or is_named:
        return move.format(x=found.moved, y=there.moved, device=target)
    return (
        move.format(x=found.moved, y="y", device=target)
        + f", where y is {there.title} of {operation}"
    )


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
