"""Labels of sequences, and labels in a function that is traced."""

import jax
import numpy as np
from sequences import assert_the_loss_is_the_mean_over_all_labels


def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(backend):
    net = backend.mlp([2, 3])
    assert_the_loss_is_the_mean_over_all_labels(backend, net)


def test_accuracy_is_traced_under_jit(backend):
    logits = backend.asarray(np.eye(3, dtype="float32"))
    labels = backend.asarray(np.array([0, 1, 0]))
    np.testing.assert_allclose(jax.jit(backend.accuracy)(logits, labels), 2 / 3, rtol=1e-6)
