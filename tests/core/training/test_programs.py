"""Programs: which parts share one, and that nothing of them is kept alive."""

import copy
import gc
import pickle
import sys
from dataclasses import dataclass
from functools import partial
from weakref import ref

import pytest

from d2ldev.framework import Programs, ProgramUsers


def double(x):
    return 2 * x


class Loss:
    weight = 1.0

    def __init__(self, delta=1.0):
        self.delta = delta
        self.function = double
        self._weight = 1.0

    def __call__(self):
        return self.delta


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
    "slices": lambda: slice(1, None, 2),
    "one object": lambda: LOSS,
    "a bound method": lambda: LOSS.__call__,
    "a class": lambda: Loss,
    "one function": lambda: double,
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
    "a function": lambda loss, _: setattr(loss, "function", lambda x: 2 * x),
    "a private attribute": lambda loss, _: setattr(loss, "_weight", 2.0),
    "an attribute of the class": lambda _, patch: patch.setattr(Loss, "weight", 2.0),
    "a method of the class": lambda _, patch: patch.setattr(Loss, "__call__", lambda _self: 0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_an_object_gives_another_program(programs, monkeypatch, change):
    loss = Loss()
    before = programs.get([loss], object)
    change(loss, monkeypatch)
    assert programs.get([loss], object) is not before


def test_an_object_with_every_attribute_is_not_a_dataclass(programs):
    class Obliging:
        def __getattr__(self, name):
            return lambda *_: name

    obliging = Obliging()
    assert programs.get(obliging, object) is programs.get(obliging, object)


def test_a_nesting_that_contains_itself_keeps_no_program(programs):
    parts = []
    parts.append(parts)
    assert programs.get(parts, object) is not programs.get(parts, object)
    assert len(programs) == 0


def test_attributes_that_the_framework_changes_are_ignored():
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


def test_the_programs_used_last_are_kept(programs):
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


def test_an_object_that_equals_another_has_a_program_of_its_own(programs):
    class Equal:
        __hash__ = None

        def __eq__(self, other):
            return True

    first, second = Equal(), Equal()
    before = programs.get(first, object)
    assert programs.get(second, object) is not before
    assert programs.get(first, object) is before


def test_an_object_that_refers_to_itself_has_a_program_that_is_kept(programs):
    loss = Loss()
    loss.itself = loss.__call__
    assert programs.get(loss.itself, object) is programs.get(loss.itself, object)


def test_a_program_taken_by_one_thread_is_not_given_to_another(programs):
    before = programs.get(1, object)
    meanwhile = []

    def take(program):
        meanwhile.append(programs.get(1, object))
        return True

    assert programs.get(1, object, take) is before
    assert meanwhile[0] is not before


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_has_no_programs(programs, copied):
    programs.get(1, object)
    found = copied(programs)
    assert (len(programs), len(found)) == (1, 0)
    assert found.get(1, object) is not programs.get(1, object)


class Slotted:
    __slots__ = ("kept",)


def test_an_object_without_weak_references_keeps_nothing_alive(programs):
    loss, data = Slotted(), Loss()
    loss.kept, gone = data, ref(data)
    assert programs.get([loss], object) is not programs.get([loss], object)
    del loss, data
    gc.collect()
    assert gone() is None
    assert len(programs) == 0


@pytest.fixture
def users():
    return ProgramUsers()


def test_a_user_that_is_gone_is_not_chosen(users):
    first, second = Loss(), Loss()
    users.add(first)
    users.add(second)
    del first
    gc.collect()
    assert users.choose() is second
    users.discard(second)
    with pytest.raises(LookupError):
        users.choose()


def test_a_user_is_found_while_another_thread_adds_its_own(users):
    first, others = Loss(), []
    users.add(first)

    def add_at_each_instruction(frame, _event, _argument):
        frame.f_trace_opcodes = True
        others.append(Loss())
        users.add(others[-1])
        return add_at_each_instruction

    before = sys.gettrace()
    sys.settrace(add_at_each_instruction)
    try:
        found = users.choose()
    finally:
        sys.settrace(before)
    assert others
    assert found in (first, *others)
