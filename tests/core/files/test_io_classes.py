"""What is made of a class that a file names: nothing of the class runs."""

import collections
import dataclasses
import os
import subprocess

import pytest

from d2ldev.files.classes import find_class, make

Point = collections.namedtuple("Point", "x y")
RAN = []


@dataclasses.dataclass
class Batch:
    x: object
    y: object

    def __post_init__(self):
        RAN.append("__post_init__")

    def __setattr__(self, name, value):
        RAN.append("__setattr__")
        super().__setattr__(name, value)


@dataclasses.dataclass
class Deleted:
    x: object

    def __del__(self):
        RAN.append("__del__")


class DeletedPoint(Point):
    _fields = Point._fields

    def __del__(self):
        RAN.append("__del__")


@dataclasses.dataclass
class Made:
    x: object

    def __new__(cls, *args):
        RAN.append("__new__")
        return super().__new__(cls)


@dataclasses.dataclass
class Managed:
    x: object


Managed.x = property(lambda self: 1, lambda self, value: RAN.append("a property"))


class Attribute(type):
    def __getattr__(cls, name):
        RAN.append("__getattr__")
        return subprocess.Popen


class Looked(metaclass=Attribute):
    pass


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()
    yield
    assert RAN == []


def test_a_dataclass_is_made_and_nothing_of_it_runs():
    made = make("dataclass", __name__, "Batch", ["x", "y"], [1, 2])
    assert type(made) is Batch
    assert vars(made) == {"x": 1, "y": 2}


@pytest.mark.parametrize("name", ["Deleted", "Made", "Managed", "Point", "missing", "RAN"])
def test_a_dataclass_that_would_run_or_is_none_is_a_dict(name):
    assert make("dataclass", __name__, name, ["x"], [1]) == {"x": 1}


@pytest.mark.parametrize("fields", [["y", "x"], ["x"], ["x", "y", "z"], ["x", "__class__"]])
def test_a_class_of_other_fields_is_not_made(fields):
    values = list(range(len(fields)))
    assert make("dataclass", __name__, "Batch", fields, values) == dict(
        zip(fields, values, strict=True)
    )
    assert type(make("namedtuple", __name__, "Point", fields, values)) is tuple


def test_a_namedtuple_is_made():
    assert type(make("namedtuple", __name__, "Point", ["x", "y"], [1, 2])) is Point


@pytest.mark.parametrize("name", ["DeletedPoint", "Batch", "missing"])
def test_a_namedtuple_that_would_run_or_is_none_is_a_tuple(name):
    assert type(make("namedtuple", __name__, name, ["x", "y"], [1, 2])) is tuple


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        *[(__name__, "Looked.missing"), ("missing", "Point"), (__name__, "Point.x")],
        *[(__name__, ""), ("", "Point"), (__name__, "Point.__new__"), ("os", "path.join")],
    ],
)
def test_what_is_no_class_is_not_found(module, qualname):
    assert find_class(module, qualname) is None


def test_a_class_is_found_by_its_name():
    assert find_class(__name__, "Point") is Point
    assert find_class("os", "PathLike") is os.PathLike
