"""Blocks that are entered and left: each leaves its own entry, and nothing else.

A block in a generator may end after one that was entered later, and a task that was started in a
block may outlive it. So what is entered is kept per thread and task as a tuple of entries, and
leaving removes the entry that entering made, wherever it stands.

Held by ``tests/test_scopes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class Entry(Generic[T]):
    """One entered block.

    Args:
        value: what the block makes current.
    """

    __slots__ = ("ended", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.ended = False


class _State(NamedTuple):
    current: Any
    entries: tuple[Entry[Any], ...]


_OUTSIDE = _State(None, ())


class Scopes(Generic[T]):
    """The blocks of one kind that were entered and not left, in this thread or asyncio task.

    Args:
        name: of the context variable, for a debugger.

    >>> scopes = Scopes[str]("example")
    >>> outer, inner = scopes.enter("outer"), scopes.enter("inner")
    >>> scopes.leave(outer)
    >>> scopes.current()
    'inner'
    """

    __slots__ = ("__weakref__", "_state", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._state: ContextVar[_State] = ContextVar(name, default=_OUTSIDE)
        every_scopes.add(self)

    def enter(self, value: T) -> Entry[T]:
        """Make a value the current one; the entry is what ``leave`` takes."""
        entry = Entry(value)
        self._state.set(_State(value, (*self._state.get().entries, entry)))
        return entry

    def leave(self, entry: Entry[T]) -> None:
        """Remove an entry; the innermost one that is left is the current one again."""
        entry.ended = True
        left = tuple(each for each in self._state.get().entries if each is not entry)
        self._state.set(_State(left[-1].value, left) if left else _OUTSIDE)

    def entries(self) -> tuple[Entry[T], ...]:
        """The entries of this thread or task, the outermost first."""
        return self._state.get().entries

    def innermost(self, holds: Callable[[T], bool]) -> Entry[T] | None:
        """The innermost entry whose value is such; None if there is none.

        For an object that can be entered again inside its own block, and so cannot keep its entry.
        """
        return next((each for each in reversed(self.entries()) if holds(each.value)), None)

    def current(self) -> T | None:
        """The value of the innermost block; None outside of any."""
        value: T | None = self._state.get().current
        return value

    def is_in_force(self) -> bool:
        """Whether this thread or task is in a block that has not ended elsewhere."""
        entries = self._state.get().entries
        # The innermost one first: strictness asks this for every operation.
        return bool(entries) and (not entries[-1].ended or any(not e.ended for e in entries))

    def forget(self) -> None:
        """Leave every block of this thread or task."""
        self._state.set(_OUTSIDE)


every_scopes: WeakSet[Scopes[Any]] = WeakSet()
"""All there are in the process, for whoever looks for blocks that were not left."""
