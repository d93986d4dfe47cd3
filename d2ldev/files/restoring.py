"""From the description (``nodes.py``) back to the nesting, without believing it."""

from __future__ import annotations

import base64
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from d2ldev.files import nodes
from d2ldev.files.classes import make
from d2ldev.files.format.dtypes import numpy_dtype, storage_of
from d2ldev.files.format.header import HeaderError
from d2ldev.files.layouts import layouts_of
from d2ldev.files.nesting import name_of
from d2ldev.framework import Layout
from d2ldev.nesting.walk import joined

_MAX_NAMES = 1_000_000


class Stored(NamedTuple):
    """A tensor in a file, before it is read.

    Args:
        kind: whether it was a tensor or a NumPy array.
        name: its name there.
        dtype: its true dtype.
        shape: its shape; of random keys that of their numbers.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Outline:
    """A container of the file, for ``load_into``: what is in it, before anything is read.

    Args:
        type: one of the types of rows.
        children: by key, field or index.
        layouts: of the layers of a model, if they are known.
        key: what it is as the key of another.
        number: of its row.
    """

    type: str
    children: Mapping[Any, Any]
    layouts: Mapping[str, Layout] | None
    key: Any
    number: int


def flat(outline: Outline) -> dict[str, Stored]:
    """The tensors in a container of the file, by their dotted names.

    Raises:
        HeaderError: if they are more than can be: containers that share theirs without end.
    """
    found: dict[str, Stored] = {}
    todo: list[tuple[str, Any]] = [("", outline)]
    for _ in range(_MAX_NAMES):
        if not todo:
            return found
        path, node = todo.pop()
        if isinstance(node, Outline):
            children = [(joined(path, name_of(k)), child) for k, child in node.children.items()]
            todo += reversed(children)
        elif isinstance(node, Stored):
            found[path] = node
    raise HeaderError(f"it has more than {_MAX_NAMES} names")


def restored(told: Any, leaf: Callable[[str, int], Any]) -> Any:
    """The nesting that a description tells of.

    Args:
        told: the description.
        leaf: ``(kind, number) -> value`` of a tensor or an array.

    Raises:
        HeaderError: if it is none.
    """
    return _rows(told, leaf, _made)[1]


def restored_rows(told: Any, leaf: Callable[[str, int], Any]) -> list[Any]:
    """What each row becomes; see ``restored``."""
    return _rows(told, leaf, _made)[0]


def outlined(told: Any, leaf: Callable[[str, int], Any]) -> Any:
    """The same with an ``Outline`` for each container."""
    numbers = count()

    def outline(row: dict[str, Any], labels: Any, items: list[Any]) -> Outline:
        return _outline(row, labels, items, next(numbers))

    return _rows(told, leaf, outline)[1]


def _rows(
    told: Any,
    leaf: Callable[[str, int], Any],
    container: Callable[[dict[str, Any], list[Any], list[Any]], Any],
) -> tuple[list[Any], Any]:
    made: list[Any] = []
    sizes = nodes.Sizes()

    def value(node: Any) -> Any:
        if not isinstance(node, dict):
            _check(node is None or isinstance(node, (bool, int, float, str)), "a value")
            return node
        _check(len(node) == 1, "a value")
        ((kind, what),) = node.items()
        if kind == nodes.AT:
            _check(type(what) is int and 0 <= what < len(made), "a reference")
            return made[what]
        if kind in (nodes.TENSOR, nodes.ARRAY):
            _check(type(what) is int, "a reference")
            return leaf(kind, what)
        return _leaf(kind, what)

    try:
        for row in told["containers"]:
            _check(isinstance(row["items"], list), "items")
            labels: Any = None
            if row["type"] not in nodes.UNLABELLED:
                _check(isinstance(row["labels"], list), "labels")
                _check(len(row["labels"]) == len(row["items"]), "as many labels as items")
                labels = [value(node) for node in row["labels"]]
            items = [value(node) for node in row["items"]]
            hashed = row["items"] if row["type"] in nodes.SETS else row.get("labels", [])
            problem = sizes.add(row, hashed)
            _check(not problem, problem)
            made.append(container(row, labels, items))
        return made, value(told["root"])
    except HeaderError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise HeaderError(f"its description cannot be read: {what}") from error


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise HeaderError(f"its description cannot be read: it lacks {what}")


def _check_keys(keys: Collection[Any]) -> None:
    problem = nodes.alike(keys)
    if problem:
        raise HeaderError(problem)


def _leaf(kind: str, what: Any) -> Any:
    if kind == nodes.INTEGER:
        return int(what, 16)
    if kind == nodes.FLOAT:
        _check(what in ("nan", "inf", "-inf"), "a number")
        return float(what)
    if kind == nodes.COMPLEX:
        real, imaginary = (x if type(x) is float else _leaf(*_only(x)) for x in what)
        return complex(real, imaginary)
    if kind in (nodes.BYTES, nodes.BYTEARRAY):
        data = base64.b64decode(what, validate=True)
        return data if kind == nodes.BYTES else bytearray(data)
    _check(kind == nodes.SCALAR, f"what is known: {kind[:40]}")
    return _scalar(*what)


def _only(node: dict[str, Any]) -> tuple[str, Any]:
    ((kind, what),) = node.items()
    _check(kind == nodes.FLOAT, "a number")
    return kind, what


def _scalar(dtype: str, digits: str) -> Any:
    import numpy as np

    _check(storage_of(dtype) is not None, "a dtype")
    return np.frombuffer(bytes.fromhex(digits), numpy_dtype(dtype)).reshape(())[()]


def _made(row: dict[str, Any], labels: Any, items: list[Any]) -> Any:
    kind = row["type"]
    if kind in nodes.UNLABELLED:
        _check_keys(items if kind in nodes.SETS else ())
        return deque(items, row["maxlen"]) if kind == "deque" else _PLAIN[kind](items)
    if kind in (nodes.NAMEDTUPLE, nodes.DATACLASS):
        module, qualname = row["class"]
        _check(all(type(name) is str for name in (module, qualname, *labels)), "names")
        return make(kind, module, qualname, labels, items)
    _check_keys(labels)
    pairs = zip(labels, items, strict=True)
    if kind == "defaultdict":
        factory = row["factory"]
        return defaultdict(None if factory is None else nodes.FACTORIES[factory], pairs)
    if kind == "Counter":
        # Past ``__init__``, which counts.
        counter: Counter[Any] = Counter()
        dict.update(counter, pairs)
        return counter
    return dict(pairs) if kind in (nodes.MODEL, nodes.STATE) else _PLAIN[kind](pairs)


_PLAIN: dict[str, Any] = nodes.MAPPINGS | nodes.SEQUENCES | nodes.SETS


def _outline(row: dict[str, Any], labels: Any, items: list[Any], number: int) -> Outline:
    named = range(len(items)) if labels is None else [_key(label) for label in labels]
    _check_keys(named)
    children = dict(zip(named, items, strict=True))
    _check(len(children) == len(items), "keys that differ")
    layouts = layouts_of(row["layouts"]) if "layouts" in row else None
    key = None
    if row["type"] in _HASHABLE:
        key = _made(row, labels, [_key(item) for item in items])
    return Outline(row["type"], children, layouts, key, number)


_HASHABLE = ("tuple", "frozenset", nodes.NAMEDTUPLE, nodes.DATACLASS)


def _key(x: Any) -> Any:
    return x.key if isinstance(x, Outline) else x
