"""Copies to a GPU beside what it computes, on a driver that writes down what it is asked."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from d2ldev_torch import prefetching
from torch_places import LedgerBackend

from d2ldev import OutOfDeviceMemoryError, UnsupportedValueError, gpu


class Stream:
    """A stream that writes down what happens in it, and what it waits for."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        self.events = 0

    def record_event(self):
        self.events += 1
        event = f"event {self.events} of {self.name}"
        self.log.append(f"record {event}")
        return event

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


class Driver:
    """What ``torch.cuda`` is asked for streams."""

    def __init__(self):
        self.log = []
        self.current = Stream(self.log, "computing")
        self.made_on = []

    def Stream(self, device):  # noqa: N802
        self.made_on.append(device)
        return Stream(self.log, "copying")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_stream(self, device):
        return self.current


@pytest.fixture
def driver(monkeypatch):
    return Driver()


@pytest.fixture
def backend(driver, monkeypatch):
    """Two GPUs with streams, whose memory is the CPU's, where pinning is a copy."""
    backend = LedgerBackend()
    monkeypatch.setattr(backend._accelerator, "streams", lambda: driver)

    class Pinned:
        def __init__(self, x):
            self.x = x.clone()

        def to(self, native, non_blocking):
            where = f"in {driver.current.name}, waiting: {not non_blocking}"
            driver.log.append(f"copy {self.x.tolist()} {where}")
            return backend._copy(self.x, native)

    monkeypatch.setattr(prefetching, "pinned", Pinned)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda x, stream: driver.log.append(f"{x.tolist()} is used in {stream.name}"),
    )
    return backend


def values(batches):
    return [x.tolist() for x in batches]


def test_the_batches_are_the_same_in_the_same_order(backend):
    batches = [torch.tensor([float(i)]) for i in range(5)]
    assert values(backend.prefetch(batches, "gpu:1")) == [[0.0], [1.0], [2.0], [3.0], [4.0]]


def test_they_are_on_the_gpu(backend):
    batch = (torch.ones(1), {"y": np.ones(1)})
    ((x, rest),) = backend.prefetch([batch], "gpu:1")
    assert (backend.device_of(x), backend.device_of(rest["y"])) == (gpu(1), gpu(1))


def test_copies_are_made_in_a_stream_of_their_own_and_not_waited_for(backend, driver):
    next(backend.prefetch([torch.ones(1), torch.zeros(1)], "gpu:1"))
    copies = [line for line in driver.log if line.startswith("copy")]
    assert copies == [f"copy {x} in copying, waiting: False" for x in ([1.0], [0.0])]
    assert driver.made_on == [torch.device("cuda:1")]


def test_a_batch_waits_for_its_own_copies_and_not_for_those_of_the_next(backend, driver):
    batches = backend.prefetch([torch.ones(1), torch.zeros(1)], "gpu:0", depth=1)
    next(batches)
    first = "computing waits for event 1 of copying"
    assert driver.log.index(first) > driver.log.index("record event 2 of copying")
    assert "computing waits for event 2 of copying" not in driver.log
    next(batches)
    assert "computing waits for event 2 of copying" in driver.log


def test_the_memory_of_a_batch_is_known_to_be_used_where_it_is_computed_with(backend, driver):
    next(backend.prefetch([(torch.ones(1), torch.zeros(1))], "gpu:0"))
    assert driver.log[-2:] == ["[1.0] is used in computing", "[0.0] is used in computing"]


def test_no_stream_is_made_before_the_first_batch_is_asked_for(backend, driver):
    backend.prefetch([torch.ones(1)], "gpu:0")
    assert driver.made_on == []


def test_what_a_gpu_computes_keeps_its_place_in_the_queue(backend, driver, monkeypatch):
    monkeypatch.setattr(prefetching, "_is_copied_aside", lambda x: False)
    (x,) = backend.prefetch([torch.ones(1)], "gpu:0")
    assert [line for line in driver.log if line.startswith(("copy", "[1.0] is used"))] == []
    assert backend.device_of(x) is gpu(0)


@pytest.mark.parametrize(
    ("x", "aside"),
    [
        (torch.ones(1), True),
        (torch.ones(1, requires_grad=True), False),
        (torch.eye(2).to_sparse(), False),
        (torch.ones(1, device="meta"), False),
    ],
    ids=["dense", "with gradients", "sparse", "on another device"],
)
def test_only_dense_tensors_of_the_host_are_copied_aside(x, aside):
    assert prefetching._is_copied_aside(x) is aside


def test_gradients_flow_back_through_a_batch(backend):
    x = torch.ones(1, requires_grad=True)
    (moved,) = backend.prefetch([x], "gpu:0")
    (2 * moved).sum().backward()
    assert x.grad.tolist() == [2.0]


def test_what_is_there_comes_back_itself(backend):
    x = backend.ones(1, device="cpu")
    there = backend.to(x, "gpu:0")
    ((same, _),) = backend.prefetch([(there, x)], "gpu:0")
    assert same is there


def test_ties_stay_ties_and_are_copied_once(backend, driver):
    x = torch.ones(1)
    ((a, b),) = backend.prefetch([(x, x)], "gpu:0")
    assert a is b
    assert sum(line.startswith("copy") for line in driver.log) == 1


def test_an_array_that_is_used_again_may_be_written_to(backend):
    def source():
        buffer = np.zeros(1)
        for i in range(4):
            buffer[:] = i
            yield buffer

    assert values(backend.prefetch(source(), "gpu:0")) == [[0.0], [1.0], [2.0], [3.0]]


def test_too_little_memory_is_the_error_of_the_batch_that_does_not_fit(backend, monkeypatch):
    def before_copy(number):
        if number == 1:
            raise torch.OutOfMemoryError("full")

    backend.before_copy = before_copy
    batches = backend.prefetch([torch.ones(1), torch.ones(1)], "gpu:0")
    next(batches)
    with pytest.raises(OutOfDeviceMemoryError, match="gpu:0"):
        next(batches)


def test_what_is_no_tensor_is_named(backend):
    with pytest.raises(UnsupportedValueError, match=r"meta\.0"):
        next(backend.prefetch([{"x": torch.ones(1), "meta": [open]}], "gpu:0"))


def test_without_depth_nothing_is_copied_aside(backend, driver):
    assert values(backend.prefetch([torch.ones(1)], "gpu:0", depth=0)) == [[1.0]]
    assert driver.log == []


def test_to_the_cpu_nothing_is_copied_aside(backend, driver):
    assert values(backend.prefetch([torch.ones(1)], "cpu")) == [[1.0]]
    assert driver.log == []


def test_what_is_pinned_is_not_pinned_again():
    x = torch.ones(1)
    x.is_pinned = lambda: True
    assert prefetching.pinned(x) is x
