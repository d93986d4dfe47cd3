"""Nestings that cannot be moved: each is told with its place, and is as it was afterwards."""

from collections import namedtuple

import numpy as np
import pytest

from d2ldev import UnsupportedValueError, gpu


@pytest.fixture(params=["to", "copy"])
def move(request, reference):
    """Both ways to walk a nesting."""
    return lambda batch: getattr(reference, request.param)(batch, gpu(0))


class Unknown:
    def __init__(self, value=None):
        self.value = value


@pytest.mark.parametrize(
    ("nest", "path"),
    [
        (lambda value: {"a": [0, value]}, "at a.1 is"),
        (lambda value: [{"b": {"c": value}}], "at 0.b.c is"),
        (lambda value: (value,), "at 0 is"),
    ],
)
def test_an_unknown_object_is_named_with_its_path(move, nest, path):
    with pytest.raises(UnsupportedValueError, match="an Unknown,") as error:
        move(nest(Unknown()))
    assert path in str(error.value)


def test_the_path_of_a_namedtuple_names_its_field(move):
    with pytest.raises(UnsupportedValueError, match=r"at label is"):
        move(namedtuple("Batch", "x label")(None, Unknown()))


def test_an_object_is_refused_with_the_fix(move):
    with pytest.raises(UnsupportedValueError) as error:
        move([Unknown()])
    assert "d2ldev.register_container(Unknown, children, rebuild)" in error.value.fix


def test_a_copy_of_an_array_is_refused_with_the_fix(reference):
    with pytest.raises(UnsupportedValueError) as error:
        reference.copy([np.zeros(3)], gpu(0))
    assert "backend.asarray(x, device=device)" in error.value.fix


def test_nothing_is_changed_when_something_is_refused(move, x):
    inner = {"x": x}
    batch = [inner, x, Unknown()]
    before = list(batch)
    with pytest.raises(UnsupportedValueError):
        move(batch)
    assert all(now is was for now, was in zip(batch, before, strict=True))
    assert inner["x"] is x


# -- cycles and depth -------------------------------------------------------------------------


def list_cycle(x):
    cycle = [x]
    cycle.append([cycle])
    return {"batch": cycle}


def dict_cycle(x):
    cycle = {"x": x}
    cycle["again"] = cycle
    return {"batch": cycle}


@pytest.mark.parametrize(("make", "name"), [(list_cycle, "list"), (dict_cycle, "dict")])
def test_a_cycle_is_reported_with_its_path(move, x, make, name):
    with pytest.raises(UnsupportedValueError, match=f"the {name} at batch.* contains itself"):
        move(make(x))


def deep(value, levels=5000):
    for _ in range(levels):
        value = [value]
    return value


def test_a_nesting_that_is_too_deep_is_reported(move, x):
    with pytest.raises(UnsupportedValueError, match="nested deeper than Python follows"):
        move(deep(x))


@pytest.mark.parametrize("method", ["place", "placement", "named_tensors"])
def test_place_reports_a_nesting_that_is_too_deep(reference, x, method):
    arguments = [deep(x), gpu(0)] if method == "place" else [deep(x)]
    with pytest.raises(UnsupportedValueError, match="nested deeper than Python follows"):
        getattr(reference, method)(*arguments)


# -- what cannot be made again ----------------------------------------------------------------


class Sealed(list):
    def __reduce_ex__(self, protocol):
        raise TypeError("sealed")


def test_a_container_that_cannot_be_rebuilt_is_named_with_its_path(move, x):
    with pytest.raises(
        UnsupportedValueError, match=r"the Sealed at a\.0 cannot be made again: sealed"
    ) as error:
        move({"a": [Sealed([x])]})
    assert error.value.fix == "d2ldev.register_container(Sealed, children, rebuild)"


def test_the_error_of_a_failed_rebuild_is_the_cause(move, x):
    with pytest.raises(UnsupportedValueError) as error:
        move(Sealed([x]))
    assert isinstance(error.value.__cause__, TypeError)


def test_a_container_that_cannot_be_rebuilt_stays_unchanged(move, x):
    batch = Sealed([x])
    with pytest.raises(UnsupportedValueError):
        move(batch)
    assert batch[0] is x


def test_a_container_that_cannot_be_rebuilt_passes_if_nothing_moves(reference, x):
    batch = Sealed([x])
    assert reference.to(batch, "cpu") is batch


# -- register_container -----------------------------------------------------------------------


def test_a_container_can_be_registered_after_it_was_refused(reference, registered, x):
    class Own(Unknown):
        pass

    with pytest.raises(UnsupportedValueError):
        reference.to(Own(x), gpu(0))
    registered(Own, lambda old: [old.value], lambda old, new: Own(*new))
    assert reference.device_of(reference.to(Own(x), gpu(0)).value) is gpu(0)


def test_a_subclass_of_a_registered_container_is_not_registered(reference, registered, x):
    class Own(Unknown):
        pass

    class Child(Own):
        pass

    registered(Own, lambda old: [old.value], lambda old, new: Own(*new))
    with pytest.raises(UnsupportedValueError, match="a Child,"):
        reference.to(Child(x), gpu(0))


def test_registering_a_type_overrides_its_handling(reference, registered, x):
    class Own(list):
        pass

    registered(Own, lambda old: [], lambda old, new: Own(old))
    batch = Own([x])
    assert reference.to(batch, gpu(0)) is batch


def test_a_registered_rebuild_that_fails_is_reported(reference, registered, x):
    class Own(Unknown):
        pass

    registered(Own, lambda old: [old.value], lambda old, new: 1 / 0)
    with pytest.raises(UnsupportedValueError, match="the Own at the top cannot be made again"):
        reference.to(Own(x), gpu(0))


def test_the_children_of_a_registered_container_are_numbered_in_messages(reference, registered):
    class Own(Unknown):
        pass

    registered(Own, lambda old: [1, old.value], lambda old, new: Own(new[1]))
    with pytest.raises(UnsupportedValueError, match=r"at a\.1 is"):
        reference.to({"a": Own(Unknown())}, gpu(0))
