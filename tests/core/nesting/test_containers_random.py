"""Random nestings: there and back again, nothing is different."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import d2ldev
from d2ldev import cpu, gpu
from d2ldev.framework.testing import framework_of
from d2ldev.nesting import walk as containers

reference = d2ldev.get_backend("reference")
Point = namedtuple("Point", "x y")


@dataclass(eq=False)
class Record:
    x: object
    y: object


keys = st.one_of(st.text(max_size=3), st.integers(), st.none())
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.binary())
tensors = st.builds(
    lambda shape: reference.asarray(np.arange(np.prod(shape)).reshape(shape)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
# A few tensors, some of which are drawn more than once: ties.
leaves = st.one_of(plain, tensors, st.sampled_from([reference.ones(2), reference.zeros(())]))
nestings = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=9)),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda items: defaultdict(list, items)),
        st.builds(Point, inner, inner),
        st.builds(Record, inner, inner),
        inner.map(lambda one: [one, one]),
    ),
    max_leaves=12,
)


def unfold(x):
    """Return everything in a nesting but devices: types, labels, values, and what is tied."""
    numbers = {}

    def of(value):
        kind = framework_of(reference).state.kinds[type(value)]
        if kind is containers.PLAIN:
            return value
        known = id(value) in numbers
        number = numbers.setdefault(id(value), len(numbers))
        if known:
            return "again", number
        if kind is containers.TENSOR:
            array = reference.to_numpy(value)
            return number, array.dtype.name, array.shape, array.tolist()
        return number, type(value), list(kind.labels(value)), [of(v) for v in kind.children(value)]

    return of(x)


def tensors_in(x):
    found = containers.leaves(x, framework_of(reference).state.kinds)
    return [leaf for _, leaf, kind in found if kind is containers.TENSOR]


@given(nestings)
def test_moving_keeps_structure_values_and_ties(batch):
    assert unfold(reference.to(batch, gpu(0))) == unfold(batch)


@given(nestings)
def test_moving_there_and_back_keeps_structure_values_and_ties(batch):
    assert unfold(reference.to(reference.to(batch, gpu(0)), cpu())) == unfold(batch)


@given(nestings)
def test_moving_moves_every_tensor(batch):
    there = tensors_in(reference.to(batch, gpu(1)))
    assert {reference.device_of(x) for x in there} <= {gpu(1)}
    assert len(there) == len(tensors_in(batch))


@given(nestings)
def test_moving_again_gives_the_same_object(batch):
    there = reference.to(batch, gpu(0))
    assert reference.to(there, gpu(0)) is there


@given(nestings)
def test_moving_changes_nothing_that_was_given(batch):
    before, objects = unfold(batch), list(map(id, tensors_in(batch)))
    reference.to(batch, gpu(0))
    assert (unfold(batch), list(map(id, tensors_in(batch)))) == (before, objects)
    assert {reference.device_of(x) for x in tensors_in(batch)} <= {cpu()}


@given(nestings)
def test_a_copy_shares_no_tensor_and_keeps_the_rest(batch):
    new = reference.copy(batch)
    assert unfold(new) == unfold(batch)
    assert {id(x) for x in tensors_in(new)}.isdisjoint({id(x) for x in tensors_in(batch)})


@given(nestings)
def test_place_and_to_agree_on_nestings(batch):
    assert unfold(reference.place(batch, gpu(0))) == unfold(reference.to(batch, gpu(0)))
