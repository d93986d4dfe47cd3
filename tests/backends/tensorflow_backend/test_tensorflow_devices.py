"""TensorFlow's devices: their names, how many there are, how they start, their memory."""

import time
from importlib import metadata
from types import SimpleNamespace

import pytest
import tensorflow as tf
from d2ldev_tensorflow import devices as room
from d2ldev_tensorflow.devices import TensorFlowDevices

from d2ldev import (
    D2LDevError,
    DeviceInitializationWarning,
    DeviceUnavailableError,
    InvalidDeviceError,
    MemoryPolicyWarning,
    cpu,
    gpu,
)
from d2ldev.framework import Memory, nvml
from d2ldev.framework.testing import framework_of

FULL = "/job:localhost/replica:0/task:0/device:"


@pytest.mark.parametrize(
    "name", ["/CPU:0", "/cpu:0", "/device:CPU:0", FULL + "CPU:0", (FULL + "cpu:0").lower()]
)
def test_every_name_of_the_cpu_means_it(backend, name):
    assert backend.device(name) is cpu()


@pytest.mark.parametrize("name", ["/GPU:1", "/gpu:1", "/device:GPU:1", FULL + "GPU:1"])
def test_every_name_of_a_gpu_means_it(backend, name):
    assert backend.device(name) is gpu(1)


@pytest.mark.parametrize("name", ["/CPU:2", "/device:cpu:2", FULL + "CPU:2"])
def test_a_virtual_gpu_is_a_further_logical_cpu(backend, name):
    assert backend.device(name) is gpu(1)
    assert backend.native("gpu:1") == "/CPU:2"


def test_without_virtual_gpus_every_logical_cpu_is_the_cpu():
    assert TensorFlowDevices(None).from_native("/CPU:2") is cpu()


def test_tensorflow_s_device_objects_are_taken(backend):
    devices = [backend.device(each) for each in tf.config.list_logical_devices()]
    assert devices == [cpu(), gpu(0), gpu(1)]


@pytest.mark.parametrize("name", ["/TPU:0", "/job:worker/device:CPU:0", "/GPU:x", "/GPU", "/:0"])
def test_names_of_other_devices_are_refused(backend, name):
    with pytest.raises(InvalidDeviceError) as caught:
        backend.device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["/GPU:7", "/CPU:8", "gpu:7"])
def test_a_device_that_is_not_there_is_refused_and_nothing_lands_on_the_cpu(backend, name):
    with pytest.raises(DeviceUnavailableError, match="gpu:7"):
        backend.ones(2, device=name)


def test_the_default_device_is_where_tensorflow_puts_a_tensor(backend):
    with tf.device("/CPU:2"):
        assert backend.default_device() is gpu(1)
    assert backend.default_device() is cpu()


def test_a_scope_is_where_tensorflow_s_operations_run(backend):
    x = backend.ones((2, 2))
    with backend.on("gpu:1"):
        y = x @ x
    assert backend.device_of(y) is gpu(1)


def test_a_variable_is_where_its_memory_is(backend):
    with tf.device("/CPU:1"):
        variable = tf.Variable(tf.ones(2))
    assert backend.device_of(variable) is gpu(0)


def test_a_traced_tensor_has_no_device(backend):
    refusals = []

    @tf.function(autograph=False)
    def trace(x):
        with pytest.raises(D2LDevError) as caught:
            backend.device_of(x)
        refusals.append(str(caught.value))
        return x

    trace(tf.ones(2))
    assert "only traced" in refusals[0]


def test_a_symbolic_input_of_keras_has_no_device(backend):
    import keras

    with pytest.raises(D2LDevError, match="only traced"):
        backend.device_of(keras.Input((2,)))


def test_a_variable_that_is_spread_has_no_one_device(backend):
    class Spread(tf.Variable):
        values = ()

        def __init__(self):
            pass

        def __repr__(self):
            return "a spread variable"

    with pytest.raises(D2LDevError, match="several devices"):
        backend.device_of(object.__new__(Spread))


def test_other_virtual_gpus_are_refused_once_tensorflow_has_started(backend):
    with pytest.raises(D2LDevError, match="already") as caught:
        TensorFlowDevices(3)
    assert "D2LDEV_VIRTUAL_GPUS=3" in caught.value.fix


def test_the_same_virtual_gpus_are_found_again(backend):
    assert TensorFlowDevices(2).count() == 2


