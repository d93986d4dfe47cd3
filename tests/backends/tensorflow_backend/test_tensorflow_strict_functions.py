"""``strict()`` and ``tf.function``: a call is one operation."""

import tempfile
import threading
from functools import partial

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


@pytest.fixture
def _converted_elsewhere(monkeypatch, tmp_path):
    """AutoGraph converts what is mapped, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Scaling:
    """What is mapped may be any callable object."""

    def __init__(self, by):
        self.by = by

    def __call__(self, row):
        return row * self.by

    def scaled(self, row):
        """The same, as a method."""
        return row * self.by


def scaling(by):
    """As a function that closes over a tensor."""

    def scaled(row):
        return row * by

    return scaled


MAPPED = {
    "function": scaling,
    "method": lambda by: Scaling(by).scaled,
    "callable object": Scaling,
    "partial": lambda by: partial(tf.multiply, by),
    "tf.function": lambda by: traced(scaling(by)),
}


@pytest.mark.usefixtures("_converted_elsewhere")
@pytest.mark.parametrize("make", MAPPED.values(), ids=MAPPED)
def test_what_a_vectorized_map_closes_over_is_an_operand(tensorflow_backend, here, elsewhere, make):
    with tensorflow_backend.strict():
        mapped = make(here[0])
        assert tensorflow_backend.device_of(tf.vectorized_map(mapped, here)) is gpu(1)
        with pytest.raises(DeviceMismatchError):
            tf.vectorized_map(mapped, elsewhere)


@pytest.mark.usefixtures("_converted_elsewhere")
def test_what_a_vectorized_map_makes_is_no_operand(tensorflow_backend, here):
    signals = tensorflow_backend.ones((4, 30), device="gpu:1")

    def noise(row):
        return row + tf.random.normal((4,))

    def spectrum(row):
        return tf.signal.stft(row, 3, 1)

    with tensorflow_backend.strict():
        found = [tf.vectorized_map(noise, here), tf.vectorized_map(spectrum, signals)]
    assert {tensorflow_backend.device_of(x) for x in found} == {gpu(1)}


def test_a_jacobian_goes_back_through_moves(tensorflow_backend, here, elsewhere):
    with tensorflow_backend.strict(), tf.GradientTape() as tape:
        tape.watch(here)
        y = tensorflow_backend.to(here * here, "gpu:0") * elsewhere
        found = tape.jacobian(y, here)
    assert found.shape == (4, 4, 4, 4)


@pytest.mark.parametrize("of", ["gradient", "jacobian"])
def test_a_gradient_of_ones_own_that_mixes_is_refused(tensorflow_backend, here, elsewhere, of):
    square = tf.custom_gradient(lambda x: (x * x, lambda upstream: upstream * elsewhere))
    with tensorflow_backend.strict(), tf.GradientTape(persistent=True) as tape:
        tape.watch(here)
        y = square(here)
        options = {"experimental_use_pfor": False} if of == "jacobian" else {}
        with pytest.raises(DeviceMismatchError):
            getattr(tape, of)(y, here, **options)


def test_a_python_function_refuses(tensorflow_backend, here, elsewhere):
    with tensorflow_backend.strict():
        tf.py_function(lambda x, y: x + y, [here, here], tf.float32)
        with pytest.raises(DeviceMismatchError):
            tf.py_function(lambda x, y: x + y, [here, elsewhere], tf.float32)


def test_a_python_function_in_a_traced_one_is_strict_with_the_whole_process(run):
    program = """
backend = d2ldev.get_backend("tensorflow")
here, elsewhere = (backend.ones((2, 2), device=f"gpu:{i}") for i in (1, 0))
run = tf.function(lambda x: tf.py_function(lambda x: x + elsewhere, [x], tf.float32))
try:
    run(here)
except Exception as error:
    show("DeviceMismatchError" in str(error))
"""
    assert run(program, D2LDEV_VIRTUAL_GPUS="2", D2LDEV_STRICT="1") == [True]


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
