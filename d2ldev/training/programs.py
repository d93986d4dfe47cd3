"""Programs: keep compiled code for the next training of the same kind.

A helper for ``training`` of the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np

P = TypeVar("P")

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def _is_plain(value: Any) -> bool:
    """Return whether a value counts by value: a number, also of NumPy, a string or a flag."""
    return type(value) in _PLAIN or isinstance(value, np.generic)


class Programs(Generic[P]):
    """Compiled programs by the objects that they depend on. They do not keep these alive.

    A program goes with the first of its objects. Copies and pickles have no programs.

    Args:
        size: the number of programs that are kept: those that were asked for last.
        ignored: the names of attributes that a framework changes when it uses an object.
    """

    def __init__(self, size: int, ignored: Collection[str] = ()) -> None:
        self._size, self._ignored = size, ignored
        # Each operation on the dict is atomic, so that threads and ``gc`` may call any method.
        self._kept: dict[Hashable, tuple[P, list[ref[Any]]]] = {}

    def __reduce__(self) -> Any:
        return Programs, (self._size, self._ignored)

    def get(
        self,
        objects: Iterable[Any],
        values: Hashable,
        make: Callable[[], P],
        take: Callable[[P], bool] = lambda _program: True,
    ) -> P:
        """Return the program for these objects and values.

        Args:
            objects: each counts by identity, and by the plain values and functions among its
                attributes. A plain value counts by value, and a method by its object.
            values: what else the program depends on. The table keeps it.
            make: makes the program, which has no reference to the objects.
            take: returns whether a kept program can be used; another takes its place if not. No
                other thread gets the program at the same time.
        """
        found: list[Any] = []
        key = tuple(self._read(each, found) for each in objects), values
        itself = ref(self)

        def forget(_: Any) -> None:
            if (programs := itself()) is not None:
                programs._kept.pop(key, None)

        try:
            hash(key)
            references = [ref(each, forget) for each in found]
        except TypeError:  # a value without a hash, or an object without weak references
            return make()
        entry = self._kept.pop(key, None)
        program = entry[0] if entry is not None and take(entry[0]) else make()
        self._kept[key] = program, references
        for oldest in list(self._kept)[: -self._size]:
            self._kept.pop(oldest, None)
        return program

    def _read(self, obj: Any, found: list[Any]) -> Hashable:
        """Return what an object counts by, and add all that counts by identity to ``found``."""
        if _is_plain(obj):
            return type(obj), obj
        if type(obj) is MethodType:  # it is a new object each time
            return self._read(obj.__func__, found), self._read(obj.__self__, found)
        found.append(obj)
        parts: list[Hashable] = [id(obj)]
        for name, value in list(getattr(obj, "__dict__", {}).items()):
            if name not in self._ignored and _is_plain(value):
                parts.append((name, type(value), value))
            elif name not in self._ignored and type(value) is FunctionType:
                found.append(value)
                parts.append((name, id(value)))
        return tuple(parts)
