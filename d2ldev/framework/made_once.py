"""``made_once``: a property that is made at its first use, without a lock.

Held by ``tests/core/framework/test_made_once.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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
