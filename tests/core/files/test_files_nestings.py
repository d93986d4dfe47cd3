"""A saved nesting comes back as it was."""

import collections
import dataclasses
import enum
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from d2ldev import CheckpointError, UnsupportedValueError

FORMAT_4 = Path(__file__).parents[2] / "data" / "format-4"
Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: object
    label: str


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: object


@dataclasses.dataclass
class Later:
    x: object
    y: object = dataclasses.field(init=False)


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
    if isinstance(x, backend.tensor_types):
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


def test_a_nested_dict_comes_back(reference, round_trip):
    obj = {"a": {"b": [reference.rand((3, 4), seed=0), None]}, "step": 3, "name": "net"}
    assert same(reference, obj, round_trip(obj))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -7, 2**53, -(2**63), 2**20000, 0.1, -0.0, 1e-320, "", "a.b/..\0"),
        *("\ud800", "\N{SNOWMAN}", math.nan, math.inf, -math.inf, 1 - 2j, complex(math.nan, -0.0)),
        *(b"", b"\x00\xff", bytearray(b"ab"), np.float32(1.5), np.int8(-3), np.bool_(True)),
        *([], (), {}, [[]], {"a": {}}, (1, (2, (3,)))),
        *({(): 1, (-1, -1): 2, (-1, -2): 3, 2**63 - 1: 4}),
        {1: "int", "1": "str", None: 0, (1, "b"): 2, b"k": 3, 1.5: 4, False: 5},
        collections.OrderedDict(b=1, a=2),
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
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_of_another_class_comes_back_as_one_of_pythons_own(
    reference, path, round_trip, value, loaded
):
    assert same(reference, round_trip([value]), [loaded])
    assert type(reference.load_into([value], path)[0]) is type(value)


def test_a_file_of_version_4_is_read(reference):
    """As d2ldev 0.1.0 wrote it, with containers that are not written any more."""
    loaded = reference.load(FORMAT_4 / "nesting.safetensors")
    x, n = loaded["x"], loaded["n"]
    assert reference.to_numpy(x).tolist() == [1.0, 2.0]
    assert loaded["tied"][0] is loaded["tied"][1][0] is x
    assert loaded["tied"][1][1].tolist() == [0, 1, 2]
    assert loaded["point"] == (1, "one")
    assert n[:6] == [1, 2**70, math.inf, 1j, b"ab", None]
    assert (n[6], n[7], n[8].maxlen, list(n[8])) == ("text", np.float32(1), 2, [1, 2])
    assert loaded["a", 1] == {3, (4, "b")}
    assert list(loaded["ordered"].items()) == [("b", 1), ("a", 2)]
    assert (loaded["wide"].tolist(), loaded["narrow"].tolist()) == ([1 + 2j], [1 - 2j])
    assert loaded["narrow"].dtype == "complex64"
    first, *_ = reference.load(FORMAT_4 / "nesting.safetensors", classes=[Point])["point"], x
    assert first == Point(1, "one")


def test_a_model_of_version_4_is_read_into_a_model(reference):
    net = reference.load_into(reference.mlp([3, 2, 1], seed=2), FORMAT_4 / "mlp.safetensors")
    wanted = reference.named_tensors(reference.mlp([3, 2, 1], seed=1))
    for name, x in reference.named_tensors(net).items():
        assert same(reference, x, wanted[name])


@pytest.mark.parametrize("name", ["nesting", "mlp"])
def test_every_bit_of_a_file_of_version_4_is_in_its_checksums(reference, path, name):
    whole = (FORMAT_4 / f"{name}.safetensors").read_bytes()
    for position in range(0, len(whole), 3):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                reference.load(path)


