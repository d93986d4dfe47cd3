"""Programs: which parts share one, and that nothing of them is kept alive."""

import gc
import sys
from dataclasses import dataclass
from functools import partial
from json import dumps
from types import ModuleType
from weakref import ref

import numpy as np
import pytest

from d2ldev.operations.programs import Programs

FACTOR = 1.0
SETTINGS = ModuleType("settings_of_the_user")
SETTINGS.power = 1


def doubled(x):
    return 2 * x


def limited(x, limits=[1.0]):  # noqa: B006
    return min(x, *limits)


class Term:
    __slots__ = ("__weakref__", "factor")

    def __init__(self):
        self.factor = 1.0


class Loss:
    weight = 1.0

    def __init__(self, delta=1.0):
        self.delta = delta
        self.terms = [1, 2]
        self.function = len
        self.term = Term()
        self.bound = 1.0
        self._weights = np.ones(2)

    def __call__(self):
        return self.delta

    def scaled(self):
        return [doubled(limited(x)) * FACTOR**SETTINGS.power for x in self.terms]


def closing_over(loss):
    """A function that reads a variable of another one, which is changed through the loss."""

    def bounded(x, name="bound"):
        return min(x, bound) if name else x

    bound = loss.bound

    def change(value):
        nonlocal bound
        bound = value

    loss.change = change
    return bounded


@dataclass
class Config:
    rate: float
    sizes: tuple


@pytest.fixture
def programs():
    return Programs(4)


