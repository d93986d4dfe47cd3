"""Devices: GPUs that are counted without JAX, what is queued and held on a device, virtual GPUs.

What happens once in a process is in the second half, each time in a process of its own. There a
plugin of JAX and a driver stand in for the machine's. To JAX the GPUs are there: it initialises
them, makes them its default, and can fail to.
"""

import gc
import logging
import os
import sys
import threading
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from d2ldev_jax import devices
from d2ldev_jax.devices import HardwareDevices
from installs import find_extras
from processes import make_distribution, make_package, run_python

from d2ldev import (
    DeviceInitializationWarning,
    DeviceUnavailableError,
    InvalidDeviceError,
    MemoryPolicyWarning,
    UnsupportedValueError,
    cpu,
    gpu,
)
from d2ldev.framework import Memory, nvml
from d2ldev.framework.testing import framework_of

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
def plugin(monkeypatch, tmp_path):
    """Makes plugins of JAX for these platforms the ones that are installed; JAX has not begun."""
    monkeypatch.setattr(devices, "is_initialized", lambda: False)
    package = ModuleSpec("jax_plugins", None, is_package=True)
    package.submodule_search_locations = [str(tmp_path / "jax_plugins")]
    monkeypatch.setitem(sys.modules, "jax_plugins", module_from_spec(package))

    def install(*platforms, announced=()):
        for name in platforms:
            make_package(tmp_path / "jax_plugins", f"xla_{name}12", "")
        points = [SimpleNamespace(value=f"elsewhere.xla_{name}12") for name in announced]
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


def test_a_plugin_for_cuda_warns_once_without_a_driver(plugin, allow, settled, monkeypatch):
    plugin("cuda")
    allow(None)
    monkeypatch.setattr(nvml, "cards", list)
    monkeypatch.setattr(nvml, "has_driver", lambda: False)
    nvml.warn_without_driver.cache_clear()
    room = HardwareDevices()
    with pytest.warns(DeviceInitializationWarning, match="no NVIDIA driver here") as warned:
        counts = [room.count(), room.count()]
    nvml.warn_without_driver.cache_clear()
    assert (counts, len(warned)) == ([0, 0], 1)


@pytest.mark.parametrize(("driver", "logged"), [(True, ["it fails"]), (False, [])])
def test_without_a_driver_jax_logs_no_traceback_of_its_plugin(
    plugin, allow, settled, monkeypatch, caplog, driver, logged
):
    plugin("cuda")
    allow(None)
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(nvml, "has_driver", lambda: driver)
    monkeypatch.setattr(nvml, "cards", list)

    def initialize(backend=None):
        if backend is None:
            logger.error("it fails")
        return []

    monkeypatch.setattr(devices.jax, "local_devices", initialize)
    with caplog.at_level(logging.ERROR, logger.name):
        HardwareDevices().gpus()
    assert caplog.messages == logged
    assert not logger.disabled


@pytest.mark.parametrize(("found", "warned"), [(2, 1), (0, 0)])
def test_where_the_driver_cannot_be_asked_jax_counts_and_says_so(
    plugin, allow, settled, monkeypatch, found, warned
):
    plugin("cuda")
    allow(None)
    monkeypatch.setattr(nvml, "has_driver", lambda: True)
    monkeypatch.setattr(nvml, "cards", lambda: None)
    gpus = [SimpleNamespace(platform="gpu", id=i) for i in range(found)]
    monkeypatch.setattr(devices.jax, "local_devices", lambda backend=None: gpus)
    nvml.warn_of_context.cache_clear()
    room = HardwareDevices()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        counts = [room.count(), room.count()]
    nvml.warn_of_context.cache_clear()
    assert counts == [found, found]
    messages = [str(each.message) for each in shown]
    assert len(messages) == warned
    assert all(each.startswith("jax initialises CUDA to count its GPUs") for each in messages)


