"""Describe a nesting as JSON, and read such a description without trusting it.

The description is a flat table: each container is a row, and refers to rows above it by their
number. So it is read without recursion, and holds no cycles. A list that is in two places is
written once.

``None``, booleans, text, and numbers that JSON keeps stand for themselves. Everything else is an
object of one key: ``at`` with the number of a row, ``tensor`` or ``array`` with the number of a
tensor, or the kind of a value with its text.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from d2ldev.errors import D2LDevError, UnsupportedValueError, said, shown
from d2ldev.files.format.dtypes import numpy_dtype, storage_of
from d2ldev.files.format.header import HeaderError
from d2ldev.files.layouts import layouts_of, layouts_of_model
from d2ldev.framework import Framework, Layout
from d2ldev.nesting.containers import Container, is_dataclass, is_namedtuple
from d2ldev.nesting.kinds import OBJECT, TENSOR, Kind
from d2ldev.nesting.walk import depth_refusal, joined, labelled
from d2ldev.operations.creation import shape_of
from d2ldev.operations.other_backends import of_another_backend
from d2ldev.operations.placing import Inventory, NamedTensors

VERSION = 4
"""The version of the description; a reader refuses a higher one.

Since version 2 it names the algorithm of the checksums. Since version 3 it names no classes that a
reader would look for. Since version 4 the header has a checksum, too.
"""

# The types of rows: without labels, and with them.
SETS: dict[str, Any] = {"set": set, "frozenset": frozenset}
_UNLABELLED: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque, **SETS}
_NAMES = {cls: name for name, cls in _UNLABELLED.items()}
_NAMES |= {dict: "dict", OrderedDict: "OrderedDict"}
NAMEDTUPLE = "namedtuple"
MODEL = "model"
"""A model: its tensors by their names."""
STATE = "state"
"""An optimizer: its state, in a dict."""
_LABELLED = frozenset(
    {
        *("dict", "OrderedDict", NAMEDTUPLE, MODEL, STATE),
        # Older versions have written these, which are loaded as dicts.
        *("dataclass", "defaultdict", "Counter"),
    }
)

# Python goes through a nesting recursively, to compare it or to show it.
_MAX_DEPTH = 500
# A tuple computes its hash anew each time; a file may refer to one tuple any number of times.
_MAX_KEY = 32
# Python compares a key with all keys of the same hash, and a file can choose the hash of a tuple.
_MAX_ALIKE = 100
# Containers that share children can have exponentially many values, each with a name as long as
# those of all containers that it is in. A short one takes memory, too.
_MAX_VALUES = 1_000_000
_MAX_LETTERS = 20_000_000
_LEAST_LETTERS = 100


class Saved(NamedTuple):
    """A tensor, or a NumPy array, that goes into the file.

    Args:
        name: its name in the file, which is unique.
        dtype: the name of its dtype.
        numbers: the name of the dtype of its numbers, the same but for random keys.
    """

    name: str
    value: Any
    dtype: str
    numbers: str


class Stored(NamedTuple):
    """A tensor in a file, before it is read.

    Args:
        kind: ``'tensor'``, or ``'array'`` for a NumPy array.
        name: its name there.
        dtype, numbers: see ``Saved``.
        shape: its shape; of random keys that of their numbers.
    """

    kind: str
    name: str
    dtype: str
    numbers: str
    shape: tuple[int, ...]


# Without a ``repr``, which could be exponentially long where containers share children.
@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Outline:
    """A container of the file, before any tensor is read.

    Args:
        type: one of the types of rows.
        labels: the keys, fields or indices of what is in it.
        items: an ``Outline``, a ``Stored`` or a plain value for each of them.
        number: of its row.
        layouts, inputs: of a model, if they are known; see ``Files.inputs``.
        unlisted: the names of tensors that are not needed; see ``Models.unlisted``.
        maxlen: of a deque.
        name: of the class of a namedtuple or a dataclass.
        size: how many values it has, itself included; what is in it twice counts twice.
        settings: of a model; see ``settings_of``.
    """

    type: str
    labels: Sequence[Any]
    items: Sequence[Any]
    number: int
    layouts: Mapping[str, Layout] | None = None
    maxlen: int | None = None
    inputs: Any = None
    name: str | None = None
    size: int = 1
    unlisted: AbstractSet[str] = frozenset()
    settings: Mapping[str, str] = field(default_factory=dict)

    def children(self) -> Mapping[Any, Any]:
        """Return what is in it, by key, field or index."""
        if isinstance(self.labels, range):
            return _Items(self.items)
        return dict(zip(self.labels, self.items, strict=True))


class _Items(Mapping[Any, Any]):
    """A list as a mapping from its indices, which are not kept."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and 0 <= index < len(self._items):
            return self._items[index]
        raise KeyError(index)

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self._items)))

    def __len__(self) -> int:
        return len(self._items)


