"""The types of containers that d2ldev knows from the start, and how to create each again.

Each ``rebuild`` returns the same type with other children. It keeps order, default factory, maximal
length and attributes. It calls no constructor of a dataclass or namedtuple again.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cached_property
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from d2ldev.errors import quote

T = TypeVar("T")


class Container(NamedTuple):
    """How to take one type of container apart, and create it again.

    Args:
        children: the values in a container, in order.
        labels: the key, index or field of each child, for messages and names.
        rebuild: ``(old, children) -> new``: a container like ``old`` with other children.
        items: the container of the items alone, if the attributes are children, too; else None.
        holds: the kind of its children. ``'fields'`` is for a dict or a dataclass, ``'items'`` for
            a list or a set. ``'pieces'`` is for one value of several tensors, such as a sparse
            array. With ``slice_items`` it has a ``shape``, and is split by rows like a tensor.
        slice_items: ``(old, start, stop) -> new``: a container like ``old`` with the items or rows
            from ``start`` up to ``stop``. None without them, or without an order.
        saved: how files walk it, with all values that create it again, such as the shape of a
            sparse array. None if the children are enough.
    """

    children: Callable[[Any], Iterable[Any]]
    labels: Callable[[Any], Iterable[object]]
    rebuild: Callable[[Any, list[Any]], Any]
    items: Container | None = None
    holds: str = "fields"
    slice_items: Callable[[Any, int, int], Any] | None = None
    saved: Container | None = None

    @property
    def in_files(self) -> Container:
        """How it is walked in files."""
        return self.saved or self.items or self


class Broadcast(Generic[T]):
    """Mark a value in a batch as the same for all shards: nothing splits it.

    The model, the loss and the metrics get the value itself, on one device as on several.

    Args:
        value: any nesting. ``to`` moves its tensors and NumPy arrays, as all others of the batch.

    >>> batch = {"x": [[1.0], [2.0]], "sizes": Broadcast([16, 32, 64])}
    >>> batch["sizes"].value
    [16, 32, 64]
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Broadcast({quote(self.value)})"


def _indices(x: Any) -> range:
    return range(len(x))


def _slice(x: Any, start: int, stop: int) -> Any:
    return x[start:stop]


def _rebuild_dict(old: dict[Any, Any], new: list[Any]) -> dict[Any, Any]:
    if len(old) != len(new):
        raise RuntimeError("its size has changed meanwhile")
    return dict(zip(old, new))  # noqa: B905 - ``strict`` takes a quarter of the time


# Most of every batch, and so as cheap as can be.
DICT = Container(dict.values, iter, _rebuild_dict)
"""How a dict is walked."""
LIST = Container(iter, _indices, lambda _, new: new, holds="items", slice_items=_slice)
"""How a list is walked."""
TUPLE = Container(iter, _indices, lambda _, new: tuple(new), holds="items", slice_items=_slice)
"""How a tuple is walked."""
BROADCAST = Container(
    lambda mark: (mark.value,), lambda _: ("value",), lambda _, new: Broadcast(*new)
)
_EXACT = {dict: DICT, list: LIST, tuple: TUPLE, Broadcast: BROADCAST}
# Python's own class allows attributes, but nobody sets any.
_WITHOUT_ATTRIBUTES = frozenset({OrderedDict})


def container_of(cls: type) -> Container | None:
    """Return how a type of Python's own containers is walked; None for other types."""
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, Mapping):
        # Of most classes without a call of Python's.
        is_dict = getattr(cls, "values", None) is dict.values
        children = dict.values if is_dict else lambda x: x.values()
        return Container(children, iter, _rebuild_mapping)
    if issubclass(cls, tuple):
        rebuild = _tuple_rebuild(cls)
        if is_namedtuple(cls):
            return Container(iter, lambda x: x._fields, rebuild)
        if hasattr(cls, "n_sequence_fields"):  # a structure of C's
            return Container(iter, _indices, rebuild)
        slice_range = lambda x, a, b: rebuild(x, list(x)[a:b])  # noqa: E731
        return Container(iter, _indices, rebuild, holds="items", slice_items=slice_range)
    if issubclass(cls, MutableSequence):
        return Container(
            iter, _indices, _sequence_rebuild, holds="items", slice_items=_slice_sequence
        )
    if issubclass(cls, AbstractSet):
        return Container(iter, _indices, _set_rebuild, holds="items")
    if is_dataclass(cls):
        return _dataclass_container(cls)
    return None


