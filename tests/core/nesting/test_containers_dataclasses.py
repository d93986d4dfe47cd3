"""Dataclasses in a nesting: frozen, with slots, with fields that ``__init__`` does not know."""

from dataclasses import FrozenInstanceError, InitVar, dataclass, field
from typing import ClassVar

import pytest

from d2ldev import UnsupportedValueError, gpu


@dataclass
class Usual:
    x: object
    label: str = "label"


@dataclass(frozen=True)
class Frozen:
    x: object
    label: str = "label"


@dataclass(slots=True)
class Slots:
    x: object
    label: str = "label"


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSlots:
    x: object
    label: str = "label"


@dataclass(kw_only=True)
class KeywordOnly(Usual):
    more: int = 1


KINDS = [Usual, Frozen, Slots, FrozenSlots, KeywordOnly]


@pytest.mark.parametrize("cls", KINDS)
def test_a_dataclass_comes_back_as_its_type_with_its_fields(reference, moved, x, cls):
    new = moved(cls(x, label="other"))
    assert (type(new), reference.device_of(new.x), new.label) == (cls, gpu(0), "other")


@pytest.mark.parametrize("cls", KINDS)
def test_the_dataclass_that_was_given_is_not_changed(moved, x, cls):
    batch = cls(x)
    moved(batch)
    assert batch.x is x


def test_a_frozen_dataclass_is_frozen_afterwards(moved, x):
    new = moved(Frozen(x))
    with pytest.raises(FrozenInstanceError):
        new.label = "other"


@dataclass
class OwnConstructor:
    x: object

    def __new__(cls, x):
        return super().__new__(cls)

    def __copy__(self):
        raise AssertionError


def test_no_constructor_runs_again(reference, moved, x):
    assert reference.device_of(moved(OwnConstructor(x)).x) is gpu(0)


@dataclass
class Unset:
    x: object
    later: object = field(init=False)


@dataclass(slots=True)
class UnsetSlots:
    x: object
    later: object = field(init=False)


@dataclass(frozen=True, slots=True)
class UnsetFrozenSlots:
    x: object
    later: object = field(init=False)


@pytest.mark.parametrize("cls", [Unset, UnsetSlots, UnsetFrozenSlots])
def test_a_field_that_was_not_set_is_not_set_afterwards(reference, moved, x, cls):
    new = moved(cls(x))
    assert reference.device_of(new.x) is gpu(0)
    assert not hasattr(new, "later")


@pytest.mark.parametrize("cls", [Unset, UnsetSlots])
def test_a_field_that_was_set_later_is_moved(reference, moved, x, cls):
    batch = cls(1)
    batch.later = x
    assert reference.device_of(moved(batch).later) is gpu(0)


@dataclass
class WithOthers:
    shared: ClassVar[list] = []
    x: object
    scale: InitVar[int] = 2
    product: int = field(init=False)

    def __post_init__(self, scale):
        self.product = 10 * scale


def test_attributes_made_from_an_init_var_are_kept(moved, x):
    assert moved(WithOthers(x, scale=3)).product == 30


def test_a_class_variable_is_not_a_field(moved, x, monkeypatch):
    monkeypatch.setattr(WithOthers, "shared", [object()])
    assert "shared" not in vars(moved(WithOthers(x)))


def test_a_dataclass_class_is_not_a_container(moved):
    with pytest.raises(UnsupportedValueError, match="a class,"):
        moved([Usual])
