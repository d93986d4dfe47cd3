"""The TensorFlow tab of the chapter "GPUs" as it is printed, on the CPU and on two virtual GPUs."""

import pytest
from book import BOOKS_RUN, BOOKS_TRAINER, run_chapter, run_tour

import d2ldev
from d2ldev.native import NativeDevices

CHAPTER = """
# 6.7.1 Computing Devices
from d2ldev.native import tensorflow as d2l
import tensorflow as tf

# Of ``EXCEPTIONS``: in the place of the chapter's definitions.
cpu, gpu, num_gpus = d2l.cpu, d2l.gpu, d2l.num_gpus
try_gpu, try_all_gpus = d2l.try_gpu, d2l.try_all_gpus

show_as('named', cpu(), gpu(), gpu(1))
show_as('the number', num_gpus())
show_as('tried', try_gpu(), try_gpu(10), try_all_gpus())

def place(x):
    # The last part of the name: the device of a process.
    return '/' + x.device.rpartition(':')[0].rpartition(':')[2] + x.device[-2:]

# 6.7.2 Tensors and GPUs
x = tf.constant([1, 2, 3])
show_as('x', place(x))

with try_gpu():
    X = tf.ones((2, 3))
with try_gpu(1):
    Y = tf.random.uniform((2, 3))
show_as('X and Y', place(X), place(Y))

with try_gpu(1):
    Z = X
show_as('Z is X', Z is X, place(Z))

show_as('Y + Z', list((Y + Z).shape))

with try_gpu(1):
    Z2 = Z
show_as('Z2 is Z', Z2 is Z)

# 6.7.3 Neural Networks and GPUs
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    net = tf.keras.models.Sequential([
        tf.keras.layers.Dense(1)])

# Of ``EXCEPTIONS``: the book has no block here.
with try_gpu():
    show_as('net(X)', place(net(X)), list(net(X).shape))
    show_as('net', *(place(tf.identity(net.layers[0].weights[i])) for i in range(2)))
show_as('weights', *(place(weight.value) for weight in net.layers[0].weights))

"""
CHAPTER += BOOKS_TRAINER
CHAPTER += """
@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    if self.gpus:
        with self.gpus[0]:
            batch = [tf.identity(a) for a in batch]
    return batch

class LinearRegression(d2l.Module):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = tf.keras.layers.Dense(1)

    def loss(self, y_hat, y):
        return tf.reduce_mean((y_hat - y) ** 2)

    def configure_optimizers(self):
        return tf.keras.optimizers.SGD(self.lr)

as_tensor = tf.constant
"""
CHAPTER += BOOKS_RUN
CHAPTER += """
show_as('trained', *(place(weight.value) for weight in model.net.weights))
trainer = d2l.Trainer(max_epochs=1, num_gpus=1)
show_as('trainer', *map(place, trainer.prepare_batch([tf.ones((2, 3)), tf.ones((2, 1))])))
"""
CPU, FIRST, SECOND = "/CPU:0", "/CPU:1", "/CPU:2"


def test_on_the_cpu_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=0) == {
        "named": [CPU, "/GPU:0", "/GPU:1"],
        "the number": [0],
        "tried": [CPU, CPU, [CPU]],
        "x": [CPU],
        "X and Y": [CPU, CPU],
        "Z is X": [True, CPU],
        "Y + Z": [[2, 3]],
        "Z2 is Z": [True],
        "net(X)": [CPU, [2, 1]],
        "net": [CPU, CPU],
        "weights": [CPU, CPU],
        "fit": [True, 10],
        "trained": [CPU] * 2,
        "trainer": [CPU, CPU],
    }


def test_on_two_virtual_gpus_the_chapter_runs_as_printed():
    assert run_chapter(CHAPTER, virtual_gpus=2) == {
        "named": [CPU, FIRST, SECOND],
        "the number": [2],
        "tried": [FIRST, CPU, [FIRST, SECOND]],
        "x": [CPU],
        "X and Y": [FIRST, SECOND],
        # TensorFlow copies nothing here, whatever the book says.
        "Z is X": [True, FIRST],
        "Y + Z": [[2, 3]],
        "Z2 is Z": [True],
        "net(X)": [FIRST, [2, 1]],
        "net": [FIRST, FIRST],
        "weights": [FIRST, FIRST],
        "fit": [True, 10],
        "trained": [FIRST] * 2,
        "trainer": [FIRST, FIRST],
    }


def test_in_the_tour_every_result_is_where_its_cell_says():
    assert run_tour("tensorflow") == [0, []]


# -- a native device is a name that is also a context -------------------------------------------


@pytest.fixture
def native(backend):
    return NativeDevices(backend)


def test_a_native_device_can_be_printed_and_compared(native):
    assert (repr(native.try_gpu()), native.try_gpu(1)) == ("'/CPU:1'", "/CPU:2")


def test_a_native_device_is_taken_where_tensorflow_takes_a_device(native, backend):
    import tensorflow as tf

    with tf.device(native.try_gpu(1)):
        assert backend.device_of(tf.ones(2)) is d2ldev.gpu(1)


def test_a_native_device_can_be_entered_again_in_its_own_block(native, backend):
    import tensorflow as tf

    first, second = native.gpu(0), native.gpu(1)
    with first, second, first:
        inner = tf.ones(2)
    with first:
        with second:
            pass
        outer = tf.ones(2)
    assert [backend.device_of(x) for x in (inner, outer, tf.ones(2))] == [
        d2ldev.gpu(0),
        d2ldev.gpu(0),
        d2ldev.cpu(),
    ]


def test_a_native_device_is_a_context_in_a_traced_function(native, backend):
    import tensorflow as tf

    @tf.function(autograph=False)
    def build():
        with native.gpu(1):
            return tf.random.uniform((2,))

    operations = build.get_concrete_function().graph.get_operations()
    assert {each.device for each in operations if "uniform" in each.name} == {"/device:CPU:2"}
