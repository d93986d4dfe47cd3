"""The parts of a batch: who has which examples, and which loaders leave a process too few."""

from types import SimpleNamespace

import numpy as np
import pytest

import d2ldev
from d2ldev import UnsupportedValueError
from d2ldev.distributed.portions import Portions
from d2ldev.framework import BatchNorm, Sharded, bounds
from d2ldev.framework.testing import framework_of
from d2ldev.operations.examples import number_of_examples

NET = object()


class Tagged(list):
    """A list with an attribute."""


@pytest.fixture
def framework(monkeypatch):
    """The reference backend, one of whose models needs two examples in a part."""
    found = framework_of(d2ldev.get_backend("reference"))
    norms = [BatchNorm("norm", "local")]
    monkeypatch.setattr(found.parallel, "batch_norms", lambda model: norms if model is NET else [])
    return found


def portions(framework, rank, size, model=NET):
    group = SimpleNamespace(rank=rank, size=size)
    return Portions(framework, group, model)


@pytest.mark.parametrize("length", range(12))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("least", [1, 2, 3])
def test_parts_are_in_order_as_even_as_can_be_and_large_enough(length, size, least):
    found = [bounds(length, rank, size, least) for rank in range(size)]
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == length
    lengths = [stop - start for start, stop in found]
    filled = [each for each in lengths if each]
    assert lengths == sorted(lengths, reverse=True)
    assert not filled or max(filled) - min(filled) <= 1 or size > len(filled)
    assert all(each >= min(least, length) for each in filled)


@pytest.mark.parametrize(("model", "lengths"), [(NET, [3, 2]), (None, [2, 1])])
def test_a_process_has_the_examples_that_the_model_needs(framework, model, lengths):
    x = np.arange(3.0, dtype="float32")
    for rank, length in enumerate(lengths):
        part, _ = portions(framework, rank, 2, model).select((x, x))
        # The second process only computes with the first examples, where the first has all.
        wanted = x[:length] if model is NET or rank == 0 else x[-length:]
        assert framework.tensors.to_numpy(part).tolist() == wanted.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_that_leaves_a_process_one_example_is_refused_in_all(framework, rank):
    batch = Sharded((np.ones(2 - rank), np.ones(2 - rank)), 2 - rank, 3)
    with pytest.raises(UnsupportedValueError, match=r"of the 3 examples.*\n.*drop_last=True"):
        portions(framework, rank, 2).select(batch)
    assert portions(framework, rank, 2, None).select(batch) is batch.operands


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        ({"x": np.ones((4, 2)), "y": [1, 2, 3, 4]}, 4),
        ({"x": [np.ones((3, 2))] * 4, "y": [1, 2, 3, 4]}, 4),
        ({"x": [np.ones((3, 2)), np.ones(3)]}, None),
        ({"x": (np.ones((3, 2)), np.ones(3))}, 3),
        ({"x": [1, 2], "y": [1, 2, 3]}, None),
        ([1, 2, 3], None),
        ({"x": np.ones(3), "y": 1.0, "z": None, "empty": []}, 3),
    ],
)
def test_examples_are_counted_by_the_rule(framework, batch, number):
    assert number_of_examples(framework, batch) == number


def test_a_list_whose_attribute_is_a_tensor_is_not_split(framework):
    names = Tagged("abcd")
    names.mask = framework.tensors.from_data(
        [1, 0, 1, 0], None, framework.devices.native(d2ldev.cpu())
    )
    with pytest.raises(UnsupportedValueError, match=r"its attributes have tensors.*: mask"):
        d2ldev.get_backend("reference").split({"x": np.ones(4), "names": names}, ["cpu"])


def test_a_list_in_two_places_is_one_list_in_each_part(framework):
    names = ["a", "b"]
    backend = d2ldev.get_backend("reference")
    (part,) = backend.split({"x": np.ones(2), "names": names, "again": {"same": names}}, ["cpu"])
    assert part["names"] is part["again"]["same"]