# -- writing --------------------------------------------------------------------------------------


class Description:
    """The description of a nesting.

    Attributes:
        root: the node of the nesting itself.
        rows: its containers.
        saved: its tensors.

    Raises:
        UnsupportedValueError: if it holds something that cannot be saved.
    """

    def __init__(self, framework: Framework, obj: Any, attempted: str) -> None:
        self._framework = framework
        self._attempted = attempted
        self.unsaved: list[str] = []
        """The names of what its models have learned, and the file has not."""
        self.rows: list[dict[str, Any]] = []
        self.saved: list[Saved] = []
        self._depths: list[int] = []
        self._names: set[str] = {"__metadata__"}
        # id -> (the object, kept so that its id stays its own; its node, None until it is made).
        self._done: dict[int, tuple[Any, Any]] = {}
        try:
            self.root = self._node(obj, "")
        except RecursionError:
            raise depth_refusal(attempted) from None

    def _refusal(self, value: object, path: str, problem: str) -> UnsupportedValueError:
        return UnsupportedValueError(
            self._attempted,
            f"the {type(value).__name__} at {path or 'the top'} cannot be saved: {problem}",
            "save tensors, models, optimizers, numbers, text, and containers of them; what else "
            "there is, such as a function, your program makes again",
        )

    def _node(self, x: Any, path: str) -> Any:
        try:
            return _leaf_node(x)
        except TypeError:
            pass
        if id(x) in self._done:
            node = self._done[id(x)][1]
            if node is None:
                raise self._refusal(x, path, "it contains itself")
            return node
        self._done[id(x)] = (x, None)
        kind = self._framework.kinds[type(x)]
        if kind is TENSOR:
            node = self._tensor("tensor", x, self._framework.tensors.dtype_of(x), path)
        elif type(x) is np.ndarray:
            node = self._tensor("array", x, x.dtype.name, path)
        elif kind is OBJECT or layouts_of_model(self._framework, x) is not None:
            node = self._object(x, path)
        elif isinstance(kind, Kind):
            foreign = of_another_backend(self._framework, self._attempted, x, path)
            raise foreign or self._refusal(x, path, "no file can hold it")
        else:
            node = self._container(x, kind, path)
        self._done[id(x)] = (x, node)
        return node

    def _tensor(self, kind: str, x: Any, dtype: str, path: str) -> dict[str, int]:
        if kind == "tensor" and not self._framework.files.is_dense(x):
            problem = "it is sparse: save a dense copy of it, or the tensors that it is made of"
            raise self._refusal(x, path, problem)
        numbers = self._framework.files.numbers_dtype(dtype)
        if numbers is None and storage_of(dtype) is None:
            raise self._refusal(x, path, f"no file can hold its dtype, {dtype}")
        # A name in the file is Unicode, which half of a surrogate pair is not.
        name = path.encode("utf-8", "backslashreplace").decode() or "tensor"
        unique, count = name, 1
        while unique in self._names:  # 'a.b' in a dict, and 'b' in its 'a'
            count += 1
            unique = f"{name}#{count}"
        self._names.add(unique)
        self.saved.append(Saved(unique, x, dtype, numbers or dtype))
        return {kind: len(self.saved) - 1}

    def _object(self, x: Any, path: str) -> Any:
        state = self._framework.files.state(x)
        if state is not None:
            return self._row({"type": STATE}, x, list(state), list(state.values()), path)
        row: dict[str, Any] = {"type": MODEL}
        layouts = layouts_of_model(self._framework, x)
        if layouts is not None:
            row["layouts"] = {name: list(layout) for name, layout in layouts.items()}
        inputs = self._framework.files.inputs(x)
        if inputs is not None:
            row["inputs"] = inputs
        self.unsaved += [joined(path, name) for name in self._framework.files.unsaved(x)]
        inventory = Inventory(self._framework, x, self._attempted, is_saved=True)
        inventory.check_tensors(is_saved=True)
        self.unsaved += [joined(path, name) for name in inventory.unsaved()]
        tensors = NamedTensors(inventory)
        self._mark(row, tensors, path)
        settings = settings_of(self._framework, inventory)
        if settings:
            row["settings"] = {name: text for name, (_, text) in settings.items()}
        return self._row(row, x, list(tensors), list(tensors.values()), path)

    def _mark(self, row: dict[str, Any], tensors: NamedTensors, path: str) -> None:
        """Note which tensors are not needed, and take those out that no file can hold."""
        for name in [name for name in tensors if name in tensors.unlisted]:
            if not self._is_storable(tensors[name]):
                del tensors[name]
                self.unsaved.append(joined(path, name))
        if unlisted := [name for name in tensors if name in tensors.unlisted]:
            row["unlisted"] = unlisted

    def _is_storable(self, x: Any) -> bool:
        tensors, files = self._framework.tensors, self._framework.files
        try:
            tensors.device_of(x)
            dtype, _ = tensors.dtype_of(x), shape_of(x, self._attempted)
        except (D2LDevError, RuntimeError):  # it is spread over devices, or has no shape
            return False
        is_known = files.numbers_dtype(dtype) is not None or storage_of(dtype) is not None
        return is_known and files.is_dense(x)

    def _container(self, x: Any, kind: Container, path: str) -> Any:
        try:
            kind = kind.saved or kind
            labels, children = list(kind.labels(x)), list(kind.children(x))
            if len(labels) != len(children):
                raise ValueError(f"it has {len(labels)} keys and {len(children)} values")
            if kind.items is not None:
                names, values = labels, children
                labels, children = list(kind.items.labels(x)), list(kind.items.children(x))
                if lost := _lost_attributes(names, values, children):
                    raise ValueError(f"its attributes {lost} are not in it")
            if lost := _lost_fields(x, labels):
                raise ValueError(f"it is a dataclass, too, whose fields {lost} are not in it")
        except Exception as error:  # whatever a class's own methods raise
            raise self._refusal(x, path, said(error)) from error
        row: dict[str, Any] = {"type": _type_of(x, labels)}
        if is_record(type(x)):
            row["class"] = type(x).__qualname__
        if row["type"] == "deque":
            row["maxlen"] = x.maxlen
        if isinstance(x, NamedTensors) and x.unlisted:
            row["unlisted"] = sorted(x.unlisted)
        return self._row(row, x, labels, children, path)

    def _row(
        self, row: dict[str, Any], x: Any, labels: list[Any], children: list[Any], path: str
    ) -> dict[str, int]:
        is_named = row["type"] not in _UNLABELLED
        problem = _keys_problem(children if row["type"] in SETS else labels if is_named else ())
        if problem:
            raise self._refusal(x, path, problem)
        row["items"] = [
            self._node(child, joined(path, label))
            for label, child in zip(labels, children, strict=True)
        ]
        if is_named:
            row["labels"] = [self._node(label, path) for label in labels]
        self._depths.append(_depth(row["items"], self._depths))
        if self._depths[-1] > _MAX_DEPTH:
            raise self._refusal(x, path, f"it is nested deeper than {_MAX_DEPTH} levels")
        self.rows.append(row)
        return {"at": len(self.rows) - 1}


