"""TensorFlow's devices: their names, how many there are, what is asked of them."""

import time
from importlib import metadata

import pytest
import tensorflow as tf
from d2ldev_tensorflow.backend import TensorFlowBackend
from d2ldev_tensorflow.logical import LogicalDevices

from d2ldev import D2LDevError, DeviceUnavailableError, InvalidDeviceError, cpu, gpu

FULL = "/job:localhost/replica:0/task:0/device:"


@pytest.mark.parametrize(
    "name", ["/CPU:0", "/cpu:0", "/device:CPU:0", FULL + "CPU:0", (FULL + "cpu:0").lower()]
)
def test_every_name_of_the_cpu_means_it(tensorflow_backend, name):
    assert tensorflow_backend.device(name) is cpu()


@pytest.mark.parametrize("name", ["/GPU:1", "/gpu:1", "/device:GPU:1", FULL + "GPU:1"])
def test_every_name_of_a_gpu_means_it(tensorflow_backend, name):
    assert tensorflow_backend.device(name) is gpu(1)


@pytest.mark.parametrize("name", ["/CPU:2", "/device:cpu:2", FULL + "CPU:2"])
def test_a_virtual_gpu_is_a_further_logical_cpu(tensorflow_backend, name):
    assert tensorflow_backend.device(name) is gpu(1)
    assert tensorflow_backend.native("gpu:1") == "/CPU:2"


def test_without_virtual_gpus_every_logical_cpu_is_the_cpu():
    assert LogicalDevices(None).place("/CPU:2") is cpu()


def test_tensorflow_s_device_objects_are_taken(tensorflow_backend):
    devices = [tensorflow_backend.device(each) for each in tf.config.list_logical_devices()]
    assert devices == [cpu(), gpu(0), gpu(1)]


@pytest.mark.parametrize("name", ["/TPU:0", "/job:worker/device:CPU:0", "/GPU:x", "/GPU", "/:0"])
def test_names_of_other_devices_are_refused(tensorflow_backend, name):
    with pytest.raises(InvalidDeviceError) as caught:
        tensorflow_backend.device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["/GPU:7", "/CPU:8", "gpu:7"])
def test_a_device_that_is_not_there_is_refused_and_nothing_lands_on_the_cpu(
    tensorflow_backend, name
):
    with pytest.raises(DeviceUnavailableError, match="gpu:7"):
        tensorflow_backend.ones(2, device=name)


def test_the_default_device_is_where_tensorflow_puts_a_tensor(tensorflow_backend):
    with tf.device("/CPU:2"):
        assert tensorflow_backend.default_device() is gpu(1)
    assert tensorflow_backend.default_device() is cpu()


def test_a_scope_is_where_tensorflow_s_operations_run(tensorflow_backend):
    x = tensorflow_backend.ones((2, 2))
    with tensorflow_backend.on("gpu:1"):
        y = x @ x
    assert tensorflow_backend.device_of(y) is gpu(1)


def test_a_variable_is_where_its_memory_is(tensorflow_backend):
    with tf.device("/CPU:1"):
        variable = tf.Variable(tf.ones(2))
    assert tensorflow_backend.device_of(variable) is gpu(0)


def test_a_traced_tensor_has_no_device(tensorflow_backend):
    refusals = []

    @tf.function(autograph=False)
    def traced(x):
        with pytest.raises(D2LDevError) as caught:
            tensorflow_backend.device_of(x)
        refusals.append(str(caught.value))
        return x

    traced(tf.ones(2))
    assert "only traced" in refusals[0]


def test_a_symbolic_input_of_keras_has_no_device(tensorflow_backend):
    import keras

    with pytest.raises(D2LDevError, match="only traced"):
        tensorflow_backend.device_of(keras.Input((2,)))


def test_a_variable_that_is_spread_has_no_one_device(tensorflow_backend):
    class Spread(tf.Variable):
        values = ()

        def __init__(self):
            pass

        def __repr__(self):
            return "a spread variable"

    with pytest.raises(D2LDevError, match="several devices"):
        tensorflow_backend.device_of(object.__new__(Spread))


def test_other_virtual_gpus_are_refused_once_tensorflow_has_started(tensorflow_backend):
    with pytest.raises(D2LDevError, match="already") as caught:
        TensorFlowBackend(virtual_gpus=3)
    assert "D2LDEV_VIRTUAL_GPUS=3" in caught.value.fix


def test_the_same_virtual_gpus_are_found_again(tensorflow_backend):
    assert TensorFlowBackend(virtual_gpus=2).num_gpus() == 2


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
    assert "initialised its devices already" in problem
    assert "D2LDEV_VIRTUAL_GPUS=2" in fix
    assert devices == ["/device:CPU:0"]


def test_asking_for_virtual_gpus_does_not_start_tensorflow(run):
    program = """
from d2ldev_tensorflow.logical import has_started
backend = d2ldev.get_backend("tensorflow")
show([backend.num_gpus(), str(backend.try_gpu(1)), has_started()])
backend.ones(1)
show(has_started())
"""
    assert run(program, D2LDEV_VIRTUAL_GPUS="2") == [[2, "gpu:1", False], True]


def test_waiting_does_not_start_tensorflow(run):
    program = """
from d2ldev_tensorflow.logical import has_started
backend = d2ldev.get_backend("tensorflow")
backend.synchronize()
show([backend.is_idle(), has_started()])
"""
    assert run(program) == [[True, False]]


def test_keras_on_another_framework_is_an_error_that_names_it(run):
    program = """
import sys, types
other = types.ModuleType("keras")
other.config = types.SimpleNamespace(backend=lambda: "jax")
sys.modules["keras"] = other
try:
    d2ldev.get_backend("tensorflow").mlp([2, 1])
except d2ldev.D2LDevError as error:
    show([error.problem, error.fix])
"""
    problem, fix = run(program)[0]
    assert "jax" in problem
    assert "KERAS_BACKEND=tensorflow" in fix


QUEUED = """
backend = d2ldev.get_backend("tensorflow")
x = backend.rand((1500, 1500), seed=0)
tf.config.experimental.set_synchronous_execution(False)
for _ in range(10):
    y = tf.linalg.matmul(x, x)
busy = not backend.is_idle()
backend.synchronize()
show([busy, backend.is_idle()])
"""


def test_work_that_tensorflow_has_queued_is_waited_for(run):
    assert run(QUEUED) == [[True, True]]


def test_an_answer_that_takes_long_means_work(monkeypatch, tensorflow_backend):
    from d2ldev_tensorflow import machine

    monkeypatch.setattr(machine, "wait_for", lambda native: time.sleep(0.2))
    assert not machine.answers_at_once("/CPU:0")


def test_an_answer_that_comes_at_once_means_none(monkeypatch, tensorflow_backend):
    from d2ldev_tensorflow import machine

    monkeypatch.setattr(machine, "_PATIENCE", 30)
    assert machine.answers_at_once("/CPU:0")


def test_the_distribution_is_the_one_that_is_installed(tensorflow_backend):
    assert metadata.version(tensorflow_backend.distributions[0]) == tf.__version__
