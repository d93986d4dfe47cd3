"""The kind of a value for one backend: a tensor, an object of the framework, a container, or plain.

Only the type decides. The code looks at each type once, because every step of a training loop walks
a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, ValuesView
from numbers import Number
from typing import Any, final
from weakref import WeakValueDictionary

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.containers import (
    Container,
    container_of,
    is_of_python,
    is_plain_class,
    with_attributes,
)
from d2ldev.nesting.keras import is_refused


@final
class Kind:
    """The kind of a value that is not a container, for a walk."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<kind {self.name}>"


TENSOR = Kind("tensor")
"""The kind of a tensor of the framework."""
PLAIN = Kind("plain value")
"""The kind of a number, text, a dtype, or anything else that holds no tensor."""
OBJECT = Kind("object of the framework")
"""The kind of a model, an optimizer, or another object of ``Models.types``."""
UNKNOWN = Kind("unknown")
REFUSED = Kind("object that is refused wherever it is")

_PLAIN_TYPES = (type(None), str, bytes, bytearray, Number)
_registered: dict[type, Container] = {}
# By their ids: a dict has no hash. A framework that is dropped takes its kinds with it.
_all_kinds: WeakValueDictionary[int, Kinds] = WeakValueDictionary()


def register_container(
    cls: type,
    children: Callable[[Any], Iterable[Any]],
    rebuild: Callable[[Any, list[Any]], Any],
) -> None:
    """Teach ``to``, ``copy`` and ``place`` a container type, such as your own batch class.

    Args:
        cls: the type, without its subclasses.
        children: ``container -> children``: the values that may hold tensors, in a fixed order. It
            returns a list, a tuple, an iterator, or the ``values()`` of a dict.
        rebuild: ``(old, children) -> new``: a container like ``old`` with these children.

    Raises:
        UnsupportedValueError: if ``cls`` is not a class, or one of the others not a function.

    >>> class Batch:
    ...     def __init__(self, x, path): self.x, self.path = x, path
    >>> register_container(Batch, lambda b: [b.x], lambda old, new: Batch(new[0], old.path))
    """
    if not isinstance(cls, type) or not callable(children) or not callable(rebuild):
        raise UnsupportedValueError(
            f"register {describe(cls)} as a container",
            "that takes a class and two functions",
            "d2ldev.register_container(Batch, lambda b: [b.x], lambda old, new: Batch(new[0]))",
        )

    def list_children(x: Any) -> list[Any]:
        found = children(x)
        # Of a dict a walk would take the keys, and of a tensor the rows.
        if not isinstance(found, (list, tuple, Iterator, ValuesView)):
            raise TypeError(
                f"its function 'children' returns {describe(found)}, and has to return a list: "
                "[batch.x, batch.y]"
            )
        return list(found)

    _registered[cls] = Container(list_children, lambda x: range(len(list_children(x))), rebuild)
    for kinds in list(_all_kinds.values()):
        kinds.clear()


def is_pair(x: Any, kinds: Kinds) -> bool:
    """Return whether a batch is a tuple of two tensors. Most are, and need no walk."""
    if type(x) is not tuple or len(x) != 2:
        return False
    first, second = x
    return kinds[type(first)] is kinds[type(second)] is TENSOR and first is not second


class Kinds(dict[type, "Kind | Container"]):
    """The kind of each type for one backend: looked up by type, and found once for each.

    Args:
        framework: a ``d2ldev.contract.Framework``. The first lookup of a type asks its ``tensors``
            and ``models``.
    """

    # A program that makes a class for every batch must not fill the memory with them.
    _LIMIT = 4096

    def __init__(self, framework: Any) -> None:
        super().__init__()
        self._framework = framework
        _all_kinds[id(self)] = self

    def __missing__(self, cls: type) -> Kind | Container:
        if len(self) >= self._LIMIT:
            self.clear()
        kind = self[cls] = self._classify(cls)
        return kind

    def _classify(self, cls: type) -> Kind | Container:
        tensors, models = self._framework.tensors, self._framework.models
        if is_refused(cls, self._framework.name):
            return REFUSED
        if issubclass(cls, tensors.types):
            return TENSOR
        if issubclass(cls, models.types):
            return OBJECT
        if cls in _registered:
            return _registered[cls]
        if issubclass(cls, (*_PLAIN_TYPES, *tensors.plain_types)):
            return PLAIN
        # The framework's own containers before Python's. It says itself what is in them.
        container: Container | None = tensors.container_of(cls)
        if container is not None:
            return container
        if self._moves_by_itself(cls):
            return UNKNOWN
        if (container := container_of(cls)) is not None:
            return with_attributes(cls, container, self.has_tensors)
        return PLAIN if is_plain_class(cls) else UNKNOWN

    def has_tensors(self, x: Any) -> bool:
        """Tell whether a value is a tensor, moves by itself, or is a container with such a one."""
        kind = self[type(x)]
        if isinstance(kind, Kind):
            return kind is TENSOR or (kind is UNKNOWN and self.method_of(type(x), 0) is not None)
        return self._has_tensors(x, kind, {})

    def method_of(self, cls: type, which: int) -> str | None:
        """Return the name of one of ``Tensors.own_methods``; None for a class without it."""
        return self._own_method(cls, which) if self[cls] is UNKNOWN else None

    def _own_method(self, cls: type, which: int) -> str | None:
        names = self._framework.tensors.own_methods
        if names is None:
            return None
        # The class is asked: an object may answer to every name. Only an object that moves by
        # itself copies itself, because arrays of other frameworks have ``clone``, too.
        is_there = all(callable(getattr(cls, name, None)) for name in names[: which + 1])
        return names[which] if is_there else None

    def _moves_by_itself(self, cls: type) -> bool:
        """Return whether a container is moved by its own method, and is not walked.

        Python's containers, and classes derived from them, are walked. So are dataclasses. A
        class with both methods behaves like a tensor, such as one whose iteration gives rows.
        """
        if self._own_method(cls, 0) is None:
            return False
        return not is_of_python(cls) or self._own_method(cls, 1) is not None

    def _has_tensors(self, x: Any, kind: Container, seen: dict[int, Any]) -> bool:
        seen[id(x)] = x  # kept, so that its id stays its own
        for child in kind.children(x):
            inner = self[type(child)]
            if inner is TENSOR or (inner is UNKNOWN and self.method_of(type(child), 0)):
                return True
            is_new = not isinstance(inner, Kind) and id(child) not in seen
            if is_new and self._has_tensors(child, inner, seen):  # type: ignore[arg-type]
                return True
        return False
