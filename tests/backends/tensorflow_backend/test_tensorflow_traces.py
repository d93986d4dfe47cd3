"""``fit`` on TensorFlow: a step is traced once for each shape of a batch, and never again."""

import numpy as np
import pytest
import tensorflow as tf
from keras_models import Plain, Subclassed, convolutional, made

from d2ldev.training.trainer import Trainer

EPOCHS = 5
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 2, 10).astype("int32")
IMAGES = RANDOM.random((10, 8, 8, 3), dtype=np.float32)
INPUTS = {
    convolutional: (IMAGES,),
    Subclassed: (IMAGES[:, 0, 0], IMAGES[:, 1, 1]),  # has no variables before the first batch
    Plain: (IMAGES[:, 0, 0],),
}


@pytest.fixture(scope="module", autouse=True)
def _datasets_were_prefetched(tensorflow_backend):
    """AutoGraph leaves files behind when TensorFlow's prefetching is used first."""
    dataset = tf.data.Dataset.from_tensor_slices(LABELS).batch(4)
    assert len(list(tensorflow_backend.prefetch(dataset, "gpu:0"))) == 3


@pytest.fixture
def traced():
    """The lengths of the batches for which the loss was called, which happens in a trace only."""
    return []


@pytest.fixture
def loss(traced):
    def noted(prediction, y):
        traced.append(prediction.shape[0])
        logits = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=prediction)
        return tf.reduce_mean(logits)

    return noted


def batches(model, size=4):
    """Batches of 4, 4 and 2."""
    return [
        (*(x[i : i + size] for x in INPUTS[model]), LABELS[i : i + size])
        for i in range(0, 10, size)
    ]


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)
def test_a_step_and_an_evaluation_are_traced_once_for_each_shape(
    backend, model, num_gpus, loss, traced
):
    counts = []
    trainer = Trainer(
        EPOCHS, num_gpus, backend=backend, callback=lambda *_: counts.append(len(traced))
    )
    data = batches(model)
    trainer.fit(made(backend, model, "cpu"), data, data, loss=loss, optimizer="adam")
    assert traced == [4, 2, 4, 2]
    assert counts == [4] * EPOCHS


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_so_it_is_with_a_dataset(backend, num_gpus, loss, traced):
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    trainer.fit(made(backend, convolutional, "cpu"), dataset, dataset, loss=loss)
    assert sorted(traced) == [2, 2, 4, 4]


def test_a_checkpoint_and_a_metric_have_nothing_traced_again(backend, loss, traced, path):
    data = batches(convolutional)
    trainer = Trainer(EPOCHS, 1, gradient_clip_val=1.0, backend=backend)
    trainer.fit(
        made(backend, convolutional, "cpu"),
        data,
        data,
        loss=loss,
        metrics=["accuracy"],
        checkpoint=path,
    )
    assert traced == [4, 2, 4, 2]


def test_a_resumed_run_traces_as_often_as_a_new_one(backend, loss, traced, path):
    data = batches(convolutional)
    for epochs in (2, EPOCHS):
        traced.clear()
        net = made(backend, convolutional, "cpu")
        trainer = Trainer(epochs, backend=backend)
        trainer.fit(net, data, data, loss=loss, checkpoint=path, resume=True)
        assert traced == [4, 2, 4, 2]
