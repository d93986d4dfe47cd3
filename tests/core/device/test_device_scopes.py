"""``with device:``: the place of new tensors, for a block of one thread or task."""

import asyncio
import threading

import pytest

import d2ldev
from d2ldev import cpu, gpu
from d2ldev.framework.testing import framework_of


def find_device():
    """Return the device on which a tensor is made now."""
    return d2ldev.backend.device_of(d2ldev.backend.zeros(1))


def test_with_gives_the_device():
    with gpu(1) as device:
        assert device is gpu(1)


def test_nested_blocks_come_back_one_by_one():
    places = []
    with gpu(0):
        with gpu(1):
            with cpu():
                places.append(find_device())
            places.append(find_device())
        places.append(find_device())
    assert places == [cpu(), gpu(1), gpu(0)]


def test_a_device_can_be_entered_inside_its_own_block():
    with gpu(1):
        with gpu(1):
            pass
        assert find_device() is gpu(1)


def test_an_exception_leaves_the_block():
    with pytest.raises(ZeroDivisionError), gpu(1):
        raise ZeroDivisionError
    assert find_device() is cpu()


def test_a_device_that_does_not_exist_cannot_be_entered():
    with pytest.raises(d2ldev.DeviceUnavailableError, match="gpu:7"), gpu(7):
        pass
    assert find_device() is cpu()


def test_the_block_is_that_of_the_backend_that_was_active_on_entering(reference):
    other = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=2))
    with gpu(1), d2ldev.use_backend(other):
        assert find_device() is cpu()


def test_a_block_is_left_in_the_backend_in_which_it_was_entered(reference):
    other = d2ldev.Backend(type(framework_of(reference))(virtual_gpus=2))
    device = gpu(1)
    device.__enter__()
    with d2ldev.use_backend(other):
        device.__exit__(None, None, None)
    assert find_device() is cpu()


def test_a_thread_does_not_see_the_block_of_another():
    places = []
    with gpu(1):
        thread = threading.Thread(target=lambda: places.append(find_device()))
        thread.start()
        thread.join()
    assert places == [cpu()]


def test_asyncio_tasks_have_blocks_of_their_own():
    async def task(device, entered, others):
        with device:
            entered.set()
            await others.wait()
            return find_device()

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(
            task(gpu(0), first, second),
            task(gpu(1), second, first),
        )

    assert asyncio.run(both()) == [gpu(0), gpu(1)]


def test_an_asyncio_task_starts_with_the_block_in_which_it_was_made():
    async def task():
        return find_device()

    async def main():
        with gpu(1):
            inner = asyncio.create_task(task())
        return await inner, find_device()

    assert asyncio.run(main()) == (gpu(1), cpu())


def test_native_is_the_active_backend_s_own_device(reference):
    assert gpu(1).native is reference.native("gpu:1")
