"""``ArrayLoader``: batches of arrays, in an order that depends on the seed and the epoch alone."""

import pickle
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python

from d2ldev import ArrayLoader, CheckpointError, UnsupportedValueError


def epoch(loader):
    """Return one epoch of a loader of one array, as lists."""
    return [x.tolist() for (x,) in loader]


def shuffle_examples(seed=0, n=20, **options):
    return ArrayLoader(np.arange(n), batch_size=6, shuffle=True, seed=seed, **options)


# -- batches ----------------------------------------------------------------------------------


def test_batches_are_tuples_of_what_belongs_together():
    array, y = np.arange(10).reshape(5, 2), np.arange(5) * 10
    batches = list(ArrayLoader(array, y, batch_size=2, shuffle=True))
    assert {type(batch) for batch in batches} == {tuple}
    assert all((x[:, 0] * 5).tolist() == y.tolist() for x, y in batches)


@given(
    n=st.integers(0, 30),
    batch_size=st.integers(1, 40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_an_epoch_has_as_many_batches_as_the_loader_is_long(n, batch_size, shuffle, drop_last):
    loader = ArrayLoader(np.arange(n), batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    batches = epoch(loader)
    seen = list(chain.from_iterable(batches))
    assert len(batches) == len(loader)
    assert len(seen) == len(set(seen)) == (n // batch_size * batch_size if drop_last else n)
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_it_can_be_iterated_again():
    loader = ArrayLoader(np.arange(3), batch_size=2)
    assert epoch(loader) == epoch(loader) == [[0, 1], [2]]


def test_without_shuffling_batches_are_views():
    array = np.arange(4)
    (first,), _ = ArrayLoader(array, batch_size=2)
    assert np.shares_memory(first, array)


def test_with_shuffling_batches_are_copies():
    array = np.arange(4)
    assert not any(
        np.shares_memory(x, array) for (x,) in ArrayLoader(array, batch_size=2, shuffle=True)
    )


def test_dtypes_do_not_change():
    array, y = np.zeros((2, 3), "float16"), np.zeros(2, "uint8")
    ((x, label),) = ArrayLoader(array, y, batch_size=2, shuffle=True)
    assert (x.dtype, label.dtype) == ("float16", "uint8")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_tensors_give_tensors_of_their_dtype_on_the_cpu(reference, shuffle, dtype):
    array = reference.asarray(np.arange(5) % 2, dtype=dtype)
    batches = [x for (x,) in ArrayLoader(array, batch_size=2, shuffle=shuffle)]
    assert {type(x) for x in batches} == {type(array)}
    assert {reference.dtype_of(x) for x in batches} == {dtype}
    assert {reference.device_of(x) for x in batches} == {reference.cpu()}


def test_in_a_scope_batches_of_tensors_are_on_the_cpu_too(reference):
    array = reference.ones(2)
    with reference.on("gpu:0"):
        ((x,),) = ArrayLoader(array, batch_size=2)
    assert reference.device_of(x) is reference.cpu()


# -- the order --------------------------------------------------------------------------------


def test_the_seed_and_the_epoch_make_the_order():
    one, other = shuffle_examples(seed=3), shuffle_examples(seed=3)
    assert [epoch(one) for _ in range(3)] == [epoch(other) for _ in range(3)]


def test_seeds_next_to_each_other_have_no_epoch_in_common():
    one, other = shuffle_examples(seed=0), shuffle_examples(seed=1)
    orders = [str(epoch(loader)) for loader in (one, other) for _ in range(5)]
    assert len(set(orders)) == 10


def test_the_order_of_a_seed_never_changes():
    # Whoever resumes a run with a later version of d2ldev or NumPy needs the same.
    assert epoch(ArrayLoader(np.arange(8), batch_size=8, shuffle=True, seed=7)) == [
        [1, 6, 5, 2, 4, 7, 0, 3]
    ]


def test_the_order_is_the_same_in_another_process():
    code = """
        import numpy as np, d2ldev
        loader = d2ldev.ArrayLoader(np.arange(20), batch_size=6, shuffle=True, seed=0)
        show([x.tolist() for (x,) in loader])
    """
    assert run_python(code) == [epoch(shuffle_examples())]


def test_other_draws_do_not_change_the_order():
    loader, other = shuffle_examples(), shuffle_examples()
    epoch(loader), epoch(other)
    np.random.seed(1)
    np.random.rand(3)
    assert epoch(loader) == epoch(other)


def test_numpys_random_state_is_not_touched():
    before = np.random.get_state()[1].tolist()
    epoch(shuffle_examples()), epoch(shuffle_examples(seed=None))
    assert np.random.get_state()[1].tolist() == before


def test_without_a_seed_every_loader_has_its_own_order():
    assert epoch(shuffle_examples(seed=None)) != epoch(shuffle_examples(seed=None))


# -- going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 2**62, None])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_resumed_loader_has_the_orders_of_an_uninterrupted_one(seed, done):
    loader, resumed = shuffle_examples(seed), shuffle_examples()
    for _ in range(done):
        epoch(loader)
    resumed.load_state_dict(loader.state_dict())
    assert [epoch(resumed) for _ in range(2)] == [epoch(loader) for _ in range(2)]


def test_an_epoch_that_was_left_early_counts():
    loader, resumed = shuffle_examples(), shuffle_examples()
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    assert epoch(resumed) == epoch(loader)
    assert resumed.state_dict()["epoch"] == 2


def test_making_an_iterator_does_not_count_an_epoch():
    loader = shuffle_examples()
    assert iter(loader) is not loader
    assert loader.state_dict()["epoch"] == 0


def test_two_epochs_at_once_do_not_disturb_each_other():
    loader, other = shuffle_examples(), shuffle_examples()
    both = [(a.tolist(), b.tolist()) for (a,), (b,) in zip(loader, loader, strict=True)]
    assert [a for a, _ in both] == epoch(other)
    assert [b for _, b in both] == epoch(other)


def test_a_pickled_loader_goes_on_with_the_same_order():
    loader = shuffle_examples()
    epoch(loader)
    assert epoch(pickle.loads(pickle.dumps(loader))) == epoch(loader)


@pytest.mark.parametrize(
    "state",
    [None, {}, {"seed": 0}, {"seed": 0, "epoch": -1}, {"seed": "0", "epoch": 1}, [0, 1]],
    ids=repr,
)
def test_an_invalid_state_is_refused_and_changes_nothing(state):
    loader = shuffle_examples(seed=5)
    with pytest.raises(CheckpointError):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"seed": 5, "epoch": 0}


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ([], {}, "there are none"),
        ([[1, 2]], {}, "neither a NumPy array"),
        (["ab"], {}, "neither a NumPy array"),
        ([None], {}, "neither a NumPy array"),
        ([np.zeros(())], {}, "no axis"),
        ([np.zeros(2), np.zeros(3)], {}, "lengths are 2, 3"),
        ([np.zeros(2)], {"batch_size": 0}, "batch_size"),
        ([np.zeros(2)], {"batch_size": 1.5}, "batch_size"),
        ([np.zeros(2)], {"batch_size": True}, "batch_size"),
        ([np.zeros(2)], {"seed": -1}, "seed"),
        ([np.zeros(2)], {"seed": 0.5}, "seed"),
    ],
)
def test_invalid_arguments_are_refused(arrays, options, words):
    with pytest.raises(UnsupportedValueError, match=words):
        ArrayLoader(*arrays, **{"batch_size": 2, **options})


def test_a_tensor_of_a_gpu_is_refused_with_its_device(reference):
    with pytest.raises(UnsupportedValueError, match="gpu:1") as caught:
        ArrayLoader(reference.ones(2, device="gpu:1"), batch_size=1)
    assert caught.value.devices == ("gpu:1",)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_processes_that_read_their_part_only_see_each_example_once(size):
    loader = ArrayLoader(np.arange(12), batch_size=5, shuffle=True)
    shards = zip(*(loader.shard(rank, size) for rank in range(size)), strict=True)
    batches = [
        np.concatenate([shard.operands[0][: shard.number] for shard in parts]) for parts in shards
    ]
    assert [batch.tolist() for batch in batches] == [x.tolist() for (x,) in loader]


@pytest.mark.parametrize("shuffle", [False, True])
def test_processes_that_read_their_part_know_whether_the_batches_are_the_same(shuffle):
    loader = ArrayLoader(np.arange(12), batch_size=5, shuffle=shuffle)
    first, second = ([shard.content for shard in loader.shard(rank, 2)] for rank in range(2))
    other = ArrayLoader(np.arange(12), batch_size=5, shuffle=True, seed=1).shard(0, 2)
    assert first == second
    assert not {*first} & {shard.content for shard in other}


def test_a_part_without_examples_has_the_first_one_of_its_batch():
    (shard,) = ArrayLoader(np.arange(2), batch_size=5).shard(2, 3)
    assert (shard.operands[0].tolist(), shard.number, shard.length) == ([0], 0, 2)


LONG = pytest.param(10**5000, 2, id="more digits than Python writes")


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), ("0", 2), (0, None), LONG])
def test_a_part_for_no_process_is_refused(rank, size):
    with pytest.raises(UnsupportedValueError, match="make batches"):
        ArrayLoader(np.arange(2), batch_size=5).shard(rank, size)
