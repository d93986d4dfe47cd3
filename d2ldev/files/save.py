"""``save``: take a nesting apart, and write it into one file, all of it or nothing.

The file has the tensors, and a description of what is around them: see ``structure.py``.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from d2ldev.contract import Framework
from d2ldev.device import CPU
from d2ldev.errors import (
    CheckpointError,
    D2LDevError,
    OutOfDeviceMemoryError,
    UnsupportedValueError,
    text_of,
    warn,
)
from d2ldev.files.format.atomic import replace_file
from d2ldev.files.format.container import (
    FileError,
    check_files,
    compute_checksum,
    make_file,
    name_of,
    normalize,
    storage_of,
)
from d2ldev.files.structure import (
    LABELLED,
    MODEL,
    NAMEDTUPLE,
    STATE,
    make_unique,
    problem_of_keys,
)
from d2ldev.nesting.containers import Container, is_dataclass, is_namedtuple
from d2ldev.nesting.kinds import OBJECT, PLAIN, TENSOR, Kind
from d2ldev.nesting.walk import depth_refusal, join_path, label_children
from d2ldev.operations.arguments import as_path
from d2ldev.operations.inventory import Inventory, NamedTensors
from d2ldev.operations.moving import copy_refusal
from d2ldev.operations.other_backends import of_another_backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SHOWN = 3
"""How many names a warning has."""


def save(framework: Framework, obj: Any, path: Any) -> None:
    """Write a nesting; see ``Backend.save``."""
    path = as_path(path, "save")
    attempted = f"save to {path}"
    check_files(attempted)
    try:
        structure = Structure(framework, obj, attempted)
        text = structure.to_json()
        # The operating system finds no path in "file/../other", which ``replace_file`` would.
        os.stat(os.path.dirname(path) or os.curdir)
        with replace_file(path) as new:
            make_file(structure.arrays, text, new)
    except OutOfDeviceMemoryError:
        raise
    except MemoryError as error:
        raise OutOfDeviceMemoryError(
            attempted,
            f"the host has no memory for a copy: {error}",
            "save the values of the object in files of their own; the old file is as it was",
            [CPU],
        ) from error
    except (OSError, FileError) as error:
        raise CheckpointError(
            attempted,
            getattr(error, "strerror", None) or str(error),
            "save to a folder that exists, has space, and may be written to; the old file is as "
            "it was",
        ) from error
    if structure.unsaved:
        warn(
            f"{path} has no {' and no '.join(structure.unsaved)}. fix: save it beside the "
            "file, and make the model with it before load_into"
        )
    for cls, names in structure.hidden.items():
        few = ", ".join(names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warn(
            f"{path} has no {few}{more}: the state_dict() of the {cls} does not show it. fix: "
            f"define state_dict() and load_state_dict() in {cls}, unless it never changes"
        )


def to_bytes(framework: Framework, obj: Any) -> bytes:
    """Return what ``save`` writes of a small nesting, for another process."""
    attempted = "send an object to another process"
    structure = Structure(framework, obj, attempted)
    return make_file(structure.arrays, structure.to_json())


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
        is_named = row["type"] in LABELLED
        if is_named and (problem := problem_of_keys([label for label, _ in items])):
            raise self._refusal(x, path, problem)
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
    return UnsupportedValueError(attempted, f"no file can hold {where}: {problem}", fix)


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
