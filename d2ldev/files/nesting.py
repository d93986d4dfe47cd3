"""From a nesting to its description (``nodes.py``), and the list of its tensors."""

from __future__ import annotations

import base64
import math
import reprlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from d2ldev.errors import UnsupportedValueError
from d2ldev.files import nodes
from d2ldev.files.format.dtypes import storage_of
from d2ldev.files.layouts import layouts_of_model
from d2ldev.files.objects import tensors_of
from d2ldev.framework import Framework
from d2ldev.nesting.containers import Container
from d2ldev.nesting.walk import OBJECT, TENSOR, Kind, joined, too_deep


class Saved(NamedTuple):
    """A tensor, or a NumPy array, that goes into the file.

    Args:
        name: its name there, which no other has.
        value: the tensor or the array.
        dtype: the name of its dtype.
    """

    name: str
    value: Any
    dtype: str


class Description:
    """A nesting as rows, and its tensors.

    Args:
        backend: whose tensors and models they are.
        obj: the nesting.
        attempted: what the caller is doing, for messages.

    Raises:
        UnsupportedValueError: if it holds something that cannot be saved.
    """

    def __init__(self, framework: Framework, obj: Any, attempted: str) -> None:
        self._framework = framework
        self._attempted = attempted
        self.rows: list[dict[str, Any]] = []
        self.saved: list[Saved] = []
        self._sizes = nodes.Sizes()
        self._names: set[str] = {"__metadata__"}
        # id -> (the object, kept so that its id stays its own; its node).
        self._done: dict[int, tuple[Any, Any]] = {}
        self._inside: set[int] = set()
        try:
            self.root = self._node(obj, "")
        except RecursionError:
            raise too_deep(attempted) from None

    def _refusal(self, value: object, path: str, problem: str = "") -> UnsupportedValueError:
        reason = f": {problem}" if problem else ""
        return UnsupportedValueError(
            self._attempted,
            f"{brief(value)}, of type {type(value).__name__}, at {path or 'the top'} cannot be "
            f"saved{reason}",
            "save tensors, models, optimizers, numbers, text, and containers of them; what else "
            "there is, such as a function, your program makes again",
        )

    def _node(self, x: Any, path: str) -> Any:
        leaf = _leaf(x)
        if leaf is not _NO_LEAF:
            return leaf
        if id(x) in self._done:
            return self._done[id(x)][1]
        kind = self._framework.kinds[type(x)]
        if kind is TENSOR:
            node = self._stored(nodes.TENSOR, x, self._framework.tensors.dtype_of(x), path)
        elif kind is OBJECT or layouts_of_model(self._framework, x) is not None:
            node = self._object(x, path)
        elif isinstance(kind, Kind):
            node = self._numpy(x, path)
        else:
            node = self._container(x, kind, path)
        self._done[id(x)] = (x, node)
        return node

    def _stored(self, kind: str, x: Any, dtype: str, path: str) -> dict[str, int]:
        if storage_of(dtype) is None and self._framework.files.numbers_dtype(dtype) is None:
            raise self._refusal(x, path, f"no file can hold its dtype, {dtype}")
        # A name in the file is Unicode, which half of a surrogate pair is not.
        name = path.encode("utf-8", "backslashreplace").decode() or "tensor"
        unique, count = name, 1
        while unique in self._names:  # 'a.b' in a dict, and 'b' in its 'a'
            count += 1
            unique = f"{name}#{count}"
        self._names.add(unique)
        self.saved.append(Saved(unique, x, dtype))
        return {kind: len(self.saved) - 1}

    def _numpy(self, x: Any, path: str) -> Any:
        import numpy as np

        if type(x) is np.ndarray:
            return self._stored(nodes.ARRAY, x, x.dtype.name, path)
        if isinstance(x, np.generic) and storage_of(x.dtype.name) is not None:
            return {nodes.SCALAR: [x.dtype.name, x.tobytes().hex()]}
        raise self._refusal(x, path)

    def _object(self, x: Any, path: str) -> Any:
        row: dict[str, Any] = {"type": nodes.MODEL, "class": [type(x).__name__]}
        state = self._framework.files.state(x)
        if state is not None:
            row["type"] = nodes.STATE
            return self._row(row, x, state, state.values(), path)
        layouts = layouts_of_model(self._framework, x)
        if layouts is not None:
            row["layouts"] = {name: list(layout) for name, layout in layouts.items()}
        tensors = tensors_of(self._framework, x, self._attempted)
        return self._row(row, x, tensors, tensors.values(), path)

    def _container(self, x: Any, kind: Container, path: str) -> Any:
        row = nodes.row_of(x, kind)
        if row is None:
            raise self._refusal(x, path, f"a file names {', '.join(nodes.FACTORIES)}, no other")
        if id(x) in self._inside:
            raise self._refusal(x, path, "it contains itself")
        self._inside.add(id(x))
        try:
            labels, children = list(kind.labels(x)), list(kind.children(x))
        except Exception as error:  # whatever a class's own methods raise
            raise self._refusal(x, path, str(error)) from error
        node = self._row(row, x, labels, children, path)
        self._inside.discard(id(x))
        return node

    def _row(
        self,
        row: dict[str, Any],
        x: Any,
        labels: Iterable[Any],
        children: Iterable[Any],
        path: str,
    ) -> dict[str, int]:
        labels, children = list(labels), list(children)
        items = [
            (label, self._node(child, joined(path, name_of(label))))
            for label, child in zip(labels, children, strict=True)
        ]
        row["items"] = [node for _, node in items]
        hashed = row["items"] if row["type"] in nodes.SETS else []
        if row["type"] not in nodes.UNLABELLED:
            hashed = row["labels"] = [
                self._node(label, joined(path, f"<the key {brief(label)}>")) for label, _ in items
            ]
        problem = self._sizes.add(row, hashed)
        if hashed and not problem:
            problem = _keys_problem(children if row["type"] in nodes.SETS else labels)
        if problem:
            raise self._refusal(x, path, problem)
        self.rows.append(row)
        return {nodes.AT: len(self.rows) - 1}


