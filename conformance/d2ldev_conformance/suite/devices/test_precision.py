"""The precision of float32 products: as a setting, in a block, and in training.

GPUs may multiply float32 with 10 bits or 7, and each framework has another default. Results can
only be compared at a known precision.

The suite runs at ``'highest'``. Frameworks begin with other precisions, and a GPU's TensorFloat-32
has 10 bits, where float32 has 23.
"""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from d2ldev import Trainer, UnsupportedValueError
from d2ldev.options import MATMUL_PRECISIONS
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.1"
SOURCE = "contract, How precise are products?"
ROUNDING = 1e-6
"""How far a product of float32 may be off, of the sum of its terms without their signs: some
roundings of 6e-8. TensorFloat-32 rounds each factor by up to 5e-4."""
WIDTH = 128

precisions = pytest.mark.parametrize("precision", MATMUL_PRECISIONS)
orders = pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)], ids=str)


def matrices():
    random = np.random.default_rng(0)
    return [random.standard_normal((WIDTH, WIDTH)).astype("float32") for _ in range(2)]


def error_of_product(backend, place):
    """Return by how much a product is off at most, of the sum of its terms without their signs."""
    x, y = matrices()
    with backend.on(place):
        found = backend.to_numpy(backend.asarray(x) @ backend.asarray(y))
    exact, size = x.astype("float64") @ y, np.abs(x).astype("float64") @ np.abs(y)
    return np.max(np.abs(found - exact) / size)


def is_at_least(found, precision):
    """Tell whether a precision is as good as another one."""
    return MATMUL_PRECISIONS.index(found) <= MATMUL_PRECISIONS.index(precision)


def enter(backend, precision):
    """Return a generator that is in a block."""

    def generate():
        with backend.matmul_precision(precision):
            yield

    generator = generate()
    next(generator)
    return generator


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def others(backend):
    """Each precision, and what the framework has in force when it is asked for."""
    found = {}
    for precision in MATMUL_PRECISIONS:
        with backend.matmul_precision(precision) as found[precision]:
            pass
    return found


@requirement("precision.is-accepted", section=SECTION)
@precisions
def test_every_precision_is_accepted_on_every_device(backend, place, precision):
    """Accept each precision on each device, and compute at least as precisely.

    A device without fewer bits computes in float32, and needs no special case.
    """
    x = backend.ones((2, 2), device=place)
    with backend.on(place), backend.matmul_precision(precision) as found:
        assert is_at_least(found, precision)
        assert backend.matmul_precision() == found
        product = x @ x
    assert backend.device_of(product) is place
    assert backend.to_numpy(product).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@requirement("precision.highest-is-float32", section=SECTION)
def test_a_product_in_the_highest_precision_is_that_of_float32(backend, place):
    """Multiply matrices in float32 at ``'highest'``, up to rounding errors of float32."""
    with backend.matmul_precision("highest"):
        assert error_of_product(backend, place) < ROUNDING


@requirement("precision.is-checked", section=SECTION)
@pytest.mark.parametrize("precision", ["float32", "HIGHEST", "", 1, True, ["highest"]], ids=repr)
def test_an_invalid_precision_is_refused_with_the_choices(backend, precision):
    """Refuse an unknown precision with the list of choices, and change nothing.

    A misspelt precision that is ignored gives other digits without a sign.
    """
    before = backend.matmul_precision()
    with pytest.raises(UnsupportedValueError, match="'highest', 'high', 'medium'"):
        backend.matmul_precision(precision)
    with pytest.raises(UnsupportedValueError, match="'highest', 'high', 'medium'"):
        Trainer(1, backend=backend, matmul_precision=precision)
    assert backend.matmul_precision() == before


@requirement("precision.is-put-back", section=SECTION)
@precisions
def test_a_block_restores_the_setting_also_after_an_exception(backend, precision):
    """Restore the earlier precision at the end of a block, also after an error.

    A library that needs one precision must not change its caller's.
    """
    before = backend.matmul_precision()
    with pytest.raises(ZeroDivisionError), backend.matmul_precision(precision):
        1 / 0  # noqa: B018
    assert backend.matmul_precision() == before


