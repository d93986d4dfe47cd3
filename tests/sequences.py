"""Labels of sequences, and what ``'cross_entropy'`` is of them, written out."""

import numpy as np


def cross_entropy(logits, labels):
    """The mean over all labels, of NumPy's arrays."""
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logarithms, labels[..., np.newaxis], -1).mean()


def assert_the_loss_is_the_mean_over_all_labels(backend, net):
    """Of four sequences of five examples, for a model of two features and three classes."""
    x = backend.asarray(np.random.default_rng(0).standard_normal((4, 5, 2)).astype("float32"))
    labels = np.arange(20, dtype="int32").reshape(4, 5) % 3
    learner = backend.learner(net, loss="cross_entropy")
    loss, prediction = learner.step((x,), backend.asarray(labels))
    expected = cross_entropy(backend.to_numpy(prediction), labels)
    np.testing.assert_allclose(backend.to_numpy(loss), expected, rtol=1e-5)