def settings_of(framework: Framework, inventory: Inventory) -> dict[str, tuple[str, str]]:
    """Return what the containers in a model have besides its tensors, such as batch sizes.

    Returns:
        For each setting, by its name, the name of its container and the setting as text.
    """
    found: dict[str, tuple[str, str]] = {}
    kinds, attempted = framework.kinds, inventory.attempted
    waiting = [(name, value) for name, value, _, _ in reversed(inventory.parts)]
    seen: dict[int, Any] = {}
    while waiting:
        path, x = waiting.pop()
        kind = kinds[type(x)]
        if isinstance(kind, Kind) or id(x) in seen:
            continue
        seen[id(x)] = x  # kept, so that its id stays its own
        children = labelled(x, kind, path, attempted)
        waiting += [(joined(path, label), child) for label, child in reversed(children)]
        if kind.saved is not None:
            known = {label for label, _ in children}
            for label, value in labelled(x, kind.saved, path, attempted):
                if label not in known:
                    found[joined(path, label)] = (path, _setting(framework, value))
    return found


def _setting(framework: Framework, x: Any) -> str:
    if framework.kinds[type(x)] is TENSOR:
        x = framework.files.borrow(x).tolist()
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(_setting(framework, each) for each in x)}]"
    return repr(x.item() if isinstance(x, np.generic) else x)


