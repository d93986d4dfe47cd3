"""``Lock``: a lock that a forked child finds free.

d2ldev has no other kind of lock.

A fork copies the memory and one thread. A lock that another thread held would stay locked in the
child for ever.

Held by ``tests/core/package/test_locks.py``.
"""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """A re-entrant lock, which is entered by ``with``.

    Args:
        patience: how many seconds a fork waits for another thread to leave. Then the guarded data
            is complete in the child. After that, as with 0, the child finds the lock free and the
            data as it is.
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
