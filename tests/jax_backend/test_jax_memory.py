"""``memory`` of CPU devices, which JAX does not count: what live arrays hold."""

import jax
import numpy as np

from d2ldev import cpu, gpu


def test_what_an_array_holds_is_counted_on_its_device_only(backend):
    before = {device: backend.memory(device).used for device in (cpu(), gpu(0), gpu(1))}
    x = backend.zeros((256, 1024), device="gpu:1")
    after = {device: backend.memory(device).used for device in before}
    assert {device: after[device] - before[device] for device in before} == {
        cpu(): 0,
        gpu(0): 0,
        gpu(1): x.nbytes,
    }
    del x
    assert backend.memory("gpu:1").used == before[gpu(1)]


def test_memory_that_arrays_share_is_counted_once(backend):
    x = backend.zeros((256, 1024), device="gpu:1")
    before = backend.memory("gpu:1").used
    same = jax.device_put(x, x.device)
    assert same is not x
    assert backend.memory("gpu:1").used == before


def test_a_deleted_array_holds_nothing(backend):
    before = backend.memory("gpu:1").used
    x = backend.zeros((256, 1024), device="gpu:1")
    x.delete()
    assert backend.memory("gpu:1").used == before


def test_each_device_has_its_part_of_an_array_that_is_spread(backend):
    mesh = jax.sharding.Mesh([backend.native("gpu:0"), backend.native("gpu:1")], "d")
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    before = [backend.memory(device).used for device in ("gpu:0", "gpu:1")]
    x = jax.device_put(np.zeros((2, 1024), "float32"), rows)
    after = [backend.memory(device).used for device in ("gpu:0", "gpu:1")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [x.nbytes // 2] * 2


def test_the_most_that_was_ever_held_is_not_known(backend):
    assert backend.memory("gpu:1").peak is None
    assert backend.memory("gpu:1").total is None
