"""The values in objects that are not containers: attributes, slots, arguments, closures.

``place`` searches the plain attributes of a model. A search calls no code of the user: no property,
no ``__getattr__``, no ``__setattr__``. It enters only the model's own objects. It skips modules,
classes, and globals of functions. It skips objects of Python's library, such as files, locks,
threads and loggers. It also skips objects of the framework's and d2ldev's, such as loaders and
trainers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)
from typing import Any, NamedTuple

Put = Callable[[Any, Any], object]
"""A function that stores a value under a key, like a dict's ``__setitem__``. It must not fail."""

# A plain tuple: a named one takes five times as long to make, for each parameter of a model.
Member = tuple[str, Any, Put | None, Any]
"""One thing that a framework's object keeps: ``(name, value, put, key)``.

``name`` is its name in the object, dotted: ``'weight'``, ``'state.0.exp_avg'``. ``value`` is a
tensor, a nesting, another object of the framework, any other object, which ``place`` looks through,
or a ``NoTensor``. ``put(key, other)`` stores another value in its place. ``put`` is None for what
is never replaced: an object, or a tensor that is refilled.
"""


class Keeper(NamedTuple):
    """How objects of a class are looked through.

    Args:
        members: what an object keeps.
        is_fixed: whether nothing of it can be replaced, so that ``put`` always is None.
    """

    members: Callable[[Any], Iterable[Member]]
    is_fixed: bool = False


class Keepers(dict[type, "Keeper | None"]):
    """How objects of each class are looked through; None for those that are not entered.

    Args:
        framework: a ``d2ldev.areas.Framework``, whose ``models`` are asked when a class is
            looked up for the first time.
    """

    # A program that makes a class for every model must not fill the memory with them.
    _LIMIT = 4096

    def __init__(self, framework: Any) -> None:
        super().__init__()
        self._framework = framework

    def __missing__(self, cls: type) -> Keeper | None:
        if len(self) >= self._LIMIT:
            self.clear()
        keeper = self[cls] = self._keeper_of(cls)
        return keeper

    def _keeper_of(self, cls: type) -> Keeper | None:
        if (known := _KEEPERS.get(cls)) is not None:
            return known
        own, models = type(self._framework).__module__.partition(".")[0], self._framework.models
        packages = frozenset({"d2ldev", own, *models.packages})
        if cls is FunctionType:
            return Keeper(partial(_of_function, packages), is_fixed=True)
        if issubclass(cls, _NEVER_ENTERED):
            return None
        if cls.__module__ in _OF_THE_INTERPRETER and not _has_attributes(cls):
            return _REFERENTS
        if issubclass(cls, partial):
            return Keeper(_of_partial)
        if not all(_is_entered(base, packages, models.searched) for base in cls.__mro__):
            return None
        slots = tuple(_slots_of(cls))
        if slots or _has_attributes(cls):
            return Keeper(partial(_of_object, slots, _has_attributes(cls)))
        return None


_NEVER_ENTERED = (type, ModuleType, CodeType, FrameType, TracebackType, BaseException)
# Whose classes say what an object can do, and keep nothing.
_OF_MIXINS = frozenset({"abc", "typing", "collections.abc", "_collections_abc", "contextlib"})
# Of iterators and the like, written in C, only the garbage collector says what they keep.
_OF_THE_INTERPRETER = frozenset({"builtins", "itertools", "functools", "operator", "_operator"})
# A model, or a program around it, that is kept by what it has made.
_OF_OTHERS = frozenset({"trainer", "_trainer"})


def _is_entered(base: type, packages: frozenset[str], searched: tuple[str, ...]) -> bool:
    module = base.__module__
    if base is object or base is SimpleNamespace or module in _OF_MIXINS:
        return True
    package = module.partition(".")[0]
    if package in packages:
        return module.startswith(searched)
    return package not in sys.stdlib_module_names


def _of_function(packages: frozenset[str], x: Any) -> Sequence[Member]:
    if x.__closure__ is None and x.__defaults__ is None and x.__kwdefaults__ is None:
        return ()  # most, and all other questions take longer
    # The framework's own have settings, and no tensors.
    if str(x.__globals__.get("__name__")).partition(".")[0] in packages:
        return ()
    found: list[Member] = []
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            found.append((f"closure.{name}", cell.cell_contents, None, None))
    settings = (
        (name, object.__getattribute__(x, name)) for name in ("__defaults__", "__kwdefaults__")
    )
    found += [(name, value, None, None) for name, value in settings if value is not None]
    return found


def _has_attributes(cls: type) -> bool:
    return cls.__dictoffset__ != 0


def _slots_of(cls: type) -> Iterator[str]:
    """Yield the slots that a class and its bases have declared in Python."""
    for base in cls.__mro__:
        declared = vars(base).get("__slots__", ())
        if declared:
            for name, value in vars(base).items():
                if isinstance(value, MemberDescriptorType):
                    yield name


def _of_object(slots: tuple[str, ...], has_attributes: bool, x: Any) -> Iterator[Member]:
    if has_attributes:
        attributes = object.__getattribute__(x, "__dict__")
        for name, value in attributes.items():
            if name not in _OF_OTHERS:
                yield str(name), value, attributes.__setitem__, name
    for name in slots:
        try:
            value = object.__getattribute__(x, name)
        except AttributeError:  # it is empty
            continue
        yield name, value, partial(object.__setattr__, x), name


# Which typeshed leaves out.
_set_state: Callable[[Any, Any], None] = vars(partial)["__setstate__"]


def _of_partial(x: Any) -> Iterator[Member]:
    def put(name: str, value: Any) -> None:
        state = {"args": x.args, "keywords": x.keywords, name: value}
        attributes = object.__getattribute__(x, "__dict__")
        _set_state(x, (x.func, state["args"], state["keywords"], attributes))

    yield "func", x.func, None, None
    yield "args", x.args, put, "args"
    yield "keywords", x.keywords, put, "keywords"
    yield from _of_object((), True, x)


def _of_method(x: Any) -> Iterator[Member]:
    yield "__self__", x.__self__, None, None
    yield "__func__", x.__func__, None, None


def _of_builtin(x: Any) -> Sequence[Member]:
    owner = x.__self__
    if owner is None or isinstance(owner, (type, ModuleType)):
        return ()
    return (("__self__", owner, None, None),)


def _of_generator(x: Any) -> Iterator[Member]:
    frame = next((getattr(x, name) for name in _FRAMES if hasattr(x, name)), None)
    if frame is not None:  # it has not ended
        for name, value in frame.f_locals.items():
            yield name, value, None, None


_FRAMES = ("gi_frame", "cr_frame", "ag_frame")


def _of_referents(x: Any) -> Iterator[Member]:
    for index, value in enumerate(gc.get_referents(x)):
        yield str(index), value, None, None


_REFERENTS = Keeper(_of_referents, is_fixed=True)
_KEEPERS: dict[type, Keeper] = {
    MethodType: Keeper(_of_method),
    type(lru_cache(len)): _REFERENTS,
    BuiltinFunctionType: Keeper(_of_builtin, is_fixed=True),
    **dict.fromkeys(
        (GeneratorType, CoroutineType, AsyncGeneratorType),
        Keeper(_of_generator, is_fixed=True),
    ),
}
