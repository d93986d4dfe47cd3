"""torch's devices: their spellings, the accelerator that is there, and what makes no context."""

import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from d2ldev_torch import TorchFramework
from d2ldev_torch.devices import MetalDevices, TorchDevices, find_devices

from d2ldev import DeviceInitializationWarning, InvalidDeviceError, cpu, gpu
from d2ldev.framework import Memory, nvml

# -- spellings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["cpu", "cpu:0"])
def test_torch_s_own_devices_name_the_cpu(torch_backend, text):
    assert torch_backend.device(torch.device(text)) is cpu()


def test_the_native_cpu_is_the_one_that_torch_s_tensors_have(torch_backend):
    assert torch_backend.native("cpu:0") == torch.ones(1).device


def test_the_native_gpu_has_its_index(ledger):
    assert ledger.native("gpu") == torch.device("cuda:0")


def test_torch_s_gpu_of_an_index_is_that_gpu(ledger):
    assert ledger.device(torch.device("cuda:1")) is gpu(1)


def test_torch_s_gpu_without_an_index_is_the_current_one_at_each_call(ledger, devices, monkeypatch):
    assert ledger.native(torch.device("cuda")) == torch.device("cuda:0")
    monkeypatch.setattr(devices, "current", lambda: 1)
    assert ledger.native(torch.device("cuda")) == torch.device("cuda:1")


@pytest.mark.parametrize("kind", ["meta", "xpu", "mps", "vulkan"])
def test_torch_s_devices_of_another_kind_are_refused(ledger, kind):
    with pytest.raises(InvalidDeviceError, match=kind):
        ledger.device(torch.device(kind))


def test_the_default_device_is_torch_s(meta):
    with torch.device("meta"):
        assert meta.default_device() is gpu()
    assert meta.default_device() is cpu()


def test_the_platform_is_the_accelerator_s(ledger):
    assert [ledger.platform(device) for device in ledger.devices()] == ["cpu", "cuda", "cuda"]


# -- work and memory -------------------------------------------------------------------------------


def test_waiting_for_one_device_waits_for_no_other(ledger, devices):
    ledger.synchronize("cpu")
    ledger.synchronize("gpu:1")
    assert devices.synchronized == [1]


def test_all_are_idle_when_each_is(ledger):
    ledger.synchronize("gpu:0")
    assert ledger.is_idle("gpu:0")
    assert not ledger.is_idle()
    ledger.synchronize("gpu:1")
    assert ledger.is_idle()


def test_hardware_that_fails_to_start_is_a_warning_with_the_reason(ledger, devices, monkeypatch):
    def fail():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(devices, "count", fail)
    with pytest.warns(DeviceInitializationWarning, match="torch .* the driver is too old"):
        assert ledger.num_gpus() == 0


@pytest.fixture
def _without_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(nvml, "has_driver", lambda: False)
    nvml.warn_without_driver.cache_clear()
    yield
    nvml.warn_without_driver.cache_clear()


@pytest.mark.usefixtures("_without_driver")
@pytest.mark.filterwarnings("error")
def test_a_build_for_cuda_without_a_driver_says_so_where_warnings_are_errors(torch_backend):
    with pytest.raises(DeviceInitializationWarning, match=r"^torch is built for CUDA"):
        torch_backend.num_gpus()


@pytest.mark.usefixtures("_without_driver")
def test_a_build_for_cuda_warns_once_without_a_driver(torch_backend):
    with pytest.warns(DeviceInitializationWarning) as warned:
        counts = [torch_backend.num_gpus(), torch_backend.num_gpus()]
    assert counts == [0, 0]
    assert [str(w.message).partition(" (")[0] for w in warned] == [
        "torch is built for CUDA, and there is no NVIDIA driver here"
    ]


