"""Datasets are prefetched by ``tf.data`` itself; every other iterable as on any framework."""

import numpy as np
import pytest
import tensorflow as tf
from d2ldev_tensorflow.prefetching import can_prefetch

from d2ldev import gpu

DEVICES = ["cpu", "gpu:0", "gpu:1"]


@pytest.fixture(scope="module", autouse=True)
def _used_once(tensorflow_backend):
    """AutoGraph keeps the source that it generated for ``prefetch_to_device`` in files."""
    list(tensorflow_backend.prefetch(tf.data.Dataset.range(1), "gpu:0"))


@pytest.fixture
def dataset():
    """Five examples in three batches; TensorFlow keeps the labels' dtype in the host's memory."""
    x, y = np.arange(10, dtype="float32").reshape(5, 2), np.arange(5, dtype="int32")
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(2)


def failing():
    """Two batches and an error."""

    def source():
        yield np.float32(0)
        yield np.float32(1)
        raise ValueError("the third is broken")

    return tf.data.Dataset.from_generator(source, output_signature=tf.TensorSpec((), tf.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_a_dataset_gives_the_same_batches_in_the_same_order(tensorflow_backend, dataset, device):
    found = [batch["y"].numpy().tolist() for batch in tensorflow_backend.prefetch(dataset, device)]
    assert found == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("device", DEVICES)
def test_all_of_a_batch_is_on_the_device(tensorflow_backend, dataset, device):
    for batch in tensorflow_backend.prefetch(dataset, device):
        found = {str(tensorflow_backend.device_of(x)) for x in batch.values()}
        assert found == {device}


def test_tf_data_brings_a_dataset_to_the_device(tensorflow_backend, dataset, monkeypatch):
    copies = []
    monkeypatch.setattr(tensorflow_backend, "_copy_all", lambda *given: copies.append(given))
    batches = list(tensorflow_backend.prefetch(dataset, "gpu:1"))
    assert (len(batches), copies) == (3, [])


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_a_dataset_comes_in_the_place_of_its_batch(tensorflow_backend, device):
    batches = tensorflow_backend.prefetch(failing(), device)
    assert [float(next(batches)), float(next(batches))] == [0.0, 1.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="the third is broken"):
        next(batches)


def test_a_dataset_without_end_can_be_left(tensorflow_backend, dataset):
    batches = tensorflow_backend.prefetch(dataset.repeat(), "gpu:0")
    next(batches)
    batches.close()
    assert list(batches) == []


def test_without_depth_tf_data_is_not_asked(tensorflow_backend, dataset):
    batches = list(tensorflow_backend.prefetch(dataset, "gpu:1", depth=0))
    assert {tensorflow_backend.device_of(batch["y"]) for batch in batches} == {gpu(1)}


@pytest.mark.parametrize(
    "make",
    [lambda: ["text"], lambda: tf.ragged.constant([[1], [2, 3]]), lambda: tf.sparse.eye(2)],
    ids=["strings", "ragged", "sparse"],
)
def test_what_a_gpu_cannot_hold_is_left_to_the_backend(make):
    assert not can_prefetch(tf.data.Dataset.from_tensor_slices(make()))


def test_an_error_of_what_the_backend_refuses_names_it(tensorflow_backend):
    words = tf.data.Dataset.from_tensor_slices(["text"])
    with pytest.raises(ValueError, match="strings"):
        next(tensorflow_backend.prefetch(words, "gpu:0"))


def test_words_are_prefetched_on_the_cpu(tensorflow_backend):
    words = tf.data.Dataset.from_tensor_slices(["a", "b"])
    assert [word.numpy() for word in tensorflow_backend.prefetch(words, "cpu")] == [b"a", b"b"]


def test_arrays_of_numpy_are_prefetched(tensorflow_backend):
    batches = tensorflow_backend.prefetch([np.ones(2), np.zeros(2)], "gpu:1")
    assert [x.numpy().sum() for x in batches] == [2.0, 0.0]
