"""What a value is to one backend: a tensor, an object of the framework, a container, or plain.

Only the type decides, and each type is looked at once, because a batch is walked at every step of a
training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.containers import Container, container_of, is_plain_class


class Kind:
    """What a value is to a walk, when it is no container."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<kind {self.name}>"


TENSOR = Kind("tensor")
PLAIN = Kind("plain value")
OBJECT = Kind("object of the framework")
UNKNOWN = Kind("unknown")

_registered: dict[type, Container] = {}
_all_kinds: list[Kinds] = []


def register_container(
    cls: type,
    children: Callable[[Any], Iterable[Any]],
    rebuild: Callable[[Any, list[Any]], Any],
) -> None:
    """Teach ``to``, ``copy`` and ``place`` a container type, such as your own batch class.

    Args:
        cls: the type; its subclasses are not included.
        children: the values of a container that may hold tensors, in a fixed order.
        rebuild: ``(old, children) -> new``: a container like ``old`` with these children.

    Raises:
        UnsupportedValueError: if ``cls`` is no class, or one of the others no function.

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
    _registered[cls] = Container(children, lambda x: range(len(list(children(x)))), rebuild)
    for kinds in _all_kinds:
        kinds.clear()


class Kinds(dict[type, "Kind | Container"]):
    """What each type is to one backend: looked up by type, worked out once for each.

    Args:
        tensor_types: the backend's tensors.
        object_types: its models, optimizers and the like.
        plain_types: its own values without parts.
        container_of: how the framework itself walks a class; None if it does not. It is asked
            about classes that are none of the above and not registered, before Python's own.
    """

    # A program that makes a class for every batch must not fill the memory with them.
    _LIMIT = 4096

    def __init__(
        self,
        tensor_types: tuple[type, ...],
        object_types: tuple[type, ...],
        plain_types: tuple[type, ...] = (),
        container_of: Callable[[type], Container | None] | None = None,
    ) -> None:
        super().__init__()
        self._container_of = container_of
        self._tensor_types = tensor_types
        self._object_types = object_types
        plain: tuple[type, ...] = (type(None), str, bytes, bytearray, Number)
        self._plain_types = plain + plain_types
        _all_kinds.append(self)

    def __missing__(self, cls: type) -> Kind | Container:
        if len(self) >= self._LIMIT:
            self.clear()
        kind = self[cls] = self._classify(cls)
        return kind

    def _classify(self, cls: type) -> Kind | Container:
        if issubclass(cls, self._tensor_types):
            return TENSOR
        if issubclass(cls, self._object_types):
            return OBJECT
        if cls in _registered:
            return _registered[cls]
        if issubclass(cls, self._plain_types):
            return PLAIN
        known = self._container_of(cls) if self._container_of is not None else None
        return known or container_of(cls) or (PLAIN if is_plain_class(cls) else UNKNOWN)
