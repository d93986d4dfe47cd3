"""``backend.matmul_precision``: the precision of float32 products, as a setting and a block.

A call changes the framework's own switch at once. It returns a block whose end undoes the change,
as ``torch.set_grad_enabled`` does. The process has one switch, on every framework.

Held by ``tests/core/areas/test_precision.py`` and the requirements ``precision.*``.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING

from d2ldev.areas.abilities import require
from d2ldev.locks import Lock
from d2ldev.settings import check_matmul_precision

if TYPE_CHECKING:
    from d2ldev.areas import Framework


def check_precision(framework: Framework, precision: object, attempted: str, fix: str) -> str:
    """Return a precision of products that a framework supports.

    Args:
        framework: the framework.
        precision: the user's argument.
        attempted: the current operation, for messages.
        fix: the line that sets ``'highest'``.

    Raises:
        UnsupportedValueError: if the precision is invalid, or the framework cannot use it.
    """
    precision = check_matmul_precision(precision, attempted, fix)
    if precision == "highest":
        require(framework, "multiply in float32", attempted, fix.replace("highest", "high"))
    return precision


def set_precision(framework: Framework, precision: str) -> MatmulPrecision:
    """Set the precision of products, which was checked, and return the block that ends it."""
    return MatmulPrecision(framework.state.matmul_switch, precision)


class _Change:
    """One change of the switch.

    Args:
        number: of the change, in the order in which they were made.
        undo: puts back what was before.
    """

    def __init__(self, number: int, undo: Callable[[], None]) -> None:
        self.number, self.undo = number, undo


class Switch:
    """A framework's switch, and the changes of open blocks, which are undone in any order.

    Args:
        framework: whose precision it is.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._blocks: list[_Change] = []
        self._numbers = count()
        # Of each thread: another one may call ``matmul_precision`` before this one's block begins.
        self._latest = threading.local()
        self._lock = Lock()

    def precision(self) -> str:
        """Return the precision in force."""
        return self._framework.devices.matmul_precision()

    def change(self, precision: str) -> _Change:
        """Make a change, which is a setting until a block enters it."""
        with self._lock:
            undo = self._framework.devices.set_matmul_precision(precision)
            self._latest.change = change = _Change(next(self._numbers), undo)
            return change

    def enter(self, change: _Change | None, precision: str) -> _Change:
        """Begin a block with a change, or with a new one if the thread has made others since."""
        with self._lock:
            is_latest = change is getattr(self._latest, "change", None)
            entered = change if change is not None and is_latest else self.change(precision)
            self._latest.change = None
            insort(self._blocks, entered, key=lambda each: each.number)
            return entered

    def leave(self, change: _Change) -> None:
        """Undo the change of a block, with the settings that were made in it."""
        with self._lock:
            later = self._blocks[self._blocks.index(change) + 1 :]
            if later:
                # What is in force stays so, and puts back later what this one would have now.
                later[0].undo = change.undo
            else:
                change.undo()
            self._blocks.remove(change)
            self._latest.change = None


class MatmulPrecision(AbstractContextManager[str]):
    """A precision that was set, and a block that ends it; can be entered again.

    The first block takes over the change that the call made.

    Args:
        switch: what is changed, at once.
        precision: one of ``MATMUL_PRECISIONS``.
    """

    def __init__(self, switch: Switch, precision: str) -> None:
        self._switch, self._precision = switch, precision
        self._called: _Change | None = switch.change(precision)
        self._entered: list[_Change] = []

    def __enter__(self) -> str:
        called, self._called = self._called, None
        self._entered.append(self._switch.enter(called, self._precision))
        return self._switch.precision()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._switch.leave(self._entered.pop())
