"""``strict()``: where an operation that is given tensors of different devices raises.

A framework that refuses them by itself only has its error translated, when it leaves the block.
One that does not has functions replaced, for as long as any block of any thread is in force; they
ask ``Strictness.in_force`` whether this thread or task is in one.

Held by ``tests/test_strictness.py`` and the requirements ``strict.*`` of the conformance suite.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from d2ldev.device import CPU, Device
from d2ldev.errors import DeviceMismatchError, UnsupportedValueError
from d2ldev.nesting.kinds import TENSOR

if TYPE_CHECKING:
    from d2ldev.primitives import Primitives

_NONE: Mapping[str, Any] = MappingProxyType({})
VARIABLE = "D2LDEV_STRICT"

Operand = tuple[str, Device]
"""What an operation's operand is called, and where it is."""


def is_requested() -> bool:
    """Whether ``D2LDEV_STRICT`` puts the whole process under ``strict()``.

    Raises:
        UnsupportedValueError: if its value is neither yes nor no.
    """
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise UnsupportedValueError(
        f"put the process under strict() (from {VARIABLE}={text!r})",
        "it is neither 1 nor 0",
        f"{VARIABLE}=1, or unset {VARIABLE}",
    )


def mismatch(operation: str, operands: Iterable[Operand]) -> DeviceMismatchError:
    """The error of an operation whose operands are on different devices.

    Args:
        operation: its name, such as ``'add'``.
        operands: the name and the device of each operand that is a tensor; where the framework
            has no name for it, ``operand_0``, ``operand_1`` ...

    >>> print(mismatch('add', [('x', Device('gpu', 0)), ('y', Device('cpu'))]))
    cannot run add: its operands are on different devices: x on gpu:0, y on cpu
      devices: gpu:0, cpu
      fix: y = backend.to(y, 'gpu:0')
    """
    listed = list(operands)
    # What is on the CPU is to be moved: a model that lives on a GPU met a batch that does not.
    target = next((device for _, device in listed if device is not CPU), CPU)
    elsewhere = dict.fromkeys(name for name, device in listed if device is not target)
    return DeviceMismatchError(
        f"run {operation}",
        "its operands are on different devices: "
        + ", ".join(f"{name} on {device}" for name, device in listed),
        "; ".join(f"{name} = backend.to({name}, '{target}')" for name in elsewhere),
        dict.fromkeys(device for _, device in listed),
    )


def operands_of(
    backend: Primitives, arguments: Sequence[Any], keywords: Mapping[str, Any] = _NONE
) -> list[Operand]:
    """The tensors among what an operation was called with, by name.

    Those in lists and tuples too, as ``concat`` takes them: ``operand_0[1]``. A tensor that has
    no one place, such as a traced one, is left out.
    """
    found: list[Operand] = []
    named = [(f"operand_{index}", value) for index, value in enumerate(arguments)]
    _collect(backend, [*named, *keywords.items()], found)
    return found


def _collect(backend: Primitives, named: list[tuple[str, Any]], found: list[Operand]) -> None:
    for name, value in named:
        if isinstance(value, (list, tuple)):
            _collect(backend, [(f"{name}[{i}]", item) for i, item in enumerate(value)], found)
        elif backend.kinds[type(value)] is TENSOR:
            with suppress(UnsupportedValueError):
                found.append((name, backend.device_of(value)))


def replace(replacements: Iterable[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Replace functions of modules, classes and objects, all of them or none.

    Args:
        replacements: the owner, the name, and what is to be there instead.

    Returns:
        What puts back the very objects that were there.
    """
    replaced: list[tuple[Any, str, Any]] = []

    def restore() -> None:
        for owner, name, function in reversed(replaced):
            setattr(owner, name, function)

    try:
        for owner, name, function in replacements:
            before = vars(owner)[name]
            setattr(owner, name, function)
            replaced.append((owner, name, before))
    except BaseException:
        restore()
        raise
    return restore


class _Block:
    """One entered ``strict()``; a task that was started in it may outlive it."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended = False


class Strictness:
    """Where strictness is in force, and what is replaced meanwhile.

    Args:
        replace: replaces functions of the framework and returns what puts them back. It is called
            when the first block begins, and what it returned when the last one has ended.
    """

    def __init__(self, replace: Callable[[], Callable[[], None]]) -> None:
        self._replace = replace
        self._restore: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._count = 0
        self._everywhere = False
        self._blocks: ContextVar[tuple[_Block, ...]] = ContextVar("strict_blocks", default=())

    def in_force(self) -> bool:
        """Whether this thread or task is in a block, or the whole process is under it."""
        if self._everywhere:
            return True
        blocks = self._blocks.get()
        return bool(blocks) and (not blocks[-1].ended or any(not b.ended for b in blocks))

    @contextmanager
    def block(self) -> Iterator[None]:
        """Strictness for the length of a block, in this thread or task only."""
        self._begin()
        block = _Block()
        self._blocks.set((*self._blocks.get(), block))
        try:
            yield
        finally:
            # Its own entry and no other: a block in a generator may end after a later one.
            block.ended = True
            self._blocks.set(tuple(b for b in self._blocks.get() if b is not block))
            self._end()

    def everywhere(self) -> None:
        """Strictness for the whole process, in every thread, from now on."""
        self._begin()
        self._everywhere = True

    def _begin(self) -> None:
        with self._lock:
            if not self._count:
                self._restore = self._replace()
            self._count += 1

    def _end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._restore is not None:
                self._restore()
                self._restore = None


def translate_uncaught(
    translation: Callable[[BaseException], DeviceMismatchError | None],
) -> None:
    """Have an error that ends the program, or a thread, shown as its translation.

    Under ``D2LDEV_STRICT=1`` the process is the block that it leaves.
    """
    import sys

    shown, shown_of_thread = sys.excepthook, threading.excepthook

    def translated(error: BaseException) -> BaseException:
        found = None if isinstance(error, DeviceMismatchError) else translation(error)
        if found is None:
            return error
        found.__cause__ = error
        return found

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        after = translated(error)
        shown(kind if after is error else type(after), after, traceback)

    def show_of_thread(arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        after = None if error is None else translated(error)
        if after is not None and after is not error:
            arguments = threading.ExceptHookArgs(
                (type(after), after, arguments.exc_traceback, arguments.thread)
            )
        shown_of_thread(arguments)

    sys.excepthook, threading.excepthook = show, show_of_thread
