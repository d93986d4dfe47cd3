"""Programs: what was traced and compiled is kept for the next training of the same kind.

A helper for the rooms ``training``.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import PurePath
from types import (
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np

P = TypeVar("P")

_PLAIN = frozenset({type(None), type(...), bool, int, float, complex, str, bytes})
_CONTAINERS = (tuple, list, dict)
_OPAQUE = frozenset({FunctionType, type})
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)
_IS_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# Bytes of an array of NumPy's that may be changed in place, as the weights of classes are.
_SMALL = 1 << 16
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
# Also the user's own, Debian's, those that a virtual environment shares, and those of a ``.pth``.
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_BASES = ("abc", "typing")  # of the user's own classes, without a state


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
        try:
            key = reader.key(parts)
        except RecursionError:  # such as of a list that contains itself
            return make()
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
    """Makes a key of parts, which is equal for parts of which the same program is made.

    - Numbers, strings, containers, dataclasses, small arrays of NumPy's, ``partial``s and bound
      methods count by value.
    - A class counts by identity and all of its attributes.
    - Any other object counts by identity, class and attributes. Plain attributes count by value. So
      do public ones that are containers, or objects with plain attributes only; others by identity.
    - The user's own code is often changed between two trainings. So an object of the user's classes
      counts by all of its attributes, and a function of the user's by what it reads elsewhere, too.

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
        if kind is np.ndarray and part.nbytes <= _SMALL and not part.dtype.hasobject:
            return kind, part.dtype.str, part.shape, part.tobytes()
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
        read = self._read_by(part) if kind is FunctionType and _is_users(part) else ()
        return self._named(part), self.key(kind), tuple(self._attributes(part)), tuple(read)

    def _named(self, obj: Any) -> int:
        self.objects[id(obj)] = obj
        return id(obj)

    def _inner(self, value: Any) -> Any:
        """Return the key of what another part refers to."""
        kind = type(value)
        counts = kind in _PLAIN or isinstance(value, (*_CONTAINERS, np.ndarray, partial))
        if kind is FunctionType or isinstance(value, type):
            counts = _is_users(value)
        counts = counts or _is_simple(value) or _is_all_users(kind)
        return self.key(value) if counts else self._named(value)

    def _attributes(self, obj: Any) -> Iterator[Any]:
        is_whole = _is_all_users(type(obj))
        attributes = dict(getattr(obj, "__dict__", {}))
        if is_whole:
            attributes |= _slots(obj)
        for name, value in attributes.items():
            is_read = is_whole or name[:1] != "_" or type(value) in _PLAIN
            if is_read and name not in self._ignored:
                yield name, self._inner(value)

    def _read_by(self, function: FunctionType) -> Iterator[Any]:
        """Yield what a function is made of, and what it reads when it is called."""
        code, everywhere = function.__code__, function.__globals__
        yield self._named(code)
        yield self.key([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            try:
                yield self._inner(cell.cell_contents)
            except ValueError:  # it is empty
                yield None
        for name in _global_names(code):
            value = everywhere.get(name)
            yield name, self._inner(value)
            if isinstance(value, ModuleType) and not _is_installed(value.__name__):
                inner = vars(value)
                yield from ((x, self._inner(inner[x])) for x in _names(code) if x in inner)

    def _attributes_of_class(self, kind: type) -> Iterator[Any]:
        # A method may be replaced, as by D2L's ``add_to_class``; not in a class of C.
        for each in kind.__mro__:
            for name, value in list(vars(each).items()) if each.__flags__ & _IS_OF_PYTHON else ():
                if name[:2] == "__" and not callable(value):
                    continue  # such as ``__annotations__``, which Python makes when it is asked for
                is_private = name[:1] == "_" and isinstance(value, _CONTAINERS)
                if isinstance(value, property):
                    yield name, self._inner(value.fget), self._inner(value.fset)
                elif isinstance(value, (classmethod, staticmethod)):
                    yield name, self._named(value), self._inner(value.__func__)
                elif is_private and not _is_users(each):
                    yield name, self._named(value)
                elif type(value) not in _SLOTS:  # these refer to the class
                    yield name, self._inner(value)


def _is_users(part: Any) -> bool:
    """Return whether a function or a class is the user's own, and may be changed at any time."""
    module = part.__module__
    # Classes of proxies have a property there, or a slot: they are a library's.
    return isinstance(module, str | None) and not _is_installed(module or "")


def _is_all_users(kind: type) -> bool:
    """Return whether a class and its bases are the user's own."""
    *own, _ = kind.__mro__
    own = [each for each in own if each.__module__ not in _BASES]
    return bool(own) and all(map(_is_users, own))


def _is_simple(value: Any) -> bool:
    """Return whether all attributes of an object are plain, as those of Keras' regularizers are."""
    attributes = getattr(value, "__dict__", None)
    return type(attributes) is dict and all(type(x) in _PLAIN for x in attributes.values())


def _is_installed(module: str) -> bool:
    """Return whether a module is Python's, a package's, or d2ldev's."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""  # none in a notebook
    return _is_package(module, file)


@lru_cache(maxsize=4096)  # a fit asks a thousand times, about a hundred modules
def _is_package(module: str, file: str) -> bool:
    if module.startswith("d2ldev") or module in sys.builtin_module_names:
        return True
    if file.startswith(_STANDARD_LIBRARY) or _INSTALLED.search(file) is not None:
        return True
    # ``pip install --target`` takes any folder, and tells what it has put there.
    depth = module.count(".") + (PurePath(file).stem == "__init__")
    folders = PurePath(file).parents
    return depth < len(folders) and _has_distributions(str(folders[depth]))


@lru_cache(maxsize=128)
def _has_distributions(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # such as of a module in an archive
        return False


def _slots(obj: Any) -> dict[str, Any]:
    names = [
        name
        for kind in type(obj).__mro__
        for name, each in vars(kind).items()
        if type(each) is MemberDescriptorType
    ]
    return {name: getattr(obj, name) for name in names if hasattr(obj, name)}


@lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that a function reads, in order."""
    import dis  # not before it is needed: only training asks

    names = {x.argval for x in dis.get_instructions(code) if x.opname.startswith("LOAD_GLOBAL")}
    return tuple(sorted(names.union(*map(_global_names, _inner_codes(code)))))


def _names(code: CodeType) -> tuple[str, ...]:
    """Return all names in a function, those of attributes too."""
    names = {*code.co_names}
    return tuple(sorted(names.union(*map(_names, _inner_codes(code)))))


def _inner_codes(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _contents(part: Any) -> Any:
    """Return the parts of a container, a dataclass or a bound method; None for all else."""
    if isinstance(part, (tuple, list, set, frozenset)):
        return part
    if isinstance(part, type):
        return None
    if hasattr(type(part), "__dataclass_fields__"):  # an object may say yes to any name
        return [getattr(part, name, None) for name in part.__dataclass_fields__]
    if isinstance(part, Mapping):
        return part.items()
    if isinstance(part, MethodType):  # it is a new object each time
        return part.__func__, part.__self__
    if type(part) is partial:
        return part.func, part.args, part.keywords
    return None
