"""Labels of sequences, and labels in a function that is traced."""

import jax
import numpy as np


def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(backend):
    net = backend.mlp([2, 3])
    x = backend.asarray(np.random.default_rng(0).standard_normal((4, 5, 2)).astype("float32"))
    labels = np.arange(20, dtype="int32").reshape(4, 5) % 3
    loss, prediction = backend.learner(net, loss="cross_entropy").step(
        (x,), backend.asarray(labels)
    )
    logits = backend.to_numpy(prediction)
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logarithms, labels[..., np.newaxis], -1).mean()
    np.testing.assert_allclose(backend.to_numpy(loss), expected, rtol=1e-5)


def test_accuracy_is_traced_under_jit(backend):
    logits = backend.asarray(np.eye(3, dtype="float32"))
    labels = backend.asarray(np.array([0, 1, 0]))
    np.testing.assert_allclose(jax.jit(backend.accuracy)(logits, labels), 2 / 3, rtol=1e-6)
