"""Containers whose classes do what they like: moved whole, or refused and left as they were."""

import collections
import dataclasses
import functools
from collections.abc import MutableMapping, MutableSequence

import pytest

import d2ldev
from d2ldev import UnsupportedValueError, gpu


class Record(MutableMapping):
    """A mapping that keeps its items in a dict of its own, as libraries' batches do."""

    def __init__(self, **items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Row(MutableSequence):
    def __init__(self, *items):
        self._items = list(items)

    def __getitem__(self, index):
        return self._items[index]

    def __setitem__(self, index, value):
        self._items[index] = value

    def __delitem__(self, index):
        del self._items[index]

    def insert(self, index, value):
        self._items.insert(index, value)

    def __len__(self):
        return len(self._items)


class Store:
    """Where a ``View`` keeps its items; copies of the view share it."""

    def __init__(self, items):
        self.items = items


class View(Record):
    def __init__(self, **items):
        self._store = Store(items)

    @property
    def _items(self):
        return self._store.items


class Attributes(dict):
    """The idiom of a dictionary whose keys are its attributes."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Single(dict):
    def __copy__(self):
        return self


@dataclasses.dataclass
class Masked:
    x: object

    @functools.cached_property
    def kept(self):
        return [self.x]


class Unwalkable(dict):
    def values(self):
        raise RuntimeError("no values today")


class Uneven(list):
    def __len__(self):
        return 99


@pytest.mark.parametrize(
    ("make", "key"), [(lambda x: Record(x=x, n=1), "x"), (lambda x: Row(x, 1), 0)]
)
def test_a_class_with_a_container_inside_moves_without_a_change_to_the_callers(
    reference, x, make, key
):
    batch = make(x)
    moved = reference.to(batch, gpu(0))
    assert type(moved) is type(batch)
    assert reference.device_of(moved[key]) is gpu(0)
    assert batch[key] is x


def test_a_container_that_shares_its_items_with_its_copies_is_refused_and_unchanged(reference, x):
    batch = View(x=x, y=x)
    with pytest.raises(UnsupportedValueError, match="the View at the top cannot be made again"):
        reference.to(batch, gpu(0))
    assert batch["x"] is batch["y"] is x


def test_a_container_whose_copy_is_itself_is_refused_and_unchanged(reference, x):
    batch = Single(x=x)
    with pytest.raises(UnsupportedValueError, match="a copy of it is itself"):
        reference.to({"batch": batch}, gpu(0))
    assert batch["x"] is x


def test_a_dictionary_that_is_its_own_attributes_stays_so(reference, x):
    batch = Attributes(x=x, n=1)
    moved = reference.to(batch, gpu(0))
    assert type(moved) is Attributes
    assert moved.x is moved["x"]
    assert reference.device_of(moved.x) is gpu(0)
    assert batch.x is batch["x"] is x


def test_a_cached_property_is_computed_again_on_the_device_of_the_fields(reference, x):
    batch = Masked(x)
    assert batch.kept == [x]
    moved = reference.to(batch, gpu(0))
    assert moved.kept[0] is moved.x
    assert batch.kept[0] is x


@pytest.mark.parametrize(
    ("method", "container", "words"),
    [
        ("to", Unwalkable(a=1), "no values today"),
        ("copy", Unwalkable(a=1), "no values today"),
        ("place", Unwalkable(a=1), "no values today"),
        ("place", Uneven([1]), "more keys or indices"),
    ],
)
def test_a_container_that_cannot_be_walked_is_refused_by_name(
    reference, x, method, container, words
):
    with pytest.raises(UnsupportedValueError, match=words) as caught:
        getattr(reference, method)([x, {"odd": container}], gpu(0))
    assert f"the {type(container).__name__} at 1.odd cannot be taken apart" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_list_that_lies_about_its_length_moves_with_what_is_in_it(reference, x):
    moved = reference.to(Uneven([x]), gpu(0))
    assert type(moved) is Uneven
    assert [reference.device_of(tensor) for tensor in moved] == [gpu(0)]


def test_an_object_that_cannot_even_be_shown_is_refused_all_the_same(reference, x):
    class Shy:
        def __repr__(self):
            raise RuntimeError("do not look")

    with pytest.raises(UnsupportedValueError, match="a Shy, at 1 is not a tensor"):
        reference.to([x, Shy()], gpu(0))


@pytest.mark.parametrize("given", [("Batch", list, list), (Store, None, list), (Store, list, 1)])
def test_register_container_takes_a_class_and_two_functions(reference, given):
    with pytest.raises(UnsupportedValueError, match="a class and two functions"):
        d2ldev.register_container(*given)
    with pytest.raises(UnsupportedValueError, match="not a tensor"):
        reference.to(Store([]), gpu(0))


def test_a_deque_that_is_written_again_keeps_its_order(reference, x):
    moved = reference.to(collections.deque([1, x, 3], maxlen=3), gpu(0))
    assert [moved[0], moved[2]] == [1, 3]
    assert reference.device_of(moved[1]) is gpu(0)
