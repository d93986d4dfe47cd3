"""``strict()`` and ``tf.function``: a call is one operation."""

import threading

import pytest
import tensorflow as tf

from d2ldev import DeviceMismatchError, cpu, gpu


def traced(function):
    # AutoGraph writes files when it converts a function.
    return tf.function(function, autograph=False)


@pytest.fixture
def here(tensorflow_backend):
    return tensorflow_backend.rand((4, 4), seed=1, device="gpu:1")


@pytest.fixture
def elsewhere(tensorflow_backend):
    return tensorflow_backend.rand((4, 4), seed=2, device="gpu:0")


def test_a_function_runs_where_its_operands_are(tensorflow_backend, here):
    double = traced(lambda x: tf.matmul(x, x) + tf.ones((4, 4)))
    with tensorflow_backend.strict():
        assert tensorflow_backend.device_of(double(here)) is gpu(1)


def test_arguments_on_two_devices_are_refused(tensorflow_backend, here, elsewhere):
    add = traced(lambda x, y: x + y)
    with tensorflow_backend.strict():
        with pytest.raises(DeviceMismatchError) as caught:
            add(here, elsewhere)
        add(here, here)
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_a_function_that_was_traced_before_refuses(tensorflow_backend, here, elsewhere):
    add = traced(lambda x, y: x + y)
    add(here, elsewhere)
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError):
        add(here, elsewhere)


def test_a_concrete_function_refuses(tensorflow_backend, here, elsewhere):
    add = traced(lambda x, y: x + y).get_concrete_function(here, here)
    with tensorflow_backend.strict():
        assert tensorflow_backend.device_of(add(here, here)) is gpu(1)
        with pytest.raises(DeviceMismatchError):
            add(here, elsewhere)


def test_a_captured_tensor_is_an_operand(tensorflow_backend, here, elsewhere):
    add = traced(lambda x: x + elsewhere)
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError):
        add(here)


def test_a_captured_variable_is_an_operand_and_named(tensorflow_backend, here, elsewhere):
    weight = tf.Variable(elsewhere, name="weight")
    with tensorflow_backend.on("gpu:1"):
        bias = tf.Variable(here, name="bias")
    add = traced(lambda: weight + bias)
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        add()
    assert "weight on cpu" in caught.value.problem
    assert "bias on gpu:1" in caught.value.problem


def test_a_captured_0_dim_variable_of_the_cpu_is_none(tensorflow_backend, here):
    rate = tf.Variable(0.5)
    scaled = traced(lambda x: x * rate)
    with tensorflow_backend.strict():
        assert tensorflow_backend.device_of(scaled(here)) is gpu(1)


def test_gradients_of_a_function_are_where_its_operands_are(tensorflow_backend, here):
    square = traced(lambda x: tf.reduce_sum(x**2))
    with tensorflow_backend.strict():
        with tf.GradientTape() as tape:
            tape.watch(here)
            y = square(here)
        assert tensorflow_backend.device_of(tape.gradient(y, here)) is gpu(1)


def test_a_function_with_an_iterator_runs(tensorflow_backend, here):
    data = iter(tf.data.Dataset.range(3))
    take = traced(lambda: here * tf.cast(next(data), tf.float32))
    with tensorflow_backend.strict():
        take()
        assert bool(tf.reduce_all(take() == here))


def test_another_thread_computes_as_before(tensorflow_backend, here, elsewhere):
    results = []

    def compute():
        results.append(tensorflow_backend.device_of(here + elsewhere))
        results.append(tensorflow_backend.device_of(here + here))

    with tensorflow_backend.strict():
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    assert results == [cpu(), cpu()]


def test_the_whole_process_is_strict_with_the_environment_variable(run):
    program = """
backend = d2ldev.get_backend("tensorflow")
x, y = (backend.ones((2, 2), device=f"gpu:{index}") for index in range(2))
show(str(backend.device_of(y + y)))
try:
    x + y
except d2ldev.DeviceMismatchError as error:
    show(error.attempted)
"""
    shown = run(program, D2LDEV_VIRTUAL_GPUS="2", D2LDEV_STRICT="1")
    assert shown == ["gpu:1", "run add"]
