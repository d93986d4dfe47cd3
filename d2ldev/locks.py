"""``Lock``: a lock that a forked child finds free, and ``made_once``, which needs none.

d2ldev has no other kind of lock.

A fork copies the memory and one thread. A lock that another thread held would stay locked in the
child for ever.

Held by ``tests/core/package/test_locks.py``.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Lock:
    """A re-entrant lock, which is entered by ``with``.

    Args:
        patience: how many seconds a fork waits for another thread to leave, so that the child
            finds what it guards complete. After that, as with 0, the child finds the lock free and
            the rest as it is.
    """

    def __init__(self, patience: float = 0) -> None:
        self._lock = threading.RLock()
        self._patience = patience
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def hold(self) -> bool:
        """Enter before a fork; return whether another thread left in time."""
        return self._lock.acquire(timeout=self._patience)

    def renew(self) -> None:
        """Become free, in a child that has no thread that would leave."""
        self._lock = threading.RLock()


class made_once(Generic[T]):  # noqa: N801  # it reads as a decorator
    """A property that is made at its first use; threads that make it at once get the same one.

    Before Python 3.12, ``functools.cached_property`` holds a lock, which a forked child may find
    locked for ever. Since then two threads may get two objects.
    https://github.com/python/cpython/issues/87634
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: object, _type: type | None = None) -> T:
        if owner is None:
            return self  # type: ignore[return-value]  # of the class, as documentation asks
        made: T = vars(owner).setdefault(self._name, self._make(owner))
        return made


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
# Of each thread, because several may fork at once.
_forking = threading.local()


def _before() -> None:
    _forking.held = []
    asked: set[Lock] = set()
    # Another thread may make new locks while this one waits.
    while new := [lock for lock in list(_locks) if lock not in asked]:
        asked.update(new)
        _forking.held += [lock for lock in new if lock.hold()]


def _after_in_parent() -> None:
    for lock in _forking.held:
        lock.__exit__()
    del _forking.held


def _after_in_child() -> None:
    for lock in list(_locks):
        if lock not in _forking.held:
            lock.renew()
    _after_in_parent()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
