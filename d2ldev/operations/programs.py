"""Programs: what was traced and compiled is kept for the next training of the same kind.

A helper for the rooms ``training``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

P = TypeVar("P")

_PLAIN = frozenset({type(None), type(...), bool, int, float, complex, str, bytes})
_CONTAINERS = (tuple, list, dict)
_OPAQUE = frozenset({FunctionType, type})
_IS_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)


class Programs(Generic[P]):
    """Compiled programs, found by what they were compiled from, of which nothing is kept alive.

    Numbers, strings, and containers and dataclasses of parts count by their values. Any other
    object counts by which one it is and by the numbers and strings among its attributes; a class by
    all of its attributes. A program goes as soon as such an object does, so that a new object in
    its place in memory is not taken for it.

    Args:
        size: how many programs are kept: those that were asked for last.
        parts_of: takes a framework's own value apart, such as a tree; returns None for all else.
    """

    def __init__(self, size: int, parts_of: Callable[[Any], Any] = lambda _part: None) -> None:
        self._size = size
        self._parts_of = parts_of
        # Each operation on a dict of plain keys is atomic: threads and ``gc`` may call anything.
        self._kept: dict[Any, tuple[P, list[Any]]] = {}

    def __len__(self) -> int:
        """Return the number of programs that are kept."""
        return len(self._kept)

    def get(self, parts: Any, make: Callable[[], P]) -> P:
        """Return the program that was made from such parts.

        Args:
            parts: all that the program depends on but for what it is called with.
            make: makes it, without a reference to the objects among the parts.
        """
        objects: dict[int, Any] = {}
        key = self._key(parts, objects)
        entry = self._kept.pop(key, None)
        if entry is None:
            entry = make(), [self._watched(each, key) for each in objects.values()]
        self._kept[key] = entry
        for oldest in list(self._kept)[: -self._size]:
            self._kept.pop(oldest, None)
        return entry[0]

    def _key(self, part: Any, objects: dict[int, Any]) -> Any:
        """Return what is equal for equal parts; add the objects that it names by their ids."""
        kind = type(part)
        if kind in _PLAIN:
            return kind, repr(part) if kind is float else part  # 0.0 is not -0.0
        if id(part) in objects:
            return id(part)
        inner = None if kind in _OPAQUE else self._parts_of(part)
        if inner is None and kind not in _OPAQUE:
            inner = _contents(part)
        if inner is None:
            objects[id(part)] = part
            return id(part), tuple(self._attributes(part, objects))
        keys = [self._key(each, objects) for each in inner]
        named = id(kind) if id(kind) in objects else self._key(kind, objects)
        return named, frozenset(keys) if isinstance(part, (set, frozenset)) else tuple(keys)

    def _attributes(self, part: Any, objects: dict[int, Any]) -> Iterator[Any]:
        if not isinstance(part, type):
            for name, value in getattr(part, "__dict__", {}).items():
                if type(value) in _PLAIN:
                    yield name, self._key(value, objects)
            return
        # A method may be replaced in the class, as by D2L's ``add_to_class``; not in one of C.
        for each in part.__mro__:
            if not each.__flags__ & _IS_OF_PYTHON:
                continue
            for name, value in vars(each).items():
                if type(value) in _PLAIN or (type(value) in _CONTAINERS and name[:1] != "_"):
                    yield name, self._key(value, objects)
                elif type(value) is property:
                    yield name, self._key((value.fget, value.fset), objects)
                elif type(value) not in _SLOTS:  # which refer to the class
                    objects[id(value)] = value
                    yield name, id(value)

    def _watched(self, obj: Any, key: Any) -> Any:
        kept = self._kept
        try:
            return ref(obj, lambda _: kept.pop(key, None))
        except TypeError:  # it has no place for weak references, and is kept
            return obj


def _contents(part: Any) -> Any:
    """Return the parts of a container, a dataclass or a bound method; None for all else."""
    if isinstance(part, (tuple, list, set, frozenset)):
        return part
    if isinstance(part, type):
        return None
    if hasattr(part, "__dataclass_fields__"):
        return [getattr(part, name, None) for name in part.__dataclass_fields__]
    if isinstance(part, Mapping):
        return part.items()
    if isinstance(part, MethodType):  # it is a new object each time
        return part.__func__, part.__self__
    return None
