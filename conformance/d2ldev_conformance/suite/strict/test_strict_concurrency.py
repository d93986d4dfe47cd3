"""``strict()`` is in force where it was entered: threads, tasks; and it leaves nothing behind.

A check that is installed for a block may reach other threads and tasks, and may stay after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from d2ldev import DeviceMismatchError
from d2ldev_conformance.leaks import functions_of_modules
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import outcome_of

SECTION = "6.7.2.2"
SOURCE = "contract, Blocks"


def _add(x, y):
    return x + y


@pytest.fixture
def elsewhere(backend, route):
    """Two tensors that are not on one device."""
    source, target = route
    return backend.ones((2, 2), device=source), backend.ones((2, 2), device=target)


@requirement("strict.leaves-other-threads-alone", section=SECTION)
def test_a_block_is_not_in_force_in_another_thread(backend, elsewhere):
    """Apply a block in its own thread, and in no other."""
    x, y = elsewhere
    before = outcome_of(backend, _add, x, y)
    with backend.strict(), ThreadPoolExecutor(1) as pool:
        during = pool.submit(outcome_of, backend, _add, x, y).result()
    assert during == before


@requirement("strict.threads", section=SECTION)
def test_blocks_of_threads_begin_and_end_in_any_order(backend, elsewhere):
    """End blocks of threads in any order.

    The thread that ends first must not switch the check off for the other.
    """
    x, y = elsewhere
    before = outcome_of(backend, _add, x, y)
    both_in, one_out = threading.Barrier(2, timeout=60), threading.Event()

    def first():
        with backend.strict():
            both_in.wait()
        one_out.set()
        return outcome_of(backend, _add, x, y)

    def second():
        with backend.strict():
            both_in.wait()
            assert one_out.wait(60)
            with pytest.raises(DeviceMismatchError):
                x + y
        return outcome_of(backend, _add, x, y)

    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(run) for run in (first, second)]
        assert [outcome.result(60) for outcome in outcomes] == [before, before]


@requirement("strict.tasks", section=SECTION, source="PEP 567")
def test_blocks_of_tasks_do_not_reach_each_other(backend, elsewhere):
    """Apply a block in its own asyncio task, and in no other."""
    x, y = elsewhere
    before = outcome_of(backend, _add, x, y)

    async def strict(entered: asyncio.Event, leave: asyncio.Event):
        with backend.strict():
            entered.set()
            await leave.wait()
            with pytest.raises(DeviceMismatchError):
                x + y
        return outcome_of(backend, _add, x, y)

    async def both():
        entered, leave = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
        tasks = [
            asyncio.create_task(strict(*events)) for events in zip(entered, leave, strict=True)
        ]
        for event in entered:
            await event.wait()
        outside = outcome_of(backend, _add, x, y)
        found = []
        for event, task in zip(leave, tasks, strict=True):
            event.set()
            found.append(await task)
        return [outside, *found]

    assert asyncio.run(both()) == [before] * 3


@requirement("strict.generators", section=SECTION)
def test_a_block_in_a_generator_may_end_after_a_later_one(backend, elsewhere):
    """Keep a block in force when an earlier block of a generator ends."""
    x, y = elsewhere
    before = outcome_of(backend, _add, x, y)

    def block():
        with backend.strict():
            yield

    first, second = block(), block()
    next(first)
    next(second)
    first.close()
    with pytest.raises(DeviceMismatchError):
        x + y
    second.close()
    assert outcome_of(backend, _add, x, y) == before


@requirement("strict.leaves-nothing-patched", section=SECTION)
@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["", "error"])
def test_every_function_of_every_module_is_the_one_it_was(backend, error):
    """Leave each function of each module as it was after a block.

    A replaced function slows down the whole process, and breaks other libraries.
    """
    backend.ones(2) + backend.ones(2)
    before = functions_of_modules(sys.modules)
    with contextlib.suppress(ZeroDivisionError), backend.strict(), backend.strict():
        backend.ones(2) + backend.ones(2)
        if error:
            raise error
    after = functions_of_modules(sys.modules)
    assert [name for name, value in before.items() if after.get(name) is not value] == []
