"""``backend.matmul_precision``: the precision of float32 products, as a setting and a block.

A call changes the framework's own switch at once. It returns a block whose end undoes the change,
as ``torch.set_grad_enabled`` does. The process has one switch, on every framework.

Held by ``tests/core/contract/test_precision.py`` and the requirements ``precision.*``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from weakref import ref

from d2ldev.contract.devices import Devices
from d2ldev.locks import Lock
from d2ldev.scopes import leave_in_turn, make_change


class _Change:
    """One change of the switch.

    Attributes:
        precision: what it was changed to.
        is_block: whether a block was entered, which will undo it.
        undo: puts back what was before; None until the change is made.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.is_block = False
        self.undo: Callable[[], None] | None = None


class Switch:
    """A framework's switch, and its open changes, which are undone in any order.

    A change is open while a block may still undo it: as long as the block's object lives. After
    that it is a setting, which ends with the block around it.

    Args:
        get_devices: returns the area ``devices`` of the framework.
    """

    def __init__(self, get_devices: Callable[[], Devices]) -> None:
        self._get_devices = get_devices
        self._refs: list[ref[_Change]] = []
        self._latest: ref[_Change] | None = None
        self._lock = Lock()

    def precision(self) -> str:
        """Return the precision in force."""
        return self._get_devices().matmul_precision()

    def make(self, change: _Change) -> None:
        """Make a change."""
        with self._lock:
            change.undo = self._get_devices().set_matmul_precision(change.precision)
            self._latest = ref(change)
            self._refs = [ref(each) for each in self._open() if each is not change]
            self._refs.append(self._latest)

    def is_latest(self, change: _Change) -> bool:
        """Return whether a change is open, and none was made after it."""
        with self._lock:
            latest = None if self._latest is None else self._latest()
            return latest is change and change in self._open()

    def take_back(self, change: _Change) -> None:
        """Undo a change after which others were made, and which no block has entered."""
        with self._lock:
            changes = self._open()
            if change in changes:
                after = changes[changes.index(change) + 1 :]
                if after:
                    after[0].undo = change.undo
                self._refs = [ref(each) for each in changes if each is not change]

    def undo(self, change: _Change) -> None:
        """Undo the change of a block, with the settings that were made in it."""
        with self._lock:
            changes = self._open()
            if change not in changes:
                return
            start = changes.index(change)
            blocks = [each for each in changes[start + 1 :] if each.is_block]
            if blocks:
                # What is in force stays so, and puts back later what this one would have now.
                blocks[0].undo = change.undo
            elif change.undo is not None:
                change.undo()
            end = changes.index(blocks[0]) if blocks else len(changes)
            self._refs = [ref(each) for each in (*changes[:start], *changes[end:])]

    def _open(self) -> list[_Change]:
        return [change for each in self._refs if (change := each()) is not None]


class MatmulPrecision(AbstractContextManager[str]):
    """A precision that was set, and a block that ends it; can be entered again.

    The first block takes over the change that the call made.

    Args:
        switch: what is changed, at once.
        precision: one of ``MATMUL_PRECISIONS``.
    """

    def __init__(self, switch: Switch, precision: str) -> None:
        self._switch, self._precision = switch, precision
        self._called: _Change | None = self._make()
        self._entered: list[_Change] = []

    def _make(self) -> _Change:
        change = _Change(self._precision)
        make_change(self._switch.make, change)
        return change

    def __enter__(self) -> str:
        change, self._called = self._called, None
        if change is None or not self._switch.is_latest(change):
            if change is not None:
                make_change(self._switch.take_back, change)
            change = self._make()
        change.is_block = True
        self._entered.append(change)
        return self._switch.precision()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave_in_turn(self._switch.undo, self._entered.pop())