@pytest.mark.parametrize(
    "value",
    [object(), len, Colour.RED, np.array(["a"]), np.array([object()]), np.datetime64(0, "s"), int],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_saved_is_refused_with_its_path(reference, path, value):
    with pytest.raises(UnsupportedValueError, match=r"at a\.1\.b "):
        reference.save({"a": [1, {"b": value}]}, path)
    assert not path.exists()


def test_a_nesting_that_contains_itself_is_refused(reference, path):
    obj = []
    obj.append(obj)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        reference.save(obj, path)


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
    with pytest.raises(UnsupportedValueError, match="at a is in no file"):
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


@dataclasses.dataclass
class Counted:
    """A class of which no method is to run."""

    x: object

    def __post_init__(self):
        self.count = 1

    def __eq__(self, other):
        raise AssertionError("compared")

    def __hash__(self):
        raise AssertionError("hashed")


@pytest.mark.parametrize(
    "value", [Point(1, [2]), Batch(1, "one"), Slotted([1])], ids=lambda value: type(value).__name__
)
def test_a_class_in_classes_restores_the_saved_object(reference, path, round_trip, value):
    round_trip([value, value])
    first, second = reference.load(path, classes=[Point, Batch, Slotted])
    assert first is second
    assert type(first) is type(value)
    assert repr(first) == repr(value)
    assert type(reference.load(path, classes=[Sorted])[0]) in (tuple, dict)


Sorted = collections.namedtuple("Sorted", "x")


def test_no_constructor_runs_and_nothing_is_compared(reference, path):
    reference.save({"a": {"b": Counted(1)}, 1: Counted(2)}, path)
    loaded = reference.load(path, classes=[Counted])
    assert (loaded["a"]["b"].x, loaded[1].x) == (1, 2)
    assert not hasattr(loaded[1], "count")


@pytest.mark.parametrize(
    "other",
    [
        collections.namedtuple("Point", "x z"),
        collections.namedtuple("Point", "x y z"),
        dataclasses.make_dataclass("Point", ["x", "z"]),
    ],
    ids=["names", "more", "dataclass"],
)
def test_a_class_with_other_fields_is_refused(reference, path, other):
    reference.save([Point(1, 2)], path)
    with pytest.raises(CheckpointError, match=r"its 'Point' has the fields \['x', 'y'\]"):
        reference.load(path, classes=[other])


@pytest.mark.parametrize("more", [object, (object, 3)], ids=["needed", "with a default"])
def test_a_dataclass_of_which_the_file_lacks_a_field_is_refused(reference, path, more):
    fields = [("x", object), ("label", str), ("z", *(more if isinstance(more, tuple) else [more]))]
    reference.save([Batch(1, "one")], path)
    with pytest.raises(CheckpointError, match=r"its 'Batch' has the fields \['x', 'label'\]"):
        reference.load(path, classes=[dataclasses.make_dataclass("Batch", fields)])


def test_a_field_that_comes_after_the_making_of_a_dataclass_may_be_absent(reference, path):
    reference.save([Later(1)], path)
    (loaded,) = reference.load(path, classes=[Later])
    assert vars(loaded) == {"x": 1}


def test_a_dataclass_that_refuses_a_value_is_an_error_of_ours(reference, path):
    reference.save([Batch(1, "one")], path)
    odd = dataclasses.make_dataclass("Batch", ["x", "label"])
    odd.label = property(lambda self: 1)
    with pytest.raises(CheckpointError, match="no 'Batch' can be made"):
        reference.load(path, classes=[odd])


@pytest.mark.parametrize(
    "classes", [[dict], [3], ["Point"], [Point, collections.namedtuple("Point", "x")], 3, None]
)
def test_other_classes_are_refused(reference, path, classes):
    reference.save([1], path)
    with pytest.raises(UnsupportedValueError, match="load "):
        reference.load(path, classes=classes)


def test_one_class_alone_may_be_given(reference, path):
    reference.save([Point(1, 2)], path)
    assert reference.load(path, classes=Point) == [Point(1, 2)]


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


@dataclasses.dataclass
class OddError(Exception):
    code: int


class Unequal(list):
    def __iter__(self):
        return iter([1, 2])


def test_a_dataclass_whose_fields_would_be_lost_is_not_saved(reference, path):
    with pytest.raises(UnsupportedValueError, match=r"its attributes \['label'\] are not in it"):
        reference.save([Rows("one")], path)
    assert not path.exists()


def test_a_dataclass_whose_fields_are_its_keys_is_saved_as_a_dict(reference, round_trip):
    assert round_trip([Output(2)]) == [{"x": 2}]


def test_a_class_of_which_no_bare_object_can_be_made_is_refused(reference, path):
    reference.save([OddError(2)], path)
    assert reference.load(path) == [{"code": 2}]
    with pytest.raises(CheckpointError, match="no 'OddError' can be made"):
        reference.load(path, classes=[OddError])


def test_a_list_of_another_length_than_it_says_is_not_saved(reference, path):
    with pytest.raises(UnsupportedValueError, match="the Unequal at 0 cannot be taken apart"):
        reference.save([Unequal()], path)
