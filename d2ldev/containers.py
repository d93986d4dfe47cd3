"""Walking nested batches: what a container is, what is in it, how one is made again.

A *nesting* is a tensor, or any dict, list, tuple, namedtuple, dataclass, set, deque or other
registered container of nestings. ``None``, numbers, strings and bytes may stand anywhere and
stay as they are. The rules, each held by a requirement ``containers.*`` of the suite:

- What comes back is what went in: the same type, order, default factory, maximal length and
  attributes. No constructor of a dataclass or namedtuple runs again.
- A container in which nothing changed comes back as itself.
- What was one object before is one object afterwards: tied tensors stay tied, and a list that
  is in two places is made again once.
- Nothing that was given is changed; whatever goes wrong, the caller's containers are as they
  were.

This module imports no framework, and knows none: which types are tensors is asked of a
``Kinds``, made by the backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any

from d2ldev.container_types import Container, container_of, is_plain_class
from d2ldev.errors import UnsupportedValueError


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

# Framework objects with parts of their own (models, optimizers) are no containers: ``to`` refuses
# them and names ``place``.

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

    >>> class Batch:
    ...     def __init__(self, x, path): self.x, self.path = x, path
    >>> register_container(Batch, lambda b: [b.x], lambda old, new: Batch(new[0], old.path))
    """
    _registered[cls] = Container(children, lambda x: range(len(list(children(x)))), rebuild)
    for kinds in _all_kinds:
        kinds.clear()


class Kinds(dict[type, "Kind | Container"]):
    """What each type is to one backend: looked up by type, worked out once for each.

    Args:
        tensor_types: the backend's tensors.
        object_types: its models, optimizers and the like.
        plain_types: its own values without parts.
    """

    # A program that makes a class for every batch must not fill the memory with them.
    _LIMIT = 4096

    def __init__(
        self,
        tensor_types: tuple[type, ...],
        object_types: tuple[type, ...],
        plain_types: tuple[type, ...] = (),
    ) -> None:
        super().__init__()
        self._tensor_types = tensor_types
        self._object_types = object_types
        self._plain_types: tuple[type, ...] = (
            type(None),
            str,
            bytes,
            bytearray,
            Number,
            *plain_types,
        )
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
        return container_of(cls) or (PLAIN if is_plain_class(cls) else UNKNOWN)


def every(x: Any, kinds: Kinds, holds: Callable[[Any], bool], budget: list[int]) -> bool:
    """Whether ``holds`` is true of every tensor in the nesting ``x``, which may hold no others.

    The walk that decides that nothing has to move: it makes no object of its own, and does not
    remember where it was.

    Args:
        x: a nesting.
        kinds: what each type is.
        holds: asked of each tensor.
        budget: how many containers it may enter, in a list of one; it gives up, with False, at
            a nesting that is large or full of shared containers, which ``rebuild`` enters once.

    Raises:
        RecursionError: if a container contains itself.
        UnsupportedValueError: never; a value of an unknown kind makes the answer False, so
            that the walk which names its place comes next.
    """
    kind = kinds[type(x)]
    if kind is TENSOR:
        return holds(x)
    if kind is PLAIN:
        return True
    budget[0] -= 1
    if isinstance(kind, Kind) or budget[0] < 0:
        return False
    for child in kind.children(x):  # noqa: SIM110  # a generator would double the cost
        if not every(child, kinds, holds, budget):
            return False
    return True


def leaves(x: Any, kinds: Kinds, path: str = "") -> Iterator[tuple[str, Any, Kind]]:
    """Every value in a nesting that is no container, with its name and kind.

    Args:
        x: a nesting; containers that contain themselves are entered once.
        kinds: what each type is.
        path: the name of ``x`` itself.

    Yields:
        ``(name, value, kind)``, names dotted: ``'layers.0.weight'``.

    Raises:
        UnsupportedValueError: if it is nested deeper than Python can follow.
    """
    try:
        yield from _leaves(x, kinds, path, set())
    except RecursionError:
        raise _too_deep("look through a nesting") from None


def _leaves(x: Any, kinds: Kinds, path: str, inside: set[int]) -> Iterator[tuple[str, Any, Kind]]:
    kind = kinds[type(x)]
    if isinstance(kind, Kind):
        yield path, x, kind
    elif id(x) not in inside:
        inside.add(id(x))
        for label, child in zip(kind.labels(x), kind.children(x), strict=True):
            yield from _leaves(child, kinds, f"{path}.{label}" if path else str(label), inside)
        inside.discard(id(x))


def rebuild(x: Any, kinds: Kinds, change: Callable[[Any, Kind, str], Any], attempted: str) -> Any:
    """A nesting like ``x`` in which every leaf is what ``change`` makes of it.

    Args:
        x: any nesting; it is not changed.
        kinds: what each type is.
        change: ``(leaf, kind, name) -> leaf``, called once for each leaf object.
        attempted: what the caller is doing, for messages.

    Returns:
        ``x`` itself if ``change`` returned every leaf as it was.

    Raises:
        UnsupportedValueError: if a container contains itself, is nested deeper than Python
            can follow, or cannot be made again.
    """
    try:
        return _Rebuild(kinds, change, attempted).of(x, "")
    except RecursionError:
        raise _too_deep(attempted) from None


def _too_deep(attempted: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        attempted,
        f"it is nested deeper than Python follows (about {sys.getrecursionlimit()} levels)",
        "flatten the batch: batch = list(batch_of_batches)",
    )


class _Rebuild:
    """One walk: what each object has become so far."""

    def __init__(
        self, kinds: Kinds, change: Callable[[Any, Kind, str], Any], attempted: str
    ) -> None:
        self._kinds = kinds
        self._change = change
        self._attempted = attempted
        # id -> (the object, kept so that its id stays its own; what it became).
        self._done: dict[int, tuple[Any, Any]] = {}
        self._inside: set[int] = set()

    def of(self, x: Any, path: str) -> Any:
        kind = self._kinds[type(x)]
        if kind is PLAIN:
            return x
        key = id(x)
        if key in self._done:
            return self._done[key][1]
        if isinstance(kind, Kind):
            new = self._change(x, kind, path)
        else:
            new = self._container(x, kind, path)
        self._done[key] = (x, new)
        return new

    def _container(self, x: Any, kind: Container, path: str) -> Any:
        if id(x) in self._inside:
            raise UnsupportedValueError(
                self._attempted,
                f"the {type(x).__name__} at {path or 'the top'} contains itself",
                "take the cycle out of the batch",
            )
        self._inside.add(id(x))
        old = list(kind.children(x))
        new = [
            self.of(child, f"{path}.{label}" if path else str(label))
            for label, child in zip(kind.labels(x), old, strict=True)
        ]
        self._inside.discard(id(x))
        if all(after is before for after, before in zip(new, old, strict=True)):
            return x
        try:
            return kind.rebuild(x, new)
        except Exception as error:
            name = type(x).__name__
            raise UnsupportedValueError(
                self._attempted,
                f"the {name} at {path or 'the top'} cannot be made again: {error}",
                f"d2ldev.register_container({name}, children, rebuild)",
            ) from error
