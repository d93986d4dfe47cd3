"""``Trainer`` on TensorFlow: data from ``tf.data``, and the user's model holds what was learnt."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import Subclassed, convolutional, made

from d2ldev import cpu, gpu
from d2ldev.training.trainer import Trainer

RANDOM = np.random.default_rng(0)
IMAGES, LABELS = RANDOM.random((10, 8, 8, 3), dtype=np.float32), RANDOM.integers(0, 2, 10)
BATCHES = [(IMAGES[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]
OPTIONS = {"loss": "cross_entropy", "optimizer": "adam"}


@pytest.fixture(scope="module", autouse=True)
def _datasets_were_prefetched(tensorflow_backend):
    """AutoGraph leaves files behind when TensorFlow's prefetching is used first."""
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    assert len(list(tensorflow_backend.prefetch(dataset, "gpu:0"))) == 3


@pytest.fixture
def net(backend):
    return made(backend, convolutional, "cpu")


@pytest.mark.parametrize(("num_gpus", "device"), [(0, cpu()), (1, gpu(0))])
def test_a_model_is_trained_on_the_trainers_device(backend, net, num_gpus, device):
    with backend.strict():
        trainer = Trainer(3, num_gpus, backend=backend)
        history = trainer.fit(net, BATCHES, BATCHES, metrics=["accuracy"], **OPTIONS)
    assert sorted(history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert history["loss"][-1] < history["loss"][0]
    assert trainer.model is net
    assert set(backend.placement(net).values()) == {device}


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_dataset_gives_the_same_as_its_arrays(backend, num_gpus):
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    losses = [
        Trainer(2, num_gpus, backend=backend).fit(
            made(backend, convolutional, "cpu"), data, dataset, **OPTIONS
        )
        for data in (BATCHES, dataset, dataset.prefetch(1))
    ]
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def test_a_model_that_is_not_built_is_trained_on_the_gpu(backend):
    net = made(backend, Subclassed, "cpu")
    pairs = [(X[:, 0, 0], X[:, 1, 1], y) for X, y in BATCHES]
    trainer = Trainer(10, num_gpus=1, backend=backend)
    history = trainer.fit(net, pairs, pairs, loss="cross_entropy", lr=0.1)
    assert history["val_loss"][-1] < history["val_loss"][0]
    assert set(backend.placement(net).values()) == {gpu(0)}


def test_the_users_optimizer_is_placed(backend, net):
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(net.trainable_variables)
    Trainer(1, num_gpus=1, backend=backend).fit(
        net, BATCHES, loss="cross_entropy", optimizer=optimizer
    )
    assert int(optimizer.iterations) == 3
    assert set(backend.placement(optimizer).values()) == {gpu(0)}


def test_a_killed_run_is_resumed_to_the_last_bit(backend, tmp_path):
    def fit(epochs, **options):
        net = made(backend, convolutional, "cpu")
        trainer = Trainer(epochs, num_gpus=1, backend=backend)
        history = trainer.fit(net, BATCHES, **OPTIONS, **options)
        return history, net.get_weights()

    path = tmp_path / "run.safetensors"
    expected, parameters = fit(4)
    fit(2, checkpoint=path)
    history, resumed = fit(4, checkpoint=path, resume=True)
    assert history == expected
    for x, y in zip(resumed, parameters, strict=True):
        np.testing.assert_array_equal(x, y)
