"""Blocks that are entered and left: each leaves its own entry, and nothing else.

A block in a generator may end after one that was entered later, and a task that was started in a
block may outlive it. So what is entered is kept per thread and task as a tuple of entries, and
leaving removes the entry that entering made, wherever it stands.

Held by ``tests/core/operations/test_leaving.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


def traced_as(traced: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let torch's compiler trace another function in the decorated one's stead.

    It traces Python, and knows neither context variables nor locks. A property whose function is
    one of C, such as ``property(operator.call)``, it reads instead: while it compiles, and whenever
    it asks whether what it compiled still holds.
    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/user_defined.py
    """

    def mark(function: Function) -> Function:
        function._torchdynamo_inline = traced  # type: ignore[attr-defined]
        return function

    return mark


class Entry(Generic[T]):
    """One entered block.

    Args:
        value: what the block makes current.
    """

    __slots__ = ("ended", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.ended = False


class Scopes(Generic[T]):
    """The blocks of one kind that were entered and not left, in this thread or asyncio task.

    Args:
        name: of the context variables, for a debugger.

    Attributes:
        value: a context variable with the value of the innermost block; None outside of any. Code
            that runs in every call reads it without a Python function: ``scopes.value.get()``.

    >>> scopes = Scopes[str]("example")
    >>> outer, inner = scopes.enter("outer"), scopes.enter("inner")
    >>> scopes.leave(outer)
    >>> scopes.value.get()
    'inner'
    """

    __slots__ = ("__weakref__", "_entries", "name", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: ContextVar[T | None] = ContextVar(name, default=None)
        self._entries: ContextVar[tuple[Entry[T], ...]] = ContextVar(f"{name}_entries", default=())
        every_scopes.add(self)

    def enter(self, value: T) -> Entry[T]:
        """Make a value the current one; the entry is what ``leave`` takes."""
        entry = Entry(value)
        self._entries.set((*self._entries.get(), entry))
        self.value.set(value)
        return entry

    def leave(self, entry: Entry[T]) -> None:
        """Remove an entry; the innermost one that is left is the current one again."""
        entry.ended = True
        left = tuple(each for each in self._entries.get() if each is not entry)
        self._entries.set(left)
        self.value.set(left[-1].value if left else None)

    def entries(self) -> tuple[Entry[T], ...]:
        """Return the entries of this thread or task, the outermost first."""
        return self._entries.get()

    def __call__(self) -> T | None:
        """Return the value of the innermost block; None outside of any."""
        return self.value.get()

    in_c = property(operator.call)
    """The same, for ``traced_as``."""

    def is_in_force(self) -> bool:
        """Tell whether this thread or task is in a block that has not ended elsewhere."""
        entries = self._entries.get()
        # The innermost one first: strictness asks this for every operation.
        return bool(entries) and (not entries[-1].ended or any(not e.ended for e in entries))


every_scopes: WeakSet[Scopes[Any]] = WeakSet()
"""All ``Scopes`` of the process, to look for blocks that were not left."""
