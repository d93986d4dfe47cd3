"""Nested batches: what comes back is what went in, and nothing that was given is changed."""

import enum
import os
import time
import types
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    defaultdict,
    deque,
    namedtuple,
)
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest

from d2ldev import gpu


@pytest.fixture
def is_moved(reference):
    """Whether a leaf is what ``x`` becomes on gpu:0."""
    return lambda leaf: (
        reference.device_of(leaf) is gpu(0) and reference.to_numpy(leaf).tolist() == [1.0, 2.0]
    )


# -- mappings ---------------------------------------------------------------------------------


class Batch(dict):
    """A dict with attributes, whose constructor asks for something else."""

    def __init__(self, path, **items):
        super().__init__(items)
        self.path = path


class UserBatch(UserDict):
    pass


MAPPINGS = {
    "dict": lambda x: {"b": x, "a": 1},
    "OrderedDict": lambda x: OrderedDict(b=x, a=1),
    "defaultdict": lambda x: defaultdict(list, b=x, a=1),
    "Counter": lambda x: Counter(b=x, a=1),
    "dict subclass": lambda x: Batch("file", b=x, a=1),
    "MappingProxyType": lambda x: types.MappingProxyType({"b": x, "a": 1}),
    "UserDict": lambda x: UserDict(b=x, a=1),
    "UserDict subclass": lambda x: UserBatch(b=x, a=1),
    "ChainMap": lambda x: ChainMap({"b": x, "a": 1}),
}


@pytest.mark.parametrize("make", MAPPINGS.values(), ids=MAPPINGS.keys())
def test_a_mapping_comes_back_as_its_type_with_its_keys_in_order(moved, is_moved, x, make):
    batch = make(x)
    new = moved(batch)
    assert (type(new), list(new)) == (type(batch), ["b", "a"])
    assert is_moved(new["b"])
    assert new["a"] == 1


def test_keys_may_be_anything(moved, is_moved, x):
    new = moved({(1, "a"): x, None: x})
    assert is_moved(new[1, "a"])
    assert is_moved(new[None])


# -- sequences --------------------------------------------------------------------------------


class Rows(list):
    """A list with attributes, whose constructor asks for something else."""

    def __init__(self, path, *rows):
        super().__init__(rows)
        self.path = path


class Pair(tuple):
    """A tuple with attributes, whose constructor asks for two items."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    x: object
    y: int = 1


class Named(Point):
    """A namedtuple with attributes, whose constructor asks for less."""

    def __new__(cls, x):
        return super().__new__(cls, x, 1)


SEQUENCES = {
    "list": lambda x: [x, 1],
    "list subclass": lambda x: Rows("file", x, 1),
    "UserList": lambda x: UserList([x, 1]),
    "deque": lambda x: deque([x, 1], maxlen=5),
    "tuple": lambda x: (x, 1),
    "tuple subclass": lambda x: Pair(x, 1),
    "namedtuple": lambda x: Point(x, 1),
    "NamedTuple": lambda x: Typed(x),
    "namedtuple subclass": lambda x: Named(x),
    "structure of C": lambda x: os.terminal_size((x, 1)),
}


@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_a_sequence_comes_back_as_its_type_with_its_items(moved, is_moved, x, make):
    batch = make(x)
    new = moved(batch)
    first, second = new
    assert type(new) is type(batch)
    assert is_moved(first)
    assert second == 1


@pytest.mark.parametrize("make", [Pair, lambda x, _: Named(x)], ids=["tuple", "namedtuple"])
def test_a_tuple_subclass_keeps_its_attributes(moved, x, make):
    batch = make(x, x)
    batch.path = "file"
    assert moved(batch).path == "file"


def test_a_structure_of_c_keeps_its_hidden_fields(moved, x):
    batch = time.struct_time((x, *range(8), "CET", 3600))
    new = moved(batch)
    assert (new.tm_zone, new.tm_gmtoff) == ("CET", 3600)


# -- sets -------------------------------------------------------------------------------------


class Holder(NamedTuple):
    """Tensors cannot be in a set; what holds one can, if it says so."""

    x: object

    __hash__ = object.__hash__


class Bag(set):
    pass


class FrozenBag(frozenset):
    pass


SETS = [set, frozenset, Bag, FrozenBag]


@pytest.mark.parametrize("cls", SETS)
def test_a_set_comes_back_as_its_type(moved, is_moved, x, cls):
    (holder,) = new = moved(cls([Holder(x)]))
    assert type(new) is cls
    assert is_moved(holder.x)


@pytest.mark.parametrize("cls", [Bag, FrozenBag])
def test_a_set_subclass_keeps_its_attributes(moved, x, cls):
    batch = cls([Holder(x)])
    batch.path = "file"
    assert moved(batch).path == "file"


@pytest.mark.parametrize("cls", SETS)
def test_a_set_without_tensors_is_itself(moved, cls):
    batch = cls([1, "a", None])
    assert moved(batch) is batch


# -- what passes ------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Flag(enum.IntFlag):
    UP = 1


PLAIN = [
    *(None, True, 1, 1.5, 1j, "text", b"bytes", bytearray(b"bytes"), 10**30),
    *(Decimal(1), Fraction(1, 2), range(3), slice(1), ..., Colour.RED, Flag.UP),
    *(np.float32(1), np.float64(1), np.int8(1), np.bool_(True), np.str_("text"), np.complex64(1)),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: f"{type(v).__name__}")
def test_a_plain_value_passes_beside_a_tensor(moved, x, value):
    assert moved([x, value])[1] is value