@pytest.mark.parametrize(("platforms", "count"), [(["cuda"], 3), (["tpu"], 0), ([], 0)])
def test_the_driver_s_gpus_are_counted_where_jax_has_a_plugin(
    drive, plugin, allow, settled, platforms, count
):
    drive()
    plugin(*platforms)
    allow(None)
    assert HardwareDevices().count() == count


@pytest.mark.parametrize(("driver", "count"), [(True, 3), (False, 0)])
def test_a_plugin_that_is_only_announced_is_found_where_there_is_a_driver(
    drive, plugin, allow, settled, monkeypatch, driver, count
):
    drive()
    plugin(announced=["cuda"])
    allow(None)
    monkeypatch.setattr(nvml, "has_driver", lambda: driver)
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


@pytest.mark.parametrize(("version", "name"), [("cuda 12060", "GPU-2"), ("rocm 60100", None)])
def test_the_name_of_a_gpu_is_the_driver_s(drive, settled, monkeypatch, version, name):
    drive()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    client = SimpleNamespace(platform_version=version)
    # Of the GPUs that CUDA numbers, JAX uses the last.
    native = SimpleNamespace(platform="gpu", local_hardware_id=2, client=client)
    monkeypatch.setattr(devices.jax, "local_devices", lambda backend=None: [native])
    assert HardwareDevices().uuid(gpu(0)) == name


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
    monkeypatch.setattr(nvml, "cards", list)
    plugin("rocm")
    allow(None)
    monkeypatch.setattr(devices, "ROCM_DRIVER", tmp_path)

    def local_devices(backend=None):
        return ["rocm:0"] if backend == "gpu" else ["cpu:0"]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    found = HardwareDevices()
    assert found.count() == 1
    assert found.gpus() == ["rocm:0"]


@pytest.mark.parametrize(("platforms", "count"), [(None, 2), ("tpu,cpu", 2), ("cpu", 0)])
def test_tpus_are_the_gpus_where_there_are_some(
    plugin, allow, settled, monkeypatch, platforms, count
):
    monkeypatch.setattr(nvml, "cards", list)
    monkeypatch.setattr(devices, "is_initialized", lambda: False)
    monkeypatch.setattr(devices.importlib.util, "find_spec", {"libtpu": "there"}.get)
    plugin()
    allow(platforms)
    tpus = [SimpleNamespace(platform="tpu", id=i) for i in range(2)]

    def local_devices(backend=None):
        if backend == "gpu":
            raise RuntimeError("Unknown backend gpu")
        return tpus

    monkeypatch.setattr(jax, "local_devices", local_devices)
    found = HardwareDevices()
    assert found.count() == count
    assert [found.platform(gpu(i)) for i in range(count)] == ["tpu"] * count


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
    HardwareDevices().count()
    assert os.environ.get(PREALLOCATE) == expected


def test_nothing_is_set_before_the_gpus_are_counted(untouched):
    made = HardwareDevices()
    assert PREALLOCATE not in os.environ
    assert made.count() == 3
    assert os.environ[PREALLOCATE] == "false"


def test_jax_is_told_before_it_is_asked_for_its_gpus(untouched, monkeypatch):
    told = []

    def local_devices(backend=None):
        told.append(os.environ.get(PREALLOCATE))
        return [f"{backend}:0"]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    HardwareDevices().cpus()
    assert told
    assert set(told) == {"false"}


def test_without_a_gpu_nothing_is_set(untouched, allow):
    allow("cpu")
    HardwareDevices().count()
    assert PREALLOCATE not in os.environ


def test_memory_that_was_taken_already_is_warned_about(untouched, monkeypatch):
    monkeypatch.setattr(devices, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [f"{backend}:0"])
    made = HardwareDevices()
    with pytest.warns(MemoryPolicyWarning, match=PREALLOCATE):
        made.count()
    assert PREALLOCATE not in os.environ


