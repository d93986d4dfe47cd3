"""``prefetch`` on MXNet: its engine copies beside what it computes, and nobody waits for it."""

import numpy as np
import pytest
from d2ldev_mxnet.backend import MXNetBackend
from d2ldev_mxnet.framework import mx

from d2ldev import gpu

WAITS = [
    (mx.nd, "waitall"),
    (mx.npx, "waitall"),
    *((mx.nd.NDArray, name) for name in ("wait_to_read", "asnumpy", "_sync_copyfrom")),
]


class CountingBackend(MXNetBackend):
    """Two virtual GPUs, which write down each tensor that they are asked to copy."""

    def __init__(self):
        super().__init__(virtual_gpus=2)
        self.log = []

    def _copy_all(self, xs, native):
        self.log += ["copy"] * len(xs)
        return super()._copy_all(xs, native)


class RealBackend(CountingBackend):
    """The same, with GPUs that say they are real: batches go by way of the host's tensors."""

    def _platform(self, device):
        return "cpu" if device == self.cpu() else "cuda"


@pytest.fixture
def counting():
    return CountingBackend()


@pytest.fixture
def source(counting):
    """Five batches of two tensors with their number in them; it writes down who takes one."""
    tensors = [
        (counting.full((2, 3), float(number)), counting.full(2, number, dtype="int32"))
        for number in range(5)
    ]

    def batches():
        for number, batch in enumerate(tensors):
            counting.log.append(f"take {number}")
            yield batch
        counting.log.append("end")

    return batches


@pytest.fixture
def no_waiting():
    """Has everything fail that waits for MXNet's engine, until it is called."""
    patch = pytest.MonkeyPatch()
    for owner, name in WAITS:
        patch.setattr(owner, name, _refusing(name))
    yield patch.undo
    patch.undo()


def _refusing(name):
    def refused(*args, **kwargs):
        raise AssertionError(f"{name} waits for the engine")

    return refused


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_copies_of_the_next_batches_are_asked_for_before_the_one_in_use(
    counting, source, depth
):
    log, copied = counting.log, []
    for number, _ in enumerate(counting.prefetch(source(), "gpu:0", depth)):
        log.append(f"use {number}")
        copied.append(log.count("copy"))
    assert copied == [2 * min(number + 1 + depth, 5) for number in range(5)]
    assert log[: 3 * (depth + 1)] == [
        step for number in range(depth + 1) for step in (f"take {number}", "copy", "copy")
    ]
    assert log[3 * (depth + 1)] == "use 0"


@pytest.mark.parametrize("device", [gpu(0), gpu(1)])
def test_nothing_is_waited_for_and_the_batches_are_the_same(counting, source, no_waiting, device):
    moved = list(counting.prefetch(source(), device))
    no_waiting()
    assert [counting.device_of(x) for batch in moved for x in batch] == [device] * 10
    for number, (x, y) in enumerate(moved):
        np.testing.assert_array_equal(counting.to_numpy(x), np.full((2, 3), number, "float32"))
        np.testing.assert_array_equal(counting.to_numpy(y), np.full(2, number, "int32"))


def test_what_waits_is_refused_in_these_tests(counting, no_waiting):
    x = counting.ones(2)
    for wait in (x.asnumpy, x.wait_to_read, mx.nd.waitall, mx.npx.waitall):
        with pytest.raises(AssertionError, match="waits for the engine"):
            wait()


def test_arrays_of_numpy_go_to_a_real_gpu_by_way_of_tensors_which_nobody_waits_for():
    """Only into the host's memory, where it is at once, are they copied before the call ends."""
    backend = RealBackend()
    arrays = [(np.full((2, 3), number, "float32"), np.full(2, number)) for number in range(5)]
    batches = backend.prefetch(arrays, "gpu:0")
    first = next(batches)
    assert backend.log == ["copy"] * 6
    moved = [first, *batches]
    assert backend.log == ["copy"] * 10
    for batch, expected in zip(moved, arrays, strict=True):
        for x, array in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(x), array)
