"""The book's code for TensorFlow: docs/d2l.md on the CPU and virtual GPUs, the epochs of 3.4."""

import pytest
from book import expect, run_book, run_cells, run_tour
from pages import ROOT, find_blocks
from processes import run_python

import d2ldev
from d2ldev.native import NativeDevices

EPOCHS = """
@d2l.add_to_class(d2l.Trainer)
def prepare_batch(self, batch):
    if self.gpus:
        with self.gpus[0]:
            batch = [tf.identity(a) for a in batch]
    return batch

@d2l.add_to_class(d2l.Trainer)
def fit_epoch(self):
    self.model.training = True
    for batch in self.train_dataloader:
        with tf.GradientTape() as tape:
            loss = self.model.training_step(self.prepare_batch(batch))
        grads = tape.gradient(loss, self.model.trainable_variables)
        if self.gradient_clip_val > 0:
            grads = self.clip_gradients(self.gradient_clip_val, grads)
        self.optim.apply_gradients(zip(grads, self.model.trainable_variables))
        self.train_batch_idx += 1
    if self.val_dataloader is None:
        return
    self.model.training = False
    for batch in self.val_dataloader:
        self.model.validation_step(self.prepare_batch(batch))
        self.val_batch_idx += 1

# Section 6.7.3.
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    net = tf.keras.models.Sequential([tf.keras.layers.Dense(1)])
with d2l.try_gpu():
    assert backend.device_of(net(X)) == backend.device_of(X)
"""


@pytest.mark.parametrize("virtual_gpus", [0, 2])
def test_the_books_code_runs(virtual_gpus):
    assert run_book("tensorflow", EPOCHS, "trainer.model", virtual_gpus) == expect(virtual_gpus)


@pytest.mark.parametrize(
    ("virtual_gpus", "first", "last"), [(0, "cpu", "cpu"), (2, "gpu:0", "gpu:1")]
)
def test_the_printed_cells_run_with_the_lines_of_the_page(virtual_gpus, first, last):
    # ``Z = X`` copies nothing, in a block of another device as well.
    assert run_cells("tensorflow", "net", virtual_gpus) == [first, last, first, first]


def test_the_model_of_the_page_trains_on_two_gpus_without_points_of_the_training():
    # The step is traced, and a traced loss has no number for the board.
    page = "".join(code for _, _, code in find_blocks(ROOT / "docs" / "d2l.md", "tensorflow"))
    program = (
        page.replace("num_gpus=1)", "num_gpus=2)")
        + """
losses = history["loss"]
show([len(trainer.gpus), losses[-1] < losses[0], sorted(model.board.points)])
"""
    )
    environment = {"D2LDEV_BACKEND": "tensorflow", "D2LDEV_VIRTUAL_GPUS": "2"}
    assert run_python(program, hide=(), environment=environment) == [[2, True, ["val_loss"]]]


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
