"""Classes that a file names: found among those that the program has, and never run.

A file is data, and its names are only looked up: in a module that is already imported, past every
``__getattr__``. A class that is found is taken if it is a namedtuple or a dataclass with the same
fields, and nothing of it runs: no constructor, no ``__setattr__``. One that would run by itself,
when an object of it is forgotten, is not taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from d2ldev.files import nodes


def find_class(module: str, qualname: str) -> type | None:
    """The class of a name in a module that is imported; None if there is none.

    >>> find_class("collections", "OrderedDict")
    <class 'collections.OrderedDict'>
    """
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        attributes = getattr(found, "__dict__", {})
        # By the name of its type: a class's ``__dict__`` is no dict.
        found = attributes.get(name) if type(attributes).__name__ in ("dict", "mappingproxy") else 0
    return found if isinstance(found, type) else None


def make(kind: str, module: str, qualname: str, fields: Sequence[str], values: list[Any]) -> Any:
    """A namedtuple or a dataclass, or what stands for it: a tuple, or a dict by its fields."""
    cls = find_class(module, qualname)
    if cls is not None and hasattr(cls, "__del__"):
        cls = None
    if kind == nodes.NAMEDTUPLE:
        is_it = cls is not None and issubclass(cls, tuple) and _is_named(cls, fields)
        return tuple.__new__(cls, values) if is_it and cls is not None else tuple(values)
    if cls is not None and _is_dataclass(cls, fields):
        made: Any = object.__new__(cls)
        for name, value in zip(fields, values, strict=True):
            object.__setattr__(made, name, value)  # a frozen one refuses ``setattr``
        return made
    return dict(zip(fields, values, strict=True))


def _runs_when_made(cls: type) -> bool:
    return any("__new__" in vars(base) for base in cls.__mro__ if base is not object)


def _is_named(cls: type, fields: Sequence[str]) -> bool:
    return vars(cls).get("_fields") == tuple(fields)


def _is_dataclass(cls: type, fields: Sequence[str]) -> bool:
    known = vars(cls).get("__dataclass_fields__")
    if not isinstance(known, dict) or _runs_when_made(cls):
        return False
    named = [name for name, field in known.items() if field._field_type.name == "_FIELD"]
    # A field that is a property would run with a value of the file's. Those of a class with slots
    # are descriptors, too, which run nothing of anybody's.
    return named == list(fields) and not any(
        hasattr(getattr(cls, name, None), "__set__")
        and type(vars(cls).get(name)).__name__ != "member_descriptor"
        for name in fields
    )
