"""Labels of sequences, and labels in a function that is traced."""

import keras
import numpy as np
import tensorflow as tf


def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(tensorflow_backend):
    net = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(3)])
    x = tensorflow_backend.asarray(
        np.random.default_rng(0).standard_normal((4, 5, 2)).astype("float32")
    )
    labels = np.arange(20, dtype="int32").reshape(4, 5) % 3
    loss, prediction = tensorflow_backend.learner(net, loss="cross_entropy").step(
        (x,), tensorflow_backend.asarray(labels)
    )
    logits = tensorflow_backend.to_numpy(prediction)
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logarithms, labels[..., np.newaxis], -1).mean()
    np.testing.assert_allclose(tensorflow_backend.to_numpy(loss), expected, rtol=1e-5)


def test_accuracy_is_traced_in_a_function(tensorflow_backend):
    logits = tensorflow_backend.asarray(np.eye(3, dtype="float32"))
    labels = tensorflow_backend.asarray(np.array([0, 1, 0]))
    traced = tf.function(tensorflow_backend.accuracy, autograph=False)
    np.testing.assert_allclose(traced(logits, labels), 2 / 3, rtol=1e-6)
