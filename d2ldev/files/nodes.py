"""The description of a nesting in JSON: what it is made of.

It is a flat table: each container is a row, and refers to rows above it by their number. So it is
read without recursion, holds no cycles, and a list that is in two places is there once.

``None``, booleans, text, and numbers that JSON keeps stand for themselves; everything else is an
object of one key, which says what it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from d2ldev.nesting.containers import Container

VERSION = 2
"""Of the description; a reader refuses a higher one. Since 2 it names the checksums' algorithm."""

STRUCTURE = "d2ldev.structure"
CHECKSUM = "d2ldev.checksum"
"""The keys in the metadata of a file: the description, and the CRC-32 of its text.

It is CRC-32 in every version, so that a reader can tell a newer file from a damaged one.
"""

# The keys of nodes: a container; a tensor and a NumPy array, by their numbers; leaves.
AT, TENSOR, ARRAY = "at", "tensor", "array"
INTEGER, FLOAT, COMPLEX = "int", "float", "complex"
BYTES, BYTEARRAY, SCALAR = "bytes", "bytearray", "scalar"

# The types of rows.
MAPPINGS: dict[str, type] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
    "Counter": Counter,
}
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "deque": deque}
SETS: dict[str, type] = {"set": set, "frozenset": frozenset}
NAMEDTUPLE, DATACLASS = "namedtuple", "dataclass"
MODEL = "model"
"""A model: its tensors by their names."""
STATE = "state"
"""An optimizer: what it has learned, in a dict."""

UNLABELLED = frozenset(SEQUENCES | SETS)
"""The types of rows whose children have no keys."""
FACTORIES: dict[str, Any] = {
    cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)
}
"""What a ``defaultdict`` may make."""

MAX_DEPTH = 500
"""How deep a nesting may be: Python goes through it recursively, to compare it or to show it."""
MAX_KEY = 10_000
"""How many values there may be in a key or an element of a set, with which Python computes."""

MAX_KEYS = 1_000_000
"""How many values there may be in all keys together that are more than one value."""
MAX_ALIKE = 1000
"""How many keys of a dict may have the hash of another: Python compares each with all of them."""

_TYPE_NAMES = {cls: name for name, cls in (MAPPINGS | SEQUENCES | SETS).items()}


def row_of(x: Any, kind: Container) -> dict[str, Any] | None:
    """The row of a container, but for what is in it; None for a ``defaultdict`` of one's own.

    A class that is none of Python's own is written as what it is derived from; one that only was
    registered is the tuple of its children, or their dict if they have names.
    """
    cls = type(x)
    row: dict[str, Any] = {"type": _TYPE_NAMES.get(cls)}
    if cls is deque:
        row["maxlen"] = x.maxlen
    elif cls is defaultdict:
        row["factory"] = getattr(x.default_factory, "__name__", None)
        if x.default_factory is not None and FACTORIES.get(row["factory"]) is not x.default_factory:
            return None
    elif row["type"] is None:
        if isinstance(x, tuple) and hasattr(cls, "_fields"):
            row = {"type": NAMEDTUPLE, "class": [cls.__module__, cls.__qualname__]}
        elif hasattr(cls, "__dataclass_fields__"):
            row = {"type": DATACLASS, "class": [cls.__module__, cls.__qualname__]}
        elif isinstance(x, AbstractSet) and not isinstance(x, Mapping):
            row = {"type": "set"}
        elif isinstance(x, (Mapping, tuple)):
            row = {"type": "dict" if isinstance(x, Mapping) else "tuple"}
        elif all(isinstance(label, int) for label in kind.labels(x)):
            row = {"type": "list" if hasattr(x, "append") else "tuple"}
        else:
            row = {"type": "dict"}
    return row


class Sizes:
    """How large and how deep each row is, with all that it refers to, as often as it does."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int]] = []
        self._in_keys = 0

    def add(self, row: Mapping[str, Any], hashed: list[Any]) -> str:
        """Take a row in; what is wrong with it, if anything.

        Args:
            row: the next one.
            hashed: its nodes that are keys or elements of a set.
        """
        size, depth = 1, 0
        for node in (*row["items"], *row.get("labels", ())):
            its_size, its_depth = self._of(node)
            # Of what is larger than any key may be, nobody wants to know how large.
            size, depth = min(size + its_size, MAX_KEY + 1), max(depth, its_depth)
        self._found.append((size, depth + 1))
        if depth >= MAX_DEPTH:
            return f"it is nested deeper than {MAX_DEPTH} levels"
        in_keys = [self._of(node)[0] for node in hashed]
        if any(count > MAX_KEY for count in in_keys):
            return f"it has a key of more than {MAX_KEY} values"
        self._in_keys += sum(count for count in in_keys if count > 1)
        if self._in_keys > MAX_KEYS:
            return f"it has keys of more than {MAX_KEYS} values together"
        return ""

    def _of(self, node: Any) -> tuple[int, int]:
        return self._found[node[AT]] if isinstance(node, dict) and AT in node else (1, 0)


def alike(keys: Collection[Any]) -> str:
    """What is wrong with the keys of a dict, or the elements of a set, as Python finds them again.

    Integers, unlike text, have hashes that can be chosen: a file of a megabyte would take minutes.
    """
    if len(keys) - len({hash(key) for key in keys}) > MAX_ALIKE:
        return f"it has more than {MAX_ALIKE} keys whose hash another has"
    return ""
