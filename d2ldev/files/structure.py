"""Describe a nesting as JSON, and read such a description without trusting it.

The description is a flat table: each container is a row, and refers to rows above it by their
number. So it is read without recursion, and holds no cycles. A list that is in two places is
written once.

``None``, booleans, text, and numbers that JSON keeps stand for themselves. Everything else is an
object of one key. ``at`` has the number of a row, and ``tensor`` or ``array`` that of a tensor.
Any other key is the kind of a value, with its text.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from d2ldev.contract import Framework, Layout
from d2ldev.device import CPU
from d2ldev.errors import D2LDevError, UnsupportedValueError, text_of
from d2ldev.files.format.container import (
    FileError,
    compute_checksum,
    name_of,
    normalize,
    numpy_dtype,
    storage_of,
)
from d2ldev.nesting.containers import Container, is_dataclass, is_namedtuple
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, Kind
from d2ldev.nesting.walk import depth_refusal, join_path, label_children
from d2ldev.operations.inventory import Inventory, NamedTensors
from d2ldev.operations.moving import copy_refusal
from d2ldev.operations.other_backends import of_another_backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNLABELLED = frozenset({"list", "tuple", "deque"})
NAMEDTUPLE = "namedtuple"
MODEL = "model"
"""A model: its tensors by their names."""
STATE = "state"
"""An optimizer: its state, in a dict."""
_LABELLED = frozenset({"dict", NAMEDTUPLE, MODEL, STATE})

# A tuple computes its hash anew each time; a file may refer to one tuple any number of times.
_MAX_KEY = 32
# Python compares a key with all keys of the same hash. A file can choose the hash of a tuple.
_MAX_ALIKE = 100
# Containers that share children can have exponentially many values, each with a long name. A short
# one takes memory, too.
_MAX_LETTERS = 50_000_000
_LEAST_LETTERS = 100
_ALIKE = f"it has more than {_MAX_ALIKE} keys of one hash"
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


# -- writing --------------------------------------------------------------------------------------


class Structure:
    """The structure of a nesting, and its tensors apart.

    Attributes:
        arrays: the values of its tensors by their names in the file.
        dtypes: the names of their dtypes.
        unsaved: the names of what its models have learned, and the file has not.
        hidden: the same of its optimizers, by the names of their classes.

    Raises:
        UnsupportedValueError: if it holds something that cannot be saved.
    """

    def __init__(self, framework: Framework, obj: Any, attempted: str) -> None:
        self._framework = framework
        self._attempted = attempted
        self.arrays: dict[str, NDArray[Any]] = {}
        self.dtypes: dict[str, str] = {}
        self.unsaved: list[str] = []
        self.hidden: dict[str, list[str]] = {}
        self._rows: list[dict[str, Any]] = []
        # id -> (the object, kept so that its id stays its own; its node, None until it is made).
        self._done: dict[int, tuple[Any, Any]] = {}
        # The parameters of optimizers, and where the description has them.
        self._parameters: list[tuple[Any, list[Any]]] = []
        # Whether the current value is in a container of the framework's own. Functions may be among
        # its values, and the program makes them again.
        self._has_functions = False
        try:
            self._root = self._node(obj, "")
        except RecursionError:
            raise depth_refusal(attempted) from None
        for parameters, told in self._parameters:
            nodes = [self._done.get(id(x), (x, None))[1] or {} for _, x in parameters]
            told += [
                [label, node.get("tensor")]
                for (label, _), node in zip(parameters, nodes, strict=True)
            ]

    def to_json(self) -> str:
        """Return the description, with the checksum of each tensor."""
        told = {
            "backend": self._framework.name,
            "root": self._root,
            "containers": self._rows,
            "tensors": [
                [name, dtype, compute_checksum(dtype, self.arrays[name])]
                for name, dtype in self.dtypes.items()
            ],
        }
        return json.dumps(told, separators=(",", ":"), allow_nan=False)

    def _refusal(self, value: object, path: str, problem: str) -> UnsupportedValueError:
        return UnsupportedValueError(
            self._attempted,
            f"the {type(value).__name__} at {path or 'the top'} cannot be saved: {problem}",
            "save tensors, models, optimizers, numbers, text, and dicts, lists and tuples of them. "
            "Create anything else, such as a set or a function, in your program",
        )

    def _node(self, x: Any, path: str) -> Any:
        try:
            return _leaf_node(x)
        except TypeError:
            pass
        kind = self._framework.state.kinds[type(x)]
        if kind is PLAIN and self._has_functions:
            return None
        if id(x) in self._done:
            node = self._done[id(x)][1]
            if node is None:
                raise self._refusal(x, path, "it contains itself")
            return node
        self._done[id(x)] = (x, None)
        if kind is TENSOR:
            dtype = self._framework.tensors.dtype_of(x)
            node = self._tensor("tensor", x, dtype, self._borrow(x, path), path)
        elif isinstance(x, np.ndarray) and isinstance(kind, Kind):
            if not is_array_of_numbers(x):
                raise array_refusal(self._attempted, x, path)
            node = self._tensor("array", x, name_of(x.dtype), x, path)
        elif is_model(self._framework, x):
            node = self._object(x, path)
        elif isinstance(kind, Kind):
            foreign = of_another_backend(self._framework, self._attempted, x, path)
            raise foreign or self._refusal(x, path, "no file can hold it")
        else:
            node = self._container(x, kind, path)
        self._done[id(x)] = (x, node)
        return node

    def _borrow(self, x: Any, path: str) -> NDArray[Any]:
        framework = self._framework
        try:
            return framework.files.borrow(x)
        except Exception as error:
            if type(error) is ValueError:
                raise self._refusal(x, path, text_of(error)) from error
            native = framework.devices.native(CPU)
            ours = copy_refusal(framework, error, f"save {path or 'a tensor'}", native, x)
            if ours is None:
                raise
            raise ours from error

    def _tensor(
        self, kind: str, x: Any, dtype: str, array: NDArray[Any], path: str
    ) -> dict[str, int]:
        if storage_of(name_of(array.dtype)) is None:
            raise self._refusal(x, path, f"no file can hold its dtype, {dtype}")
        # A name in the file is Unicode, which half of a surrogate pair is not. JSON has more than
        # one way to write a control character.
        name = path.encode("utf-8", "backslashreplace").decode() or "tensor"
        name = re.sub(r"[\0-\x1f]", lambda found: f"\\x{ord(found[0]):02x}", name)
        unique = make_unique(name, self.arrays)
        self.arrays[unique] = normalize(array)
        self.dtypes[unique] = dtype
        return {kind: len(self.arrays) - 1}

    def _object(self, x: Any, path: str) -> Any:
        files = self._framework.files
        state = files.state(x)
        if state is not None:
            if hidden := self._framework.models.find_unsaved(x):
                self.hidden[type(x).__name__] = [join_path(path, name) for name in hidden]
            told = self._list_parameters(files.list_parameters(x))
            return self._row({"type": STATE, "parameters": told}, x, state.items(), path)
        row: dict[str, Any] = {"type": MODEL}
        model = Inventory(self._framework, x, self._attempted, is_saved=True)
        model.check_tensors(is_saved=True)
        if layouts := model.find_layouts():
            row["layouts"] = {name: list(layout) for name, layout in layouts.items()}
        tensors = dict(model.entries)
        for name in sorted(model.unlisted):
            # What is not needed, and no file can hold, is left out.
            try:
                self._node(tensors[name], join_path(path, name))
            except (D2LDevError, RuntimeError):
                self._done.pop(id(tensors.pop(name)), None)
                self.unsaved.append(join_path(path, name))
        unsaved = [*model.find_unsaved(), *self._framework.models.find_unsaved(x)]
        self.unsaved += [join_path(path, name) for name in unsaved]
        if optional := sorted(model.unlisted & tensors.keys()):
            row["unlisted"] = optional
        if optimizers := model.find_optimizers():
            row["optimizers"] = {
                name: self._list_parameters(found) for name, found in optimizers.items()
            }
        if settings := model.find_settings():
            row["settings"] = {name: text for name, (_, text) in settings.items()}
        return self._row(row, x, tensors.items(), path)

    def _list_parameters(self, parameters: Any) -> list[Any]:
        """Return a list that has the parameters of an optimizer when all tensors are known."""
        told: list[Any] = []
        self._parameters.append((parameters, told))
        return told

    def _container(self, x: Any, kind: Container, path: str) -> Any:
        if isinstance(x, AbstractSet):
            raise self._refusal(x, path, "give it as a list, or sorted(...)")
        items = label_children(x, kind.in_files, path, self._attempted)
        labels = [label for label, _ in items]
        if lost := self._find_lost_attributes(x, kind, items, path):
            raise self._refusal(x, path, f"its attributes {lost} are not in it")
        row: dict[str, Any] = {"type": _type_of(x, labels)}
        if row["type"] == "deque":
            row["maxlen"] = x.maxlen
        if isinstance(x, NamedTensors) and x.unlisted:
            row["unlisted"] = sorted(x.unlisted)
        had_functions = self._has_functions
        self._has_functions = had_functions or kind.saved is not None
        made = self._row(row, x, items, path)
        self._has_functions = had_functions
        return made

    def _find_lost_attributes(
        self, x: Any, kind: Container, items: list[tuple[Any, Any]], path: str
    ) -> list[str]:
        """Return the names of attributes with tensors, and of fields, that are not items."""
        known = {id(child) for _, child in items}
        # Attributes come last.
        beside = label_children(x, kind.saved or kind, path, self._attempted)[len(items) :]
        lost = [name for name, value in beside if id(value) not in known]
        cls: Any = type(x)
        if is_dataclass(cls) and isinstance(x, (Mapping, Sequence)):
            labels = [label for label, _ in items]
            names = [each.name for each in fields(cls) if getattr(x, each.name, None) is not None]
            lost += [name for name in names if name not in labels and name not in lost]
        return lost

    def _row(
        self, row: dict[str, Any], x: Any, items: Collection[tuple[Any, Any]], path: str
    ) -> dict[str, int]:
        is_named = row["type"] in _LABELLED
        if is_named and not all(_is_key(label) for label, _ in items):
            raise self._refusal(x, path, _NO_KEYS)
        if is_named and _are_alike([label for label, _ in items]):
            raise self._refusal(x, path, _ALIKE)
        row["items"] = [self._node(child, join_path(path, label)) for label, child in items]
        if is_named:
            row["labels"] = [self._node(label, path) for label, _ in items]
        self._rows.append(row)
        return {"at": len(self._rows) - 1}


def is_model(framework: Framework, x: Any) -> bool:
    """Return whether files have a value by the names of its tensors: a model or an optimizer."""
    return framework.state.kinds[type(x)] is OBJECT or framework.files.layers(x) is not None


def is_array_of_numbers(x: Any) -> bool:
    """Return whether a value is a NumPy array that a file holds whole.

    An instance of a subclass has more than its numbers: a mask, a unit, the fields of a record.
    """
    return type(x) is np.ndarray and storage_of(name_of(x.dtype)) is not None


def array_refusal(attempted: str, x: NDArray[Any], path: str) -> UnsupportedValueError:
    """Return the error of a NumPy array that no file holds whole."""
    problem = f"its dtype is {x.dtype}"
    fix = "give x.tolist() of text, x[field] of records, x.astype('int64') of dates"
    if type(x) is not np.ndarray:
        problem = "it is of a subclass of numpy.ndarray"
        fix = "give np.asarray(x), and what that lacks beside it, such as a mask"
    where = f"the {type(x).__name__} at {path or 'the top'}"
    return UnsupportedValueError(attempted, f"{where} can be in no file: {problem}", fix)


def make_unique(name: str, known: Collection[str]) -> str:
    """Return a name that is not known yet: that of ``'a.b'``, and of ``'b'`` in ``'a'``."""
    unique, count = name, 1
    while unique in known or unique == "__metadata__":
        count += 1
        unique = f"{name}#{count}"
    return unique


def _type_of(x: Any, labels: Collection[Any]) -> str:
    """Return the type of a container's row.

    A subclass of a container of Python's is written as that container. A registered class is
    written as a tuple of its children, or as a dict if the children have names.
    """
    if is_namedtuple(type(x)):
        return NAMEDTUPLE
    if type(x) is deque:
        return "deque"
    has_names = not all(isinstance(label, int) for label in labels)
    if isinstance(x, Mapping) or is_dataclass(type(x)) or has_names:
        return "dict"
    return "list" if hasattr(x, "append") else "tuple"


def _leaf_node(x: Any) -> Any:
    """Return the node of a plain value.

    Raises:
        TypeError: if its exact type is not a plain one. A subclass, such as an enumeration, would
            lose its class.
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
    if isinstance(x, np.generic) and storage_of(name_of(x.dtype)) is not None:
        return {"scalar": [name_of(x.dtype), x.tobytes().hex()]}
    raise TypeError


def is_plain_leaf(x: Any) -> bool:
    """Return whether a file can hold a value as itself: None, text, or a number."""
    try:
        _leaf_node(x)
    except TypeError:
        return False
    return True


def _are_alike(keys: Collection[Any]) -> bool:
    """Tell whether so many keys have one hash that a dict of them takes quadratic time."""
    return len(keys) > _MAX_ALIKE and max(Counter(map(hash, keys)).values()) > _MAX_ALIKE


def _is_key(x: Any) -> bool:
    """Return whether a value can be a key of a dict in a file."""
    if type(x) is tuple:
        return len(x) <= _MAX_KEY and all(type(y) is not tuple and _is_key(y) for y in x)
    # A larger integer computes its hash from all its digits, each time.
    return type(x) in (str, bytes, bool, float, NoneType) or (type(x) is int and abs(x) < 2**63)


# -- reading --------------------------------------------------------------------------------------


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
            check(kind in _LABELLED, "a type that is known")
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
