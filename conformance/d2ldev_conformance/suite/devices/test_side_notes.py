"""D2L 6.7.2.3, "Side Notes": work is queued, transfers are slow, threads are many.

GPUs compute after a call has returned, and several threads share them. Timings and results are only
right if waiting is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import d2ldev
from d2ldev import DeviceUnavailableError, InvalidDeviceError, UnsupportedValueError
from d2ldev.framework import Memory
from d2ldev.framework.testing import framework_of
from d2ldev.registry import selection
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same
from d2ldev_conformance.suite.devices.queues import LONG, fill_queue

SECTION = "6.7.2.3"
SOURCE = "contract"


@requirement("sync.every-device", section=SECTION)
def test_synchronize_takes_no_device_for_all(backend):
    """Wait for all devices in ``synchronize()``, and then report them idle.

    A timing of the whole program ends with this call.
    """
    assert backend.synchronize() is None
    assert backend.is_idle()


@requirement("sync.one-device", section=SECTION)
def test_synchronize_takes_a_device(backend, place):
    """Wait for one device in ``synchronize(device)``, with right results afterwards.

    Other GPUs can go on with their work.
    """
    x = backend.ones((8, 8), device=place)
    y = x @ x
    assert backend.synchronize(place) is None
    assert backend.is_idle(place)
    np.testing.assert_array_equal(backend.to_numpy(y), np.full((8, 8), 8.0, "float32"))


@requirement("time.every-call", section="6.7.5", source="D2L")
def test_timeit_waits_for_all_devices_between_runs(backend):
    """Wait for all devices between the runs of ``timeit``, and report ordered quartiles.

    Without waiting, a timing measures the launch of the work alone.
    """
    calls = []
    x = backend.ones((8, 8))
    found = backend.timeit(lambda a, b: calls.append(a @ b), x, b=x, seconds=0)
    assert len(calls) > found.runs * found.calls
    assert found.runs >= 5
    assert 0 < found.low <= found.median <= found.high
    assert found.devices == tuple(backend.devices())
    assert backend.is_idle()


@requirement("time.what-can-be-called", section="6.7.5")
@pytest.mark.parametrize(
    ("function", "seconds"), [(None, 1), (3, 1), (int, -1), (int, "1"), (int, float("nan"))]
)
def test_invalid_arguments_of_timeit_are_refused(backend, function, seconds):
    """Refuse in ``timeit`` an object that cannot be called, and invalid seconds.

    The error should come before minutes of measurements.
    """
    with pytest.raises(UnsupportedValueError, match="time"):
        backend.timeit(function, seconds=seconds)


@requirement("sync.missing-device", section=SECTION)
@pytest.mark.parametrize("method", ["synchronize", "is_idle"])
def test_waiting_for_a_missing_device_is_an_error(backend, missing, method):
    """Refuse to wait for a device that does not exist.

    An immediate return would look like finished work.
    """
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        getattr(backend, method)(missing)


@requirement("sync.bad-device", section=SECTION)
@pytest.mark.parametrize("method", ["synchronize", "is_idle"])
def test_waiting_for_an_invalid_device_is_an_error(backend, method):
    """Refuse to wait for a text that does not name a device.

    A misspelt device would look idle.
    """
    with pytest.raises(InvalidDeviceError):
        getattr(backend, method)("gpu:x")


@contextlib.contextmanager
def _keep_busy(backend, place):
    """Give a device work in its queue; skip where a framework computes before it returns."""
    backend.is_idle()  # the first question is compiled
    gc.disable()  # a collection may take as long as the products
    try:
        for _ in range(3):  # a busy machine may take its time once
            _work = fill_queue(backend, place)
            times = [time.perf_counter()]
            is_idle = backend.is_idle(place)
            times.append(time.perf_counter())
            if not is_idle:
                break
            backend.synchronize(place)
            times.append(time.perf_counter())
            asked, waited = np.diff(times)
            if max(asked, waited) < LONG / 2:
                reason = f"{backend.name} computes on {place} before it returns"
                pytest.skip(f"{reason}: no work is queued")
        else:
            pytest.fail(f"is_idle waits for {asked:.2f} s, synchronize for {waited:.2f} s")
        yield
    finally:
        gc.enable()


@requirement("sync.waits-for-queued-work", section=SECTION, source="JAX, asynchronous dispatch")
def test_synchronize_waits_for_the_work_of_a_device(backend, place):
    """Return from ``synchronize(device)`` only after the device's queued work.

    A device is not idle before, and ``is_idle`` does not wait. Every timing of GPU work rests on
    these two answers.
    """
    with _keep_busy(backend, place):
        assert not backend.is_idle(place)
        backend.synchronize(place)
        assert backend.is_idle(place)


@requirement("sync.waits-for-all-queued-work", section=SECTION, source="JAX, asynchronous dispatch")
def test_synchronize_without_a_device_waits_for_all(backend, place):
    """Return from ``synchronize()`` only after the queued work of each device."""
    with _keep_busy(backend, place):
        assert not backend.is_idle()
        backend.synchronize()
        assert backend.is_idle(place)
        assert backend.is_idle()


@requirement("memory.is-a-memory", section=SECTION)
def test_memory_is_bytes_or_none(backend, place):
    """Return ``Memory`` with numbers of bytes, or None for an unknown one.

    Frameworks know different parts of it, and a guess misleads.
    """
    memory = backend.memory(place)
    assert type(memory) is Memory
    assert all(value is None or (type(value) is int and value >= 0) for value in memory)


@requirement("memory.of-the-cpu", section=SECTION)
def test_the_memory_of_the_cpu_is_the_process_s(backend):
    """Report the resident memory of the process as the memory of the CPU.

    Programs watch it to find leaks on the host.
    """
    before = backend.memory("cpu")
    assert 0 < before.used < before.total
    x = np.ones(2**24, "float32")  # a framework may keep free memory of earlier tests
    assert backend.memory("cpu").used > before.used + 2**25
    assert x.shape == (2**24,)


@requirement("memory.empty-cache", section=SECTION)
def test_emptying_the_cache_leaves_the_tensors(backend, place, missing):
    """Give cached memory back in ``empty_cache`` without harm to tensors.

    Other programs on the card need the memory.
    """
    x = backend.ones(1000, device=place)
    backend.empty_cache(place)
    backend.empty_cache()
    assert backend.to_numpy(x).sum() == 1000
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        backend.empty_cache(missing)


def _of_size(backend, size, device):
    found = [x for x in backend.live_tensors(device) if x.shape == (size,)]
    return [(x.dtype, x.nbytes, x.device) for x in found]


@requirement("memory.live-tensors", section=SECTION, source="contract, What fills the GPU?")
def test_live_tensors_are_those_that_are_still_there(backend, place, missing):
    """List each living tensor once, the largest first, by device.

    The list has to name what fills a GPU.
    """
    assert _of_size(backend, 12347, place) == []
    x = backend.ones(12347, dtype="int32", device=place)
    here = [("int32", 4 * 12347, place)]
    assert _of_size(backend, 12347, place) == _of_size(backend, 12347, None) == here
    others = [device for device in backend.devices() if device is not place]
    assert [_of_size(backend, 12347, other) for other in others] == [[] for _ in others]
    sizes = [live.nbytes for live in backend.live_tensors(place)]
    assert sizes == sorted(sizes, reverse=True)
    assert tuple(x.shape) == (12347,)
    del x
    assert _of_size(backend, 12347, place) == []
    with pytest.raises(DeviceUnavailableError, match=str(missing)):
        backend.live_tensors(missing)


def _find_origins(backend, make):
    """Return the lines of the tensors that are made while Python traces memory, if they have any.

    A framework may reuse the memory of an object, and then Python sees no new memory. So more and
    more tensors are made. It skips where Python has seen the memory of none.
    """
    made, origins = [], []
    make()  # the first call imports and compiles, which takes ten times as long while it is traced
    tracemalloc.start(60)
    try:
        for count in (1, 10, 100, 1000):
            made += [make() for _ in range(count)]
            living = [live.made for live in backend.live_tensors() if live.shape == (1237,)]
            origins = [lines for lines in living if lines]
            if origins:
                return origins
        is_seen = any(tracemalloc.get_object_traceback(x) for x in made)
    finally:
        tracemalloc.stop()
    if not is_seen:
        pytest.skip(f"Python does not see the memory of tensors of {backend.name}")
    return []


@requirement(
    "memory.live-tensors-say-where-they-were-made",
    section=SECTION,
    source="contract, What fills the GPU?",
)
def test_a_live_tensor_says_which_lines_made_it_if_python_traces_memory(backend, place):
    """Name the lines that made a living tensor while Python traces memory.

    Only the line leads to the bug.
    """
    kept = []

    def make():
        kept.append(backend.ones(1237, device=place))
        return kept[-1]

    origins = _find_origins(backend, make)
    assert origins
    assert all(any(line.startswith(f"{__file__}:") for line in lines) for lines in origins)
    assert {live.made for live in backend.live_tensors(place)} == {()}


@requirement(
    "memory.live-tensors-end-with-the-users-line",
    section=SECTION,
    source="contract, What fills the GPU?",
)
@pytest.mark.parametrize("made", ["from a list", "by a number", "at random", "copied", "computed"])
def test_the_last_line_that_made_a_live_tensor_is_the_users(backend, place, made):
    """End the lines of a living tensor with the user's own line.

    Lines within d2ldev and the framework are the same for all tensors.
    """
    x = backend.zeros(1237, device=place)
    make = {
        "from a list": lambda: backend.asarray([2.0] * 1237, device=place),
        "by a number": lambda: backend.ones(1237, device=place),
        "at random": lambda: backend.rand(1237, seed=1, device=place),
        "copied": lambda: backend.copy(x, place),
        "computed": lambda: x + 1,
    }[made]
    origins = _find_origins(backend, make)
    assert {lines[-1].partition(":")[0] for lines in origins} == {__file__}


@requirement("memory.missing-device", section=SECTION)
@pytest.mark.parametrize("method", ["memory", "empty_cache", "live_tensors"])
def test_a_missing_device_has_no_memory(backend, missing, method):
    """Refuse to report or free the memory of a device that does not exist.

    A zero would look like an empty GPU.
    """
    with pytest.raises(DeviceUnavailableError):
        getattr(backend, method)(missing)


@requirement("threads.scopes-are-their-own", section=SECTION, source="contract, Blocks")
def test_a_scope_holds_in_its_own_thread_only(backend, route):
    """Apply an ``on`` block in the thread that entered it, and in no other.

    A background thread must not move its owner's tensors.
    """
    here, there = route
    with backend.on(there), ThreadPoolExecutor(1) as pool:
        outside = pool.submit(lambda: backend.device_of(backend.ones(1))).result()
        pool.submit(_in_a_scope, backend, here).result()
        inside = backend.device_of(backend.ones(1))
    assert (inside, outside) == (there, backend.cpu())


def _in_a_scope(backend, device):
    with backend.on(device):
        return backend.device_of(backend.ones(1))


@requirement("threads.scopes-of-tasks", section=SECTION, source="PEP 567")
def test_a_scope_holds_in_its_own_task_only(backend, route, monkeypatch):
    """Apply an ``on`` block in the asyncio task that entered it, and in no other.

    Tasks of one thread take turns in the middle of blocks.
    """
    first, second = route
    # The framework's own scope belongs to a thread, not to a task: d2ldev's scope is checked.
    monkeypatch.setattr(framework_of(backend).devices, "scope", lambda _: contextlib.nullcontext())

    async def task(device, entered, others):
        with backend.on(device):
            entered.set()
            await others.wait()
            return backend.device_of(backend.ones(1))

    async def both():
        a, b = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task(first, a, b), task(second, b, a))

    assert asyncio.run(both()) == [first, second]


@requirement("threads.scopes-of-generators", section=SECTION, source="contract, Blocks")
def test_a_scope_in_a_generator_ends_without_the_others(backend, route, monkeypatch):
    """End a generator's block without an effect on a block that began later.

    Blocks of generators do not end in the order of a stack.
    """
    first, second = route
    monkeypatch.setattr(framework_of(backend).devices, "scope", lambda _: contextlib.nullcontext())

    def generator():
        with backend.on(first):
            yield

    running = generator()
    next(running)
    with backend.on(second):
        running.close()
        inside = backend.device_of(backend.ones(1))
    assert (inside, backend.device_of(backend.ones(1))) == (second, backend.cpu())


@requirement("threads.copies-at-once", section=SECTION)
def test_many_threads_move_at_once(backend, place):
    """Move and copy right values while eight threads do so at once.

    Data loaders move batches in threads.
    """

    def there_and_back(value):
        batch = {"x": backend.full((64,), float(value), device="cpu"), "y": [value]}
        moved = backend.copy(backend.to(batch, place))
        return backend.to_numpy(backend.to(moved, "cpu")["x"])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(there_and_back, range(64)))
    for value, result in enumerate(results):
        assert_same(result, np.full(64, value, "float32"))


@requirement("threads.backend-is-their-own", section=SECTION, source="contract, Which backend")
def test_the_active_backend_is_a_threads_own(backend):
    """Apply ``use_backend`` in the thread that entered it, and in no other.

    Two threads may use two frameworks.
    """
    entered, left = threading.Event(), threading.Event()

    def other():
        with d2ldev.use_backend(backend):
            entered.set()
            left.wait(30)
            return d2ldev.backend.name

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(other)
        assert entered.wait(30)
        scoped = selection.scoped.value.get()
        left.set()
        assert future.result() == backend.name
    assert scoped is None


@requirement("threads.first-use", section=SECTION, source="contract, Which backend")
def test_many_threads_get_the_same_backend(backend):
    """Return one backend to many threads that ask for it first at once.

    Two backends of one framework would keep two states.
    """
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: d2ldev.get_backend(backend.name), range(64)))
    assert found == {backend}
