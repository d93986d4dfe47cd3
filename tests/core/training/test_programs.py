"""Programs: which objects share one, and that nothing of them is kept alive."""

import copy
import gc
import pickle
from functools import partial
from weakref import ref

import numpy as np
import pytest

from d2ldev.framework import Programs


def double(x):
    return 2 * x


class Loss:
    def __init__(self, delta=1.0):
        self.delta = delta
        self.factor = np.float32(1)
        self.function = double
        self._weight = 1.0

    def __call__(self):
        return self.delta


@pytest.fixture
def programs():
    return Programs(4)


LOSS = Loss()
EQUAL = {
    "plain values": lambda: [1, 2.5, "sgd", None, True],
    "one object": lambda: [LOSS],
    "a bound method": lambda: [LOSS.__call__],
    "a class": lambda: [Loss],
    "one function": lambda: [double],
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_objects_share_a_program(programs, make):
    assert programs.get(make(), (1, "a"), object) is programs.get(make(), (1, "a"), object)


OTHERS = {
    "a number of another type": (1, 1.0),
    "a number and a bool": (1, True),
    "two objects that are alike": (Loss(), Loss()),
    "two functions that are alike": (lambda: 1, lambda: 1),
    "methods of two objects": (Loss().__call__, LOSS.__call__),
}


@pytest.mark.parametrize("pair", OTHERS.values(), ids=OTHERS)
def test_other_objects_have_programs_of_their_own(programs, pair):
    first, second = (programs.get([each], (), object) for each in pair)
    assert first is not second


def test_other_values_have_programs_of_their_own(programs):
    assert programs.get([LOSS], (1,), object) is not programs.get([LOSS], (2,), object)


CHANGES = {
    "an attribute": lambda loss: setattr(loss, "delta", 2.0),
    "a number of NumPy": lambda loss: setattr(loss, "factor", np.float32(2)),
    "a new attribute": lambda loss: setattr(loss, "scale", 2.0),
    "a function": lambda loss: setattr(loss, "function", lambda x: 2 * x),
    "a private attribute": lambda loss: setattr(loss, "_weight", 2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_an_object_gives_another_program(programs, change):
    loss = Loss()
    before = programs.get([loss], (), object)
    change(loss)
    assert programs.get([loss], (), object) is not before


def test_attributes_that_the_framework_changes_are_ignored():
    programs, loss = Programs(4, ignored=["delta"]), Loss()
    before = programs.get([loss], (), object)
    loss.delta = 2.0
    assert programs.get([loss], (), object) is before


def test_an_object_lives_no_longer_and_its_program_goes_with_it(programs):
    loss, program = Loss(), Loss()
    loss.itself = loss.__call__
    gone = ref(loss), ref(program)
    programs.get([loss.__call__], (), partial(lambda made: made.pop(), [program]))
    del program
    assert gone[1]() is not None
    del loss
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_the_programs_used_last_are_kept(programs):
    made = [programs.get([i], (), object) for i in range(4)]
    programs.get([0], (), object)
    programs.get([4], (), object)
    assert programs.get([0], (), object) is made[0]
    assert programs.get([1], (), object) is not made[1]


def test_a_program_that_does_not_fit_is_replaced(programs):
    before = programs.get([1], (), object)
    after = programs.get([1], (), object, lambda program: program is not before)
    assert after is not before
    assert programs.get([1], (), object) is after


def test_a_program_that_cannot_be_made_is_not_kept(programs):
    with pytest.raises(ZeroDivisionError):
        programs.get([1], (), lambda: 1 / 0)
    assert isinstance(programs.get([1], (), Loss), Loss)


def test_an_object_that_equals_another_has_a_program_of_its_own(programs):
    class Equal:
        __hash__ = None

        def __eq__(self, other):
            return True

    first, second = Equal(), Equal()
    before = programs.get([first], (), object)
    assert programs.get([second], (), object) is not before
    assert programs.get([first], (), object) is before


def test_a_program_taken_by_one_thread_is_not_given_to_another(programs):
    before = programs.get([1], (), object)
    meanwhile = []

    def take(program):
        meanwhile.append(programs.get([1], (), object))
        return True

    assert programs.get([1], (), object, take) is before
    assert meanwhile[0] is not before


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_has_no_programs(programs, copied):
    before = programs.get([1], (), object)
    assert copied(programs).get([1], (), object) is not before


class Slotted:
    __slots__ = ("kept",)


def test_an_object_without_weak_references_keeps_no_program(programs):
    loss, data = Slotted(), Loss()
    loss.kept, gone = data, ref(data)
    assert programs.get([loss], (), object) is not programs.get([loss], (), object)
    del loss, data
    gc.collect()
    assert gone() is None


def test_a_value_without_a_hash_keeps_no_program(programs):
    assert programs.get([LOSS], ([],), object) is not programs.get([LOSS], ([],), object)