def test_virtual_gpus_after_tensorflow_s_first_operation_are_refused(run):
    shown = run(
        """
tf.ones(2)
try:
    d2ldev.get_backend("tensorflow")
except d2ldev.D2LDevError as error:
    show([error.problem, error.fix, error.devices])
""",
        D2LDEV_VIRTUAL_GPUS="2",
    )
    problem, fix, devices = shown[0]
    assert "made its devices already" in problem
    assert "D2LDEV_VIRTUAL_GPUS=2" in fix
    assert "`from d2ldev import tensorflow`" in fix
    assert devices == ["/device:CPU:0"]


def test_the_fix_of_virtual_gpus_that_come_too_late_works(run):
    program = """
from d2ldev import backend
LINE
net = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])
try:
    d2ldev.Trainer(max_epochs=1, num_gpus="auto")
    show(backend.num_gpus())
except d2ldev.DeviceUnavailableError as error:
    show(error.fix.partition("`")[2].partition("`")[0])
"""
    variables = {"D2LDEV_VIRTUAL_GPUS": "2", "D2LDEV_BACKEND": "tensorflow"}
    (line,) = run(program.replace("LINE", ""), **variables)
    assert run(program.replace("LINE", line), **variables) == [2]
    assert run(program.replace("LINE", "backend.num_gpus()"), **variables) == [2]


def test_the_fix_of_virtual_gpus_of_a_call_names_the_call_and_the_place_of_the_import(run):
    program = """
CALL
LINE
tf.ones(2)
try:
    d2ldev.tensorflow
    show(d2ldev.tensorflow.num_gpus())
except d2ldev.DeviceUnavailableError as error:
    show(error.fix.split("`")[1::2])
"""
    (lines,) = run(program.replace("CALL", "d2ldev.virtual_gpus(2)").replace("LINE", ""))
    line, call = lines  # the line stands below the call
    assert call == "d2ldev.virtual_gpus(2)"
    assert run(program.replace("CALL", call).replace("LINE", line)) == [2]


def test_asking_for_virtual_gpus_does_not_start_tensorflow(run):
    program = """
from d2ldev_tensorflow.devices import has_started
backend = d2ldev.get_backend("tensorflow")
show([backend.num_gpus(), str(backend.try_gpu(1)), has_started()])
backend.ones(1)
show(has_started())
"""
    assert run(program, D2LDEV_VIRTUAL_GPUS="2") == [[2, "gpu:1", False], True]


@pytest.fixture(scope="module")
def before_its_start(run):
    """What a process has seen in which TensorFlow has not started: one for several tests."""
    return dict(
        run("""
from unittest import mock
from d2ldev_tensorflow import devices
from tensorflow.python.eager.context import context
backend = d2ldev.get_backend("tensorflow")
backend.synchronize()
show(["waiting", [backend.is_idle(), devices.has_started()]])

gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
tf.config.list_physical_devices()
context()._physical_devices.append(gpu)
with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [gpu]):
    warned = caught(devices.let_memory_grow)
show(["policy", [warned, tf.config.experimental.get_memory_growth(gpu)]])
""")
    )


@pytest.fixture(scope="module")
def after_its_start(run):
    """What a process has seen in which TensorFlow starts before d2ldev: one for several tests."""
    return dict(
        run("""
import sys, types
from unittest import mock
from d2ldev_tensorflow import devices
from tensorflow.python.eager.context import context
tf.ones(1)
backend = d2ldev.get_backend("tensorflow")
show(["warned", caught(lambda: backend.ones(1, device="cpu"))])

from d2ldev.native import tensorflow as d2l
seventh = d2l.gpu(7)
try:
    with seventh:
        show(["named", "entered"])
except d2ldev.DeviceUnavailableError as error:
    show(["named", [seventh, "/GPU:7" in str(error), "/device:CPU:0" in str(error)]])

x = backend.rand((1500, 1500), seed=0)
tf.config.experimental.set_synchronous_execution(False)
for _ in range(10):
    y = tf.linalg.matmul(x, x)
busy = not backend.is_idle()
backend.synchronize()
show(["queued", [busy, backend.is_idle()]])

other = types.ModuleType("keras")
other.config = types.SimpleNamespace(backend=lambda: "jax")
sys.modules["keras"] = other
try:
    backend.mlp([2, 1])
except d2ldev.D2LDevError as error:
    show(["keras", [error.problem, error.fix]])

gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
context()._physical_devices.append(gpu)
with mock.patch.object(tf.config, "get_visible_devices", lambda kind: [gpu]):
    show(["policy", caught(devices.let_memory_grow)])
""")
    )