@requirement("precision.is-set", section=SECTION)
def test_a_call_without_a_block_stays_in_force(backend, others):
    """Keep a precision that is set without a block in force until the next one.

    A program sets it once at its beginning.
    """
    found = []
    with backend.matmul_precision("highest"):
        for precision in (*MATMUL_PRECISIONS, "highest"):
            backend.matmul_precision(precision)
            found.append(backend.matmul_precision())
        backend.matmul_precision("medium")
    assert found == [*others.values(), "highest"]
    assert backend.matmul_precision() == "highest"  # as in all of the suite


@requirement("precision.blocks-nest", section=SECTION)
def test_blocks_nest(backend, others):
    """Restore the outer block's precision at the end of an inner one.

    Functions with blocks call one another.
    """
    found = []
    with backend.matmul_precision("medium"):
        block = backend.matmul_precision("highest")
        with block, backend.matmul_precision("high"), block:
            found.append(backend.matmul_precision())
        found.append(backend.matmul_precision())
    assert found == ["highest", others["medium"]]


@requirement("precision.any-order", section=SECTION, source="contract, Blocks")
@orders
def test_blocks_of_generators_end_in_any_order(backend, others, order):
    """Restore the right precision when blocks of generators end in any order.

    Data pipelines suspend generators, and Python closes them when it likes.
    """
    before = backend.matmul_precision()
    left = ["medium", "highest", "high"]
    generators = dict(enumerate([enter(backend, precision) for precision in left]))
    for number in order:
        generators.pop(number).close()
        inside = others[left[max(generators)]] if generators else before
        assert backend.matmul_precision() == inside


@requirement("precision.settings-end", section=SECTION)
@orders
def test_a_setting_ends_with_its_block(backend, order):
    """Undo a precision that is set within a block when the block ends.

    Otherwise a block would leave the setting of a function that it called.
    """
    generators = []
    for precision in ("medium", "highest", "high"):
        generators.append(enter(backend, precision))
        backend.matmul_precision("medium")
    for number in order:
        generators[number].close()
    assert backend.matmul_precision() == "highest"


@requirement("precision.tasks", section=SECTION, source="contract, Blocks")
def test_blocks_of_tasks_end_in_any_order(backend):
    """Restore the precision after blocks of asyncio tasks that overlap.

    Tasks take turns inside of their blocks.
    """

    async def wait_in(precision, inside, leave):
        with backend.matmul_precision(precision):
            inside.set()
            await leave.wait()

    async def both():
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
        tasks = []
        for precision, (inside, leave) in zip(("medium", "high"), events, strict=True):
            tasks.append(asyncio.create_task(wait_in(precision, inside, leave)))
            await inside.wait()
        for task, (_, leave) in zip(tasks, events, strict=True):
            leave.set()
            await task

    before = backend.matmul_precision()
    asyncio.run(both())
    assert backend.matmul_precision() == before


@requirement("precision.threads", section=SECTION, source="contract, Blocks")
def test_blocks_of_threads_leave_nothing_behind(backend):
    """Restore the precision after blocks of threads that overlap.

    The switch belongs to the process, and the last block has to find the first value.
    """
    before = backend.matmul_precision()
    inside, leave = threading.Event(), threading.Event()

    def wait_in():
        with backend.matmul_precision("medium"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=wait_in)
    thread.start()
    inside.wait()
    with backend.matmul_precision("high"):
        leave.set()
        thread.join()
    assert [backend.matmul_precision(), in_a_thread(backend.matmul_precision)] == [before] * 2


@requirement("precision.setting-in-every-thread", section=SECTION)
def test_a_setting_holds_in_every_thread(backend, others):
    """Apply a precision that is set to every thread.

    Some frameworks keep the switch for each thread, and workers would compute differently.
    """
    backend.matmul_precision("medium")
    found = [backend.matmul_precision(), in_a_thread(backend.matmul_precision)]
    backend.matmul_precision("highest")
    assert found == [others["medium"]] * 2
    assert in_a_thread(backend.matmul_precision) == "highest"
