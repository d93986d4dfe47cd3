"""Devices: GPUs that are counted without JAX, what is queued on a device, and what it holds."""

import os
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax import devices
from d2ldev_jax.devices import HardwareDevices

from d2ldev import (
    DeviceUnavailableError,
    Memory,
    MemoryPolicyWarning,
    UnsupportedValueError,
    cpu,
    gpu,
)
from d2ldev.operations import nvml

# -- counting --------------------------------------------------------------------------------------


@pytest.fixture
def drive(monkeypatch):
    """Makes the driver show three GPUs; or fail, if there is a problem to tell of."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(problem=""):
        def cards():
            if problem:
                raise DeviceUnavailableError("count", problem, "restart")
            return [nvml.Card(f"GPU-{index}", None) for index in range(3)]

        monkeypatch.setattr(nvml, "cards", cards)

    return install


@pytest.fixture
def plugin(monkeypatch):
    """Makes plugins of JAX for these platforms the ones that are installed; JAX has not begun."""
    monkeypatch.setattr(devices, "is_initialized", lambda: False)
    monkeypatch.setattr(devices.pkgutil, "iter_modules", lambda path: [])

    def install(*platforms):
        points = [SimpleNamespace(value=f"xla_{name}12") for name in platforms]
        monkeypatch.setattr(devices, "entry_points", lambda group: points)

    return install


@pytest.fixture
def allow(configure):
    """Sets the platforms that JAX may use."""
    return lambda platforms: configure("jax_platforms", platforms)


@pytest.fixture
def settled(monkeypatch):
    """The user has said how JAX takes memory."""
    monkeypatch.setenv("D2LDEV_GPU_MEMORY", "framework")


@pytest.mark.parametrize(("platforms", "count"), [(["cuda"], 3), (["tpu"], 0), ([], 0)])
def test_the_driver_s_gpus_are_counted_where_jax_has_a_plugin(
    drive, plugin, allow, settled, platforms, count
):
    drive()
    plugin(*platforms)
    allow(None)
    assert HardwareDevices().count() == count


@pytest.mark.parametrize(
    ("platforms", "count"),
    [("", 3), ("cuda", 3), ("gpu,cpu", 3), ("cpu", 0), ("cpu,tpu", 0), ("rocm", 0)],
)
def test_jax_platforms_is_followed(drive, plugin, allow, settled, platforms, count):
    drive()
    plugin("cuda")
    allow(platforms)
    assert HardwareDevices().count() == count


def test_jax_cuda_visible_devices_is_followed(drive, plugin, allow, settled, configure):
    drive()
    plugin("cuda")
    allow(None)
    configure("jax_cuda_visible_devices", "0,2")
    assert HardwareDevices().count() == 2


def test_a_driver_that_fails_is_an_error_with_the_reason(drive, plugin, allow, settled):
    drive("error 18")
    plugin("cuda")
    allow(None)
    with pytest.raises(DeviceUnavailableError, match="error 18"):
        HardwareDevices().count()


def test_a_driver_that_jax_would_not_use_may_fail_in_silence(drive, plugin, allow, settled):
    drive("error 18")
    plugin()
    allow(None)
    assert HardwareDevices().count() == 0


def test_rocm_is_asked_through_jax(plugin, allow, settled, monkeypatch, tmp_path):
    monkeypatch.setattr(nvml, "cards", lambda: None)
    plugin("rocm")
    allow(None)
    monkeypatch.setattr(devices, "ROCM_DRIVER", tmp_path)

    def local_devices(backend=None):
        if backend == "cuda":
            raise RuntimeError("Unknown backend cuda")
        return [f"{backend}:0"]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    found = HardwareDevices()
    assert found.count() == 1
    assert found.gpus() == ["rocm:0"]


# -- the memory policy -----------------------------------------------------------------------------

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.fixture
def untouched(monkeypatch, drive, plugin, allow):
    """A process that has three GPUs, and has said nothing of memory."""
    for name in (*devices.MEMORY_VARIABLES, "D2LDEV_GPU_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(PREALLOCATE, "")  # so that it is put back
    del os.environ[PREALLOCATE]
    drive()
    plugin("cuda")
    allow(None)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("D2LDEV_GPU_MEMORY", "grow", "false"),
        ("D2LDEV_GPU_MEMORY", "framework", None),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "true", "true"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5", None),
        ("XLA_CLIENT_MEM_FRACTION", ".5", None),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", None),
        ("CUDA_VISIBLE_DEVICES", "", None),
    ],
)
def test_jax_does_not_preallocate_unless_somebody_has_chosen(
    untouched, monkeypatch, name, value, expected
):
    monkeypatch.setenv(name, value)
    HardwareDevices()
    assert os.environ.get(PREALLOCATE) == expected


def test_without_a_gpu_nothing_is_set(untouched, allow):
    allow("cpu")
    HardwareDevices()
    assert PREALLOCATE not in os.environ


def test_memory_that_was_taken_already_is_warned_about(untouched, monkeypatch):
    monkeypatch.setattr(devices, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [f"{backend}:0"])
    with pytest.warns(MemoryPolicyWarning, match=PREALLOCATE):
        HardwareDevices()
    assert PREALLOCATE not in os.environ


def test_a_policy_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv("D2LDEV_GPU_MEMORY", "all")
    with pytest.raises(UnsupportedValueError, match="D2LDEV_GPU_MEMORY='all'"):
        HardwareDevices()


# -- JAX's default device --------------------------------------------------------------------------


@pytest.mark.parametrize("place", [cpu(), gpu(0), gpu(1)], ids=str)
def test_jax_s_default_device_is_known(backend, place):
    with jax.default_device(backend.native(place)):
        assert backend.default_device() is place


def test_jax_s_default_device_may_be_a_platform(backend):
    with jax.default_device("cpu"):
        assert backend.default_device() is cpu()


def test_a_scope_is_jax_s_scope_as_well(backend):
    with backend.on("gpu:1"):
        assert jnp.ones(1).devices() == {backend.native("gpu:1")}


# -- what is queued --------------------------------------------------------------------------------


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


def test_waiting_inside_of_jit_is_harmless(backend):
    def f(x):
        backend.synchronize()
        return x + 1

    assert jax.jit(f)(jnp.ones(1)).tolist() == [2]


# -- what is held ----------------------------------------------------------------------------------


def test_what_jax_says_of_a_device_s_memory_is_passed_on(backend, monkeypatch):
    class Native:
        def memory_stats(self):
            return {"bytes_in_use": 1, "peak_bytes_in_use": 2, "bytes_limit": 3, "num_allocs": 4}

    monkeypatch.setattr(backend.framework.devices, "native", lambda device: Native())
    assert backend.framework.devices.memory(gpu(0)) == Memory(1, 2, 3)


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