def test_an_invalid_policy_is_an_error(monkeypatch):
    monkeypatch.setenv("D2LDEV_GPU_MEMORY", "all")
    with pytest.raises(UnsupportedValueError, match="D2LDEV_GPU_MEMORY='all'"):
        HardwareDevices().gpus()


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
        x @ x
    backend.synchronize()  # what it calls itself is compiled, too

    def queue_work(device):
        # Each product waits for the one before it. JAX queues up to 32 without waiting itself.
        y = xs[backend.device(device)]
        results = [y]
        for _ in range(30):
            results.append(results[-1] @ y)
        return results[1:]

    gc.disable()  # a collection takes as long as the products
    yield queue_work
    gc.enable()
    backend.synchronize()


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1"])
def test_waiting_is_over_when_all_results_are_there(backend, work, device):
    results = work(device)
    assert not backend.is_idle(device)
    backend.synchronize(device)
    assert backend.is_idle(device)
    assert all(x.is_ready() for x in results)


def test_synchronize_waits_for_work_with_dropped_results(backend, work):
    del work("gpu:0")[:-1]
    assert not backend.is_idle("gpu:0")
    backend.synchronize("gpu:0")
    assert backend.is_idle("gpu:0")


def test_another_device_is_not_waited_for(backend, work):
    results = work("gpu:0")
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


def test_a_deleted_array_does_not_matter(backend, work):
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


def test_all_arrays_of_a_device_are_waited_for_in_one_call(backend, monkeypatch):
    xs = [backend.zeros(2, device=place) for place in ("gpu:0", "gpu:1", "gpu:0")]
    waited, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda xs: waited.append(list(xs)) or wait(xs))
    backend.synchronize("gpu:0")
    (held,) = waited
    assert {id(xs[0]), id(xs[2])} < {id(x) for x in held}
    assert id(xs[1]) not in {id(x) for x in held}


def test_what_failed_hides_nothing_that_is_to_be_waited_for(backend, work):
    key = jax.device_put(jax.random.key(0), backend.native("gpu:0"))
    failed = jax.random.uniform(key, (2**46,))  # past d2ldev, which would have refused it
    results = work("gpu:0")
    backend.synchronize("gpu:0")
    assert all(x.is_ready() for x in results)
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

    monkeypatch.setattr(framework_of(backend).devices, "native", lambda device: Native())
    assert framework_of(backend).devices.memory(gpu(0)) == Memory(1, 2, 3)


def used(backend, device):
    gc.collect()  # or arrays of other tests go in between
    return backend.memory(device).used


def test_the_memory_of_an_array_counts_only_on_its_device(backend):
    before = {device: used(backend, device) for device in (gpu(0), gpu(1))}
    x = backend.zeros((256, 1024), device="gpu:1")
    after = {device: used(backend, device) for device in before}
    assert {device: after[device] - before[device] for device in before} == {
        gpu(0): 0,
        gpu(1): x.nbytes,
    }
    del x
    assert used(backend, "gpu:1") == before[gpu(1)]


def test_memory_that_arrays_share_is_counted_once(backend):
    x = backend.zeros((256, 1024), device="gpu:1")
    before = used(backend, "gpu:1")
    same = jax.device_put(x, x.device)
    assert same is not x
    assert used(backend, "gpu:1") == before


def test_a_deleted_array_holds_nothing(backend):
    before = used(backend, "gpu:1")
    x = backend.zeros((256, 1024), device="gpu:1")
    x.delete()
    assert used(backend, "gpu:1") == before


