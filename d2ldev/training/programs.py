"""Programs: keep compiled code for the next training of the same kind.

A helper for ``training`` of the backends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import ref

P = TypeVar("P")
U = TypeVar("U")


def _leave_whole(_value: Any) -> None:
    """Return None: no value is taken apart."""


_PLAIN = frozenset({type(None), type(...), bool, int, float, complex, str, bytes})


class Programs(Generic[P]):
    """Compiled programs by the objects that they depend on. They do not keep these alive.

    A program goes with the first object that it depends on. Copies and pickles have no programs.

    Args:
        size: the number of programs that are kept: those that were asked for last.
        ignored: the names of attributes that a framework changes when it uses an object.
        take_apart: returns the contents of a framework's own value, such as a tree; None for all
            else.
    """

    def __init__(
        self,
        size: int,
        ignored: Collection[str] = (),
        take_apart: Callable[[Any], Any] = _leave_whole,
    ) -> None:
        self._size = size
        self._reading = ignored, take_apart
        # Each operation on the dict is atomic, so that threads and ``gc`` may call any method.
        self._kept: dict[Hashable, tuple[P, list[_Identity]]] = {}

    def __len__(self) -> int:
        """Return the number of programs that are kept."""
        return len(self._kept)

    def __reduce__(self) -> Any:
        return Programs, (self._size, *self._reading)

    def get(
        self,
        dependencies: Any,
        make: Callable[[], P],
        take: Callable[[P], bool] = lambda _program: True,
    ) -> P:
        """Return the program for these dependencies.

        Args:
            dependencies: all that the program depends on but the operands of its calls: see
                ``_Reader``.
            make: makes the program, which has no reference to these objects.
            take: returns whether a kept program can be used; another takes its place if not. No
                other thread gets the program at the same time.
        """
        itself = ref(self)

        def forget(_: Any) -> None:
            if (programs := itself()) is not None:
                programs._forget_dead()

        reader = _Reader(*self._reading, forget)
        try:
            key = reader.read(dependencies)
        except (RecursionError, _NoKeyError):  # for example, a list that contains itself
            return make()
        entry = self._kept.pop(key, None)
        program = entry[0] if entry is not None and take(entry[0]) else make()
        self._kept[key] = program, reader.identities
        for oldest in list(self._kept)[: -self._size]:
            self._kept.pop(oldest, None)
        return program

    def _forget_dead(self) -> None:
        for key, (_, identities) in list(self._kept.items()):
            if any(each() is None for each in identities):
                self._kept.pop(key, None)


class _Identity(ref[Any]):
    """A weak reference that equals another one of the same object, whatever equals the object."""

    __slots__ = ("_number",)
    _number: int

    def __new__(cls, obj: Any, callback: Callable[[Any], None]) -> _Identity:
        self = super().__new__(cls, obj, callback)
        self._number = id(obj)
        return self

    def __eq__(self, other: object) -> bool:
        is_alive = isinstance(other, _Identity) and self() is not None
        return self is other or (is_alive and self() is other())  # type: ignore[operator]

    def __hash__(self) -> int:
        return self._number


class _Reader:
    """Makes a key of dependencies. Dependencies with equal keys share a program.

    - Numbers, strings, containers, dataclasses and bound methods count by value.
    - A function counts by identity.
    - Any other object counts by identity, and by the plain values and functions among its
      attributes. The attributes of its class count, too.

    Args:
        ignored, take_apart: see ``Programs``.
        forget: is called when an object of the key goes.

    Attributes:
        identities: of all objects of the key.
    """

    def __init__(
        self,
        ignored: Collection[str],
        take_apart: Callable[[Any], Any],
        forget: Callable[[Any], None],
    ) -> None:
        self._ignored, self._take_apart, self._forget = ignored, take_apart, forget
        self._numbers: dict[int, int] = {}
        self.identities: list[_Identity] = []

    def read(self, value: Any) -> Hashable:
        """Return what equals the keys of equal dependencies."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, repr(value) if kind is float else value  # 0.0 is not -0.0
        inner = self._take_apart(value)
        if inner is None:
            inner = _contents(value)
        if inner is not None:
            keys = [self.read(each) for each in inner]
            is_set = isinstance(value, (set, frozenset))
            return self.read(kind), frozenset(keys) if is_set else tuple(keys)
        if id(value) in self._numbers:  # it is in the key already
            return self._numbers[id(value)]
        identity = self._identify(value)
        self._numbers[id(value)] = len(self._numbers)
        if kind is FunctionType:
            return identity
        if isinstance(value, type):
            return identity, tuple(self._read_attributes(*value.__mro__))
        return identity, self.read(kind), tuple(self._read_attributes(value))

    def _identify(self, obj: Any) -> Hashable:
        try:
            identity = _Identity(obj, self._forget)
        except TypeError:  # it has no place for weak references
            if gc.is_tracked(obj):  # and may refer to arrays, which the table must not keep
                raise _NoKeyError from None
            return _Kept(obj)
        self.identities.append(identity)
        return identity

    def _read_attributes(self, *holders: Any) -> Iterator[Hashable]:
        for holder in holders:
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if name in self._ignored or name in _OF_PYTHON:
                    continue
                if type(value) in _PLAIN:
                    yield name, self.read(value)
                elif type(value) is FunctionType:
                    yield name, self._identify(value)


# Python makes them when they are asked for.
_OF_PYTHON = frozenset({"__annotate__", "__annotate_func__", "__annotations_cache__"})


class _NoKeyError(Exception):
    """Raised for an object that a key would keep alive, with all that it refers to."""


class ProgramUsers(Generic[U]):
    """The objects that can trace a program, which does not keep them alive.

    Threads may add an object while another one asks. ``WeakSet`` then raises a ``RuntimeError``.
    """

    def __init__(self) -> None:
        # Each operation on the dict is atomic.
        self._kept: dict[int, ref[U]] = {}

    def add(self, user: U) -> None:
        """Add an object."""
        kept, number = self._kept, id(user)
        kept[number] = ref(user, lambda _: kept.pop(number, None))

    def discard(self, user: U) -> None:
        """Remove an object, if it was added."""
        self._kept.pop(id(user), None)

    def choose(self) -> U:
        """Return any of the objects that are alive.

        Raises:
            LookupError: without any.
        """
        for each in list(self._kept.values()):
            if (user := each()) is not None:
                return user
        raise LookupError("no object is left that can trace the program")


class _Kept:
    """A reference that equals another one of the same object, and keeps the object alive."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self._obj is other._obj

    def __hash__(self) -> int:
        return id(self._obj)


def _contents(value: Any) -> Any:
    """Return the contents of a container, dataclass, slice or bound method; None for all else."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, type):
        return None
    if hasattr(type(value), "__dataclass_fields__"):  # an object may say yes to any name
        return [getattr(value, name, None) for name in value.__dataclass_fields__]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, MethodType):  # it is a new object each time
        return value.__func__, value.__self__
    return None
