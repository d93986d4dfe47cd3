"""Walk nested batches: find the leaves, and create the nesting again with other leaves.

A *nesting* is a tensor, or any dict, list, tuple, namedtuple, dataclass, set, deque or other
registered container of nestings. ``None``, numbers, strings and bytes may stand anywhere and
stay. Each of these rules has a requirement ``containers.*`` in the suite:

- The result has the same type, order, default factory, maximal length and attributes. The walk
  calls no constructor of a dataclass or namedtuple again.
- A container in which nothing changed comes back as itself.
- One object stays one object: tied tensors stay tied, and the walk creates a list in two places
  once.
- The walk never changes the caller's containers, even if it fails.

Every step of a training loop walks a batch. So ``flatten`` makes no names: only an error looks up
the name of a place.

The argument ``kinds`` has the kind of each type for a backend. ``attempted`` is the current
operation, for messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any

from d2ldev.errors import D2LDevError, UnsupportedValueError, text_of
from d2ldev.nesting.containers import BROADCAST, DICT, LIST, TUPLE, Container, pair_children
from d2ldev.nesting.kinds import PLAIN, TENSOR, Kind, Kinds

MOST_CONTAINERS = 10_000
"""How many containers a batch may have that is walked without remembering each of them."""

_MOST_PLACES = 100_000
"""How often containers may be found again in a nesting whose every place is named."""

Entry = tuple[Any, Container, Any, int]
"""A container that ``find`` has found.

