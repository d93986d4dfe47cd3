"""``d2ldev.find_leaks`` in TensorFlow: tensors that a library leaves on a device that it names."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from leaky_libraries import find_number, import_library
from tensorflow.python import pywrap_tfe

import d2ldev
from d2ldev.contract.leaks import Frames
from d2ldev.leaks.finding import Leaks, follow

LIBRARY = """
import numpy as np
import tensorflow as tf

CONSTANT = tf.constant([1.0, 2.0, 3.0])

def create(x):
    with tf.device("CPU:0"):
        made = tf.ones(3)  # create
    return x + made

def create_constant(x):
    with tf.device("/cpu:0"):
        made = tf.constant(np.ones(3, "float32"))  # constant
    return x + made

def create_variable(x):
    with tf.device("CPU:0"):
        made = tf.Variable([1.0, 2.0, 3.0])  # variable
    return x * made

def derive(x):
    with tf.device("CPU:0"):
        made = tf.ones(6)  # derive
    return x + (made * 2)[:3]

def move(x):
    with tf.device("CPU:0"):
        moved = tf.identity(x)  # move
    return x + moved

def move_by_method(x):
    moved = x.cpu()  # cpu
    return x + moved

def leak_in_gradient(x):
    with tf.device("CPU:0"):
        made = tf.ones(3)  # grad
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x * made)
    return tape.gradient(y, x)

@tf.function(autograph=False)
def add(x, y):
    return x + y

def call_function(x):
    with tf.device("CPU:0"):
        made = tf.ones(3)  # function
    return add(x, made)

def catch(x):
    try:
        return x + x.cpu()  # catch
    except Exception:
        return x

def compute_elsewhere(x):
    with tf.device("CPU:0"):
        moved = tf.identity(x)  # elsewhere
        computed = tf.cumsum(moved)
    with tf.device(x.device):
        return tf.identity(computed)

def bring_back(x):
    with tf.device("CPU:0"):
        moved = tf.identity(x)
    with tf.device(x.device):
        return tf.identity(moved)

def return_it(x):
    with tf.device("CPU:0"):
        return x * 2  # result

def leak_twice(x):
    return create(move(x))

def read(x):
    return float(x[0]) + np.asarray(x).sum() + x.numpy()[0]  # read

def hand_over(x):
    return x.cpu().numpy()  # hand over

class Shift:
    def __init__(self):
        with tf.device("CPU:0"):
            self.value = tf.ones(3)  # kept

    def __call__(self, x):
        return x + self.value

def good(x):
    made = tf.ones(3) + tf.constant(np.ones(3, "float32")) + tf.Variable([1.0, 2.0, 3.0])
    made += tf.reshape(tf.range(3.0), tf.shape(x)) + tf.random.normal([3]) + CONSTANT
    return add(x, made) + 1

def take_rows(x):
    rows = tf.data.Dataset.from_tensor_slices(np.ones((2, 3), "float32"))
    return sum(x + row for row in rows)

def convert_on_host(array):
    with tf.device("CPU:0"):
        return tf.constant(array)
