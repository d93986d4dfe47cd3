"""Blocks that are entered and left: each leaves its own entry, and nothing else.

A block in a generator may end after a later block, or in another thread or task. A task that was
started in a block may outlive it. So each thread and task has a tuple of entries. To leave a block
removes its entry, wherever it stands. A framework keeps its own contexts for each thread, so those
have a list for each thread.

Held by ``tests/core/operations/test_leaving.py`` and the requirements ``scopes.*``.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Generic, TypeVar, TypeVarTuple
from weakref import WeakSet

from d2ldev.errors import ScopeError

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])


def trace_as(traced: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let torch's compiler trace another function in the decorated one's stead.

    It traces Python, and knows neither context variables nor locks. But it reads a property whose
    function is one of C, such as ``property(operator.call)``. It does so while it compiles, and
    whenever it asks whether the compiled code is still valid. Source:
    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/variables/user_defined.py
    """

    def mark(function: Function) -> Function:
        function._torchdynamo_inline = traced  # type: ignore[attr-defined]
        return function

    return mark


def call_while_tracing(function: Function) -> Function:
    """Let torch's compiler call a function, and take its result for a constant.

    Its arguments have to be constants, such as classes. ``torch.compiler.assume_constant_result``
    does the same, and needs an import of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Changes(threading.local):
    """Whether this thread enters or leaves a block now, and the blocks that it leaves next.

    The garbage collector may close a generator in the middle of a change. Its block ends after the
    change. Otherwise Python 3.11 crashes, because ``ContextVar.set`` reads a mapping that the inner
    ``set`` has freed. Since Python 3.12 one call overwrites the value that the other has set.
    """

    def __init__(self) -> None:
        self.is_in_progress = False
        self.next: list[Callable[[], object]] = []


_changes = _Changes()


def make_change(change: Callable[[*Arguments], R], *arguments: *Arguments) -> R:
    """Call a function that enters or leaves a block; then leave blocks that the collector ended."""
    changes = _changes
    is_part = changes.is_in_progress
    try:
        changes.is_in_progress = True
        return change(*arguments)
    finally:
        changes.is_in_progress = is_part
        while changes.next and not is_part:
            with suppress(ScopeError):  # which the collector could only print
                make_change(changes.next.pop(0))


def leave_in_turn(leave: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
    """Call what leaves a block, after the change that this thread makes now, if it makes one."""
    if _changes.is_in_progress:
        _changes.next.append(partial(leave, *arguments))
    else:
        make_change(leave, *arguments)


_owner: ContextVar[None] = ContextVar("d2ldev_owner")


class Entry(Generic[T]):
    """One entered block.

    Args:
        value: the value that the block makes current.

    Attributes:
        ended: whether it was left.
        owner: what only the thread or task that entered it can reset; None once it was left.
    """

    __slots__ = ("__weakref__", "ended", "owner", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.ended = False
        self.owner: Token[None] | None = _owner.set(None)

    def leave_as_owner(self) -> bool:
        """End the block; tell whether the thread or task that entered it does."""
        self.ended, owner, self.owner = True, self.owner, None
        try:
            if owner is not None:
                _owner.reset(owner)
        except ValueError:  # so says Python in every other context
            return False
        return True


class Scopes(Generic[T]):
    """The blocks of one kind that were entered and not left, in this thread or asyncio task.

    A task goes on in the block in which it was started, also after its parent has left it. A block
    that another thread or task has left is left everywhere.

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

    __slots__ = ("__weakref__", "_elsewhere", "_entries", "_open", "_value", "name", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self._value: ContextVar[T | None] = ContextVar(name, default=None)
        self.value: ContextVar[T | None] | Scopes[T] = self._value
        self._entries: ContextVar[tuple[Entry[T], ...]] = ContextVar(f"{name}_entries", default=())
        self._open: dict[Entry[T], None] = {}
        # Those that were left elsewhere, as long as any thread or task has not found it out.
        self._elsewhere: WeakSet[Entry[T]] = WeakSet()
        every_scopes.add(self)

    def enter(self, value: T) -> Entry[T]:
        """Make a value the current one; the entry is what ``leave`` takes."""
        return make_change(self._enter, value)

    def _enter(self, value: T) -> Entry[T]:
        entry, entries = Entry(value), self.entries()
        self._value.set(value)
        self._entries.set((*entries, entry))
        self._open[entry] = None
        return entry

    def leave(self, entry: Entry[T]) -> None:
        """Remove an entry; the innermost one that is left is the current one again."""
        leave_in_turn(self._leave, entry)

    def _leave(self, entry: Entry[T]) -> None:
        self._open.pop(entry, None)
        if not entry.leave_as_owner():
            # Variables of another thread or task cannot be set from here. So each asks ``get`` now.
            self._elsewhere.add(entry)
            self.value = self
        self._keep(each for each in self._entries.get() if each is not entry)

    def get(self) -> T | None:
        """Return the value of the innermost block that was not left elsewhere, and forget those."""
        if any(each in self._elsewhere for each in self._entries.get()):
            leave_in_turn(self._forget)
        if not self._elsewhere:
            self.value = self._value
            if self._elsewhere:  # another thread has just added one
                self.value = self
        return self._value.get()

    def _forget(self) -> None:
        self._keep(each for each in self._entries.get() if each not in self._elsewhere)

    def _keep(self, entries: Iterable[Entry[T]]) -> None:
        kept = tuple(entries)
        self._entries.set(kept)
        self._value.set(kept[-1].value if kept else None)

    def find(self, belongs: Callable[[Entry[T]], bool]) -> Entry[T] | None:
        """Return the innermost block that belongs: of this thread or task, else of any other."""
        candidates = (*reversed(self._entries.get()), *reversed(list(self._open)))
        return next((each for each in candidates if not each.ended and belongs(each)), None)

    def entries(self) -> tuple[Entry[T], ...]:
        """Return the entries of this thread or task, the outermost first."""
        self.value.get()
        return self._entries.get()

    def __call__(self) -> T | None:
        """Return the value of the innermost block; None outside of any."""
        return self.value.get()

    in_c = property(operator.call)
    """The same, for ``trace_as``."""

    def is_in_force(self) -> bool:
        """Tell whether this thread or task is in a block that has not ended elsewhere."""
        entries = self._entries.get()
        # The innermost one first: strictness asks this for every operation.
        return bool(entries) and (not entries[-1].ended or any(not e.ended for e in entries))


every_scopes: WeakSet[Scopes[Any]] = WeakSet()
"""All ``Scopes`` of the process, to look for blocks that were not left."""


class OpenContext:
    """An entered context of a framework.

    Args:
        make: creates the context again, if it has to be entered a second time.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.make = make
        self.context = make()
        self.thread = threading.current_thread()
        self.ended = False

    def is_held_by_another(self) -> bool:
        """Tell whether another thread, which has not ended, has the context as its default."""
        is_another = self.thread is not threading.current_thread() and self.thread.is_alive()
        return is_another and not isinstance(self.context, nullcontext)


class Contexts(threading.local):
    """Contexts of a framework that keeps them in a stack for each thread; they end in any order."""

    def __init__(self) -> None:
        self._entered: list[OpenContext] = []

    def enter(self, make: Callable[[], AbstractContextManager[Any]]) -> OpenContext:
        """Enter the context that ``make`` makes, in this thread; the result is for ``leave``."""
        return make_change(self._enter, make)

    def _enter(self, make: Callable[[], AbstractContextManager[Any]]) -> OpenContext:
        self.settle()
        entered = OpenContext(make)
        entered.context.__enter__()
        self._entered.append(entered)
        return entered

    def leave(self, entered: OpenContext, attempted: str) -> None:
        """Leave a context; those that were entered later are left with it, and entered again.

        Args:
            entered: what ``enter`` returned.
            attempted: the current operation, for messages.

        Raises:
            ScopeError: if only another thread can leave it, or if it holds an open context that
                d2ldev does not know. ``settle`` leaves it as soon as possible.
        """
        leave_in_turn(self._leave, entered, attempted)

    def _leave(self, entered: OpenContext, attempted: str) -> None:
        entered.ended = True
        if entered in self._entered:
            problem = self.settle()
            if entered in self._entered:
                raise ScopeError(
                    attempted,
                    f"a block of the framework's own, which began in it, has not ended: {problem}",
                    "end that block first. Otherwise its end makes this device the default again, "
                    "until the next 'with backend.on(device):' of this thread",
                ) from problem
        elif entered.is_held_by_another():
            raise ScopeError(
                attempted,
                "it was entered in another thread, which alone can change its default device",
                "close the generator in the thread that entered it. Otherwise the device is that "
                "thread's default until its next 'with backend.on(device):'",
            )

    def settle(self) -> RuntimeError | None:
        """Leave each context of this thread whose block has ended; return what prevented it."""
        entered, problem = self._entered, None
        first = next((i for i, each in enumerate(entered) if each.ended), len(entered))
        again = []
        while len(entered) > first and problem is None:
            each = entered.pop()
            try:
                each.context.__exit__(None, None, None)
            except RuntimeError as error:
                problem = error
                entered.append(each)
            else:
                again += [] if each.ended else [each]
        for each in reversed(again):
            each.context = each.make()
            each.context.__enter__()
            entered.append(each)
        return problem