def test_waiting_does_not_start_tensorflow(before_its_start):
    assert before_its_start["waiting"] == [True, False]


def test_tensorflow_s_own_configuration_takes_the_policy_before_it_starts(before_its_start):
    assert before_its_start["policy"] == [[], True]


def test_tensorflow_s_own_configuration_refuses_the_policy_after_its_start(after_its_start):
    (warned,) = after_its_start["policy"]
    assert warned.startswith("MemoryPolicyWarning: TensorFlow had initialised its GPU")


def test_on_the_cpu_nothing_is_warned_about(after_its_start):
    assert after_its_start["warned"] == []


def test_a_gpu_that_is_not_there_can_be_named_and_not_entered(after_its_start):
    assert after_its_start["named"] == ["/GPU:7", True, True]


def test_keras_on_another_framework_is_an_error_that_names_it(after_its_start):
    problem, fix = after_its_start["keras"]
    assert "jax" in problem
    assert "KERAS_BACKEND=tensorflow" in fix


def test_work_that_tensorflow_has_queued_is_waited_for(after_its_start):
    assert after_its_start["queued"] == [True, True]


def test_the_distribution_is_the_one_that_is_installed(backend):
    assert metadata.version(framework_of(backend).distributions[0]) == tf.__version__


def test_an_answer_that_takes_long_means_work(monkeypatch, backend):
    monkeypatch.setattr(
        framework_of(backend).devices, "synchronize", lambda device: time.sleep(0.2)
    )
    assert not backend.is_idle("cpu")


def test_an_answer_that_comes_at_once_means_none(monkeypatch, backend):
    monkeypatch.setattr(framework_of(backend).devices, "patience", 30)
    assert backend.is_idle("cpu")


# -- GPUs that this machine need not have ----------------------------------------------------------


