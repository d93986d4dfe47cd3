"""How often a nesting is walked: a registered container counts it."""

import numpy as np
import pytest

import d2ldev
from d2ldev import Trainer, gpu


class Counted(tuple):
    """A batch whose children are asked for as often as it is walked."""

    walks = rebuilds = 0

    def _children(self):
        Counted.walks += 1
        return list(self)

    def _rebuild(self, new):
        Counted.rebuilds += 1
        return Counted(new)


@pytest.fixture(autouse=True)
def counted(monkeypatch, registered):
    monkeypatch.setattr(Counted, "walks", 0)
    monkeypatch.setattr(Counted, "rebuilds", 0)
    registered(Counted, Counted._children, Counted._rebuild)


def _counts():
    return Counted.walks, Counted.rebuilds


def test_a_batch_that_moves_is_found_once_and_rebuilt_once(reference, x):
    reference.to([Counted((x, {"y": x}))], gpu(0))
    assert _counts() == (1, 1)


def test_a_batch_that_moves_in_part_is_found_once_and_rebuilt_once(reference, x):
    there = reference.to(x, gpu(0))
    reference.to(Counted((there, 3, "a", x)), gpu(0))
    assert _counts() == (1, 1)


def test_a_batch_with_data_is_found_once_and_rebuilt_once(reference, x):
    reference.to(Counted((x, np.ones(2), np.array("text"))), gpu(0))
    assert _counts() == (1, 1)


def test_a_copy_is_found_once_and_rebuilt_once(reference, x):
    reference.copy(Counted((x, {"y": x})))
    assert _counts() == (1, 1)


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_that_are_prefetched_are_each_walked_twice(reference, x, depth):
    batches = [Counted((x, np.ones(2))) for _ in range(3)]
    assert len(list(reference.prefetch(batches, gpu(0), depth))) == 3
    assert _counts() == (3, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore:data of float64 is cast")
def test_the_cast_of_a_batch_needs_no_other_walk(reference, dtype):
    batches = [Counted((np.ones((4, 2), dtype), np.ones((4, 1), dtype))) for _ in range(3)]
    Trainer(1, num_gpus=1, backend=reference).fit(reference.mlp([2, 1]), batches)
    assert _counts() == (3, 3)


def test_a_container_whose_children_are_new_each_time_moves(reference, x):
    class Fresh(Counted):
        pass

    d2ldev.register_container(
        Fresh, lambda old: [[each] for each in old], lambda old, new: Fresh(x for (x,) in new)
    )
    (moved,) = reference.to([Fresh((x, 1))], gpu(0))
    assert reference.device_of(moved[0]) is gpu(0)


@pytest.mark.parametrize("move", ["to", "copy"])
def test_a_container_whose_tensors_are_new_each_time_stays_one_object(reference, x, move):
    class Rows(Counted):
        pass

    d2ldev.register_container(
        Rows, lambda old: [reference.copy(each) for each in old], lambda old, new: Rows(new)
    )
    rows = Rows([x])
    (first,), (again,) = getattr(reference, move)(([rows], [rows]), gpu(0))
    assert first is again
