"""``timeit`` and ``Timer``: times that include what was queued."""

import pickle
import threading
import time
import weakref

import pytest
from reference_backend import ReferenceDevices, ReferenceFramework

import d2ldev
from d2ldev import DeviceUnavailableError, OutOfDeviceMemoryError, Timer
from d2ldev.framework.testing import framework_of
from d2ldev.results import Timing


class Reading(ReferenceDevices):
    """Devices whose work is only done when it is waited for."""

    def __init__(self, virtual_gpus):
        super().__init__(virtual_gpus)
        self.waited = 0
        self.last = self.last_but_one = 0.0

    def synchronize(self, device):
        self.waited += 1
        self.last_but_one, self.last = self.last, time.monotonic()


@pytest.fixture
def backend():
    framework = ReferenceFramework(virtual_gpus=1)
    framework.devices = Reading(1)
    return d2ldev.Backend(framework)


def test_every_device_is_waited_for_before_and_after_each_run(backend):
    backend.timeit(lambda: None, seconds=0)
    before = framework_of(backend).devices.waited
    found = backend.timeit(lambda: time.sleep(0.006), seconds=0)
    runs_that_are_not_counted = 2
    runs = found.runs + runs_that_are_not_counted
    assert framework_of(backend).devices.waited - before == 2 * runs * len(found.devices)


def test_a_timing_can_be_pickled_and_hashed(backend):
    found = backend.timeit(lambda: None, seconds=0)
    assert pickle.loads(pickle.dumps(found)) in {found}


def test_a_device_that_does_not_wait_is_not_timed(backend, monkeypatch):
    to_numpy = framework_of(backend).tensors.to_numpy
    devices = framework_of(backend).devices

    def read_late(x):
        # Longer than the products took, however busy the machine is.
        time.sleep(0.1 + 2 * (devices.last - devices.last_but_one))
        return to_numpy(x)

    monkeypatch.setattr(framework_of(backend).tensors, "to_numpy", read_late)
    with pytest.raises(DeviceUnavailableError, match="time what cpu computes: its synchronize"):
        backend.timeit(lambda: None, seconds=0)


def test_the_result_of_a_call_is_kept_until_its_device_was_waited_for(backend, monkeypatch):
    class Result:
        pass

    made, held = [], []

    def function():
        result = Result()
        made.append(weakref.ref(result))
        time.sleep(0.006)
        return result

    def synchronize(device):
        held.append(made[-1]() is not None if made else True)

    backend.timeit(function, seconds=0)  # ``synchronize`` is tried first
    monkeypatch.setattr(framework_of(backend).devices, "synchronize", synchronize)
    made.clear()
    backend.timeit(function, seconds=0)
    # Before each run and after it, and the CPU and a GPU each.
    assert held[2:4] == [True, True]
    assert held[6::4] == [True] * len(held[6::4])


class Dropping(ReferenceDevices):
    """Devices that compute only what somebody holds when they are waited for."""

    def __init__(self, virtual_gpus):
        super().__init__(virtual_gpus)
        self.recorded = weakref.WeakSet()
        self.computed = 0

    def synchronize(self, device):
        for each in list(self.recorded):
            self.computed += 1
            time.sleep(each.seconds)
        self.recorded.clear()


class Recorded:
    """A matrix whose products are only recorded."""

    def __init__(self, devices, seconds=0.0):
        self.devices, self.seconds = devices, seconds
        devices.recorded.add(self)

    def __matmul__(self, other):
        return Recorded(self.devices, other.seconds + 2e-3)


def test_each_call_of_a_framework_that_drops_what_nobody_holds_is_computed(monkeypatch):
    framework = ReferenceFramework(virtual_gpus=0)
    framework.devices = devices = Dropping(0)
    monkeypatch.setattr(framework.tensors, "full", lambda *_: Recorded(devices))
    monkeypatch.setattr("d2ldev.operations.timing.to_numpy", lambda *_: None)
    x = Recorded(devices)
    found = d2ldev.Backend(framework).timeit(lambda: x @ x, seconds=0)
    assert found.low > 2e-3


class Compiling(Dropping):
    """Devices that compute all that was asked for, the first time slowly."""

    def __init__(self, virtual_gpus):
        super().__init__(virtual_gpus)
        self.recorded = []
        self.waits = 0

    def synchronize(self, device):
        self.waits += 1
        time.sleep((0.2 if self.computed == 0 else 0.02) if self.recorded else 0.0)
        self.computed += len(self.recorded)
        self.recorded.clear()


class Queued:
    """A matrix whose products are computed, whether or not somebody holds them."""

    def __init__(self, devices):
        self.devices = devices

    def __matmul__(self, other):
        self.devices.recorded.append(None)
        return self


def test_a_framework_that_computes_its_first_products_slowly_drops_nothing(monkeypatch):
    framework = ReferenceFramework(virtual_gpus=0)
    framework.devices = devices = Compiling(0)
    monkeypatch.setattr(framework.tensors, "full", lambda *_: Queued(devices))
    monkeypatch.setattr("d2ldev.operations.timing.to_numpy", lambda *_: None)
    found = d2ldev.Backend(framework).timeit(lambda: None, seconds=0)
    assert found.calls > 100  # of a run
    assert devices.waits < 100


def test_memory_that_runs_out_in_a_wait_is_an_error_of_the_family(backend, monkeypatch):
    def synchronize(device):
        raise MemoryError("2 GiB are wanted")

    monkeypatch.setattr(framework_of(backend).devices, "synchronize", synchronize)
    with pytest.raises(OutOfDeviceMemoryError, match=r"synchronize gpu:0.*2 GiB are wanted"):
        backend.synchronize("gpu:0")


def test_errors_of_the_function_are_raised(backend):
    with pytest.raises(ZeroDivisionError):
        backend.timeit(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("median", "text"),
    [(2.5, "2.5 s"), (2.5e-3, "2.5 ms"), (2.5e-6, "2.5 us"), (2.5e-9, "2.5 ns"), (0.0, "0 ns")],
)
def test_a_time_is_shown_in_its_unit(median, text):
    timing = Timing(median, median, median, 5, 1, (d2ldev.cpu(),))
    assert repr(timing).startswith(f"<{text} (")
    assert repr(timing).endswith("5 runs, cpu>")


def test_a_timer_records_what_lies_between_start_and_stop(backend, monkeypatch):
    clock = iter([1.0, 2.0, 5.0, 9.0])
    monkeypatch.setattr("d2ldev.training.timer.time.perf_counter", lambda: next(clock))
    timer = Timer(backend)
    assert timer.stop() == 1.0
    timer.start()
    assert timer.stop() == 4.0
    assert (timer.times, timer.sum(), timer.avg(), timer.cumsum()) == ([1, 4], 5, 2.5, [1, 5])
    assert framework_of(backend).devices.waited == 4 * len(backend.devices())


def test_a_timer_without_times_has_no_mean(backend):
    assert str(Timer(backend).avg()) == "nan"


def test_threads_time_at_once(backend):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(backend.timeit(int, seconds=0)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [timing.runs for timing in found] == [5] * 4
