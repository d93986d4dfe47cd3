"""Waiting for what was queued: JAX computes after it has returned, on the CPU as well."""

import threading

import jax
import jax.numpy as jnp
import pytest
from d2ldev_jax import queue

from d2ldev import Memory


@pytest.fixture
def work(backend):
    """Queues products on a device, in this thread; their results."""
    xs = {place: backend.rand((1024, 1024), seed=0, device=place) for place in backend.devices()}
    for x in xs.values():
        (x @ x).block_until_ready()  # compiled

    def queue_work(device, count=16):
        return [xs[backend.device(device)] @ xs[backend.device(device)] for _ in range(count)]

    yield queue_work
    backend.synchronize()


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1"])
def test_waiting_is_over_when_all_results_are_there(backend, work, device):
    results = work(device)
    assert not backend.is_idle(device)
    backend.synchronize(device)
    assert backend.is_idle(device)
    assert all(x.is_ready() for x in results)


def test_work_whose_results_nobody_took_is_waited_for(backend, work):
    del work("gpu:0")[:-1]
    assert not backend.is_idle("gpu:0")
    backend.synchronize("gpu:0")
    assert backend.is_idle("gpu:0")


def test_another_device_is_not_waited_for(backend, work):
    results = work("gpu:0", 32)
    backend.synchronize("gpu:1")
    assert backend.is_idle("gpu:1")
    assert not results[-1].is_ready()
    assert not backend.is_idle()


def test_another_thread_s_results_are_waited_for(backend, work):
    results = []
    thread = threading.Thread(target=lambda: results.extend(work("gpu:0")))
    thread.start()
    thread.join()
    assert not backend.is_idle("gpu:0")
    backend.synchronize()
    assert all(x.is_ready() for x in results)


def test_an_array_that_was_deleted_is_no_hindrance(backend, work):
    for x in work("gpu:0"):
        x.delete()
    backend.synchronize("gpu:0")
    assert backend.is_idle("gpu:0")


def test_a_computation_that_failed_is_done(backend):
    # Past d2ldev, which would have refused it.
    failed = jax.random.uniform(jax.random.key(0), (2**46,))
    backend.synchronize()
    assert backend.is_idle()
    with pytest.raises(RuntimeError, match="Out of memory"):
        failed.block_until_ready()


def test_asking_does_not_wait_for_long(backend, work, monkeypatch):
    monkeypatch.setattr(queue, "_PATIENCE", 0)
    results = work("gpu:0", 32)
    assert not backend.is_idle("gpu:0")
    assert not results[-1].is_ready()


def test_what_jax_says_of_a_device_s_memory_is_passed_on(backend, monkeypatch):
    class Native:
        def memory_stats(self):
            return {"bytes_in_use": 1, "peak_bytes_in_use": 2, "bytes_limit": 3, "num_allocs": 4}

    monkeypatch.setattr(backend, "_native", lambda device: Native())
    assert backend.memory("gpu:0") == Memory(1, 2, 3)


def test_waiting_inside_of_jit_is_harmless(backend):
    def f(x):
        backend.synchronize()
        return x + 1

    assert jax.jit(f)(jnp.ones(1)).tolist() == [2]