def test_each_device_has_its_part_of_an_array_that_is_spread(backend):
    mesh = jax.sharding.Mesh([backend.native("gpu:0"), backend.native("gpu:1")], "d")
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    before = [used(backend, device) for device in ("gpu:0", "gpu:1")]
    x = jax.device_put(np.zeros((2, 1024), "float32"), rows)
    after = [used(backend, device) for device in ("gpu:0", "gpu:1")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [x.nbytes // 2] * 2


def test_each_device_lists_its_part_of_an_array_that_is_spread(backend):
    mesh = jax.sharding.Mesh([backend.native("gpu:0"), backend.native("gpu:1")], "d")
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.device_put(np.zeros((2, 12347), "float32"), rows)
    shapes = [live.shape for live in backend.live_tensors()]
    assert (shapes.count((1, 12347)), shapes.count(x.shape)) == (2, 0)


def test_a_deleted_array_is_not_a_live_tensor(backend):
    x = backend.zeros(12347, device="gpu:1")
    x.delete()
    assert (12347,) not in [live.shape for live in backend.live_tensors("gpu:1")]


def test_the_most_that_was_ever_held_is_not_known(backend):
    assert backend.memory("gpu:1").peak is None
    assert backend.memory("gpu:1").total is None


# -- GPUs of which JAX has a client, in processes of their own -------------------------------------

PLUGIN = """
def initialize():
    from jax._src import hardware_utils, xla_bridge
    from jax._src.lib import xla_client

    def make():
        if {failure!r}:
            raise RuntimeError({failure!r})
        return xla_client.make_cpu_client(num_devices=2)

    register = xla_bridge.register_backend_factory

    def register_others(name, *rest, **options):
        if name != "cuda":  # a real plugin of this machine, which JAX may find later
            register(name, *rest, **options)

    hardware_utils.has_visible_nvidia_gpu = lambda: True
    register("cuda", make, priority=200, fail_quietly=False)
    xla_bridge.register_backend_factory = register_others
"""
DRIVER = """
import warnings
from d2ldev.operations import nvml
nvml.cards = lambda: [nvml.Card("GPU-a", None), nvml.Card("GPU-b", None)]
import d2ldev, jax, os
from d2ldev_jax.devices import is_initialized
"""
FAILURE = "the driver is too old for CUDA 99"


@pytest.fixture
def run(tmp_path):
    """Runs code in a process with two GPUs; ``failure`` is why JAX cannot initialise them."""

    def run(code, failure="", **environment):
        make_package(tmp_path / "jax_plugins", "xla_cuda99", PLUGIN.format(failure=failure))
        point = {"xla_cuda99": "jax_plugins.xla_cuda99"}
        make_distribution(tmp_path, "jax-cuda99-plugin", point, group="jax_plugins")
        return run_python(DRIVER + code, hide=(), path=[tmp_path], environment=environment)

    return run


def test_counting_initialises_nothing(run):
    code = """
backend = d2ldev.get_backend("jax")
show([backend.num_gpus(), str(backend.try_gpu(1)), len(backend.devices()), is_initialized()])
"""
    assert run(code) == [[2, "gpu:1", 3, False]]


def test_waiting_for_nothing_initialises_nothing(run):
    code = """
backend = d2ldev.get_backend("jax")
backend.synchronize()
show([backend.is_idle(), is_initialized()])
"""
    assert run(code) == [[True, False]]


def test_a_child_of_a_process_that_has_counted_can_compute(run):
    code = """
backend = d2ldev.get_backend("jax")
backend.num_gpus()
child = os.fork()
if child == 0:
    os._exit(int(backend.ones((2, 2), device="gpu:1").sum()))
show(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == [4]


def test_after_its_start_jax_is_asked(run):
    code = """
backend = d2ldev.get_backend("jax")
backend.ones(1, device="cpu")
nvml.cards = lambda: []
show([backend.num_gpus(), is_initialized()])
"""
    assert run(code) == [[2, True]]


def test_arrays_are_made_and_moved_between_the_clients(run):
    code = """
backend = d2ldev.get_backend("jax")
x = backend.rand(3, seed=0, device="gpu:1")
y = backend.to(x, "cpu")
show([str(backend.device_of(x)), str(backend.device_of(y)), y.committed, backend.platform("gpu")])
show(x.tolist() == y.tolist())
"""
    assert run(code) == [["gpu:1", "cpu", True, "cuda"], True]


def test_copies_between_the_clients_are_new_memory_with_the_same_bytes(run):
    code = """
import jax.numpy as jnp, numpy as np
backend = d2ldev.get_backend("jax")
seen = []
for name in [*backend.dtype_names, "int4", "uint4"]:
    for shape in ((), (0,), (2, 3)):
        x = jnp.ones(shape, name)
        there = backend.to(x, "gpu:1")
        back = backend.to(there, "cpu")
        for y in (there, back):
            seen.append(y.committed and y.aval == x.aval and np.array_equal(x, y))
        if x.size and "int4" not in name:  # NumPy's view of it would be a copy
            views = [np.asarray(each) for each in (x, there, back)]
            seen.append(len({view.ctypes.data for view in views}) == 3)
show([len(seen) > 100, all(seen)])
"""
    assert run(code) == [[True, True]]


def test_the_source_of_a_copy_between_the_clients_may_go_at_once(run):
    code = """
import jax.numpy as jnp, numpy as np
backend = d2ldev.get_backend("jax")
def after(use):
    data = np.zeros(2**14, np.float32)
    x = backend.from_dlpack(data[-data.ctypes.data % 64 // 4 :])
    copied = backend.to(x, "gpu:0")
    use(x, data)
    return float(backend.to_numpy(copied).max())
queued = []
add = jax.jit(lambda x: x + 1, donate_argnums=0)
show([
    after(lambda x, data: x.delete()),
    after(lambda x, data: queued.append(add(x))),
    after(lambda x, data: data.fill(9)),
])
# Then JAX' thread lets go of NumPy's memory. It needs Python's lock, which ends with the process.
jax.block_until_ready(queued)
"""
    assert run(code) == [[0, 0, 0]]


def test_what_is_long_is_read_where_it_is_between_the_clients(run):
    code = """
from d2ldev_jax import devices, tensors
backend = d2ldev.get_backend("jax")
short, long = backend.zeros(2**10), backend.zeros(2**12)
for module in (devices, tensors):
    module.LONG = 2**14
tensors.LARGE, tensors.FEW = 2**13, 2**9
host = backend.native("cpu").client
tensors.is_on_the_host = lambda native: native.client is host
put, wait, seen = tensors.batched_device_put, jax.block_until_ready, []
tensors.batched_device_put = lambda *options: seen.append(options[-1]) or put(*options)
jax.block_until_ready = lambda x: seen.append("waited for") or wait(x)
backend.to([short, long], "gpu:0")
show(seen)
"""
    assert run(code) == [[True, False, "waited for"]]


def test_d2ldev_s_default_is_the_cpu_also_where_jax_s_is_a_gpu(run):
    code = """
backend = d2ldev.get_backend("jax")
show([str(backend.device_of(backend.ones(1))), str(backend.default_device())])
"""
    assert run(code) == [["cpu", "gpu:0"]]


def test_without_virtual_gpus_none_is_used_by_jax_itself(run):
    code = """
d2ldev.virtual_gpus(0)
backend = d2ldev.get_backend("jax")
show([backend.num_gpus(), str(backend.try_gpu()), backend.ones(2).tolist()])
show([str(backend.default_device()), sorted(device.platform for device in jax.devices())])
"""
    assert run(code) == [[0, "cpu", [1, 1]], ["cpu", ["cpu"]]]


def test_a_jax_that_has_begun_to_use_gpus_goes_on_to(run):
    code = """
x = jax.numpy.ones(2)
d2ldev.virtual_gpus(0)
backend = d2ldev.get_backend("jax")
show([backend.num_gpus(), str(backend.try_gpu()), backend.to(x, "cpu").tolist()])
"""
    assert run(code) == [[0, "cpu", [1, 1]]]


def test_virtual_gpus_stand_in_the_hardware_s_stead(run):
    code = """
d2ldev.virtual_gpus(1)
backend = d2ldev.get_backend("jax")
backend.ones(1, device="gpu")
show([backend.num_gpus(), backend.platform("gpu"), str(backend.default_device())])
show([str(device.platform) for device in jax.devices()])
"""
    assert run(code) == [[1, "virtual", "cpu"], ["cpu", "cpu"]]


FAILING = """
backend = d2ldev.get_backend("jax")
with warnings.catch_warnings(record=True) as caught:
    show([backend.ones(2, device="cpu").tolist(), backend.num_gpus(), str(backend.try_gpu())])
show(sorted({f"{type(w.message).__name__}: {w.message}" for w in caught}))
"""


def test_gpus_that_fail_are_a_warning_with_the_reason_and_the_cpu_goes_on(run):
    shown, (warning,) = run(FAILING, FAILURE)
    assert shown == [[1, 1], 0, "cpu"]
    assert warning.startswith("DeviceInitializationWarning: jax found GPUs")
    assert "NVIDIA's driver shows 2 GPUs" in warning
    assert FAILURE in warning


def test_a_failure_that_the_user_has_seen_already_is_not_hidden(run):
    seen = """
try:
    jax.devices()
except RuntimeError:
    pass
"""
    shown, (warning,) = run(seen + FAILING, FAILURE)
    assert shown == [[1, 1], 0, "cpu"]
    assert "JAX can use none" in warning
    assert "import jax before other frameworks" in warning


def test_a_gpu_that_was_counted_and_fails_is_an_error_and_never_the_cpu(run):
    code = """
backend = d2ldev.get_backend("jax")
show(backend.num_gpus())
warnings.simplefilter("ignore")
try:
    backend.ones(1, device="gpu:0")
except d2ldev.DeviceUnavailableError as error:
    show([str(error), list(error.devices)])
"""
    count, (text, devices) = run(code, FAILURE)
    assert count == 2
    assert "gpu:0" in text
    assert FAILURE in text
    assert devices == ["cpu"]


def test_jax_without_a_cpu_is_an_error_that_says_how_to_get_one(run):
    code = """
backend = d2ldev.get_backend("jax")
try:
    backend.ones(1, device="cpu")
except d2ldev.DeviceUnavailableError as error:
    show(str(error))
show(backend.num_gpus())
"""
    text, count = run(code, JAX_PLATFORMS="cuda")
    assert "JAX_PLATFORMS=cuda,cpu" in text
    assert count == 2


def test_jax_without_a_cpu_has_its_gpus(run):
    code = """
backend = d2ldev.get_backend("jax")
x = backend.ones(2, device="gpu:1")
show([str(backend.device_of(x)), str(backend.default_device()), backend.to(x, "gpu:1") is x])
"""
    assert run(code, JAX_PLATFORMS="cuda") == [["gpu:1", "gpu:0", True]]


def test_with_hidden_gpus_jax_has_none_and_does_not_warn(run):
    shown, caught = run(FAILING, FAILURE, JAX_PLATFORMS="cpu")
    assert shown == [[1, 1], 0, "cpu"]
    assert caught == []


# -- virtual GPUs, in processes of their own -------------------------------------------------------

XLA_FLAGS = "--xla_force_host_platform_device_count="

USE = """
import d2ldev
backend = d2ldev.get_backend("jax")
show([str(backend.device_of(backend.ones(1, device=device))) for device in backend.devices()])
"""
IN_USE = "import jax; jax.devices()\n"


def run_virtual(code, **environment):
    return run_python(code, hide=(), environment=environment)


@pytest.mark.parametrize("number", [1, 8])
def test_as_many_as_were_asked_for_are_made(number):
    devices = ["cpu", *(f"gpu:{i}" for i in range(number))]
    assert run_virtual(USE, D2LDEV_VIRTUAL_GPUS=str(number)) == [devices]


def test_importing_jax_before_is_early_enough():
    assert run_virtual("import jax, jax.numpy\n" + USE, D2LDEV_VIRTUAL_GPUS="2")[0][-1] == "gpu:1"


def test_using_jax_before_is_an_error_with_a_fix():
    code = """
import d2ldev
try:
    d2ldev.get_backend("jax")
except d2ldev.DeviceUnavailableError as error:
    show(str(error))
"""
    (text,) = run_virtual(IN_USE + code, D2LDEV_VIRTUAL_GPUS="2")
    assert "JAX is in use already, with 1 CPU device; it takes 3" in text
    fix = text.partition("`")[2].partition("`")[0]
    assert fix == "from d2ldev import jax"
    assert run_virtual(f"{fix}\n{IN_USE}{USE}", D2LDEV_VIRTUAL_GPUS="2") == [
        ["cpu", "gpu:0", "gpu:1"]
    ]


# What stands above the program's own use of JAX, with D2LDEV_VIRTUAL_GPUS=2, and without it.
WISHES = [
    ("import d2ldev", "2"),
    ("from d2ldev import backend", "2"),
    ("import jax; from d2ldev import backend", "2"),
    ("import d2ldev; d2ldev.backend", "2"),
    ("from d2ldev import Trainer", "2"),
    ("import d2ldev; d2ldev.virtual_gpus(2)", ""),
    ("import d2ldev; d2ldev.virtual_gpus(1); d2ldev.virtual_gpus(2)", ""),
]


@pytest.mark.parametrize(("wish", "variable"), WISHES)
def test_a_model_may_be_made_between_the_import_of_the_handle_and_its_first_use(wish, variable):
    code = f"""
import sys
{wish}
from flax import nnx
import numpy as np
net = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
import d2ldev
trainer = d2ldev.Trainer(max_epochs=1, num_gpus="auto")
batch = np.ones((4, 4), np.float32), np.zeros(4, np.int64)
history = trainer.fit(net, [batch], loss="cross_entropy")
show([d2ldev.backend.num_gpus(), len(history["loss"])])
"""
    variables = {"D2LDEV_VIRTUAL_GPUS": variable, "D2LDEV_BACKEND": "jax"}
    assert run_virtual(code, **variables) == [[2, 1]]


def test_the_error_names_the_program_s_own_number_of_cpu_devices_and_the_mend_works(tmp_path):
    file = tmp_path / "flags.txt"
    file.write_text(f"{XLA_FLAGS}2")
    program = """
import d2ldev
d2ldev.virtual_gpus(2)
import jax
LINE
jax.devices()
try:
    d2ldev.get_backend("jax")
    show("works")
except d2ldev.DeviceUnavailableError as error:
    show([error.problem, error.fix])
"""
    there = "JAX is in use already, with 2 CPU devices by "
    problem = f"{there}{{}}; it takes 3"

    def run_late(line="", **variables):
        return run_virtual(program.replace("LINE", line), **variables)[0]

    assert run_late(JAX_NUM_CPU_DEVICES="2") == [
        problem.format("JAX_NUM_CPU_DEVICES=2"),
        "JAX_NUM_CPU_DEVICES=3",
    ]
    assert run_late(JAX_NUM_CPU_DEVICES="3") == "works"
    said, line = run_late('jax.config.update("jax_num_cpu_devices", 2)')
    assert said == problem.format("jax_num_cpu_devices=2")
    assert run_late(line) == "works"
    said, fix = run_late(XLA_FLAGS=str(file))
    assert said == problem.format("the file of XLA_FLAGS")
    assert fix == f"write {XLA_FLAGS}3 into {file}"
    file.write_text(fix.split()[1])
    assert run_late(XLA_FLAGS=str(file)) == "works"


def test_a_child_process_may_have_another_number_of_virtual_gpus():
    code = """
import os, subprocess, sys
from d2ldev import backend
import jax
program = "from d2ldev import backend; import jax; jax.devices(); print(backend.num_gpus())"
for number in ("0", "1", "3", ""):
    environment = os.environ | {"D2LDEV_VIRTUAL_GPUS": number, "JAX_PLATFORMS": "cpu"}
    show(int(subprocess.check_output([sys.executable, "-c", program], env=environment)))
show(backend.num_gpus())
"""
    variables = {"D2LDEV_VIRTUAL_GPUS": "2", "D2LDEV_BACKEND": "jax"}
    assert run_virtual(code, **variables) == [0, 1, 3, 0, 2]


def test_using_jax_before_with_enough_cpu_devices_is_allowed():
    shown = run_virtual(IN_USE + USE, D2LDEV_VIRTUAL_GPUS="2", XLA_FLAGS=f"{XLA_FLAGS}4")
    assert shown == [["cpu", "gpu:0", "gpu:1"]]


def test_the_user_s_own_cpu_devices_are_not_taken_away():
    code = USE + "import jax; show(len(jax.devices()))"
    shown = run_virtual(code, D2LDEV_VIRTUAL_GPUS="1", XLA_FLAGS=f"{XLA_FLAGS}5")
    assert shown == [["cpu", "gpu:0"], 5]


def test_other_cpu_devices_are_the_cpu():
    code = USE + "import jax; show([str(backend.device(device)) for device in jax.devices()])"
    shown = run_virtual(code, D2LDEV_VIRTUAL_GPUS="1", XLA_FLAGS=f"{XLA_FLAGS}3")
    assert shown == [["cpu", "gpu:0"], ["cpu", "gpu:0", "cpu"]]


def test_without_virtual_gpus_every_cpu_device_is_the_cpu():
    code = USE + "import jax; show([str(backend.device(device)) for device in jax.devices()])"
    shown = run_virtual(code, XLA_FLAGS=f"{XLA_FLAGS}2", JAX_PLATFORMS="cpu")
    assert shown == [["cpu"], ["cpu", "cpu"]]


def test_the_backend_needs_no_flax_until_a_model_is_made():
    code = """
import sys, d2ldev
backend = d2ldev.get_backend("jax")
backend.to(backend.place({"x": backend.ones(1)}, "gpu"), "cpu")
show([name for name in ("flax", "optax") if name in sys.modules])
"""
    assert run_virtual(code, D2LDEV_VIRTUAL_GPUS="1") == [[]]


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("flax", "backend.mlp([2, 1])"),
        ("flax", "backend.learner(net)"),
        ("optax", "backend.learner(net)"),
        ("optax", "d2ldev.Trainer(1).fit(net, data)"),
        ("optax", "d2ldev.Trainer(1, num_gpus=2).fit(net, data)"),
        ("flax", "native.jax.Module"),
    ],
)
def test_without_flax_or_optax_models_name_the_line_that_installs_them(missing, call):
    code = f"""
import d2ldev
import numpy as np
from d2ldev import native
backend = d2ldev.get_backend("jax")
net = {{"w": backend.ones((2, 1))}}
data = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))]
try:
    {call}
except d2ldev.PackageNotInstalledError as error:
    show([error.problem, error.fix])
"""
    variables = {"D2LDEV_BACKEND": "jax", "D2LDEV_VIRTUAL_GPUS": "2"}
    ((problem, fix),) = run_python(code, hide=(missing,), environment=variables)
    assert problem.startswith(f"{missing} cannot be imported: No module named")
    assert find_extras(fix) == ["jax"]


@pytest.mark.parametrize("text", ["cpu:{}", "TFRT_CPU_{}"])
def test_the_text_of_a_device_of_an_older_or_newer_jax_names_it(backend, text):
    found = [backend.device(text.format(index)) for index in range(3)]
    assert found == backend.devices()


def test_the_cpu_of_an_index_that_is_no_virtual_gpu_s_is_the_cpu(backend):
    assert backend.device("cpu:3") is backend.cpu()
    with pytest.raises(InvalidDeviceError):
        backend.device("TFRT_CPU_3")  # and no device of JAX's