Most are ``(container, kind, first, end)``. Their children are the tensors from ``first`` to ``end``
in the walk's order, which the walk has not seen before. The others are
``(container, kind, children, 0)``, with -1 if no child is a tensor that may change.
"""


def join_path(path: str, label: object) -> str:
    """Return the name of the child ``label`` of the container with the name ``path``.

    >>> join_path("layers", 0), join_path("", "weight")
    ('layers.0', 'weight')
    """
    return f"{path}.{text_of(label)}" if path else text_of(label)


def find(
    x: Any,
    kind: Kind | Container,
    kinds: Kinds,
    ask: Callable[[Any], object],
    answer: object,
    tensors: dict[int, Any],
    containers: list[Entry],
    others: list[Any],
) -> bool:
    """Collect the leaves in a container that may change, and the containers around them.

    The walk remembers its way only where it has found a leaf. So ``to`` creates no object for a
    batch that is there already.

    Args:
        x: the container, or a leaf that is neither a tensor nor plain.
        kind: its kind.
        ask: a tensor for which ``ask(x) is answer`` does not change. Every other tensor may change,
            and every leaf that is not plain.
        tensors: gets the tensors by their ids.
        containers: gets the containers, each after those within it.
        others: begins with the number of containers that the walk may enter. It gets the other
            leaves. ``BROADCAST`` itself stands for a ``Broadcast``.

    Returns:
        Whether a leaf was found.

    Raises:
        RecursionError: for a container that contains itself, and for a nesting that is larger, or
            full of shared containers. ``flatten`` enters each container once.
    """
    children = x
    # torch's compiler cannot trace ``dict.values`` as a function, which ``DICT.children`` is.
    if kind is DICT:
        children = x.values()
    elif kind is not LIST and kind is not TUPLE:
        if type(kind) is Kind:
            others.append(x)
            return True
        if kind is BROADCAST:
            others.append(kind)
        items = kind.items
        # A class that is derived from a container mostly has no attributes.
        children = kind.children(x) if items is None or x.__dict__ else items.children(x)
        # A container may make its children anew each time: the rebuild needs these.
        if type(children) is not list:
            children = list(children)
    left = others[0] = others[0] - 1
    if left < 0:
        raise RecursionError
    first = len(tensors) if tensors else 0  # mostly nothing is found: a call less
    has_tensors = has_inner = False
    for child in children:
        kind_of_child = kinds[type(child)]
        if kind_of_child is TENSOR:
            if ask(child) is not answer:
                tensors[id(child)] = child
                has_tensors = True
        elif kind_of_child is not PLAIN and find(
            child, kind_of_child, kinds, ask, answer, tensors, containers, others
        ):
            has_inner = True
    if has_inner or has_tensors:
        end = len(tensors)
        if has_inner or end - first != len(children):
            containers.append((x, kind, list(children), 0 if has_tensors else -1))
        else:
            containers.append((x, kind, first, end))
        return True
    return False


def flatten_changing(
    x: Any, kinds: Kinds, attempted: str, ask: Callable[[Any], object] = id, answer: object = None
) -> Flattened | None:
    """Go through a nesting once, for the leaves that may change; None if there is none.

    It is faster than ``flatten``, because it does not remember the way to other leaves.

    Args:
        ask, answer: see ``find``. As they are, every tensor may change.

    Raises:
        UnsupportedValueError: see ``flatten``.
    """
    kind = kinds[type(x)]
    is_alone = kind is TENSOR or kind is PLAIN
    whole, kind = ((x,), TUPLE) if is_alone else (x, kind)
    tensors: dict[int, Any] = {}
    containers: list[Entry] = []
    others: list[Any] = [MOST_CONTAINERS]
    try:
        if find(whole, kind, kinds, ask, answer, tensors, containers, others):
            if is_alone:
                containers.pop()
        elif len(others) == 1:
            return None
    except Exception:  # such as a cycle, which this walk names
        flat = flatten(x, kinds, attempted)
        flat.tensors = {key: each for key, each in flat.tensors.items() if ask(each) is not answer}
        return flat
    return flatten_found(x, tensors, containers, others, kinds, attempted)


def flatten_found(
    x: Any,
    tensors: dict[int, Any],
    containers: list[Entry],
    others: list[Any],
    kinds: Kinds,
    attempted: str,
) -> Flattened:
    """Return the leaves of a nesting that ``find`` has found."""
    flat = Flattened((x,), ("",), kinds, attempted)
    flat.take(tensors, containers, others)
    return flat


def put_tensors(tensors: dict[int, Any], containers: list[Entry], new: list[Any]) -> Any:
    """Return a container in which ``find`` has found tensors alone, with others in their places.

    It takes half of the time of ``Flattened.unflatten``.

    Args:
        tensors, containers: see ``find``.
        new: the other tensors, in the order of ``tensors``.
    """
    outermost, kind, _, end = containers[-1]
    if end > 0:
        return kind.rebuild(outermost, [*new])
    changed: dict[int, Any] = {}
    new_of, has_tensors = changed.get, False
    for x, kind, children, end in containers:
        if id(x) in changed:  # a container in two places is found in both
            continue
        if end > 0:
            changed[id(x)] = kind.rebuild(x, new[children:end])
        else:
            if end == 0 and not has_tensors:
                changed.update(zip(tensors, new, strict=True))
                has_tensors = True
            changed[id(x)] = kind.rebuild(x, [new_of(id(child), child) for child in children])
    return changed[id(outermost)]


def flatten(x: Any, kinds: Kinds, attempted: str) -> Flattened:
    """Go through a nesting once; it is not changed.

    Raises:
        UnsupportedValueError: if a container contains itself, is nested deeper than Python
            can follow, or cannot be taken apart.

    >>> flat = flatten(batch, framework.state.kinds, "double a batch")     # doctest: +SKIP
    >>> flat.unflatten({key: 2 * x for key, x in flat.tensors.items()})    # doctest: +SKIP
    """
    return flatten_all((("", x),), kinds, attempted)


def flatten_all(named: Sequence[tuple[str, Any]], kinds: Kinds, attempted: str) -> Flattened:
    """Go through several nestings as ``flatten`` does; what they share stays shared.

    Args:
        named: ``(name, nesting)``; the name is where the names in it begin.
    """
    names, nestings = zip(*named, strict=True) if named else ((), ())
    flat = Flattened(nestings, names, kinds, attempted)
    flat.collect()
    return flat


def map_tensors(function: Callable[[Any], Any], x: Any, kinds: Kinds, attempted: str) -> Any:
    """Return a nesting with what a function makes of each tensor in it; see ``flatten``."""
    flat = flatten(x, kinds, attempted)
    return flat.unflatten({key: function(tensor) for key, tensor in flat.tensors.items()})


def unwrap_broadcasts(x: Any, kinds: Kinds) -> Any:
    """Return a nesting with the values of ``Broadcast`` in their places.

    Args:
        x: a nesting, such as the inputs and the target of a step.
        kinds: of the framework: ``framework.state.kinds``.
    """
    return _unwrap(x, kinds, {})


def _unwrap(x: Any, kinds: Kinds, known: dict[int, tuple[Any, Any]]) -> Any:
    """Return a nesting without ``Broadcast``.

    Args:
        known: id -> the container, kept so that its id stays its own; the container without
            ``Broadcast``.
    """
    kind = kinds[type(x)]
    if isinstance(kind, Kind):
        return x
    if id(x) in known:
        return known[id(x)][1]
    if kind is BROADCAST:
        made = _unwrap(x.value, kinds, known)
    else:
        old = list(kind.children(x))
        new = [_unwrap(child, kinds, known) for child in old]
        made = kind.rebuild(x, new) if any(map(is_not, new, old)) else x
    known[id(x)] = x, made
    return made


class Flattened:
    """The leaves of nestings, and how the containers around them are made again.

    Args:
        nestings: the nestings to walk.
        names: where the names in each begin.

    Attributes:
        has_few_places: whether all places of its containers were walked, and are few.
        has_marks: whether a ``Broadcast`` was walked.
    """

    __slots__ = (
        "_attempted",
        "_containers",
        "_kinds",
        "_names",
        "_nestings",
        "_replaced",
        "has_few_places",
        "has_marks",
        "others",
        "tensors",
    )

    def __init__(
        self, nestings: tuple[Any, ...], names: tuple[str, ...], kinds: Kinds, attempted: str
    ) -> None:
        self._nestings = nestings
        self._names = names
        self._kinds = kinds
        self._attempted = attempted
        self.tensors: dict[int, Any] = {}
        """The tensors by their ids, each once, in order."""
        self.others: dict[int, Any] = {}
        """The other leaves that are not plain values, in the same way."""
        # (container, how it is made again, its children), inner containers before outer ones. The
        # tuples keep the children alive, so that no id is used for two objects.
        self._containers: list[tuple[Any, Container, Sequence[Any]]] = []
        self._replaced: dict[int, Any] = {}
        self.has_few_places = self.has_marks = False

    def collect(self) -> None:
        """Walk the nestings, and enter each container once.

        Raises:
            UnsupportedValueError: see ``flatten``.
        """
        containers, nestings = self._containers, self._nestings
        try:
            _collect(nestings, self._kinds, self.tensors, self.others, containers, {})
        except RecursionError:
            raise depth_refusal(self._attempted) from None
        except (D2LDevError, MemoryError):
            raise
        except Exception:  # a cycle, or whatever a class's own methods raise
            for _ in self._places():  # raises the error that names the place
                pass
            raise
        self.has_marks = any(kind is BROADCAST for _, kind, _ in containers)

    def take(self, tensors: dict[int, Any], containers: list[Entry], others: list[Any]) -> None:
        """Take the leaves and containers that ``find`` has found."""
        self.tensors = tensors
        self.has_few_places = True
        in_order, known = list(tensors.values()), set()
        for x, kind, children, end in containers:
            if id(x) not in known:  # a container in two places is found in both
                known.add(id(x))
                self._containers.append((x, kind, in_order[children:end] if end > 0 else children))
        for each in others[1:]:
            if each is BROADCAST:
                self.has_marks = True
            else:
                self.others[id(each)] = each

    def replace(self, new: dict[int, Any]) -> None:
        """Note other leaves for ``unflatten``, by the ids of the leaves that they replace."""
        for key, leaf in new.items():
            self.tensors.pop(key, None)
            self.others.pop(key, None)
            (self.tensors if self._kinds[type(leaf)] is TENSOR else self.others)[key] = leaf
        self._replaced.update(new)

    def unflatten(self, changed: dict[int, Any]) -> Any:
        """Return the nesting with other leaves: the first nesting, of several.

        Args:
            changed: id -> the replacement of this leaf; other leaves stay. The containers that are
                made again are added to it.

        Raises:
            UnsupportedValueError: if a container cannot be made again.
        """
        changed = {**self._replaced, **changed} if self._replaced else changed
        if not changed:
            return self._nestings[0]
        self._make_again(changed)
        x = self._nestings[0]
        return changed.get(id(x), x)

    def unflatten_all(self, changed: dict[int, Any]) -> list[Any]:
        """Return the nestings with other leaves; see ``unflatten``."""
        self._make_again(changed)
        return [changed.get(id(x), x) for x in self._nestings]

    def _make_again(self, changed: dict[int, Any]) -> None:
        new_of = changed.get
        for x, kind, old in self._containers:
            new = [new_of(id(child), child) for child in old]
            if any(map(is_not, new, old)):
                try:
                    changed[id(x)] = kind.rebuild(x, new)
                except Exception as error:  # whatever a class's own methods raise
                    name = self.name_of(x)
                    raise container_refusal(
                        x, "made again", name, self._attempted, error
                    ) from error

    def name_of(self, wanted: Any) -> str:
        """Return the name of the first place of a leaf or a container; empty at the top."""
        # A container may make its children anew each time they are asked for.
        alike = ""
        for name, x in self._places():
            if x is wanted:
                return name
            if type(x) is type(wanted):
                alike = alike or name
        return alike

    def _places(self) -> Iterator[tuple[str, Any]]:
        entered: dict[int, tuple[Any, bool]] = {}
        for name, x in zip(self._names, self._nestings, strict=True):
            yield from _places(x, self._kinds, name, self._attempted, entered)


def _collect(
    children: Iterable[Any],
    kinds: Kinds,
    tensors: dict[int, Any],
    others: dict[int, Any],
    containers: list[tuple[Any, Container, Sequence[Any]]],
    is_open: dict[int, bool],
) -> None:
    """Add the contents of a container to ``tensors``, ``others`` and ``containers``.

    Args:
        children: what is in the container.
        tensors, others, containers: see ``Flattened``.
        is_open: for each container that was entered, by its id, whether it is not left yet.
    """
    for child in children:
        kind = kinds[type(child)]
        if kind is TENSOR:
            tensors[id(child)] = child
        elif kind is PLAIN:
            continue
        elif isinstance(kind, Kind):
            others[id(child)] = child
        else:
            key = id(child)
            if key not in is_open:
                is_open[key] = True
                inner = child if kind is TUPLE else list(kind.children(child))
                _collect(inner, kinds, tensors, others, containers, is_open)
                is_open[key] = False
                containers.append((child, kind, inner))
            elif is_open[key]:
                raise ValueError("a container contains itself")


def _places(
    x: Any, kinds: Kinds, name: str, attempted: str, entered: dict[int, tuple[Any, bool]]
) -> Iterator[tuple[str, Any]]:
    """Yield every leaf and container with its name, in ``_collect``'s order, each container once.

    Args:
        entered: id -> the container, kept so that its id stays its own; whether it is not left yet.
    """
    yield name, x
    kind = kinds[type(x)]
    if isinstance(kind, Kind):
        return
    if id(x) in entered:
        if entered[id(x)][1]:
            raise UnsupportedValueError(
                attempted,
                f"the {type(x).__name__} at {name or 'the top'} contains itself",
                "take the cycle out of the batch",
            )
        return
    entered[id(x)] = (x, True)
    for label, child in label_children(x, kind, name, attempted):
        yield from _places(child, kinds, join_path(name, label), attempted, entered)
    entered[id(x)] = (x, False)


# -- with names --------------------------------------------------------------------------------


def leaves(
    x: Any, kinds: Kinds, path: str = "", attempted: str = "look through a nesting"
) -> Iterator[tuple[str, Any, Kind]]:
    """Yield every value in a nesting that is not a container, with its name and kind.

    Args:
        x: a nesting; containers that contain themselves are entered once.
        path: the name of ``x`` itself.

    Yields:
        ``(name, value, kind)``, names dotted: ``'layers.0.weight'``.

    Raises:
        UnsupportedValueError: if it is nested deeper than Python can follow, or a container
            in it cannot be taken apart.
    """
    try:
        yield from _leaves(x, kinds, path, attempted, {}, [_MOST_PLACES])
    except RecursionError:
        raise depth_refusal(attempted) from None


def _leaves(
    x: Any,
    kinds: Kinds,
    path: str,
    attempted: str,
    entered: dict[int, tuple[Any, bool]],
    budget: list[int],
) -> Iterator[tuple[str, Any, Kind]]:
    kind = kinds[type(x)]
    if isinstance(kind, Kind):
        yield path, x, kind
        return
    is_known = id(x) in entered
    if is_known and entered[id(x)][1]:
        return
    budget[0] -= is_known
    if budget[0] < 0:
        raise UnsupportedValueError(
            attempted,
            f"containers in it are in more than {_MOST_PLACES} places",
            "give each container once",
        )
    entered[id(x)] = (x, True)
    for label, child in label_children(x, kind, path, attempted):
        yield from _leaves(child, kinds, join_path(path, label), attempted, entered, budget)
    entered[id(x)] = (x, False)


def label_children(x: Any, kind: Container, path: str, attempted: str) -> list[tuple[Any, Any]]:
    """Return what is in a container of this name, each with its key, index or field.

    Raises:
        UnsupportedValueError: if its class does not let it be taken apart, such as a list whose
            length is wrong.
    """
    try:
        return pair_children(kind.labels(x), list(kind.children(x)))
    except (D2LDevError, MemoryError, RecursionError):
        raise
    except Exception as error:  # whatever a class's own methods raise
        raise container_refusal(x, "taken apart", path, attempted, error) from error


def container_refusal(
    x: Any, what: str, path: str, attempted: str, error: Exception
) -> UnsupportedValueError:
    """Return the error of a container that cannot be ``'taken apart'`` or ``'made again'``."""
    name = type(x).__name__
    return UnsupportedValueError(
        attempted,
        f"the {name} at {path or 'the top'} cannot be {what}: {text_of(error)}",
        f"d2ldev.register_container({name}, children, rebuild)",
    )


def depth_refusal(attempted: str) -> UnsupportedValueError:
    """Return the error of a nesting that is deeper than Python can follow."""
    return UnsupportedValueError(
        attempted,
        "it is nested deeper than Python follows: sys.getrecursionlimit() is "
        f"{sys.getrecursionlimit()}",
        "nest it less deeply: (x, y, z), and not (x, (y, (z,)))",
    )