def is_record(cls: type) -> bool:
    """Return whether a class is a namedtuple or a dataclass."""
    return is_namedtuple(cls) or is_dataclass(cls)


def _lost_fields(x: Any, labels: Collection[Any]) -> list[str]:
    """Return the fields that would be lost of a dataclass that is a dict, list or set, too."""
    cls: Any = type(x)
    if not is_dataclass(cls) or not isinstance(x, (Mapping, Sequence, AbstractSet)):
        return []
    given = [field.name for field in fields(cls) if getattr(x, field.name, None) is not None]
    return [name for name in given if name not in labels]


def _lost_attributes(
    names: Sequence[Any], values: Sequence[Any], items: Sequence[Any]
) -> list[Any]:
    """Return the attributes that come after a container's items, and are no items themselves."""
    known, count = {id(item) for item in items}, len(items)
    rest = zip(names[count:], values[count:], strict=True)
    return [name for name, value in rest if id(value) not in known]


def _type_of(x: Any, labels: Collection[Any]) -> str:
    """Return the type of a container's row.

    A subclass of a container of Python's is written as that container. A class that was only
    registered is written as the tuple of its children, or as a dict if they have names.
    """
    cls = type(x)
    if cls in _NAMES:
        return _NAMES[cls]
    if is_namedtuple(cls):
        return NAMEDTUPLE
    if isinstance(x, Mapping) or is_dataclass(cls):
        return "dict"
    if isinstance(x, AbstractSet):
        return "set"
    if all(isinstance(label, int) for label in labels):
        return "list" if hasattr(x, "append") else "tuple"
    return "dict"


def _leaf_node(x: Any) -> Any:
    """Return the node of a plain value.

    Raises:
        TypeError: if its exact type is no plain one. A subclass, such as an enumeration, would lose
            its class.
    """
    cls = type(x)
    if x is None or cls is bool or cls is str:
        return x
    if cls is int:
        # In hexadecimal, because Python limits how many decimal digits it reads.
        return x if abs(x) < 2**53 else {"int": hex(x)}
    if cls is float:
        return x if math.isfinite(x) else {"float": str(x)}
    if cls is complex:
        return {"complex": [_leaf_node(x.real), _leaf_node(x.imag)]}
    if cls is bytes or cls is bytearray:
        return {cls.__name__: base64.b64encode(x).decode()}
    if isinstance(x, np.generic) and storage_of(x.dtype.name) is not None:
        return {"scalar": [x.dtype.name, x.tobytes().hex()]}
    raise TypeError


def _keys_problem(keys: Collection[Any]) -> str:
    """Return what is wrong with the keys of a dict or the elements of a set, if anything is."""
    if not all(map(_is_key, keys)):
        return (
            "its keys are not all None, text, bytes, numbers of 64 bits, or tuples of at most "
            f"{_MAX_KEY} of them"
        )
    if len(keys) > _MAX_ALIKE and max(Counter(map(hash, keys)).values()) > _MAX_ALIKE:
        return f"it has more than {_MAX_ALIKE} keys of one hash"
    return ""


def _is_key(x: Any) -> bool:
    if type(x) is tuple:
        return len(x) <= _MAX_KEY and all(type(y) is not tuple and _is_key(y) for y in x)
    # A larger integer computes its hash from all its digits, each time.
    return type(x) in (str, bytes, bool, float, NoneType) or (type(x) is int and abs(x) < 2**63)


