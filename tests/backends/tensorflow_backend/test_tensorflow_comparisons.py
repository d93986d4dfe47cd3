"""Keras' own losses and metrics, which take ``(y_true, y_pred)``, in ``Trainer.fit``."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import UnsupportedValueError
from d2ldev.training.trainer import Trainer

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 2)).astype("float32")
BATCHES = [(X, (X[:, :1] > 0).astype("float32"))]


def fitted(backend, loss, metrics=(), num_gpus=1):
    """The history of a run, and the parameters after it."""
    net = backend.mlp([2, 1], seed=0)
    trainer = Trainer(3, num_gpus, backend=backend)
    history = trainer.fit(net, BATCHES, loss=loss, lr=0.5, metrics=metrics)
    return history, net.get_weights()


def by_hand(prediction, y):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=prediction))


def from_a_function(y_true, y_pred):
    losses = keras.losses.binary_crossentropy(y_true, y_pred, from_logits=True)
    return tf.reduce_mean(losses)


def rate(y_true, y_pred):
    return keras.ops.mean(keras.metrics.binary_accuracy(y_true, y_pred, threshold=0.0))


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.BinaryCrossentropy(from_logits=True),
        from_a_function,
        partial(from_a_function),
        tf.function(from_a_function, autograph=False),
    ],
    ids=["object", "function", "partial", "tf.function"],
)
def test_keras_losses_are_called_with_y_first(backend, loss, num_gpus):
    history, parameters = fitted(backend, loss, num_gpus=num_gpus)
    expected, expected_parameters = fitted(backend, by_hand, num_gpus=num_gpus)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    for x, y in zip(parameters, expected_parameters, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_a_keras_loss_is_traced_once(backend):
    traced = []

    def counted(y_true, y_pred):
        traced.append(1)
        return from_a_function(y_true, y_pred)

    fitted(backend, counted)
    assert len(traced) == 1


def test_a_loss_for_each_example_is_refused_with_what_to_do(backend):
    with pytest.raises(UnsupportedValueError, match="no scalar") as error:
        fitted(backend, keras.losses.binary_crossentropy)
    assert error.value.fix == "loss.mean()"


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_keras_metrics_are_called_with_y_first(backend, num_gpus):
    def share(prediction, y):
        return tf.reduce_mean(tf.cast((prediction > 0) == (y > 0.5), tf.float32))

    history, _ = fitted(backend, by_hand, [rate, share], num_gpus)
    assert history["rate"] == history["share"]
    assert history["rate"][-1] > 0.5


@pytest.mark.parametrize("metric", [keras.metrics.BinaryAccuracy, keras.metrics.AUC])
def test_keras_metrics_with_a_state_are_refused(backend, metric):
    with pytest.raises(UnsupportedValueError, match="running value"):
        fitted(backend, by_hand, [metric()])


def test_what_is_proposed_instead_of_them_is_a_metric(backend):
    with pytest.raises(UnsupportedValueError) as error:
        fitted(backend, by_hand, [keras.metrics.BinaryAccuracy()])
    names = {"keras": keras}
    exec(error.value.fix.removeprefix("a function: "), names)
    history, _ = fitted(backend, by_hand, [names["accuracy"]])
    assert all(0 < value <= 1 for value in history["accuracy"])


def test_a_keras_metric_with_a_state_is_no_loss(backend):
    with pytest.raises(UnsupportedValueError, match="running value"):
        fitted(backend, keras.metrics.BinaryCrossentropy(from_logits=True))
