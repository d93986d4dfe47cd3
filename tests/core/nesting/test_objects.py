"""Objects that are not containers: what they keep, and which are not entered."""

import functools
import itertools
import logging
import threading
import types
import weakref
from collections import OrderedDict

import numpy as np
import pytest

from d2ldev import ArrayLoader, Trainer
from d2ldev.nesting.objects import Keepers


class Own:
    def __init__(self, **kept):
        vars(self).update(kept)

    def method(self):
        """Do nothing."""


class Slots:
    __slots__ = ("__private", "empty", "x")

    def __init__(self, x):
        self.x = self.__private = x


class Thread(threading.Thread):
    """A class that is derived from one of Python's library."""


class Partial(functools.partial):
    """A partial with attributes."""


def _keepers(packages, searched=()):
    """Return the keepers of a framework with these packages, and modules that are searched."""
    models = types.SimpleNamespace(packages=packages, searched=searched)
    return Keepers(type("Framework", (), {"__module__": "framework", "models": models})())


@pytest.fixture
def keepers():
    return _keepers(())


@pytest.fixture
def kept(keepers):
    """Takes an object apart: name -> value."""
    return lambda x: {name: value for name, value, _, _ in keepers[type(x)].members(x)}


def _generator(x):
    yield x


def test_attributes_are_kept(kept):
    assert kept(Own(x=1, y=2)) == {"x": 1, "y": 2}
    assert kept(types.SimpleNamespace(x=1)) == {"x": 1}


def test_slots_are_kept_and_empty_ones_are_not(kept):
    assert kept(Slots(1)) == {"x": 1, "_Slots__private": 1}


def test_a_closure_has_its_variables_and_defaults(kept):
    x = 3
    names = kept(lambda a, b=2, *, c=4: x)
    assert names == {"closure.x": 3, "__defaults__": (2,), "__kwdefaults__": {"c": 4}}


def test_a_closure_has_no_variable_that_is_empty(kept):
    def outer():
        def inner():
            return later

        names = kept(inner)
        later = 1
        return names, later

    assert "closure.later" not in outer()[0]


def test_a_method_has_its_object(kept):
    own = Own()
    assert kept(own.method)["__self__"] is own
    assert kept([].append)["__self__"] == []


def test_a_generator_has_its_variables_until_it_ends(kept):
    generator = _generator(5)
    assert kept(generator) == {"x": 5}
    assert list(generator) == [5]
    assert kept(generator) == {}


def test_objects_written_in_c_list_their_references(kept):
    assert len in kept(map(len, [])).values()
    row = [3]
    assert any(x is row for x in kept(itertools.repeat(row)).values())
    assert any(x is row for x in kept(iter(row)).values())


@pytest.mark.parametrize("cls", [functools.partial, Partial])
def test_the_arguments_of_a_partial_are_put_back(keepers, cls):
    made = cls(max, 1, key=abs)
    made.note = "note"
    members = {name: (put, key) for name, _, put, key in keepers[cls].members(made)}
    put, key = members["args"]
    put(key, (5, 7))
    put, key = members["keywords"]
    put(key, {"key": abs, "default": 0})
    assert (made.func, made.args, made.keywords) == (max, (5, 7), {"key": abs, "default": 0})
    assert made.note == "note"


@pytest.mark.parametrize("keep", [Own(x=1), Slots(1), types.SimpleNamespace(x=1)])
def test_attributes_are_put_back(keepers, keep):
    members = {name: (put, key) for name, _, put, key in keepers[type(keep)].members(keep)}
    put, key = members["x"]
    put(key, 2)
    assert keep.x == 2


@pytest.mark.parametrize(
    "x",
    [
        Own,
        threading,
        threading.Lock(),
        Thread(),
        logging.getLogger("any"),
        logging.StreamHandler(),
        weakref.ref(Own),
        ValueError("text"),
        OrderedDict,
        ArrayLoader(np.zeros(1), batch_size=1),
        Trainer(1),
        object,
    ],
    ids=lambda x: type(x).__name__,
)
def test_objects_outside_of_a_model_are_not_entered(keepers, x):
    assert keepers[type(x)] is None


def test_the_trainer_of_a_model_is_left_out(kept):
    assert kept(Own(trainer=1, _trainer=2, x=3)) == {"x": 3}


def test_classes_of_a_framework_are_entered_where_it_says_so():
    keepers = _keepers((__name__,))
    assert keepers[Own] is None
    keepers = _keepers((__name__,), (__name__,))
    assert keepers[Own] is not None


def test_functions_of_a_framework_are_not_entered():
    x = 3
    (keeper,) = {_keepers((__name__.partition(".")[0],))[types.FunctionType]}
    assert not list(keeper.members(lambda: x))


def test_a_program_that_makes_classes_does_not_fill_the_memory(keepers):
    for _ in range(5000):
        keepers[type("Made", (), {})]
    assert len(keepers) <= 4096