def with_attributes(cls: type, items: Container, has_tensors: Callable[[Any], bool]) -> Container:
    """Return how a container is walked with the attributes that hold tensors, beside its items.

    Args:
        cls: one of Python's own containers, or a class that is derived from one.
        items: how its items are walked.
        has_tensors: tells whether a value is a tensor, or a container with one.
    """
    if cls.__dictoffset__ == 0 or cls in _WITHOUT_ATTRIBUTES:
        return items
    own: frozenset[str] = frozenset()
    if is_dataclass(cls) and not issubclass(cls, (Mapping, tuple, MutableSequence, AbstractSet)):
        own = frozenset({*_field_names(cls), *_list_cached_properties(cls)})
    # Another class has its items in an attribute.
    has_storage = not own and not issubclass(cls, (dict, list, tuple, set, frozenset, deque))

    def beside(x: Any) -> dict[str, Any]:
        attributes: dict[str, Any] = x.__dict__
        # Of some dictionaries the keys are the attributes.
        if attributes.keys() <= own or attributes is x:
            return {}
        found = {
            name: value
            for name, value in attributes.items()
            if name not in own and has_tensors(value)
        }
        if has_storage:
            known = {id(item) for item in items.children(x)}
            found = {name: value for name, value in found.items() if not _is_storage(value, known)}
        return found

    def children(x: Any) -> Iterable[Any]:
        # Most have none.
        found = beside(x) if own or x.__dict__ else None
        return [*items.children(x), *found.values()] if found else items.children(x)

    def labels(x: Any) -> Iterable[object]:
        found = beside(x)
        return [*items.labels(x), *found] if found else items.labels(x)

    def rebuild(old: Any, new: list[Any]) -> Any:
        found = beside(old)
        made = items.rebuild(old, new[: len(new) - len(found)])
        vars(made).update(zip(found, new[len(new) - len(found) :], strict=True))
        return made

    def slice_items(x: Any, start: int, stop: int) -> Any:
        if found := beside(x):
            raise TypeError(f"its attributes have tensors, which are not items: {', '.join(found)}")
        assert items.slice_items is not None
        return items.slice_items(x, start, stop)

    return Container(
        children,
        labels,
        rebuild,
        items,
        items.holds,
        None if items.slice_items is None else slice_items,
    )


def _is_storage(x: Any, known: set[int]) -> bool:
    """Tell whether a value is where a container has its items, by the ids of these."""
    if not isinstance(x, (dict, list, deque)):
        return False
    return known.issuperset(map(id, x.values() if isinstance(x, dict) else x))


def _list_cached_properties(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, cached_property)
    ]


def is_of_python(cls: type) -> bool:
    """Return whether a class is a container of Python's, derived from one, or a dataclass."""
    own = dict, list, tuple, set, frozenset, deque, UserDict, UserList
    return issubclass(cls, own) or is_dataclass(cls)


def is_namedtuple(cls: type) -> bool:
    """Return whether a class is a namedtuple."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_dataclass(cls: type) -> bool:
    """Return whether a class is a dataclass, without the import of ``dataclasses``."""
    return hasattr(cls, "__dataclass_fields__")


def _rebuild_mapping(old: Any, new: list[Any]) -> Any:
    if not isinstance(old, MutableMapping):
        return type(old)(dict(pair_children(old, new)))
    # A shallow copy keeps the default factory, the order and the attributes of a subclass.
    return _rewritten(old, list(old), list(old.values()), new)


def pair_children(labels: Iterable[Any], children: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return what is in a container, each with its label.

    Raises:
        TypeError: if iteration gives something else than the labels, such as rows.
    """
    # A sequence may have a length that no memory holds.
    found = list(islice(labels, len(children) + 1))
    if len(found) != len(children):
        order = "fewer" if len(found) < len(children) else "more"
        raise TypeError(f"it has {len(children)} values, and {order} keys or indices")
    return list(zip(found, children, strict=True))


def _sequence_rebuild(old: Any, new: list[Any]) -> Any:
    # A copy of a deque keeps its maximal length.
    return _rewritten(old, range(len(new)), list(old), new)