@pytest.fixture
def cards(monkeypatch):
    """Makes the driver show cards of the given sizes, and CUDA's variables unset."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def show(*sizes):
        shown = [nvml.Card(f"GPU-{index}abc", size) for index, size in enumerate(sizes)]
        monkeypatch.setattr(nvml, "cards", lambda: shown)
        return shown

    return show


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
        return [SimpleNamespace(name=name) for name in self._names]

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
        monkeypatch.setattr(room.nvml, "has_driver", lambda: driver > 0)
        config = Config(listed, growth)
        test = SimpleNamespace(is_built_with_cuda=lambda: True)
        context = SimpleNamespace(
            _physical_devices=None, _initialized=started, _collective_ops_server_def=None
        )
        monkeypatch.setattr(room, "tf", SimpleNamespace(config=config, test=test))
        monkeypatch.setattr(room, "context", lambda: context)
        config.context = context
        return config

    return pretend


def test_before_tensorflow_starts_the_driver_counts(cuda):
    cuda(driver=3, listed=0)
    assert TensorFlowDevices(None).count() == 3


def test_where_the_driver_cannot_be_asked_tensorflow_counts_and_says_so(cuda, monkeypatch):
    cuda(driver=3, listed=2)
    monkeypatch.setattr(nvml, "cards", lambda: None)
    nvml.warn_of_context.cache_clear()
    with pytest.warns(DeviceInitializationWarning, match="tensorflow initialises CUDA to count"):
        assert TensorFlowDevices(None).count() == 3  # the first is divided in two
    nvml.warn_of_context.cache_clear()


@pytest.mark.parametrize("started", [False, True])
def test_a_build_for_cuda_warns_once_without_a_driver(cuda, started):
    cuda(driver=0, listed=0, started=started)
    room.nvml.warn_without_driver.cache_clear()
    devices = TensorFlowDevices(None)
    with pytest.warns(DeviceInitializationWarning, match="no NVIDIA driver here") as warned:
        counts = [devices.count(), devices.count()]
    room.nvml.warn_without_driver.cache_clear()
    assert (counts, len(warned)) == ([0, 0], 1)


def test_once_tensorflow_has_started_it_counts(cuda):
    cuda(driver=3, listed=1, started=True)
    assert TensorFlowDevices(None).count() == 1


def test_gpus_that_tensorflow_has_looked_for_are_counted_with_their_parts(cuda):
    config = cuda(driver=0, listed=2)
    config.context._physical_devices = ["GPU:0", "GPU:1"]
    assert TensorFlowDevices(None).count() == 3


def test_gpus_that_tensorflow_cannot_use_are_a_warning_and_an_error(cuda):
    config = cuda(driver=2, listed=0)
    devices = TensorFlowDevices(None)
    devices.count()
    config.list_logical_devices = lambda kind=None: (
        setattr(config.context, "_initialized", True) or []
    )
    with (
        pytest.warns(DeviceInitializationWarning, match="found 2 GPUs and can use 0"),
        pytest.raises(DeviceUnavailableError, match="gpu:0"),
    ):
        devices.native(gpu(0))


def test_a_gpu_is_called_as_tensorflow_calls_it(cuda):
    cuda(driver=2, listed=2, started=True)
    assert TensorFlowDevices(None).native(gpu(1)) == "/GPU:1"


def test_memory_grows_on_every_gpu(cuda):
    config = cuda(driver=2, listed=2)
    room.let_memory_grow()
    assert config.grown == [("GPU:0", True), ("GPU:1", True)]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TF_FORCE_GPU_ALLOW_GROWTH", "false"), ("D2LDEV_GPU_MEMORY", "framework")],
)
def test_the_user_s_choice_of_memory_is_left_alone(cuda, monkeypatch, variable, value):
    config = cuda(driver=1, listed=1)
    monkeypatch.setenv(variable, value)
    room.let_memory_grow()
    assert config.grown == []


def test_a_gpu_that_the_user_has_divided_is_left_alone(cuda):
    cuda(driver=1, listed=1, growth=ValueError("virtual devices configured"))
    assert room.let_memory_grow() is None


def test_the_policy_that_comes_too_late_is_a_warning(cuda):
    cuda(driver=1, listed=1, growth=RuntimeError("initialized"))
    with pytest.warns(MemoryPolicyWarning, match="TF_FORCE_GPU_ALLOW_GROWTH=true"):
        room.let_memory_grow()


def test_the_memory_of_a_gpu_that_has_not_started_is_not_used(cards, monkeypatch):
    cards(8)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(room, "has_started", lambda: False)
    assert TensorFlowDevices(None).memory(gpu(0)) == Memory(0, 0, 8)


def test_the_memory_of_a_gpu_is_that_of_tensorflow_s_allocator(cards, monkeypatch):
    cards(8)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    asked = []
    monkeypatch.setattr(
        tf.config.experimental,
        "get_memory_info",
        lambda name: asked.append(name) or {"current": 1, "peak": 2},
    )
    assert TensorFlowDevices(None).memory(gpu(0)) == Memory(1, 2, 8)
    assert asked == ["GPU:0"]


def test_a_variable_of_any_shape_is_a_live_tensor_of_the_shape_that_it_has(backend):
    x = tf.Variable(tf.ones(12347), shape=tf.TensorShape(None))
    found = [live for live in backend.live_tensors("cpu") if live.shape == (12347,)]
    assert {live.nbytes for live in found} == {4 * 12347}
    assert x.shape.rank is None


def test_live_tensors_can_be_asked_for_while_tensorflow_traces(backend):
    found = []

    @tf.function(autograph=False)
    def function(x):
        found.append(backend.live_tensors("gpu:0"))
        return x

    there = backend.ones(12347, device="gpu:0")
    function(there)
    assert (12347,) in [live.shape for live in found[0]]


@pytest.mark.parametrize(("name", "is_on"), [("highest", False), ("high", True), ("medium", True)])
def test_a_precision_switches_tensorfloat32_for_products_and_convolutions(backend, name, is_on):
    is_enabled = tf.config.experimental.tensor_float_32_execution_enabled
    before = is_enabled()
    with backend.matmul_precision(name) as found:
        assert is_enabled() is is_on
        assert found == ("high" if is_on else "highest")
    assert is_enabled() is before


def test_autograph_converts_calls_that_make_tensors(run, tmp_path):
    # AutoGraph reads the source of a function in a file.
    (tmp_path / "traced.py").write_text(
        "def make(backend):\n"
        "    backend.asarray([1.0], device='gpu:1')\n"
        "    return backend.zeros(3, device='gpu:1')\n"
    )
    program = """
import io, logging
import traced

d2ldev.backend.zeros(1)
told = io.StringIO()
tf.get_logger().addHandler(logging.StreamHandler(told))
tf.function(traced.make)(d2ldev.backend)
show(told.getvalue())
"""
    variables = {"D2LDEV_BACKEND": "tensorflow", "D2LDEV_VIRTUAL_GPUS": "2"}
    # AutoGraph imports what it writes, and compiled files would stay in the temporary folder.
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    assert run(program, PYTHONPATH=str(tmp_path), **variables) == [""]
