"""One process's numbers of each batch, whatever holds the numbers, and loaders that read them."""

import gc

import numpy as np
import pytest

from d2ldev import UnsupportedValueError
from d2ldev.framework import ShardSampler, shard_copy


@pytest.mark.parametrize("held", [list, tuple, np.array], ids=lambda held: held.__name__)
def test_each_process_has_its_numbers_and_one_without_any_the_first(held):
    batches = [held([4, 2, 6]), held([5])]
    samplers = [ShardSampler(batches, rank, 2) for rank in range(2)]
    assert [[list(numbers) for numbers in sampler] for sampler in samplers] == [
        [[4, 2], [5]],
        [[6], [5]],
    ]
    counts = [[entry[:2] for entry in sampler.counts] for sampler in samplers]
    assert counts == [[(2, 3), (1, 1)], [(1, 3), (0, 1)]]


def contents(batches, rank=0):
    """Return what of each batch is compared."""
    sampler = ShardSampler(batches, rank, 2)
    list(sampler)
    return [content for _, _, content in sampler.counts]


def test_all_processes_know_the_same_of_a_batch():
    (whole,) = contents([[4, 2, 6, 5]])
    assert contents([np.array([4, 2, 6, 5])], rank=1) == [whole]


@pytest.mark.parametrize(
    "other",
    [[4, 2, 5, 6], [4, 2, 6, 7], [4, 2, 6], ["a", "b"]],
    ids=["order", "examples", "length", "names"],
)
def test_other_examples_of_a_batch_are_known(other):
    assert contents([other]) != contents([[4, 2, 6, 5]])


def test_other_examples_of_a_long_batch_are_known():
    numbers = np.arange(3000)
    assert contents([numbers]) != contents([np.concatenate([numbers[:1500], numbers[1500:] + 1])])


def test_batch_samplers_get_the_number_of_the_epoch():
    class Batches(list):
        def set_epoch(self, epoch):
            self.append([epoch])

    batches = Batches([[4, 2]])
    ShardSampler(batches, 0, 2).set_epoch(7)
    assert batches == [[4, 2], [7]]
    assert not hasattr(ShardSampler([[4, 2]], 0, 2), "set_epoch")


class Loader:
    """A framework's loader, of which an attribute cannot be set."""

    def __init__(self, batches):
        vars(self)["batches"] = batches

    def __setattr__(self, name, value):
        raise ValueError(f"{name} cannot be set")

    def __iter__(self):
        return iter(self.batches)


class OwnLoader(Loader):
    """A user's, with a slot, resources that end with it, and subclasses that need an argument."""

    __slots__ = ("_file",)

    def __init_subclass__(cls, *, name):
        cls.name = name

    def __init__(self, batches):
        super().__init__(batches)
        object.__setattr__(self, "_file", ["open"])

    def __getstate__(self):
        return {}

    def __del__(self):
        self._file[:] = ["closed"]

    def file(self):
        return self._file


def shard_of(loader):
    parts = ShardSampler(loader.batches, 0, 2)
    return shard_copy(loader, Loader, parts, batches=parts)


def test_a_loader_of_a_class_of_the_user_s_keeps_all_that_it_adds():
    loader = OwnLoader([[4, 2, 6], [5]])
    shard = shard_of(loader)
    assert isinstance(shard, OwnLoader)
    assert (type(shard).__module__, type(shard).__qualname__) == (__name__, "OwnLoader")
    assert shard.file() is loader.file()
    assert [batch.operands for batch in shard] == [[4, 2], [5]]


def test_a_resource_shared_by_two_loaders_closes_with_the_first_one():
    loader = OwnLoader([[4, 2, 6]])
    shard = shard_of(loader)
    file = loader.file()
    del shard
    gc.collect()
    assert file == ["open"]
    shard = shard_of(loader)
    del loader
    gc.collect()
    assert file == ["open"]
    del shard
    gc.collect()
    assert file == ["closed"]


def test_a_loader_that_is_a_part_already_is_not_sharded():
    with pytest.raises(UnsupportedValueError, match="reads a shard already"):
        shard_of(shard_of(OwnLoader([[4, 2, 6]])))