def _depth(items: Iterable[Any], depths: list[int]) -> int:
    rows = (node["at"] for node in items if isinstance(node, dict) and "at" in node)
    return 1 + max((depths[number] for number in rows), default=0)


# -- reading --------------------------------------------------------------------------------------


def outlined(told: Any, stored: Callable[[str, int], Stored]) -> tuple[Any, list[Outline]]:
    """Read a description.

    Args:
        told: the description, as it was parsed. Its containers are taken out of it, one after the
            other: their memory is needed for what is made of them.
        stored: ``(kind, number) -> Stored`` of a tensor or an array.

    Returns:
        The nesting, and the rows of the table, in order.

    Raises:
        HeaderError: if it is no such description.
    """
    rows: list[Outline] = []
    depths: list[int] = []

    def value(node: Any) -> Any:
        if not isinstance(node, dict):
            check(node is None or isinstance(node, (bool, int, float, str)), "a value")
            return node
        check(len(node) == 1, "a value")
        ((kind, what),) = node.items()
        if kind == "at":
            check(type(what) is int and 0 <= what < len(rows), "a reference")
            return rows[what]
        if kind in ("tensor", "array"):
            check(type(what) is int, "a reference")
            return stored(kind, what)
        return _leaf(kind, what, value)

    def key(node: Any) -> Any:
        found = value(node)
        is_tuple = isinstance(found, Outline) and found.type == "tuple"
        return tuple(found.items) if is_tuple and len(found.items) <= _MAX_KEY else found

    try:
        waiting = told.pop("containers")[::-1]
        while waiting:
            row = waiting.pop()
            kind, nodes = row["type"], row["items"]
            check(isinstance(nodes, list), "items")
            items = [key(node) if kind in SETS else value(node) for node in nodes]
            labels: Sequence[Any] = range(len(items))
            keys: Sequence[Any] = items if kind in SETS else ()
            if kind not in _UNLABELLED:
                check(kind in _LABELLED, "a type that is known")
                check(isinstance(row["labels"], list), "labels")
                labels = keys = [key(node) for node in row["labels"]]
                check(len(labels) == len(items), "as many labels as items")
            problem = _keys_problem(keys)
            depths.append(_depth(nodes, depths))
            if depths[-1] > _MAX_DEPTH:
                problem = f"it is nested deeper than {_MAX_DEPTH} levels"
            if problem:
                raise HeaderError(problem)
            check(len(set(keys)) == len(keys), "keys that differ")
            layouts = layouts_of(row["layouts"]) if "layouts" in row else None
            maxlen = deque(maxlen=row["maxlen"]).maxlen if kind == "deque" else None
            inputs, name = row.get("inputs"), row.get("class")
            name = None if isinstance(name, list) else name  # older versions have a module, too
            check(name is None or isinstance(name, str), "the name of a class")
            unlisted = row.get("unlisted", [])
            check(isinstance(unlisted, list), "names of tensors")
            check(all(isinstance(each, str) for each in unlisted), "names of tensors")
            settings = row.get("settings", {})
            check(isinstance(settings, dict), "settings")
            check(all(isinstance(text, str) for text in settings.values()), "settings")
            sizes = (child.size if isinstance(child, Outline) else 1 for child in items)
            size = min(1 + sum(sizes), _MAX_VALUES + 1)
            number = len(rows)
            rows.append(
                Outline(
                    *(kind, labels, items, number, layouts, maxlen, inputs, name, size),
                    frozenset(unlisted),
                    settings,
                )
            )
        return value(told["root"]), rows
    except HeaderError:
        raise
    except (
        *(KeyError, TypeError, ValueError, AttributeError, IndexError),
        *(OverflowError, RecursionError),
    ) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise HeaderError(f"its description cannot be read: {what}") from error


def check(holds: bool, what: str) -> None:
    """Raise a ``HeaderError`` if a description lacks something."""
    if not holds:
        raise HeaderError(f"its description cannot be read: it lacks {what}")


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


