"""D2L 6.7.2: strict blocks of generators and tasks, which may end in any order.

Python may resume and close a generator in another thread or task. A block that is lost there stays
in force, or never is.
"""

from __future__ import annotations

import asyncio

import pytest

import d2ldev
from d2ldev import DeviceMismatchError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.blocks import enter, in_a_thread, places_of

SECTION = "6.7.2.1"
SOURCE = "contract, Blocks"


@requirement("scopes.any-order", section=SECTION)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)
def test_blocks_of_generators_end_in_any_order(backend, route, order):
    """End ``on`` and ``strict`` blocks of generators in any order."""
    before = places_of(backend)
    generators = [enter(backend.on(place), backend.strict()) for place in (*route, "cpu")]
    for number in order:
        generators[number].close()
    assert places_of(backend) == before
    assert not framework_of(backend).state.strictness.in_force()


@requirement("scopes.async-generators", section=SECTION, source="PEP 567")
def test_a_block_of_a_generator_that_another_task_closes_has_ended(backend, place):
    """End blocks of an asynchronous generator that another task closes."""

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


@requirement("scopes.left-by-break", section=SECTION, source="PEP 567")
def test_a_block_of_an_async_generator_that_is_left_by_break_ends(backend, place):
    """End blocks of an asynchronous generator that a loop leaves by ``break``.

    The event loop closes the generator later, in a context of its own.
    """

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


@requirement("strict.other-threads-close-it", section=SECTION)
def test_a_strict_block_that_is_closed_in_another_thread_has_ended(backend, route):
    """End a ``strict`` block that another thread closes.

    The garbage collector may close a generator in any thread.
    """
    x, y = (backend.ones(2, device=place) for place in route)
    generator = enter(backend.strict())
    with pytest.raises(DeviceMismatchError):
        x + y
    assert in_a_thread(generator.close) is None
    assert not framework_of(backend).state.strictness.in_force()
