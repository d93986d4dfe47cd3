"""GPUs that this machine need not have: counting, memory, and the policy for it.

The driver's library and TensorFlow's list of GPUs are stood in for; what is done with their
answers is the backend's own.
"""

import ctypes
from types import SimpleNamespace

import pytest
import tensorflow as tf
from d2ldev_tensorflow import logical, machine, nvml
from d2ldev_tensorflow.logical import LogicalDevices
from d2ldev_tensorflow.nvml import Card

from d2ldev import (
    DeviceInitializationWarning,
    DeviceUnavailableError,
    Memory,
    MemoryPolicyWarning,
    gpu,
)


@pytest.fixture
def cards(monkeypatch):
    """Makes the driver show cards of the given sizes, and CUDA's variables unset."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def show(*sizes):
        shown = [Card(f"GPU-{index}abc", size) for index, size in enumerate(sizes)]
        monkeypatch.setattr(nvml, "_cards", lambda: shown)
        return shown

    return show


def test_without_a_driver_nvml_cannot_say(monkeypatch):
    monkeypatch.setattr(nvml, "_LIBRARY", "libthatisnowhere.so.1")
    monkeypatch.setattr(nvml, "_cards", nvml._cards.__wrapped__)
    assert nvml.visible_cards() is None


class Library:
    """NVML with two cards."""

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))[0] = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = index + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, buffer, size):  # noqa: N802
        buffer.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        ctypes.cast(memory, ctypes.POINTER(nvml._MemoryInfo))[0].total = 80 * 2**30
        return 0


def test_nvml_is_asked_for_each_card(monkeypatch):
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: Library())
    found = nvml._cards.__wrapped__()
    assert [(card.uuid, card.memory) for card in found] == [
        ("GPU-1", 80 * 2**30),
        ("GPU-2", 80 * 2**30),
    ]


def test_a_driver_that_fails_cannot_say(monkeypatch):
    class Failing(Library):
        def nvmlInit_v2(self):  # noqa: N802
            return 999

    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: Failing())
    assert nvml._cards.__wrapped__() is None


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        ("0", [0]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("1,9,0", [1]),
        ("0,0", []),
        ("GPU-1", [1]),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices_is_followed(cards, monkeypatch, variable, visible):
    shown = cards(1, 1, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert nvml.visible_cards() == [shown[index] for index in visible]


def test_without_the_variable_all_are_visible(cards):
    shown = cards(1, 2)
    assert nvml.visible_cards() == shown


def test_cards_of_one_size_have_that_memory(cards):
    cards(8, 8)
    assert nvml.memory_of(1) == 8


def test_cards_of_several_sizes_are_not_told_apart(cards):
    cards(8, 16)
    assert nvml.memory_of(1) is None


def test_cards_in_the_order_of_the_bus_are_told_apart(cards, monkeypatch):
    cards(8, 16)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert nvml.memory_of(1) == 16


def test_a_card_that_is_not_there_has_no_memory(cards):
    cards(8)
    assert nvml.memory_of(1) is None


class Config:
    """TensorFlow's configuration, with GPUs.

    Args:
        listed: how many TensorFlow itself can use.
        growth: what setting the memory growth raises.
    """

    LogicalDevice = tf.config.LogicalDevice

    def __init__(self, listed, growth=None):
        self._names = [f"GPU:{index}" for index in range(listed)]
        self._growth = growth
        self.grown = []
        self.experimental = SimpleNamespace(set_memory_growth=self._set_memory_growth)

    def list_logical_devices(self, kind=None):
        return self._names

    def get_visible_devices(self, kind):
        return self._names

    def get_logical_device_configuration(self, card):
        return [1, 2] if card == "GPU:0" else None

    def _set_memory_growth(self, card, enabled):
        if self._growth is not None:
            raise self._growth
        self.grown.append((card, enabled))


@pytest.fixture
def cuda(cards, monkeypatch):
    """Makes this TensorFlow look like one for CUDA, which has not started."""
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    monkeypatch.delenv("D2LDEV_GPU_MEMORY", raising=False)

    def pretend(*, driver, listed, started=False, growth=None):
        cards(*[8] * driver)
        config = Config(listed, growth)
        test = SimpleNamespace(is_built_with_cuda=lambda: True)
        context = SimpleNamespace(_physical_devices=None, _initialized=started)
        monkeypatch.setattr(logical, "tf", SimpleNamespace(config=config, test=test))
        monkeypatch.setattr(logical, "context", lambda: context)
        config.context = context
        return config

    return pretend


def test_before_tensorflow_starts_the_driver_counts(cuda):
    cuda(driver=3, listed=0)
    assert LogicalDevices(None).count() == 3


def test_once_tensorflow_has_started_it_counts(cuda):
    cuda(driver=3, listed=1, started=True)
    assert LogicalDevices(None).count() == 1


def test_gpus_that_tensorflow_has_looked_for_are_counted_with_their_parts(cuda):
    config = cuda(driver=0, listed=2)
    config.context._physical_devices = ["GPU:0", "GPU:1"]
    assert LogicalDevices(None).count() == 3


def test_gpus_that_tensorflow_cannot_use_are_a_warning_and_an_error(cuda):
    config = cuda(driver=2, listed=0)
    devices = LogicalDevices(None)
    devices.count()
    config.list_logical_devices = lambda kind=None: (
        setattr(config.context, "_initialized", True) or []
    )
    with (
        pytest.warns(DeviceInitializationWarning, match="found 2 GPUs and can use 0"),
        pytest.raises(DeviceUnavailableError, match="gpu:0"),
    ):
        devices.name(gpu(0))


def test_a_gpu_is_called_as_tensorflow_calls_it(cuda):
    cuda(driver=2, listed=2, started=True)
    assert LogicalDevices(None).name(gpu(1)) == "/GPU:1"


def test_memory_grows_on_every_gpu(cuda):
    config = cuda(driver=2, listed=2)
    logical._let_memory_grow()
    assert config.grown == [("GPU:0", True), ("GPU:1", True)]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TF_FORCE_GPU_ALLOW_GROWTH", "false"), ("D2LDEV_GPU_MEMORY", "framework")],
)
def test_the_user_s_choice_of_memory_is_left_alone(cuda, monkeypatch, variable, value):
    config = cuda(driver=1, listed=1)
    monkeypatch.setenv(variable, value)
    logical._let_memory_grow()
    assert config.grown == []


def test_a_gpu_that_the_user_has_divided_is_left_alone(cuda):
    cuda(driver=1, listed=1, growth=ValueError("virtual devices configured"))
    assert logical._let_memory_grow() is None


def test_the_policy_that_comes_too_late_is_a_warning(cuda):
    cuda(driver=1, listed=1, growth=RuntimeError("initialized"))
    with pytest.warns(MemoryPolicyWarning, match="TF_FORCE_GPU_ALLOW_GROWTH=true"):
        logical._let_memory_grow()


def test_the_memory_of_a_gpu_that_has_not_started_is_not_used(cards, monkeypatch):
    cards(8)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    assert machine.memory_of_gpu(0, started=False) == Memory(0, 0, 8)


def test_the_memory_of_a_gpu_is_that_of_tensorflow_s_allocator(cards, monkeypatch):
    cards(8)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    asked = []
    monkeypatch.setattr(
        tf.config.experimental,
        "get_memory_info",
        lambda name: asked.append(name) or {"current": 1, "peak": 2},
    )
    assert machine.memory_of_gpu(0, started=True) == Memory(1, 2, 8)
    assert asked == ["GPU:0"]


def test_tensorflow_s_own_configuration_takes_the_policy_before_it_starts(run):
    program = """
from unittest import mock
from d2ldev_tensorflow import logical
from tensorflow.python.eager.context import context
gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
tf.config.list_physical_devices()
context()._physical_devices.append(gpu)
with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [gpu]):
    show(caught(logical._let_memory_grow))
show(tf.config.experimental.get_memory_growth(gpu))
"""
    assert run(program) == [[], True]


def test_tensorflow_s_own_configuration_refuses_the_policy_after_its_start(run):
    program = """
from unittest import mock
from d2ldev_tensorflow import logical
from tensorflow.python.eager.context import context
tf.ones(1)
gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
context()._physical_devices.append(gpu)
with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [gpu]):
    show(caught(logical._let_memory_grow))
"""
    (warned,) = run(program)[0]
    assert warned.startswith("MemoryPolicyWarning: TensorFlow had initialised its GPU")


def test_on_the_cpu_nothing_is_warned_about(run):
    program = """
tf.ones(1)
backend = d2ldev.get_backend("tensorflow")
show(caught(lambda: backend.ones(1, device="cpu")))
"""
    assert run(program) == [[]]
