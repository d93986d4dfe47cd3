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

This module imports no framework, and knows none: what a value is, is asked of a ``Kinds``
(``kinds.py``), made by the backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from d2ldev.errors import D2LDevError, UnsupportedValueError
from d2ldev.nesting.containers import Container
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, UNKNOWN, Kind, Kinds, register_container

__all__ = [
    "OBJECT",
    "PLAIN",
    "TENSOR",
    "UNKNOWN",
    "Kind",
    "Kinds",
    "every",
    "leaves",
    "rebuild",
    "rebuild_all",
    "register_container",
    "too_deep",
]


def joined(path: str, label: object) -> str:
    """The name of what ``label`` leads to in the container of the name ``path``.

    >>> joined("layers", 0), joined("", "weight")
    ('layers.0', 'weight')
    """
    return f"{path}.{label}" if path else str(label)


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


def leaves(
    x: Any, kinds: Kinds, path: str = "", attempted: str = "look through a nesting"
) -> Iterator[tuple[str, Any, Kind]]:
    """Every value in a nesting that is no container, with its name and kind.

    Args:
        x: a nesting; containers that contain themselves are entered once.
        kinds: what each type is.
        path: the name of ``x`` itself.
        attempted: what the caller is doing, for messages.

    Yields:
        ``(name, value, kind)``, names dotted: ``'layers.0.weight'``.

    Raises:
        UnsupportedValueError: if it is nested deeper than Python can follow, or a container
            in it cannot be taken apart.
    """
    try:
        yield from _leaves(x, kinds, path, attempted, set())
    except RecursionError:
        raise too_deep(attempted) from None


def _leaves(
    x: Any, kinds: Kinds, path: str, attempted: str, inside: set[int]
) -> Iterator[tuple[str, Any, Kind]]:
    kind = kinds[type(x)]
    if isinstance(kind, Kind):
        yield path, x, kind
    elif id(x) not in inside:
        inside.add(id(x))
        for name, child in _children(x, kind, path, attempted):
            yield from _leaves(child, kinds, name, attempted, inside)
        inside.discard(id(x))


def _children(x: Any, kind: Container, path: str, attempted: str) -> list[tuple[str, Any]]:
    """What is in a container, with its names."""
    try:
        return [
            (joined(path, label), child)
            for label, child in zip(kind.labels(x), kind.children(x), strict=True)
        ]
    except (D2LDevError, MemoryError, RecursionError):
        raise
    except Exception as error:  # whatever a class's own methods raise
        raise _refused(x, "taken apart", path, attempted, error) from error


def _refused(
    x: Any, what: str, path: str, attempted: str, error: Exception
) -> UnsupportedValueError:
    name = type(x).__name__
    return UnsupportedValueError(
        attempted,
        f"the {name} at {path or 'the top'} cannot be {what}: {error}",
        f"d2ldev.register_container({name}, children, rebuild)",
    )


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
    return rebuild_all([("", x)], kinds, change, attempted)[0]


def rebuild_all(
    named: Iterable[tuple[str, Any]],
    kinds: Kinds,
    change: Callable[[Any, Kind, str], Any],
    attempted: str,
) -> list[Any]:
    """``rebuild`` of several nestings in one walk: what they share stays shared.

    Args:
        named: ``(name, nesting)``; the name is where the names in it begin.
        kinds, change, attempted: see ``rebuild``.
    """
    walk = _Rebuild(kinds, change, attempted)
    try:
        return [walk.of(x, name) for name, x in named]
    except RecursionError:
        raise too_deep(attempted) from None


def too_deep(attempted: str) -> UnsupportedValueError:
    """The error for what is nested so deep that Python gives up."""
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
        old = _children(x, kind, path, self._attempted)
        new = [self.of(child, name) for name, child in old]
        self._inside.discard(id(x))
        if all(after is before for after, (_, before) in zip(new, old, strict=True)):
            return x
        try:
            return kind.rebuild(x, new)
        except Exception as error:
            raise _refused(x, "made again", path, self._attempted, error) from error