def _keys_problem(keys: list[Any]) -> str:
    try:
        return nodes.alike(keys)
    except TypeError as error:  # a mapping of a class of one's own may have any keys
        return f"a key of it has no hash: {error}"


class _Brief(reprlib.Repr):
    """The ``repr`` of a value that is never asked of more than a few of its parts.

    Containers that share theirs have a ``repr`` without end, and so have keys made of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:  # reprlib's own
        return str(x) if abs(x) < 2**200 else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if hasattr(type(x), "__dataclass_fields__") or hasattr(type(x), "__len__"):
            return f"<{type(x).__name__}>"
        return super().repr_instance(x, level)


_BRIEF = _Brief()


def brief(x: Any) -> str:
    """A value in a few words, whatever it refers to."""
    return _BRIEF.repr(x)


def name_of(label: Any) -> str:
    """What a key is called in names: text is itself."""
    return label if isinstance(label, str) else brief(label)


_NO_LEAF = object()


def _leaf(x: Any) -> Any:
    """What stands for a value of Python's own without parts; ``_NO_LEAF`` if it is none.

    By its exact type: of a subclass, such as an enumeration's, the class would be lost.
    """
    cls = type(x)
    if x is None or cls is bool or cls is str:
        return x
    if cls is int:
        # In hexadecimal digits, of which Python reads any number.
        return x if abs(x) < 2**53 else {nodes.INTEGER: hex(x)}
    if cls is float:
        return x if math.isfinite(x) else {nodes.FLOAT: str(x)}
    if cls is complex:
        return {nodes.COMPLEX: [_leaf(x.real), _leaf(x.imag)]}
    if cls is bytes or cls is bytearray:
        return {cls.__name__: base64.b64encode(x).decode()}
    return _NO_LEAF