def test_counting_and_placing_on_the_cpu_start_no_driver():
    program = (
        "import torch, d2ldev; backend = d2ldev.get_backend('torch'); backend.num_gpus();"
        "backend.place(backend.mlp([2, 1]), 'cpu'); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- the accelerator -------------------------------------------------------------------------------


class Driver:
    """What torch's module of an accelerator answers; every call to it is kept."""

    def __init__(self, *, initialized):
        self.initialized = initialized
        self.synchronized = []
        self.pending = False

    def device_count(self):
        return 2

    def is_initialized(self):
        return self.initialized

    def current_device(self):
        assert self.initialized, "asking makes a context"
        return 1

    def synchronize(self, index):
        assert self.initialized, "waiting makes a context"
        self.synchronized.append(index)

    def current_stream(self, index):
        assert self.initialized, "asking for the stream makes a context"
        return SimpleNamespace(query=lambda: not self.pending, index=index)

    class Event:
        """An event, which is recorded 250 milliseconds after the one before."""

        times = count(step=250)

        def __init__(self, *, enable_timing):
            self.is_timed = enable_timing

        def record(self, stream):
            self.stream = stream.index
            self.time = next(self.times)

        def elapsed_time(self, end):
            assert self.is_timed
            assert end.is_timed
            return end.time - self.time

    def get_device_properties(self, index):
        return SimpleNamespace(total_memory=1000)

    def memory_allocated(self, index):
        return 10

    def max_memory_allocated(self, index):
        return 20


@pytest.fixture
def sleeping():
    """Devices whose driver has not started."""
    return TorchDevices("test", "test", Driver(initialized=False))


@pytest.fixture
def driver():
    """A driver that has started."""
    return Driver(initialized=True)


@pytest.fixture
def awake(driver):
    """Devices with a context on each GPU."""
    return TorchDevices("test", "test", driver)


def test_before_its_start_the_current_one_is_the_first(sleeping):
    assert sleeping.current() == 0


def test_before_its_start_there_is_nothing_to_wait_for(sleeping):
    sleeping.synchronize(gpu())  # the driver would fail
    assert sleeping.is_idle(gpu())


def test_before_its_start_no_memory_is_used(sleeping):
    assert sleeping.memory(gpu()) == Memory(0, 0, 1000)


def test_the_current_one_is_torch_s(awake):
    assert awake.current() == 1


def test_waiting_waits_for_the_one_of_the_index(awake, driver):
    awake.synchronize(gpu(1))
    assert driver.synchronized == [1]


def test_with_work_in_its_stream_it_is_not_idle(awake, driver):
    driver.pending = True
    assert not awake.is_idle(gpu())


def test_with_an_empty_stream_it_is_idle(awake):
    assert awake.is_idle(gpu())


def test_its_memory_is_that_of_torch_s_allocator(awake):
    assert awake.memory(gpu()) == Memory(10, 20, 1000)


def test_metal_is_asked_whether_it_is_idle_by_an_event_without_a_clock(monkeypatch):
    events = []

    class Event:
        def __init__(self, enable_timing=False):
            events.append(enable_timing)

        def record(self):
            pass

        def query(self):
            return True

    monkeypatch.setattr(torch.mps, "Event", Event)
    assert MetalDevices().is_idle(gpu())
    assert events == [False]


@pytest.mark.parametrize("has_context", [True, False])
def test_a_gpu_without_a_context_is_not_waited_for(awake, driver, monkeypatch, has_context):
    monkeypatch.setattr(
        torch._C, "_test_hasPrimaryContext", lambda index: has_context, raising=False
    )
    awake.synchronize(gpu(1))
    assert driver.synchronized == [1] * has_context


@pytest.fixture
def build(monkeypatch):
    """Makes this build of torch look like another one."""

    def pretend(*, hip=None, cuda=None, xpus=0, metal=False):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        # Of a build without CUDA, whatever this machine has.
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(bool(hip or cuda)))
        monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: xpus > 0)
        monkeypatch.setattr(torch.xpu, "device_count", lambda: xpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: metal)

    return pretend


def test_a_cuda_build_has_cuda(build):
    build(cuda="12.8", metal=True, xpus=1)
    assert (find_devices().type, find_devices().platform(gpu())) == ("cuda", "cuda")


def test_a_rocm_build_is_cuda_to_torch_and_rocm_to_people(build):
    build(hip="6.4")
    assert (find_devices().type, find_devices().platform(gpu())) == ("cuda", "rocm")


def test_an_xpu_comes_before_metal(build):
    build(xpus=1, metal=True)
    assert (find_devices().type, find_devices().platform(gpu())) == ("xpu", "xpu")


def test_metal_is_one_gpu(build):
    build(metal=True)
    assert isinstance(find_devices(), MetalDevices)
    assert (find_devices().type, find_devices().count()) == ("mps", 1)


def test_metal_s_current_device_is_the_only_one(build):
    build(metal=True)
    assert find_devices().from_native(torch.device("mps")) is gpu(0)


def test_a_build_without_any_has_no_gpu(build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # as on a machine with a GPU
    build()
    assert TorchFramework().devices.count() == 0
