"""The description of a nesting in a file, as JSON: read it without trusting it.

``save.Structure`` writes it. It is a flat table: each container is a row, and refers to rows above
it by their number. So it is read without recursion, and holds no cycles. A list that is in two
places is written once.

``None``, booleans, text, and numbers that JSON keeps stand for themselves. Everything else is an
object of one key. ``at`` has the number of a row, and ``tensor`` or ``array`` that of a tensor.
Any other key is the kind of a value, with its text.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from d2ldev.contract import Layout
from d2ldev.files.format.container import FileError, numpy_dtype, storage_of
from d2ldev.nesting.walk import join_path

_UNLABELLED = frozenset({"list", "tuple", "deque"})
NAMEDTUPLE = "namedtuple"
MODEL = "model"
"""A model: its tensors by their names."""
STATE = "state"
"""An optimizer: its state, in a dict."""
LABELLED = frozenset({"dict", NAMEDTUPLE, MODEL, STATE})
"""The types of rows whose items have names."""

# A tuple computes its hash anew each time; a file may refer to one tuple any number of times.
_MAX_KEY = 32
# Python compares a key with all keys of the same hash. A file can choose the hash of a tuple.
_MAX_ALIKE = 100
# Containers that share children can have exponentially many values, each with a long name. A short
# one takes memory, too.
_MAX_LETTERS = 50_000_000
_LEAST_LETTERS = 100
_NO_KEYS = (
    "its keys are not all None, text, bytes, numbers of 64 bits, or tuples of at most "
    f"{_MAX_KEY} of them"
)
# What a description that ``save`` has not written raises where it is read.
_ODD = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)

T = TypeVar("T")


class Stored(NamedTuple):
    """A tensor in a file, before it is read.

    Args:
        kind: ``'tensor'``, or ``'array'`` for a NumPy array.
        name: its name there.
        dtype: the name of its dtype.
        numbers: the name of the dtype of its numbers. Only random keys have another dtype.
        shape: its shape; of random keys that of their numbers.
    """

    kind: str
    name: str
    dtype: str
    numbers: str
    shape: tuple[int, ...]


class Parameter(NamedTuple):
    """A parameter of an optimizer in a file.

    Args:
        label: the name that the optimizer gives it; empty if it gives none.
        name: the name of the tensor in the file; empty if the file has no such tensor.
    """

    label: str
    name: str


# Without a ``repr``, which could be exponentially long where containers share children.
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Outline:
    """A container of the file, before any tensor is read.

    Args:
        type: one of the types of rows.
        labels: the keys, fields or indices of its contents.
        items: an ``Outline``, a ``Stored`` or a plain value for each of them.
        layouts: of a model, by the names of its tensors.
        optional: the names of tensors that are not needed; see ``Slot.is_saved``.
        settings: of a model; see ``Inventory.find_settings``.
        parameters: of the state of an optimizer, in its order.
        optimizers: of a model; for each optimizer in it such parameters.
        maxlen: of a deque.
    """

    type: str
    labels: Sequence[Any]
    items: Sequence[Any]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    optional: AbstractSet[str] = frozenset()
    settings: Mapping[str, str] = field(default_factory=dict)
    parameters: Sequence[Parameter] = ()
    optimizers: Mapping[str, Sequence[Parameter]] = field(default_factory=dict)
    maxlen: int | None = None

    def children(self) -> dict[Any, Any]:
        """Return its contents by key, field or index."""
        return dict(zip(self.labels, self.items, strict=True))


class Description(NamedTuple):
    """The description of a nesting in a file.

    Args:
        writer: the name of the backend that wrote it.
        root: an ``Outline``, a ``Stored`` or a plain value.
        stored: the tensors in it, each once.
        sums: the checksum of each tensor by its name; None for none.
    """

    writer: str
    root: Any
    stored: list[Stored]
    sums: dict[str, str | None]


def read_description(text: str, store: Callable[[str, str], Stored]) -> Description:
    """Read the description of a nesting.

    Args:
        text: the description.
        store: ``(name, dtype) -> Stored`` of a tensor. It raises a ``FileError`` if the file has
            no such tensor.

    Raises:
        FileError: if it is another description.
    """
    table: list[Stored] = []
    used: dict[Stored, None] = {}
    rows: list[Outline] = []

    def value(node: Any) -> Any:
        if not isinstance(node, dict):
            check(not isinstance(node, list), "a value")
            return node
        ((kind, what),) = node.items()
        if kind == "at":
            return _look_up(rows, what)
        if kind in ("tensor", "array"):
            stored = _look_up(table, what)._replace(kind=kind)
            used[stored] = None
            return stored
        return _leaf(kind, what, value)

    def key(node: Any) -> Any:
        found = value(node)
        if isinstance(found, Outline) and found.type == "tuple" and len(found.items) <= _MAX_KEY:
            found = tuple(found.items)
        if not _is_key(found):
            raise FileError(_NO_KEYS)
        return found

    def parameters(found: Any) -> list[Parameter]:
        return [
            Parameter(str(label), "" if node is None else _look_up(table, node).name)
            for label, node in found
        ]

    def outline(row: Any) -> Outline:
        kind = row["type"]
        items = list(map(value, row["items"]))
        labels: Sequence[Any] = range(len(items))
        if kind not in _UNLABELLED:
            check(kind in LABELLED, "a type that is known")
            labels = list(map(key, row["labels"]))
            check(not _are_alike(labels), "keys of different hashes")
            check(len(set(labels)) == len(labels) == len(items), "as many keys as values")
        return Outline(
            *(kind, labels, items),
            layouts={each: _read_layout(*what) for each, what in row.get("layouts", {}).items()},
            optional=frozenset(map(str, row.get("unlisted", ()))),
            settings={**row.get("settings", {})},
            parameters=parameters(row.get("parameters", ())),
            optimizers={
                str(each): parameters(found) for each, found in row.get("optimizers", {}).items()
            },
            maxlen=deque(maxlen=row["maxlen"]).maxlen if kind == "deque" else None,
        )

    try:
        told = json.loads(text)
        sums = {name: total for name, _, total in told["tensors"]}
        table += [store(name, dtype) for name, dtype, _ in told["tensors"]]
        for row in told["containers"]:
            rows.append(outline(row))  # noqa: PERF401  # it refers to the rows before
        return Description(str(told["backend"]), value(told["root"]), list(used), sums)
    except FileError:
        raise
    except _ODD as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise FileError(f"its description cannot be read: {what}") from error


def check(holds: bool, what: str) -> None:
    """Raise a ``FileError`` if a description lacks something."""
    if not holds:
        raise FileError(f"its description cannot be read: it lacks {what}")


def _look_up(table: list[T], number: int) -> T:
    check(type(number) is int and 0 <= number < len(table), "a reference")
    return table[number]


def _read_layout(role: Any, *sizes: Iterable[Any]) -> Layout:
    split, axes, shape = (tuple(map(int, each)) for each in sizes)
    return Layout(str(role), split, axes, shape)


def _leaf(kind: str, what: Any, value: Callable[[Any], Any]) -> Any:
    if kind == "int":
        return int(what, 16)
    if kind == "float":
        check(what in ("nan", "inf", "-inf"), "a number")
        return float(what)
    if kind == "complex":
        real, imaginary = map(value, what)
        return complex(real, imaginary)
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(what, validate=True)
        return data if kind == "bytes" else bytearray(data)
    check(kind == "scalar", f"what is known: {kind[:40]}")
    dtype, digits = what
    check(storage_of(dtype) is not None, "a dtype")
    return np.frombuffer(bytes.fromhex(digits), numpy_dtype(dtype)).reshape(())[()]


def build(node: Any, values: Mapping[Stored, Any]) -> Any:
    """Return a node of the file as a value.

    Args:
        node: an ``Outline``, a ``Stored`` or a plain value.
        values: the tensors in it.

    Raises:
        FileError: if it is nested too deeply.
    """
    made: dict[Outline, Any] = {}

    def make(node: Any) -> Any:
        if not isinstance(node, Outline):
            return values[node] if isinstance(node, Stored) else node
        if node not in made:
            made[node] = _make_container(node, list(map(make, node.items)))
        return made[node]

    try:
        return make(node)
    except RecursionError:
        raise FileError("it is nested deeper than Python follows") from None


def _make_container(node: Outline, items: list[Any]) -> Any:
    if node.type == "list":
        return items
    if node.type == "deque":
        return deque(items, node.maxlen)
    if node.type in ("tuple", NAMEDTUPLE):
        return tuple(items)
    return dict(zip(node.labels, items, strict=True))


def flatten(node: Any, is_leaf: Callable[[str, Any], bool] | None = None) -> dict[str, Any]:
    """Return the values in a node of the file by their dotted names, without containers.

    Args:
        node: ``Checkpoint.outline``, or a child of it.
        is_leaf: tells of a container's name and itself whether it is not entered.

    Raises:
        FileError: if there are too many, or if they are too long.
    """
    found: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", node)]
    letters = 0
    while todo:
        path, node = todo.pop()
        if not isinstance(node, Outline) or (is_leaf is not None and is_leaf(path, node)):
            found[make_unique(path, found)] = node
            continue
        children = [(join_path(path, label), x) for label, x in node.children().items()]
        letters += sum(len(name) + _LEAST_LETTERS for name, _ in children)
        if letters > _MAX_LETTERS:
            raise FileError(f"the names of its values have more than {_MAX_LETTERS} letters")
        todo += reversed(children)
    return found


def make_unique(name: str, known: Collection[str]) -> str:
    """Return a name that is not known yet: that of ``'a.b'``, and of ``'b'`` in ``'a'``."""
    unique, count = name, 1
    while unique in known or unique == "__metadata__":
        count += 1
        unique = f"{name}#{count}"
    return unique


def problem_of_keys(keys: Collection[Any]) -> str:
    """Return why a dict in a file cannot have these keys; empty if it can."""
    if not all(map(_is_key, keys)):
        return _NO_KEYS
    return f"it has more than {_MAX_ALIKE} keys of one hash" if _are_alike(keys) else ""


def _are_alike(keys: Collection[Any]) -> bool:
    """Tell whether so many keys have one hash that a dict of them takes quadratic time."""
    return len(keys) > _MAX_ALIKE and max(Counter(map(hash, keys)).values()) > _MAX_ALIKE


def _is_key(x: Any) -> bool:
    """Return whether a value can be a key of a dict in a file."""
    if type(x) is tuple:
        return len(x) <= _MAX_KEY and all(type(y) is not tuple and _is_key(y) for y in x)
    # A larger integer computes its hash from all its digits, each time.
    return type(x) in (str, bytes, bool, float, NoneType) or (type(x) is int and abs(x) < 2**63)
