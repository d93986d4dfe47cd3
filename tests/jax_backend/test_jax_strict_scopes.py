"""``strict()`` in JAX is of one thread or task, although what it changes in JAX is of all."""

import asyncio
import contextvars
import threading

import jax.numpy as jnp
import pytest
from processes import run_python

from d2ldev import DeviceMismatchError


@pytest.fixture
def mixing(backend):
    """A sum that JAX computes by moving an operand, as a function that says what happened."""
    x, free = backend.ones(3, device="gpu:1"), jnp.ones(3)

    def outcome():
        try:
            return str(backend.device_of(x + free))
        except DeviceMismatchError:
            return "raised"

    outcome()
    return outcome


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_mixes_as_before_and_its_calls_are_not_remembered(backend, mixing):
    with backend.strict():
        assert [in_a_thread(mixing) for _ in range(3)] == ["gpu:1"] * 3
        assert mixing() == "raised"
    assert mixing() == "gpu:1"


def test_a_block_in_another_thread_is_not_this_one_s(backend, mixing):
    def under_strict():
        with backend.strict():
            return mixing()

    assert in_a_thread(under_strict) == "raised"
    assert mixing() == "gpu:1"


def test_a_thread_that_is_given_the_context_is_in_the_block(backend, mixing):
    with backend.strict():
        context = contextvars.copy_context()
        assert in_a_thread(lambda: context.run(mixing)) == "raised"


def test_blocks_of_two_tasks_may_overlap_in_any_order(backend, mixing):
    async def strict(begun, end, found):
        with backend.strict():
            begun.set()
            await end.wait()
            found.append(mixing())
        found.append(mixing())

    async def run():
        begun, ends = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
        found = [[], []]
        tasks = [
            asyncio.create_task(strict(*each)) for each in zip(begun, ends, found, strict=True)
        ]
        for event in begun:
            await event.wait()
        outside = [mixing()]
        for task, end in zip(tasks, ends, strict=True):  # the first that began ends first
            end.set()
            await task
            outside.append(mixing())
        return found, outside

    found, outside = asyncio.run(run())
    assert found == [["raised", "gpu:1"]] * 2
    assert outside == ["gpu:1"] * 3


def test_a_block_in_a_generator_may_end_in_another_thread(backend, mixing):
    def generator():
        with backend.strict():
            yield mixing()

    running = generator()
    assert next(running) == "raised"
    in_a_thread(running.close)
    assert mixing() == "gpu:1"


def test_a_block_that_an_error_leaves_has_ended(backend, mixing):
    with pytest.raises(KeyError), backend.strict():
        raise KeyError
    assert mixing() == "gpu:1"


def test_the_whole_process_is_under_it_and_shows_the_translation():
    code = """
import threading, d2ldev, jax.numpy as jnp
backend = d2ldev.get_backend("jax")
x, free = backend.ones(3, device="gpu:1"), jnp.ones(3)
def mix():
    try:
        x + free
    except d2ldev.DeviceMismatchError as error:
        show(str(error))
mix()
thread = threading.Thread(target=mix)
thread.start()
thread.join()
"""
    shown = run_python(
        code, hide=(), environment={"D2LDEV_VIRTUAL_GPUS": "2", "D2LDEV_STRICT": "1"}
    )
    assert len(shown) == 2
    assert all("x on gpu:1, y on cpu" in text for text in shown)
