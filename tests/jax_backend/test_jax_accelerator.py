"""Counting GPUs without JAX, which would make a context on each: the driver, and JAX's plugins."""

import ctypes

import jax
import pytest
from d2ldev_jax import accelerator, nvml
from d2ldev_jax.accelerator import Accelerator

from d2ldev import DeviceInitializationWarning


class Driver:
    """NVML's library for GPUs of the given UUIDs; ``status`` is its answer to the first call."""

    def __init__(self, uuids=(), status=0):
        self._uuids = uuids
        self._status = status
        self.open = 0
        self.nvmlInit_v2 = self._start
        self.nvmlShutdown = self._stop
        self.nvmlDeviceGetCount_v2 = self._count
        self.nvmlDeviceGetHandleByIndex_v2 = self._handle
        self.nvmlDeviceGetUUID = self._uuid

    def _start(self):
        self.open += self._status == 0
        return self._status

    def _stop(self):
        self.open -= 1
        return 0

    def _count(self, count):
        count._obj.value = len(self._uuids)
        return 0

    def _handle(self, index, handle):
        handle._obj.value = index + 1
        return 0

    def _uuid(self, handle, text, size):
        uuid = self._uuids[handle.value - 1].encode()
        ctypes.memmove(text, uuid + b"\0", len(uuid) + 1)
        return 0


UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


@pytest.fixture
def drive(monkeypatch):
    """Makes this machine one with a driver, and an environment that hides none of its GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(driver):
        monkeypatch.setattr(nvml, "_library", lambda: driver)
        return driver

    return install


@pytest.fixture
def plugin(monkeypatch):
    """Makes plugins of JAX for these platforms the ones that are installed; JAX has not begun."""
    monkeypatch.setattr(accelerator, "is_initialized", lambda: False)

    def install(*platforms):
        monkeypatch.setattr(
            accelerator, "_plugins", lambda: [f"xla_{name}12" for name in platforms]
        )

    return install


@pytest.fixture
def configure():
    """Sets a value of ``jax.config``, and puts all of them back."""
    before = {}

    def set_value(name, value):
        before.setdefault(name, jax.config.values[name])
        jax.config.update(name, value)

    yield set_value
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def allow(configure):
    """Sets the platforms that JAX may use."""
    return lambda platforms: configure("jax_platforms", platforms)


def test_without_a_driver_there_are_no_gpus(drive):
    drive(None)
    assert nvml.count_visible() == 0


def test_a_driver_that_is_not_loaded_has_no_gpus(drive):
    drive(Driver(UUIDS, status=9))
    assert nvml.count_visible() == 0


def test_a_driver_that_fails_is_an_error_and_not_zero(drive):
    drive(Driver(UUIDS, status=18))
    with pytest.raises(nvml.DriverError, match="error 18"):
        nvml.count_visible()


def test_the_driver_is_left_closed(drive):
    driver = drive(Driver(UUIDS))
    nvml.count_visible()
    assert driver.open == 0


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 2 ", 2),
        ("0,7,1", 1),
        ("-1", 0),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("0,0", 0),
        ("GPU-bb", 1),
        ("GPU-aa11,GPU-bb33", 2),
        ("GPU-aa", 0),
        ("MIG-12345", 1),
        ("MIG-1,MIG-2", 1),
        ("9" * 5000, 0),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(drive, monkeypatch, visible, count):
    drive(Driver(UUIDS))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvml.count_visible() == count


def test_the_driver_s_gpus_are_counted(drive, plugin, allow):
    drive(Driver(UUIDS))
    plugin("cuda")
    allow(None)
    assert Accelerator().count() == 3


def test_without_a_plugin_for_cuda_there_are_no_gpus(drive, plugin, allow):
    drive(Driver(UUIDS))
    plugin("tpu")
    allow(None)
    assert Accelerator().count() == 0


@pytest.mark.parametrize(
    ("platforms", "count"),
    [(None, 3), ("", 3), ("cuda", 3), ("gpu,cpu", 3), ("cpu", 0), ("cpu,tpu", 0), ("rocm", 0)],
)
def test_jax_platforms_is_followed(drive, plugin, allow, platforms, count):
    drive(Driver(UUIDS))
    plugin("cuda")
    allow(platforms)
    assert Accelerator().count() == count


def test_jax_cuda_visible_devices_is_followed(drive, plugin, allow, configure):
    drive(Driver(UUIDS))
    plugin("cuda")
    allow(None)
    configure("jax_cuda_visible_devices", "0,2")
    assert Accelerator().count() == 2


def test_a_driver_that_fails_is_a_warning_with_the_reason(drive, plugin, allow):
    drive(Driver(UUIDS, status=18))
    plugin("cuda")
    allow(None)
    with pytest.warns(DeviceInitializationWarning, match="error 18"):
        assert Accelerator().count() == 0


def test_a_driver_that_jax_would_not_use_may_fail_in_silence(drive, plugin, allow):
    drive(Driver(UUIDS, status=18))
    plugin()
    allow(None)
    assert Accelerator().count() == 0


def test_rocm_is_asked_through_jax(plugin, allow, monkeypatch, tmp_path, drive):
    drive(None)
    plugin("rocm")
    allow(None)
    monkeypatch.setattr(accelerator, "_ROCM_DRIVER", tmp_path)

    def local_devices(backend=None):
        if backend == "cuda":
            raise RuntimeError("Unknown backend cuda")
        return [f"{backend}:0"]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    found = Accelerator()
    assert found.count() == 1
    assert found.gpus() == ["rocm:0"]