def _slice_sequence(old: Any, start: int, stop: int) -> Any:
    made, length = _shallow_copy(old), len(old)
    # One by one: a deque takes no slices.
    for _ in range(length - stop):
        made.pop()
    for _ in range(start):
        del made[0]
    if len(old) != length:
        raise TypeError("an item removed from its copy is missing in the container itself")
    return made


def _rewritten(old: Any, keys: Iterable[Any], values: list[Any], new: list[Any]) -> Any:
    """Return a copy of a mapping or a sequence, with other values under the same keys.

    Raises:
        TypeError: if writing to a copy of it would change it.
    """
    made = _shallow_copy(old)
    pairs = pair_children(values, new)
    places = [(key, *pair) for key, pair in pair_children(keys, pairs)]
    for key, _, value in places:
        made[key] = value
    shared = [(key, was) for key, was, value in places if value is not was and old[key] is value]
    for key, was in shared:
        old[key] = was
    if shared:
        raise TypeError("what is written to a copy of it shows in itself")
    return made


def _shallow_copy(old: Any) -> Any:
    """Copy a mapping or sequence as ``copy.copy`` does, with the dict or list of its values."""
    # Python's ``copy`` looks for a package of Jython's in every folder, when it is imported.
    import copy

    made = copy.copy(old)
    if made is old:
        raise TypeError("a copy of it is itself")
    attributes = getattr(old, "__dict__", None)
    if attributes and isinstance(old, deque):  # whose own ``__copy__`` leaves them out
        vars(made).update(attributes)
    elif attributes is old:  # a dictionary whose keys are its attributes
        object.__setattr__(made, "__dict__", made)
    elif attributes and not isinstance(old, (dict, list, deque)) and not hasattr(old, "__copy__"):
        # A class that keeps its values in a dict or list of its own: the copy shares that.
        for name, value in attributes.items():
            if isinstance(value, (dict, list, deque)):
                vars(made)[name] = copy.copy(value)
    return made


def _set_rebuild(old: Any, new: list[Any]) -> Any:
    made = type(old)(new)
    if isinstance(old, (set, frozenset)) and hasattr(old, "__dict__"):
        vars(made).update(vars(old))
    return made


def _tuple_rebuild(cls: Any) -> Callable[[Any, list[Any]], Any]:
    if hasattr(cls, "n_sequence_fields"):  # a structure of C's, such as torch.return_types.max
        # Some have fields beside their items, such as a time's zone.
        return lambda old, new: cls(new, old.__reduce__()[1][1])

    def rebuild(old: Any, new: list[Any]) -> Any:
        # Past ``__new__``, which may ask for other arguments than the items.
        made: Any = tuple.__new__(cls, new)
        if hasattr(old, "__dict__"):
            vars(made).update(vars(old))
        return made

    return rebuild


def _field_names(cls: type) -> tuple[str, ...]:
    # Not at the top: a program without dataclasses need not pay for importing them.
    from dataclasses import fields

    return tuple(field.name for field in fields(cls))


def _dataclass_container(cls: type) -> Container:
    names, cached = _field_names(cls), frozenset(_list_cached_properties(cls))

    def labels(x: Any) -> list[str]:
        # A field with ``init=False`` and no default need not be there yet.
        return [name for name in names if hasattr(x, name)]

    def rebuild(old: Any, new: list[Any]) -> Any:
        made = object.__new__(type(old))
        # Not a class's own ``__getstate__``: that of a frozen one with slots wants every field.
        state: Any = object.__getstate__(old)
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        for name, value in (attributes or {}).items():
            # The class computes some attributes from its fields: compute them again.
            if name not in cached:
                vars(made)[name] = value
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)
        for name, value in zip(labels(old), new, strict=True):
            object.__setattr__(made, name, value)  # a frozen one refuses ``setattr``
        return made

    return Container(lambda x: [getattr(x, name) for name in labels(x)], labels, rebuild)


def is_plain_class(cls: type) -> bool:
    """Return whether a class has values without parts: NumPy's numbers, enumerations, ranges."""
    if issubclass(cls, (range, slice, type(Ellipsis), Enum)):
        return True
    return is_of_numpy(cls, "generic") and not is_of_numpy(cls, "void")


def is_of_numpy(cls: type, name: str) -> bool:
    """Return whether a class is NumPy's class of a name, or derived from it.

    NumPy is not imported for it. Where it is not imported, it has no objects.
    """
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(cls, getattr(numpy, name))
