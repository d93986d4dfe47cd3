"""D2L 6.7.2.3, "Side Notes", for frameworks that only record work until a value is needed.

``synchronize`` computes what was recorded, ``is_idle`` is False before, and errors come by then.
d2ldev's own calls leave nothing recorded. A framework that computes before it returns passes at
once.
"""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest

from d2ldev import DeviceLog
from d2ldev.framework import NotBegunError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import CREATORS
from d2ldev_conformance.suite.devices.queues import (
    LONG,
    becomes_idle,
    fill_queue,
    multiply,
    seconds_of_products,
)

SECTION = "6.7.2.3"
SOURCE = "contract, Lazy frameworks"

ROWS = 192
# Seconds of products that are much longer than a read of the result.
LONG_ENOUGH = 0.02
TRIES = 3
# Seconds of work: less than any queue has, also one that was measured on a busy machine.
SOME_WORK = LONG / 4


@pytest.fixture
def products(backend, place):
    """A matrix, and how many products of it take milliseconds."""
    x, number = backend.full((ROWS, ROWS), 1 / ROWS, device=place), 4
    seconds_of_products(backend, x, place, number)  # compiles
    while seconds_of_products(backend, x, place, number) < LONG_ENOUGH:
        number *= 2
    return x, number


@requirement("sync.values-are-there", section=SECTION)
def test_values_are_there_after_synchronize(backend, place, products):
    """Read a value after ``synchronize`` without computing it, however often.

    A timing would measure a part of the work, and a loop would compute twice.
    """
    x, number = products
    for _ in range(TRIES):  # another program may have its turn
        backend.synchronize(place)
        times = [time.perf_counter()]
        y = multiply(x, number)
        backend.synchronize(place)
        times.append(time.perf_counter())
        for _ in range(2):
            backend.to_numpy(y)
            times.append(time.perf_counter())
        computed, *read = np.diff(times)
        if max(read) < computed / 3:
            return
    pytest.fail(f"computed in {computed:.4f} s, and read in {read[0]:.4f} and {read[1]:.4f} s")


def _leave_work(backend, place, seconds, ask=lambda: None):
    """Queue work, and ask for some seconds; return the answers, and the seconds of work left."""
    _work, answers = fill_queue(backend, place), set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answers.add(ask())
        time.sleep(0.001)
    begin = time.perf_counter()
    backend.synchronize(place)
    return answers, time.perf_counter() - begin


@requirement("sync.asking-computes-nothing", section=SECTION)
def test_is_idle_leaves_recorded_work_as_it_is(backend, place):
    """Return False from ``is_idle`` as long as work is recorded, and compute none of it.

    The question would end the work about which it asks. What waits for ``is_idle`` would never see
    that a call leaves something recorded.
    """
    for _ in range(TRIES):  # another program may have its turn
        whole = min(_leave_work(backend, place, 0)[1] for _ in range(2))  # the first one compiles
        if whole < SOME_WORK:  # the framework computes before it returns
            return
        _, left = _leave_work(backend, place, 4 * whole)
        if left < SOME_WORK:  # it computes by itself
            return
        answers, left = _leave_work(backend, place, 4 * whole, lambda: backend.is_idle(place))
        if answers == {False} and left > SOME_WORK:
            return
    pytest.fail(f"is_idle answers {answers}, and leaves {left:.2f} of {whole:.2f} s of work")


@requirement("time.measures-the-work", section="6.7.5")
def test_timeit_measures_the_work_of_each_call(backend, place, products):
    """Measure in ``timeit`` the work of each call, also if its result is dropped.

    A framework that only records work would drop all calls of a run but the last one.
    """
    x, number = products
    for _ in range(TRIES):
        expected = seconds_of_products(backend, x, place, number) / number
        found = backend.timeit(lambda: x @ x, seconds=0).median
        if found > expected / 4:
            return
    pytest.fail(f"a product takes {expected:.6f} s, and timeit measures {found:.6f} s")


@requirement("sync.raises-late-errors", section=SECTION)
def test_an_error_of_recorded_work_comes_by_synchronize_and_once(backend, route):
    """Raise the error of a refused operation in it or in ``synchronize``, once.

    The work that was asked for before and after it is done. An error that is lost is a wrong value
    later. One that is raised again and again leaves nothing that can be measured.
    """
    x, y = (backend.ones(3, device=device) for device in route)
    beside = y + 1.0
    mixed, after = None, []
    try:
        mixed = x + y
        after = [x * 2.0, y * 2.0]
        backend.synchronize()
    except Exception:
        if after:  # it was synchronize that raised
            assert all(backend.is_idle(device) for device in route)
        backend.synchronize()
        assert backend.is_idle()
        if mixed is not None:  # a later read may not give values that were never computed
            for _ in range(2):
                with pytest.raises(Exception, match=r"."):
                    backend.to_numpy(mixed)
    else:  # the framework has brought one of them to the other
        assert backend.to_numpy(mixed).tolist() == [2.0] * 3
    assert [backend.to_numpy(each).tolist() for each in (beside, *after)] == [[2.0] * 3] * (
        1 + len(after)
    )


def _add_one(backend, device, shape=(3,)):
    x = backend.ones(shape, device=device)
    with suppress(Exception):  # not every framework adds to a scalar
        x = x + 1.0
    return x


def _log(backend, device):
    log = DeviceLog(backend)
    log.add(loss=_add_one(backend, device, ()))
    return log


def _make_mlp(backend, device):
    with suppress(NotBegunError):  # the tests of devices need nothing of the modules after them
        return backend.mlp([2, 3], device=device)
    return None


CALLS = {
    **CREATORS,
    "full of a tensor": lambda backend, device: backend.full((2, 3), _add_one(backend, device, ())),
    "another dtype": lambda backend, device: backend.asarray(
        _add_one(backend, device), dtype="int32"
    ),
    "copy": lambda backend, device: backend.copy(_add_one(backend, device)),
    "to": lambda backend, device: [
        backend.to(_add_one(backend, each), device)
        for each in backend.devices()
        if each is not device
    ],
    "stack": lambda backend, device: framework_of(backend).tensors.stack(
        [_add_one(backend, device)] * 2
    ),
    "mlp": _make_mlp,
    "log": _log,
}


@requirement("sync.calls-leave-nothing-recorded", section=SECTION)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_call_of_d2ldev_makes_is_computed_without_a_wait(backend, place, call):
    """Compute what d2ldev's own calls return, although nobody waits for it.

    A recorded copy would see later writes, and keep its source alive. A loop that logs would record
    without an end.
    """
    backend.synchronize()
    made = call(backend, device=place)
    assert becomes_idle(backend, place)
    del made