LOSS = Loss()
EQUAL = {
    "numbers and strings": lambda: [1, 2.5, "sgd", None, True],
    "containers": lambda: {"a": (1, [2]), "b": {3, 4}},
    "dataclasses": lambda: Config(0.5, (1, 2)),
    "one object": lambda: LOSS,
    "a bound method": lambda: LOSS.__call__,
    "a class": lambda: Loss,
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_parts_share_a_program(programs, make):
    assert programs.get(make(), object) is programs.get(make(), object)


OTHERS = {
    "a number of another type": (1, 1.0),
    "a number and a bool": (1, True),
    "zeros of two signs": (0.0, -0.0),
    "containers of another type": ([1], (1,)),
    "a value in a dataclass": (Config(0.5, ()), Config(0.25, ())),
    "two objects that are alike": (Loss(), Loss()),
    "two functions that are alike": (lambda: 1, lambda: 1),
    "methods of two objects": (Loss().__call__, LOSS.__call__),
    "two classes": (Loss, Config),
}


@pytest.mark.parametrize("pair", OTHERS.values(), ids=OTHERS)
def test_other_parts_have_programs_of_their_own(programs, pair):
    first, second = (programs.get([part], object) for part in pair)
    assert first is not second


CHANGES = {
    "an attribute": lambda loss, _: setattr(loss, "delta", 2.0),
    "a new attribute": lambda loss, _: setattr(loss, "scale", 2.0),
    "what is in a container": lambda loss, _: loss.terms.append(3),
    "a function": lambda loss, _: setattr(loss, "function", max),
    "an attribute of the class": lambda _, patch: patch.setattr(Loss, "weight", 2.0),
    "a method of the class": lambda _, patch: patch.setattr(Loss, "__call__", lambda _self: 0),
    "an object's attribute": lambda loss, _: setattr(loss.term, "factor", 2.0),
    "a private attribute": lambda loss, _: loss._weights.__setitem__(0, 2.0),
    "a global variable of a method": lambda _, patch: patch.setitem(globals(), "FACTOR", 2.0),
    "a function that a method calls": lambda _, patch: patch.setitem(globals(), "doubled", abs),
    "the code of such a function": lambda _, patch: patch.setattr(
        doubled, "__code__", (lambda x: 3 * x).__code__
    ),
    "the default of such a function": lambda _, patch: patch.setattr(
        limited, "__defaults__", ([2.0],)
    ),
    "an attribute of a module": lambda _, patch: patch.setattr(SETTINGS, "power", 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_an_object_gives_another_program(programs, monkeypatch, change):
    loss = Loss()
    before = programs.get([loss], object)
    change(loss, monkeypatch)
    assert programs.get([loss], object) is not before


def test_an_object_that_has_every_attribute_is_no_dataclass(programs):
    class Obliging:
        def __getattr__(self, name):
            return lambda *_: name

    loss = Loss()
    loss.term = Obliging()
    assert programs.get(loss, object) is programs.get(loss, object)


def test_a_variable_that_a_function_closes_over_counts(programs):
    loss = Loss()
    function = closing_over(loss)
    before = programs.get(function, object)
    assert programs.get(function, object) is before
    loss.change(2.0)
    assert programs.get(function, object) is not before


def test_what_an_installed_function_reads_does_not_count(programs, monkeypatch):
    before = programs.get(dumps, object)
    monkeypatch.setattr(sys.modules["json"], "_default_encoder", object())
    assert programs.get(dumps, object) is before


@pytest.mark.parametrize("folder", ["/home/me/lib/site-packages", "/usr/lib/python3/dist-packages"])
def test_what_is_installed_for_more_than_this_environment_is_not_the_user_s(
    programs, monkeypatch, folder
):
    module = ModuleType("of_the_system")
    module.__file__ = f"{folder}/of_the_system.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("factor = 1\ndef loss(x, y): return factor * (x - y)", vars(module))
    before = programs.get(module.loss, object)
    module.factor = 2
    assert programs.get(module.loss, object) is before


def test_what_is_installed_into_a_folder_of_its_own_is_not_the_user_s(
    programs, monkeypatch, tmp_path
):
    (tmp_path / "package-1.0.dist-info").mkdir()
    package = ModuleType("package.losses")
    package.__file__ = str(tmp_path / "package" / "losses.py")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    exec("factor = 1\ndef loss(x, y): return factor * (x - y)", vars(package))
    before = programs.get(package.loss, object)
    package.factor = 2
    assert programs.get(package.loss, object) is before


def test_a_class_whose_module_is_that_of_its_objects_is_read_past(programs):
    class Proxy:
        pass

    Proxy.__module__ = property(lambda self: "package.losses")
    loss = Loss()
    loss.term = Proxy()
    assert programs.get(loss, object) is programs.get(loss, object)


def test_what_contains_itself_has_no_program_that_is_kept(programs):
    parts = []
    parts.append(parts)
    assert programs.get(parts, object) is not programs.get(parts, object)
    assert len(programs) == 0


def test_what_a_framework_changes_itself_is_ignored():
    programs, loss = Programs(4, ignored=["delta"]), Loss()
    before = programs.get([loss], object)
    loss.delta = 2.0
    assert programs.get([loss], object) is before


def test_an_object_lives_no_longer_and_its_program_goes_with_it(programs):
    loss, program = Loss(), Loss()
    gone = ref(loss), ref(program)
    programs.get({"loss": [loss.__call__]}, partial(lambda made: made.pop(), [program]))
    del program
    assert gone[1]() is not None
    del loss
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert len(programs) == 0


def test_those_are_kept_that_were_asked_for_last(programs):
    made = [programs.get(i, object) for i in range(4)]
    programs.get(0, object)
    programs.get(4, object)
    assert len(programs) == 4
    assert programs.get(0, object) is made[0]
    assert programs.get(1, object) is not made[1]


def test_a_program_that_does_not_fit_is_replaced(programs):
    before = programs.get(1, object)
    after = programs.get(1, object, lambda program: program is not before)
    assert after is not before
    assert programs.get(1, object) is after
    assert len(programs) == 1


def test_a_program_that_cannot_be_made_is_not_kept(programs):
    with pytest.raises(ZeroDivisionError):
        programs.get(1, lambda: 1 / 0)
    assert len(programs) == 0
