"""Programs: what was traced and compiled is kept for the next training of the same kind.

A helper for the rooms ``training``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

P = TypeVar("P")

_PLAIN = frozenset({type(None), type(...), bool, int, float, complex, str, bytes})
_CONTAINERS = (tuple, list, dict)
_OPAQUE = frozenset({FunctionType, type})
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)
_IS_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Programs(Generic[P]):
    """Compiled programs, found by what they were compiled from, of which nothing is kept alive.

    A program goes as soon as one of the objects does that it was compiled from: another object at
    its place in memory is not taken for it.

    Args:
        size: how many programs are kept: those that were asked for last.
        parts_of: takes a framework's own value apart, such as a tree; returns None for all else.
        ignored: the names of attributes that a framework changes when it uses an object.
    """

    def __init__(
        self,
        size: int,
        parts_of: Callable[[Any], Any] = lambda _part: None,
        ignored: Collection[str] = (),
    ) -> None:
        self._size = size
        self._reading = parts_of, ignored
        # Each operation on a dict of plain keys is atomic: threads and ``gc`` may call anything.
        self._kept: dict[Any, tuple[P, list[Any]]] = {}

    def __len__(self) -> int:
        """Return the number of programs that are kept."""
        return len(self._kept)

    def get(
        self, parts: Any, make: Callable[[], P], fits: Callable[[P], bool] = lambda _program: True
    ) -> P:
        """Return the program that was made from such parts.

        Args:
            parts: all that the program depends on but for what it is called with: see ``_Reader``.
            make: makes it, without a reference to the objects among the parts.
            fits: tells whether a program can still be used; another one takes its place if not.
        """
        reader = _Reader(*self._reading)
        key = reader.key(parts)
        entry = self._kept.pop(key, None)
        if entry is None or not fits(entry[0]):
            entry = make(), [self._watched(each, key) for each in reader.objects.values()]
        self._kept[key] = entry
        for oldest in list(self._kept)[: -self._size]:
            self._kept.pop(oldest, None)
        return entry[0]

    def _watched(self, obj: Any, key: Any) -> Any:
        kept = self._kept
        try:
            return ref(obj, lambda _: kept.pop(key, None))
        except TypeError:  # it has no place for weak references, and is kept
            return obj


class _Reader:
    """Makes a key of parts.

    Numbers, strings, containers, dataclasses and bound methods count by their values. Any other
    object counts by which one it is, its class, the values of its plain attributes and of its
    public containers, and which objects its other public attributes are; a class by all of its
    attributes.

    Attributes:
        objects: those that the key names by their ids.
    """

    def __init__(self, parts_of: Callable[[Any], Any], ignored: Collection[str]) -> None:
        self._parts_of = parts_of
        self._ignored = ignored
        self._read: set[int] = set()
        self.objects: dict[int, Any] = {}

    def key(self, part: Any) -> Any:
        """Return what is equal for equal parts."""
        kind = type(part)
        if kind in _PLAIN:
            return kind, repr(part) if kind is float else part  # 0.0 is not -0.0
        if id(part) in self._read:
            return id(part)
        inner = None if kind in _OPAQUE else self._parts_of(part)
        if inner is None and kind not in _OPAQUE:
            inner = _contents(part)
        if inner is not None:
            keys = [self.key(each) for each in inner]
            is_set = isinstance(part, (set, frozenset))
            return self.key(kind), frozenset(keys) if is_set else tuple(keys)
        self._read.add(id(part))
        if isinstance(part, type):
            return self._named(part), tuple(self._attributes_of_class(part))
        return self._named(part), self.key(kind), tuple(self._attributes(part))

    def _named(self, obj: Any) -> int:
        self.objects[id(obj)] = obj
        return id(obj)

    def _attributes(self, obj: Any) -> Iterator[Any]:
        for name, value in getattr(obj, "__dict__", {}).items():
            is_public = name[:1] != "_"
            if name in self._ignored:
                continue
            if type(value) in _PLAIN or (is_public and isinstance(value, _CONTAINERS)):
                yield name, self.key(value)
            elif is_public:
                yield name, self._named(value)

    def _attributes_of_class(self, kind: type) -> Iterator[Any]:
        # A method may be replaced, as by D2L's ``add_to_class``; not in a class of C.
        for each in kind.__mro__:
            for name, value in vars(each).items() if each.__flags__ & _IS_OF_PYTHON else ():
                if name[:2] == "__" and not callable(value):
                    continue  # such as ``__annotations__``, which Python makes when it is asked for
                if type(value) in _PLAIN or (name[:1] != "_" and isinstance(value, _CONTAINERS)):
                    yield name, self.key(value)
                elif isinstance(value, property):
                    yield name, self._named(value.fget), self._named(value.fset)
                elif type(value) not in _SLOTS:  # these refer to the class
                    yield name, self._named(value)


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
