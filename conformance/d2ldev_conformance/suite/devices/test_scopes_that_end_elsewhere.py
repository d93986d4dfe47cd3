"""D2L 6.7.2.1, "Storage on the GPU": blocks of generators and tasks, which may end in any order.

Python may resume and close a generator in another thread or task. A block that is lost there leaves
the wrong device behind.
"""

from __future__ import annotations

import asyncio
import contextlib

import d2ldev
from d2ldev import ScopeError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.blocks import enter, in_a_thread, places_of

SECTION = "6.7.2.1"
SOURCE = "contract, Blocks"


@requirement("scopes.tasks", section=SECTION, source="PEP 567")
def test_blocks_of_tasks_that_wait_in_them_end_in_any_order(backend, route):
    """Restore the default device after blocks of asyncio tasks that overlap."""

    async def wait_in(place, inside, leave):
        with backend.on(place):
            inside.set()
            await leave.wait()

    async def both():
        events = [(asyncio.Event(), asyncio.Event()) for _ in route]
        tasks = []
        for place, (inside, leave) in zip(route, events, strict=True):
            tasks.append(asyncio.create_task(wait_in(place, inside, leave)))
            await inside.wait()
        for task, (_, leave) in zip(tasks, events, strict=True):
            leave.set()
            await task

    before = places_of(backend)
    asyncio.run(both())
    assert places_of(backend) == before


@requirement("scopes.other-threads", section=SECTION)
def test_a_block_that_is_closed_in_another_thread_has_ended(backend, place):
    """End an ``on`` block that another thread closes, or report a ``ScopeError``.

    The garbage collector may close a generator in any thread.
    """
    before = places_of(backend)
    generator = enter(backend.on(place))
    error = in_a_thread(generator.close)
    assert error is None or (isinstance(error, ScopeError) and "another thread" in str(error))
    assert places_of(backend) == before


@requirement("scopes.devices-in-other-threads", section=SECTION)
def test_a_device_whose_block_is_closed_in_another_thread_is_left(backend, place):
    """End a ``with device:`` block that another thread closes.

    Both forms of the block keep the same promise.
    """
    with d2ldev.use_backend(backend):
        before = places_of(backend)
        generator = enter(place)
        error = in_a_thread(generator.close)
        assert error is None or isinstance(error, ScopeError)
        assert places_of(backend) == before


@requirement("scopes.use-backend-in-other-threads", section=SECTION)
def test_use_backend_that_is_closed_in_another_thread_has_ended(backend):
    """End a ``use_backend`` block that another thread closes.

    A lost block would leave the wrong framework active.
    """
    with d2ldev.use_backend(backend):
        generator = enter(d2ldev.use_backend("reference"))
        assert in_a_thread(generator.close) is None
        assert d2ldev.backend.name == backend.name


@requirement("scopes.blocks-of-the-framework", section=SECTION)
def test_a_block_that_ends_inside_a_scope_of_the_framework_is_repaired(backend, route):
    """Repair the default device after a block that ends in the framework's own block.

    The framework's block restores the device that it found, which is out of date.
    """
    source, target = route
    before = places_of(backend)
    generator = enter(backend.on(source))
    with framework_of(backend).devices.scope(target):
        with contextlib.suppress(ScopeError):  # where the framework's block puts back what it found
            generator.close()
        inside = backend.device_of(backend.ones(1))
    with backend.on(target):
        pass
    assert inside is before[0]
    assert places_of(backend) == before