"""
number_of = partial(find_number, LIBRARY)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    with import_library(folder, "leaky_tensorflow_library", LIBRARY) as module:
        yield module


@pytest.fixture
def find(backend):
    """Return what finds the leaks of a function of ``[1, 2, 3]``, and its result."""

    def run(function):
        with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
            result = function(tf.constant([1.0, 2.0, 3.0]))
        return leaks, result

    return run


MIXING = {
    "create": ("create", "creates", "add"),
    "create_constant": ("constant", "creates", "add"),
    "create_variable": ("variable", "creates", "mul"),
    "derive": ("derive", "creates", "add"),
    "move": ("move", "moves", "add"),
    "move_by_method": ("cpu", "moves", "add"),
    "leak_in_gradient": ("grad", "creates", "mul"),
    "call_function": ("function", "creates", "add"),
    "catch": ("catch", "moves", "add"),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_tensor_that_a_library_leaves_elsewhere_is_found(backend, library, find, name):
    leaks, result = find(getattr(library, name))
    assert str(backend.device_of(result)) == "gpu:1"
    assert np.array_equal(result, getattr(library, name)(tf.constant([1.0, 2.0, 3.0])))
    comment, action, operation = MIXING[name]
    found = {(leak.kind, leak.line.number, leak.action, leak.operation) for leak in leaks}
    assert found == {("mix", number_of(comment), action, operation)}


def test_one_run_finds_all_leaks_in_their_order(library, find):
    leaks, _ = find(library.leak_twice)
    assert [leak.line.number for leak in leaks] == [number_of("move"), number_of("create")]


def test_what_is_computed_elsewhere_and_comes_back_is_found(library, find):
    (leak,), _ = find(library.compute_elsewhere)
    assert (leak.kind, leak.line.number, leak.action) == ("move", number_of("elsewhere"), "moves")
    assert (leak.operation, leak.met_at.number) == ("cumsum", number_of("elsewhere") + 1)
    leaks, _ = find(library.bring_back)
    assert list(leaks) == []


def test_a_result_from_elsewhere_is_found(library, find):
    (leak,), _ = find(lambda x: library.return_it(x).numpy())
    assert (leak.kind, leak.line.number, leak.action) == ("result", number_of("result"), "moves")
    (leak,), _ = find(lambda x: x + library.return_it(x))
    assert (leak.kind, leak.line.number) == ("result", number_of("result"))


def test_a_tensor_that_an_object_keeps_is_followed(library, find):
    (leak,), _ = find(lambda x: library.Shift()(x))
    assert (leak.kind, leak.line.number) == ("mix", number_of("kept"))


def test_reads_of_the_host_fail_nothing(library, find):
    leaks, _ = find(lambda x: (library.read(x), library.hand_over(x)))
    lines = {number_of("read"), number_of("hand over")}
    assert {(leak.kind, leak.line.number) for leak in leaks} == {("read", line) for line in lines}
    assert leaks.find_failing() == []


def make_on_host():
    with tf.device("CPU:0"):
        return tf.ones(3)


INPUTS = {
    "ones": lambda library: tf.ones(3),
    "drawn": lambda library: tf.random.normal([3]),
    "variable": lambda library: tf.Variable([1.0, 2.0, 3.0]),
    "on the host": lambda library: make_on_host(),
    "by the library": lambda library: library.convert_on_host(np.ones(3, "float32")),
    "from a dataset": lambda library: next(iter(tf.data.Dataset.from_tensors(np.ones(3)))),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_the_test_are_on_the_device(backend, library, name):
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        x = INPUTS[name](library)
        x + x
    assert str(backend.device_of(x)) == "gpu:1"
    assert leaks.has_inputs
    assert list(leaks) == []


@pytest.mark.parametrize("name", ["good", "take_rows"])
def test_right_functions_have_no_leaks(backend, library, find, name):
    leaks, result = find(getattr(library, name))
    assert str(backend.device_of(result)) == "gpu:1"
    assert list(leaks) == []


def test_models_from_before_the_block_and_from_it_have_no_leaks(backend):
    keras = pytest.importorskip("keras")
    before = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="relu")])
        optimizer = keras.optimizers.Adam()
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(before(net(tf.ones((2, 3)))))
            found = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(found, net.trainable_variables, strict=True))
    assert {str(backend.device_of(each)) for each in (loss, *found)} == {"gpu:1"}
    assert leaks.find_failing() == []


def test_a_tensor_that_a_library_gave_to_a_fixture_is_followed(backend, library):
    leaks, frames = Leaks(), Frames([__file__])
    with follow(backend, "gpu:1", frames, leaks):
        values = {"made": library.return_it(tf.ones(3))}
    assert list(leaks) == []
    with follow(backend, "gpu:1", frames, leaks) as place:
        place(values)
        np.asarray(values["made"])
    (leak,) = leaks
    assert (leak.kind, leak.line.number) == ("result", number_of("result"))


def test_the_block_leaves_tensorflow_as_it_was(backend, library):
    def look():
        functions = pywrap_tfe.TFE_Py_FastPathExecute, pywrap_tfe.TFE_Py_Execute
        return *functions, tf.__internal__.EagerTensor.numpy, np.asarray, tf.ones(3).device

    before = look()
    with d2ldev.find_leaks("gpu:1", backend=backend) as leaks:
        during = look()
    assert all(x != y for x, y in zip(before, during, strict=True))
    assert look() == before
    library.create(tf.ones(3))
    assert list(leaks) == []
