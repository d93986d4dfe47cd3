"""D2L 6.7.2.1, "Storage on the GPU": blocks of generators and tasks, which may end in any order."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

import d2ldev
from d2ldev import DeviceMismatchError, ScopeError
from d2ldev._backend import framework_of
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.2.1"


def enter(*blocks) -> Iterator[None]:
    """Return a generator that is inside of blocks."""

    def generate():
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block)
            yield

    generator = generate()
    next(generator)
    return generator


def in_a_thread(function) -> Exception | None:
    """Call a function in another thread; return its error."""
    errors: list[Exception] = []

    def run():
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def places_of(backend):
    """Return where d2ldev's calls put a tensor now, and where the framework's own do."""
    return backend.device_of(backend.ones(1)), backend.default_device()


@requirement("scopes.any-order", section=SECTION)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
def test_blocks_of_generators_end_in_any_order(backend, route, order):
    before = places_of(backend)
    generators = [enter(backend.on(place), backend.strict()) for place in (*route, "cpu")]
    for number in order:
        generators[number].close()
    assert places_of(backend) == before
    assert not framework_of(backend).state.strictness.in_force()


@requirement("scopes.tasks", section=SECTION)
def test_blocks_of_tasks_that_wait_in_them_end_in_any_order(backend, route):
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


@requirement("scopes.async-generators", section=SECTION)
def test_a_block_of_a_generator_that_another_task_closes_has_ended(backend, place):
    async def generate():
        with backend.on(place), backend.strict(), d2ldev.use_backend("reference"):
            yield

    async def close_in_another_task():
        generator = generate()
        await anext(generator)
        await asyncio.create_task(generator.aclose())
        return places_of(backend), d2ldev.backend.name

    before = places_of(backend), d2ldev.backend.name
    assert asyncio.run(close_in_another_task()) == before
    assert not framework_of(backend).state.strictness.in_force()


@requirement("scopes.left-by-break", section=SECTION)
def test_a_block_of_an_async_generator_that_is_left_by_break_ends(backend, place):
    async def generate():
        with backend.on(place), backend.strict():
            yield

    async def leave():
        async for _ in generate():
            break
        for _ in range(5):  # the loop closes the generator in one of its next turns
            await asyncio.sleep(0)
        return places_of(backend), framework_of(backend).state.strictness.in_force()

    before = places_of(backend)
    assert asyncio.run(leave()) == (before, False)


@requirement("scopes.other-threads", section=SECTION)
def test_a_block_that_is_closed_in_another_thread_has_ended(backend, place):
    before = places_of(backend)
    generator = enter(backend.on(place))
    error = in_a_thread(generator.close)
    assert error is None or (isinstance(error, ScopeError) and "another thread" in str(error))
    assert places_of(backend) == before


@requirement("scopes.devices-in-other-threads", section=SECTION)
def test_a_device_whose_block_is_closed_in_another_thread_is_left(backend, place):
    with d2ldev.use_backend(backend):
        before = places_of(backend)
        generator = enter(place)
        error = in_a_thread(generator.close)
        assert error is None or isinstance(error, ScopeError)
        assert places_of(backend) == before


@requirement("scopes.use-backend-in-other-threads", section=SECTION)
def test_use_backend_that_is_closed_in_another_thread_has_ended(backend):
    with d2ldev.use_backend(backend):
        generator = enter(d2ldev.use_backend("reference"))
        assert in_a_thread(generator.close) is None
        assert d2ldev.backend.name == backend.name


@requirement("strict.other-threads-close-it", section=SECTION)
def test_a_strict_block_that_is_closed_in_another_thread_has_ended(backend, route):
    x, y = (backend.ones(2, device=place) for place in route)
    generator = enter(backend.strict())
    with pytest.raises(DeviceMismatchError):
        x + y
    assert in_a_thread(generator.close) is None
    assert not framework_of(backend).state.strictness.in_force()


@requirement("scopes.blocks-of-the-framework", section=SECTION)
def test_a_block_that_ends_inside_one_of_the_frameworks_own_is_put_right(backend, route):
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