def built(
    rows: Iterable[Outline], values: Mapping[Stored, Any], classes: Mapping[str, type]
) -> list[Any]:
    """Return the value of each row, with None for the tensors that are not in ``values``.

    Instances are made of ``classes`` only: namedtuples and dataclasses, by their names.

    Raises:
        HeaderError: if the file has other fields for one of them.
    """
    made: list[Any] = []
    for row in rows:
        items = [filled(child, made, values) for child in row.items]
        if row.name is not None and row.name in classes:
            made.append(_record(classes[row.name], dict(zip(row.labels, items, strict=True))))
        elif row.type == "deque":
            made.append(deque(items, row.maxlen))
        elif row.type in _UNLABELLED:
            made.append(_UNLABELLED[row.type](items))
        elif row.type == NAMEDTUPLE:
            made.append(tuple(items))
        else:
            cls = OrderedDict if row.type == "OrderedDict" else dict
            made.append(cls(zip(row.labels, items, strict=True)))
    return made


def _record(cls: Any, values: dict[Any, Any]) -> Any:
    """Make a namedtuple or a dataclass; as with ``Container.rebuild``, no constructor runs."""
    name = shown(cls.__qualname__)
    if issubclass(cls, tuple) and list(values) == list(cls._fields):
        return tuple.__new__(cls, values.values())
    if is_dataclass(cls) and _needed_fields(cls) <= values.keys() <= {f.name for f in fields(cls)}:
        try:
            made: Any = object.__new__(cls)  # a class, and no instance
            for field, value in values.items():
                object.__setattr__(made, field, value)
        except Exception as error:  # one that is a dict or has a property of that name, too
            raise HeaderError(f"no {name} can be made: {error}") from error
        return made
    raise HeaderError(f"its {name} has the fields {shown(list(values))}")


def _needed_fields(cls: Any) -> set[str]:
    """Return the fields that each instance of a dataclass has; others may come after its making."""
    return {
        field.name
        for field in fields(cls)
        if field.init or field.default is not MISSING or field.default_factory is not MISSING
    }


def filled(node: Any, made: list[Any], values: Mapping[Stored, Any]) -> Any:
    """Return the value of an outline, a tensor or a plain value."""
    if isinstance(node, Outline):
        return made[node.number]
    return values.get(node) if isinstance(node, Stored) else node


def _check_size(node: Any) -> None:
    """Raise a ``HeaderError`` if containers share children so that they have too many values."""
    if isinstance(node, Outline) and node.size > _MAX_VALUES:
        raise HeaderError(f"a part of it has more than {_MAX_VALUES} values")


def flat(node: Any) -> dict[str, Stored]:
    """Return the tensors in a part of the file, by their dotted names.

    Raises:
        HeaderError: if there are too many, or if they are too long.
    """
    _check_size(node)
    found: dict[str, Stored] = {}
    todo: list[tuple[str, Any]] = [("", node)]
    letters = 0
    while todo:
        path, node = todo.pop()
        if isinstance(node, Stored):
            found[path] = node
            continue
        children = []
        for label, child in _parts(node):
            children.append((joined(path, label), child))
            letters += len(children[-1][0]) + _LEAST_LETTERS
            if letters > _MAX_LETTERS:
                raise HeaderError(f"its names have more than {_MAX_LETTERS} letters")
        todo += reversed(children)
    return found


def unlisted_in(node: Any) -> set[str]:
    """Return the names of tensors in a part of the file that are not needed.

    Args:
        node: one that ``flat`` takes.
    """
    found: set[str] = set()
    todo: list[tuple[str, Any]] = [("", node)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, Outline):
            found |= {joined(path, name) for name in node.unlisted}
            todo += [(joined(path, label), child) for label, child in _parts(node)]
    return found


def tensors_in(node: Any) -> list[Stored]:
    """Return the tensors in a part of the file.

    Raises:
        HeaderError: if it has too many values.
    """
    _check_size(node)
    found: dict[Stored, None] = {}
    seen: set[int] = set()
    todo = [node]
    while todo:
        node = todo.pop()
        if isinstance(node, Stored):
            found[node] = None
        elif isinstance(node, Outline) and node.number not in seen:
            seen.add(node.number)
            todo += [child for _, child in _parts(node)]
    return list(found)


def _parts(node: Any) -> Iterator[tuple[Any, Outline | Stored]]:
    """Yield the containers and tensors that are in a container, with their labels."""
    if isinstance(node, Outline):
        for label, child in zip(node.labels, node.items, strict=True):
            if isinstance(child, (Outline, Stored)):
                yield label, child
