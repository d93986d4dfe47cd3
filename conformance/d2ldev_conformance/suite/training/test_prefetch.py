"""D2L 6.7.3: batches are on their way while the one before them is computed with.

A GPU waits for its data unless the next batch is on its way. The batches must stay the same, in
their order.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import d2ldev
from d2ldev import DeviceUnavailableError, UnsupportedValueError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same
from d2ldev_conformance.suite.devices.queues import becomes_idle

SECTION = "6.7.3"
SOURCE = "contract"
DEPTHS = (0, 1, 2, 7)


class Source:
    """Batches that write down how many of them were taken, and whether anyone closed them.

    Args:
        make: makes the batch of a number.
        number: how many there are.
        error: raised after the last of them, if there is one.
    """

    def __init__(self, make, number=5, error=None):
        self.make, self.number, self.error = make, number, error
        self.taken = 0
        self.is_closed = False

    def batches(self):
        try:
            for number in range(self.number):
                self.taken += 1
                yield self.make(number)
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


@pytest.fixture
def source(backend):
    """Tensors of the CPU with their number in them."""
    return Source(lambda number: backend.full((2,), float(number)))


def _numbers(backend, batches):
    return [float(backend.to_numpy(x)[0]) for x in batches]


@requirement("prefetch.same-order", section=SECTION)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_batches_are_the_same_in_the_same_order(backend, place, source, depth):
    """Yield the same batches in the same order, at each depth."""
    found = _numbers(backend, backend.prefetch(source.batches(), place, depth))
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0]


@requirement(
    "prefetch.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks"
)
def test_batches_ahead_are_computed_without_a_wait(backend, place):
    """Compute the batches that are on their way, although nobody waits for them.

    A copy that is only recorded begins when the batch is needed, which is too late.
    """
    batches = [(np.ones(3, "float32"), backend.ones(3)) for _ in range(4)]
    backend.synchronize()
    ahead = backend.prefetch(batches, place, 2)
    first = next(ahead)
    assert becomes_idle(backend, place)
    ahead.close()
    del first


@requirement("prefetch.any-size", section=SECTION, source="PyTorch, CUDA semantics")
@pytest.mark.parametrize("length", [1, 2**18 + 1, 2**22 + 1])
def test_batches_of_any_size_arrive_whole(backend, place, length):
    """Yield each value of small and large batches.

    A copy that runs on must not be overwritten by the next batch.

    Large batches may be copied in another way than small ones.

    Nothing is read before the end, so that memory that is used again too early is noticed.
    """

    def make(number):
        x = backend.full((length,), float(number))
        return x, x + 0

    batches = backend.prefetch(Source(make, 4).batches(), place)
    copies = [backend.copy(batch) for batch in batches]
    for number, batch in enumerate(copies):
        for x in batch:
            found = backend.to_numpy(x)
            assert found.shape == (length,)
            assert (found == number).all()


@requirement("prefetch.on-the-device", section=SECTION)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_batch_is_on_the_device(backend, place, source, depth):
    """Yield each batch on the device, at each depth."""
    batches = list(backend.prefetch(source.batches(), place, depth))
    assert [backend.device_of(x) for x in batches] == [place] * source.number


@requirement("prefetch.nestings", section=SECTION)
def test_a_batch_keeps_its_form_and_its_dtypes(backend, place):
    """Keep containers, texts and dtypes of a batch."""
    integers = backend.asarray(np.arange(3, dtype="int32"))
    batch = {"x": (backend.ones((2, 3)), [integers]), "name": "first"}
    (moved,) = backend.prefetch([batch], place)
    assert (list(moved), moved["name"]) == (["x", "name"], "first")
    assert (type(moved["x"]), type(moved["x"][1])) == (tuple, list)
    assert_same(backend.to_numpy(moved["x"][0]), np.ones((2, 3), "float32"))
    assert_same(backend.to_numpy(moved["x"][1][0]), np.arange(3, dtype="int32"))


@requirement("prefetch.numpy-batches", section=SECTION)
def test_arrays_of_numpy_become_tensors_on_the_device(backend, place):
    """Turn NumPy arrays in a batch into tensors on the device."""
    arrays = [np.full((2, 3), number, "float32") for number in range(4)]
    batches = list(backend.prefetch([(array, array[:1]) for array in arrays], place))
    assert {backend.device_of(x) for batch in batches for x in batch} == {place}
    for array, (x, y) in zip(arrays, batches, strict=True):
        assert_same(backend.to_numpy(x), array)
        assert_same(backend.to_numpy(y), array[:1])


@requirement("prefetch.array-used-again", section=SECTION)
def test_a_source_may_fill_the_same_array_again(backend, place):
    """Yield right values if the source fills one array again and again.

    Data loaders reuse buffers, and the copy runs behind.
    """
    buffer = np.zeros((64, 64), "float32")

    def refill(number):
        buffer[:] = number
        return buffer

    batches = backend.prefetch(Source(refill).batches(), place)
    assert [float(backend.to_numpy(x).mean()) for x in batches] == [0.0, 1.0, 2.0, 3.0, 4.0]


@requirement("prefetch.noop-returns-same-object", section=SECTION)
def test_a_batch_already_on_the_device_is_yielded_itself(backend, place):
    """Yield a batch itself if it is on the device.

    On the CPU, a loop with ``prefetch`` costs nothing.
    """
    batches = [backend.ones(1, device=place), {"x": backend.zeros(1, device=place)}]
    for batch, same in zip(batches, backend.prefetch(batches, place), strict=True):
        assert same is batch


@requirement("prefetch.moves-ahead", section=SECTION)
@pytest.mark.parametrize("depth", DEPTHS[:3])
def test_depth_batches_are_on_their_way(backend, place, source, depth):
    """Take as many batches ahead as ``depth`` says, and none before the first.

    More would fill the GPU, and fewer would leave it waiting.
    """
    batches = backend.prefetch(source.batches(), place, depth)
    assert source.taken == 0
    taken = [source.taken for _ in batches]
    assert taken == [min(number + depth, source.number) for number in range(1, source.number + 1)]


@requirement("prefetch.error-in-its-place", section=SECTION)
@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_of_the_source_comes_after_the_batches_before_it(backend, place, depth):
    """Raise an error of the source after the batches that came before it.

    The steps before it are made, and can be saved.
    """
    error = RuntimeError("the disk is gone")
    source = Source(lambda number: backend.full((2,), float(number)), 3, error)
    batches = backend.prefetch(source.batches(), place, depth)
    assert _numbers(backend, itertools.islice(batches, 3)) == [0.0, 1.0, 2.0]
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    assert caught.value is error
    assert next(batches, None) is None


@requirement("prefetch.bad-batch-in-its-place", section=SECTION)
def test_a_batch_that_cannot_be_moved_is_an_error_in_its_place(backend, place):
    """Raise for a batch that cannot move when its turn has come.

    The error belongs to this batch, and not to the two before it.
    """
    batches = backend.prefetch([backend.ones(1), {"meta": [object()]}, backend.ones(1)], place)
    next(batches)
    with pytest.raises(UnsupportedValueError, match="object"):
        next(batches)


@requirement("prefetch.close-closes-source", section=SECTION)
@pytest.mark.parametrize("depth", DEPTHS)
def test_leaving_early_closes_the_source(backend, place, source, depth):
    """Close the source when the loop ends early.

    Loaders hold files and processes.
    """
    source.number = 100
    batches = backend.prefetch(source.batches(), place, depth)
    next(batches)
    batches.close()
    assert source.is_closed
    assert next(batches, None) is None


@requirement("prefetch.empty", section=SECTION)
def test_prefetching_no_batches_yields_none(backend, place):
    """Yield nothing from an empty source.

    The last part of a data set may be empty.
    """
    assert list(backend.prefetch([], place)) == []


@requirement("prefetch.missing-device", section=SECTION)
def test_a_missing_device_is_refused_before_any_batch_is_taken(backend, missing, source):
    """Refuse a device that does not exist before a batch is taken.

    A source that has begun may not begin again.
    """
    with pytest.raises(DeviceUnavailableError):
        backend.prefetch(source.batches(), missing)
    assert source.taken == 0


@requirement("prefetch.bad-arguments", section=SECTION)
@pytest.mark.parametrize("depth", [-1, 1.5, True, "2", None], ids=repr)
def test_an_invalid_depth_is_refused(backend, depth):
    """Refuse a depth that is not an integer of at least 0.

    A depth of 1.5 or True is a swapped argument.
    """
    with pytest.raises(UnsupportedValueError, match="depth"):
        backend.prefetch([], "cpu", depth)


@requirement("prefetch.bad-arguments", section=SECTION)
def test_an_object_that_is_not_iterable_is_refused(backend):
    """Refuse a source that cannot be iterated over.

    The error at the first batch would be far from the call.
    """
    with pytest.raises(UnsupportedValueError, match="iterable"):
        backend.prefetch(5, "cpu")


@requirement("prefetch.array-loader", section=SECTION, source="contract, Resuming a run")
def test_an_array_loader_goes_on_where_it_was(backend, place):
    """Continue an ``ArrayLoader`` where its state says, in the same order.

    A resumed run sees each example once in an epoch.
    """

    def fresh():
        return d2ldev.ArrayLoader(np.arange(7, dtype="int32"), batch_size=3, shuffle=True, seed=1)

    def epochs(loader, number):
        return [
            [backend.to_numpy(x).tolist() for (x,) in backend.prefetch(loader, place)]
            for _ in range(number)
        ]

    unbroken, before, after = fresh(), fresh(), fresh()
    first = epochs(before, 2)
    after.load_state_dict(before.state_dict())
    as_it_is = [[x.tolist() for (x,) in unbroken] for _ in range(4)]
    assert first + epochs(after, 2) == as_it_is
