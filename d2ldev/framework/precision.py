"""``backend.matmul_precision``: what products of float32 are computed in, as a setting and a block.

A call changes the framework's own switch at once, and what it returns is a block that puts back
what was: so does ``torch.set_grad_enabled``. Most switches are one for the process. JAX has one for
each thread, and a default for all of them: a block is the thread's, and a setting everybody's.

Held by ``tests/core/framework/test_precision.py`` and the requirements ``precision.*``.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from d2ldev.errors import ScopeError
from d2ldev.framework.devices import Devices
from d2ldev.locks import Lock
from d2ldev.scopes import Contexts, surely


class _Change:
    """One change of a switch.

    Attributes:
        precision: what it was changed to.
        is_block: whether a block was entered, which will undo it.
        undo: puts back what was before; None until it is made.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.is_block = False
        self.undo: Callable[[], None] | None = None


class Switch(ABC):
    """The open changes of a framework's switch, which are undone in any order."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices

    @abstractmethod
    def make(self, change: _Change) -> None:
        """Make a change; a call that was interrupted can be made again."""

    @abstractmethod
    def keep(self, change: _Change) -> None:
        """Take a change for a setting: nothing will undo it but the end of the block around it."""

    @abstractmethod
    def undo(self, change: _Change) -> None:
        """Undo a change, with the settings that were made in its block."""

    @abstractmethod
    def is_open_here(self, change: _Change) -> bool:
        """Return whether a change is in force where the caller is."""

    def now(self) -> str:
        """Return the precision in force here."""
        return self.devices.matmul_precision()


class SwitchOfTheProcess(Switch):
    """One switch for all threads; the change that was made last is in force."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices)
        self._open: list[_Change] = []
        self._lock = Lock()

    def make(self, change: _Change) -> None:
        with self._lock:
            if change.undo is None:
                change.undo = self.devices.set_matmul_precision(change.precision)
            if change not in self._open:
                self._open.append(change)

    def keep(self, change: _Change) -> None:
        with self._lock:
            if change in self._open:
                self._open.remove(change)

    def undo(self, change: _Change) -> None:
        with self._lock:
            if change not in self._open:
                return
            start, end = _extent(self._open, change)
            if end < len(self._open):
                # What is in force stays so, and puts back later what this one would have now.
                self._open[end].undo = change.undo
            elif change.undo is not None:
                change.undo()
            del self._open[start:end]

    def is_open_here(self, change: _Change) -> bool:
        return change in self._open


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.open: list[_Change] = []


class SwitchOfEachThread(Switch):
    """A switch of each thread, and a default for all of them."""

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices)
        self._here = _OfThread()
        self._contexts = Contexts("precision", "with backend.matmul_precision(...):")

    def make(self, change: _Change) -> None:
        if change.undo is None:
            scope: Callable[[], Any] = partial(self.devices.matmul_scope, change.precision)
            attempted = f"end the block of backend.matmul_precision({change.precision!r})"
            entered = self._contexts.enter(scope)
            change.undo = partial(self._contexts.leave, entered, attempted)
        if change not in self._here.open:
            self._here.open.append(change)

    def keep(self, change: _Change) -> None:
        here = self._here.open
        is_in_block = change in here and any(each.is_block for each in here[: here.index(change)])
        if is_in_block:
            # It hides the setting before it, if there is one in this block.
            before = here[here.index(change) - 1]
            if not before.is_block:
                self.undo(before)
            return
        with suppress(ScopeError):  # a thread that has ended keeps nothing
            self.undo(change)
        self.devices.set_matmul_precision(change.precision)

    def undo(self, change: _Change) -> None:
        here, gone = self._here.open, [change]
        if change in here:
            start, end = _extent(here, change)
            gone = here[start:end] if change.is_block else gone
        for each in reversed(gone):
            if each in here:
                here.remove(each)
            each.is_block = False
            if each.undo is not None:
                each.undo()

    def is_open_here(self, change: _Change) -> bool:
        return change in self._here.open

    def now(self) -> str:
        self._contexts.settle()
        return super().now()


def _extent(changes: list[_Change], change: _Change) -> tuple[int, int]:
    """Return where a change is, and where the next block is: settings are in between."""
    start = changes.index(change)
    after = range(start + 1, len(changes))
    return start, next((i for i in after if changes[i].is_block), len(changes))


class MatmulPrecision(AbstractContextManager[str]):
    """A precision that was set, and a block that ends it; can be entered again.

    Args:
        switch: what is changed, at once.
        precision: one of ``MATMUL_PRECISIONS``.
    """

    def __init__(self, switch: Switch, precision: str) -> None:
        self._switch, self._precision = switch, precision
        self._entered: list[_Change] = []
        self._made = _made(switch, precision)
        self._keep = weakref.finalize(self, surely, switch.keep, self._made)
        self._keep.atexit = False

    def __enter__(self) -> str:
        if self._keep.detach() is None or not self._switch.is_open_here(self._made):
            self._made = _made(self._switch, self._precision)
        self._made.is_block = True
        self._entered.append(self._made)
        return self._switch.now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        surely(self._switch.undo, self._entered.pop())


def _made(switch: Switch, precision: str) -> _Change:
    change = _Change(precision)
    surely(switch.make, change)
    return change
