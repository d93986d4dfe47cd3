"""A saved nesting comes back as it was."""

import collections
import dataclasses
import enum
import itertools
import math

import numpy as np
import pytest

from d2ldev import UnsupportedValueError
from d2ldev.framework.testing import framework_of

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: object
    label: str


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: object


class Bag(set):
    pass


class Sum(dict):
    pass


class Colour(enum.IntEnum):
    RED = 1


@pytest.fixture
def round_trip(reference, path):
    def save_and_load(obj):
        reference.save(obj, path)
        return reference.load(path)

    return save_and_load


def same(backend, x, y):
    """Tell whether two nestings are alike: types, order, and the bytes of tensors."""
    if isinstance(x, framework_of(backend).tensors.types):
        x, y = backend.to_numpy(x), backend.to_numpy(y)
    if isinstance(x, np.ndarray):
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    if type(x) is not type(y):
        return False
    if isinstance(x, (int, set, frozenset)):  # a large integer has no ``repr``, and a set no order
        return x == y
    if isinstance(x, dict):
        return list(x) == list(y) and all(same(backend, x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple, collections.deque)):
        return len(x) == len(y) and all(map(same, [backend] * len(x), x, y))
    return repr(x) == repr(y)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -7, 2**53, -(2**63), 2**20000, 0.1, -0.0, 1e-320, "", "a.b/..\0"),
        *("\ud800", "\N{SNOWMAN}", math.nan, math.inf, -math.inf, 1 - 2j, complex(math.nan, -0.0)),
        *(b"", b"\x00\xff", bytearray(b"ab"), np.float32(1.5), np.int8(-3), np.bool_(True)),
        *([], (), {}, [[]], {"a": {}}, (1, (2, (3,)))),
        *({(): 1, (-1, -1): 2, (-1, -2): 3, 2**63 - 1: 4}),
        {1: "int", "1": "str", None: 0, (1, "b"): 2, b"k": 3, 1.5: 4, False: 5},
        collections.deque([1, 2], maxlen=2),
        np.arange(3),
        np.zeros((2, 0), "complex128"),
        np.array(1.5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_with_its_type(reference, round_trip, value):
    assert same(reference, {"at": [value]}, round_trip({"at": [value]}))
    assert same(reference, value, round_trip(value))


def test_one_tensor_in_two_places_is_one_afterwards_and_is_stored_once(reference, path, round_trip):
    x = reference.ones((1000,))
    loaded = round_trip({"a": x, "b": [x, (x, reference.ones((1000,)))]})
    assert loaded["a"] is loaded["b"][0] is loaded["b"][1][0]
    assert loaded["b"][1][1] is not loaded["a"]
    assert 2 * 4000 < path.stat().st_size < 3 * 4000


def test_one_list_in_two_places_is_one_afterwards(round_trip):
    shared = [1]
    loaded = round_trip({"a": shared, "b": (shared, [1])})
    assert loaded["a"] is loaded["b"][0]
    assert loaded["b"][1] is not loaded["a"]


def test_containers_that_share_without_end_are_saved_in_no_time(round_trip):
    nesting = []
    for _ in range(100):
        nesting = [nesting, nesting]
    loaded = round_trip(nesting)
    for _ in range(100):
        assert loaded[0] is loaded[1]
        loaded = loaded[0]
    assert loaded == []


def test_names_that_would_be_equal_in_the_file_are_distinguished(reference, round_trip):
    names = ["a.b", "__metadata__", "", "tensor", "\ud800", "\\ud800", "../x", "a/b", "a\0b"]
    obj = {name: reference.full(1, float(i)) for i, name in enumerate(names)}
    obj["a"] = {"b": reference.full(1, 99.0)}
    assert same(reference, obj, round_trip(obj))


@pytest.mark.parametrize(
    ("value", "loaded"),
    [
        (Point(1, [2]), (1, [2])),
        (Batch(1, "one"), {"x": 1, "label": "one"}),
        (Slotted([1]), {"x": [1]}),
        (Sum(a=1), {"a": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_of_another_class_comes_back_as_one_of_pythons_own(
    reference, path, round_trip, value, loaded
):
    assert same(reference, round_trip([value]), [loaded])
    assert type(reference.load_into([value], path)[0]) is type(value)


@pytest.mark.parametrize(
    "value",
    [object(), len, Colour.RED, np.array(["a"]), np.array([object()]), np.datetime64(0, "s"), int],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_path(reference, path, value):
    with pytest.raises(UnsupportedValueError, match=r"at a\.1\.b"):
        reference.save({"a": [1, {"b": value}]}, path)
    assert not path.exists()


def test_a_nesting_that_contains_itself_is_refused(reference, path):
    obj = []
    obj.append(obj)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        reference.save(obj, path)
    reference.save([], path)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        reference.load_into(obj, path)


def test_a_nesting_whose_containers_are_in_too_many_places_is_refused(reference, path):
    """It has 2**60 places, and is small in memory."""
    nested = [1.0]
    for _ in range(60):
        nested = [nested, nested]
    reference.save([reference.ones(2)], path)
    with pytest.raises(UnsupportedValueError, match="more than 100000 places"):
        reference.load_into(nested, path)


def test_a_nesting_that_is_too_deep_is_refused(reference, path):
    obj = []
    for _ in range(5000):
        obj = [obj]
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        reference.save(obj, path)


def share_key():
    key = ()
    for _ in range(60):
        key = (key, key)
    return key


@pytest.mark.parametrize(
    "key",
    [(1,) * 33, 2**63, 1j, frozenset(), Point(1, 2), np.int8(1), ((1,),)],
    ids=lambda key: type(key).__name__,
)
def test_other_keys_are_refused(reference, path, key):
    with pytest.raises(UnsupportedValueError, match="at a cannot be saved: its keys are not"):
        reference.save({"a": {key: 1}}, path)


@pytest.mark.parametrize("value", [{1}, frozenset("a"), Bag()], ids=repr)
def test_sets_are_refused_with_the_way_to_save_them(reference, path, value):
    with pytest.raises(UnsupportedValueError, match=r"at a cannot be saved: .* a list") as caught:
        reference.save({"a": value}, path)
    assert "dicts, lists and tuples" in caught.value.fix
    assert not path.exists()
    reference.save({"a": list(value)}, path)
    with pytest.raises(UnsupportedValueError, match=r"no file holds the .* at a"):
        reference.load_into({"a": {1}}, path)


class _Keyed(dict):
    """A dict with a key whose hash would never be known."""

    def __init__(self, key):
        super().__init__()
        self.key = key

    def keys(self):
        return [self.key]

    def __iter__(self):
        return iter([self.key])

    def __len__(self):
        return 1

    def values(self):
        return [1]


def test_keys_that_all_have_one_hash_are_refused(reference, path):
    keys = list(itertools.product((-1, -2), repeat=7))
    with pytest.raises(UnsupportedValueError, match="keys of one hash"):
        reference.save({"a": dict.fromkeys(keys)}, path)
    reference.save(dict.fromkeys(keys[:100]), path)
    assert list(reference.load(path)) == keys[:100]


@pytest.mark.parametrize("key", [[1], share_key()], ids=["a list", "a key without end"])
def test_a_key_without_a_hash_is_refused(reference, path, key):
    with pytest.raises(UnsupportedValueError, match="its keys are not"):
        reference.save(_Keyed(key), path)


# -- dataclasses that are something else, too ------------------------------------------------------


@dataclasses.dataclass
class Rows(list):
    label: str


@dataclasses.dataclass
class Output(dict):
    """As some libraries return from a model: the fields are the keys, too."""

    x: object = None

    def __post_init__(self):
        self["x"] = self.x


class Unequal(list):
    def __iter__(self):
        return iter([1, 2])


def test_a_dataclass_whose_fields_would_be_lost_is_not_saved(reference, path):
    with pytest.raises(UnsupportedValueError, match=r"its attributes \['label'\] are not in it"):
        reference.save([Rows("one")], path)
    assert not path.exists()


def test_a_dataclass_whose_fields_are_its_keys_is_saved_as_a_dict(reference, round_trip):
    assert round_trip([Output(2)]) == [{"x": 2}]


def test_a_list_of_another_length_than_it_says_is_not_saved(reference, path):
    with pytest.raises(UnsupportedValueError, match="the Unequal at 0 cannot be taken apart"):
        reference.save([Unequal()], path)
