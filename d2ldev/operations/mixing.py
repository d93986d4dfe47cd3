"""Helpers for ``strict`` of the backends: the error, a call's operands, replaced functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from d2ldev.contract import Framework, Tensor
from d2ldev.device import CPU, Device
from d2ldev.errors import DeviceMismatchError, UnsupportedValueError
from d2ldev.nesting.kinds import OBJECT, TENSOR, Kind
from d2ldev.operations.inventory import list_named_tensors
from d2ldev.program import find_operation
from d2ldev.registry.discovery import packages_of
from d2ldev.registry.selection import frameworks_in_use

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
_OF_A_MODEL = "model = backend.place(model, '{device}')"


class _Found(NamedTuple):
    """An operand in an error.

    Args:
        title: how the message calls it.
        device: its device.
        line: the line that moves it, if that is not the framework's own for a tensor.
        is_name: whether the line can assign to it.
    """

    title: str
    device: Device
    line: str = ""
    is_name: bool = True


def mismatch(
    operation: str,
    operands: Iterable[Operand],
    *,
    framework: Framework | None = None,
    move: str = _BY_BACKEND,
) -> DeviceMismatchError:
    """Return the error of an operation whose operands are on different devices.

    It names the operands as the line of the program does that runs now. It does so only if each
    expression in the line has a known value. Otherwise it says which operands they are.

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
    frameworks = frameworks_in_use() if framework is None else [framework]
    found = _find_in_program(frameworks, {device for _, device in given}) or [
        _find_in_call(_title_of(name), device) for name, device in given
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


def _find_in_program(frameworks: Sequence[Framework], devices: Set[Device]) -> list[_Found]:
    """Return the operands in the line that runs now; empty unless it shows all of them."""
    of_frameworks = [each for framework in frameworks for each in packages_of(framework.name)]
    modules = [cls.__module__ for framework in frameworks for cls in type(framework).__mro__]
    of_backends = {module.partition(".")[0] for module in modules} - {"d2ldev"}
    operation = find_operation(of_backends.union(of_frameworks))
    if operation is None:
        return []
    found: list[_Found] = []
    for node in operation.operands():
        try:
            there, line = _inspect(frameworks, operation.evaluate(node))
        except Exception:  # the result of a call is unknown, and a property may raise anything
            return []
        if len(there) > 1:  # a list, or a model on several devices
            return []
        text, is_name = operation.text_of(node), operation.can_assign(node)
        found += [_Found(text, device, line, is_name) for device in there]
    return found if devices == {each.device for each in found} else []


def _find_in_call(title: str, device: Device) -> _Found:
    """Return an operand that has the name of a parameter, of a variable, or its number."""
    is_variable = not (_is_index(title) or _EXPRESSION.fullmatch(title))
    line = _OF_A_MODEL if is_variable else ""
    return _Found(title, device, line, is_variable or title.isidentifier())


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


def _title_of(name: Name) -> str:
    """Return how messages call an operand: ``'x'``, ``'operand 1'``, ``'operand 1[2]'``."""
    first, *items = name if isinstance(name, tuple) else (name,)
    title = f"operand {first + 1}" if isinstance(first, int) else first
    return title + "".join(f"[{i}]" for i in items)


def _is_index(name: str) -> bool:
    return name.startswith("operand ")


def _line_of(operation: str, found: _Found, there: _Found, move: str) -> str:
    """Return the line that moves one operand to where another one is."""
    move = found.line or (_BY_BACKEND if there.line else move)
    x, y = ("x" if _is_index(found.title) else found.title), there.title
    places = []
    if x != found.title:
        places.append(f"x is {found.title} of {operation}")
    if "{y}" in move and _is_index(y):
        places.append(f"y {y}" if places else f"y is {y} of {operation}")
        y = "y"
    line = move.format(x=x, y=y, device=there.device)
    if x == found.title and not found.is_name:
        line = f"{line.partition(' = ')[2]} in the place of {x}"
    return line + (f", where {', and '.join(places)}" if places else "")


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
