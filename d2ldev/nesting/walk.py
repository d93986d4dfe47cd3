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
from typing import Any, NamedTuple

from d2ldev.errors import D2LDevError, UnsupportedValueError, text_of
from d2ldev.nesting.containers import BROADCAST, DICT, TUPLE, Container, pair_children
from d2ldev.nesting.kinds import PLAIN, TENSOR, Kind, Kinds

_MOST_PLACES = 100_000
"""How often containers may be found again in a nesting whose every place is named."""


def join_path(path: str, label: object) -> str:
    """Return the name of the child ``label`` of the container with the name ``path``.

    >>> join_path("layers", 0), join_path("", "weight")
    ('layers.0', 'weight')
    """
    return f"{path}.{text_of(label)}" if path else text_of(label)


def flatten(
    x: Any,
    kinds: Kinds,
    attempted: str,
    is_on: Callable[[Any, Any], bool] | None = None,
    device: object = None,
) -> Flattened:
    """Go through a nesting once; it is not changed.

    Args:
        is_on, device: a tensor for which ``is_on(x, device)`` is true is left out. As they are,
            none is.

    Raises:
        UnsupportedValueError: if a container contains itself, is nested deeper than Python
            can follow, or cannot be taken apart.

    >>> flat = flatten(batch, framework.state.kinds, "double a batch")     # doctest: +SKIP
    >>> flat.unflatten({key: 2 * x for key, x in flat.tensors.items()})    # doctest: +SKIP
    """
    flat = Flattened((x,), ("",), kinds, attempted)
    flat.collect(is_on, device)
    return flat


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
        is_shared: whether a container is in several places.
    """

    __slots__ = (
        "_attempted",
        "_containers",
        "_kinds",
        "_names",
        "_nestings",
        "_replaced",
        "is_shared",
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
        self.is_shared = False

    @property
    def has_marks(self) -> bool:
        """Whether there is a ``Broadcast`` among the containers."""
        return any(kind is BROADCAST for _, kind, _ in self._containers)

    def collect(
        self, is_on: Callable[[Any, Any], bool] | None = None, device: object = None
    ) -> None:
        """Walk the nestings, and enter each container once.

        Args:
            is_on, device: see ``flatten``.

        Raises:
            UnsupportedValueError: see ``flatten``.
        """
        try:
            self.is_shared = _collect(
                self._nestings,
                self._kinds,
                is_on,
                device,
                self.tensors,
                self.others,
                self._containers,
                {},
            )
        except RecursionError:
            raise depth_refusal(self._attempted) from None
        except (D2LDevError, MemoryError):
            raise
        except Exception:  # a cycle, or whatever a class's own methods raise
            for _ in self._places():  # raises the error that names the place
                pass
            raise

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
    is_on: Callable[[Any, Any], bool] | None,
    device: object,
    tensors: dict[int, Any],
    others: dict[int, Any],
    containers: list[tuple[Any, Container, Sequence[Any]]],
    is_open: dict[int, bool],
) -> bool:
    """Add the contents of a container to ``tensors``, ``others`` and ``containers``.

    Args:
        children: what is in the container.
        is_on, device: see ``flatten``.
        tensors, others, containers: see ``Flattened``.
        is_open: for each container that was entered, by its id, whether it is not left yet.

    Returns:
        Whether it met a container again.
    """
    is_shared = False
    for child in children:
        kind = kinds[type(child)]
        if kind is TENSOR:
            if is_on is None or not is_on(child, device):
                tensors[id(child)] = child
        elif kind is PLAIN:
            continue
        elif type(kind) is Kind:
            others[id(child)] = child
        else:
            key = id(child)
            if key in is_open:
                if is_open[key]:
                    raise ValueError("a container contains itself")
                is_shared = True
                continue
            is_open[key] = True
            # torch's compiler cannot trace ``dict.values`` as a function.
            inner = child.values() if kind is DICT else kind.children(child)
            inner = child if kind is TUPLE else list(inner)
            if _collect(inner, kinds, is_on, device, tensors, others, containers, is_open):
                is_shared = True
            is_open[key] = False
            containers.append((child, kind, inner))
    return is_shared


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
            raise _cycle_refusal(x, name, attempted)
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
        raise _places_refusal(attempted)
    entered[id(x)] = (x, True)
    for label, child in label_children(x, kind, path, attempted):
        yield from _leaves(child, kinds, join_path(path, label), attempted, entered, budget)
    entered[id(x)] = (x, False)


class _Branch(NamedTuple):
    """A container of a ``Tree``; in ``branches`` None stands for a child that is a leaf."""

    container: Any
    kind: Container
    name: str
    children: list[Any]
    branches: list[_Branch | None]


class Tree:
    """A nesting taken apart, to put it together with another leaf in each place.

    A leaf has an item for each place where it is: a file may have another value for each. In
    ``Flattened`` it has one.

    Args:
        x: a nesting.
        path: the name of ``x`` itself.
        is_leaf: tells of a container whether it is not entered.
        is_saved: whether containers are walked as files do; see ``Container.in_files``.

    Attributes:
        leaves: the name and the value in each place, in order.

    Raises:
        UnsupportedValueError: if a container contains itself, or cannot be taken apart. Or if the
            nesting is deeper than Python can follow, or its containers are in too many places.

    >>> tree = Tree([x, y], framework.state.kinds, "double a batch")      # doctest: +SKIP
    >>> tree.put_together([2 * leaf for _, leaf in tree.leaves])          # doctest: +SKIP
    """

    def __init__(
        self,
        x: Any,
        kinds: Kinds,
        attempted: str,
        path: str = "",
        *,
        is_leaf: Callable[[Any], bool] = lambda _: False,
        is_saved: bool = False,
    ) -> None:
        self._kinds, self._attempted = kinds, attempted
        self._is_leaf, self._is_saved = is_leaf, is_saved
        self.leaves: list[tuple[str, Any]] = []
        self._open: set[int] = set()
        self._entered: set[int] = set()
        self._budget = _MOST_PLACES
        try:
            self._root = self._take_apart(x, path)
        except RecursionError:
            raise depth_refusal(attempted) from None

    def _take_apart(self, x: Any, path: str) -> _Branch | None:
        kind = self._kinds[type(x)]
        if isinstance(kind, Kind) or self._is_leaf(x):
            self.leaves.append((path, x))
            return None
        if id(x) in self._open:
            raise _cycle_refusal(x, path, self._attempted)
        self._budget -= id(x) in self._entered
        if self._budget < 0:
            raise _places_refusal(self._attempted)
        self._entered.add(id(x))  # a branch keeps the container, and so its id
        self._open.add(id(x))
        kind = kind.in_files if self._is_saved else kind
        found = label_children(x, kind, path, self._attempted)
        branches = [self._take_apart(child, join_path(path, label)) for label, child in found]
        self._open.remove(id(x))
        return _Branch(x, kind, path, [child for _, child in found], branches)

    def put_together(self, new: Iterable[Any], made: dict[tuple[int, ...], Any]) -> Any:
        """Return the nesting with other leaves; a container without a new leaf comes back itself.

        Args:
            new: a leaf for each of ``leaves``, which the caller keeps.
            made: the containers that were made, by the ids of a container and its new children. A
                container that is in several trees with the same children is made once.

        Raises:
            UnsupportedValueError: if a container cannot be made again.
        """
        leaves = iter(new)
        return next(leaves) if self._root is None else self._make(self._root, leaves, made)

    def _make(
        self, branch: _Branch, leaves: Iterator[Any], made: dict[tuple[int, ...], Any]
    ) -> Any:
        x, kind, name, old, branches = branch
        new = [
            next(leaves) if each is None else self._make(each, leaves, made) for each in branches
        ]
        if not any(map(is_not, new, old)):
            return x
        key = (id(x), *map(id, new))
        if key not in made:
            try:
                made[key] = kind.rebuild(x, new)
            except Exception as error:  # whatever a class's own methods raise
                raise container_refusal(x, "made again", name, self._attempted, error) from error
        return made[key]


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


def _places_refusal(attempted: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        attempted,
        f"containers in it are in more than {_MOST_PLACES} places",
        "give each container once",
    )


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


def _cycle_refusal(x: Any, name: str, attempted: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        attempted,
        f"the {type(x).__name__} at {name or 'the top'} contains itself",
        "take the cycle out of it",
    )


def depth_refusal(attempted: str) -> UnsupportedValueError:
    """Return the error of a nesting that is deeper than Python can follow."""
    return UnsupportedValueError(
        attempted,
        "it is nested deeper than Python follows: sys.getrecursionlimit() is "
        f"{sys.getrecursionlimit()}",
        "nest it less deeply: (x, y, z), and not (x, (y, (z,)))",
    )
