"""Labels of sequences, and labels in a function that is traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sequences import assert_the_loss_is_the_mean_over_all_labels, cross_entropy

from d2ldev import UnsupportedValueError

UNKNOWN = tf.TensorShape(None)
# Of logits of shape (4, 5, 3) and labels of shape (4, 5), as much as a function is traced with.
SHAPES = {
    "neither": (UNKNOWN, UNKNOWN),
    "of the logits": ([4, 5, 3], UNKNOWN),
    "of the labels": (UNKNOWN, [4, 5]),
    "ranks": ([None, None, None], [None, None]),
}
shapes = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


def _traced(function, shapes, dtype="int32"):
    signature = [tf.TensorSpec(shapes[0], tf.float32), tf.TensorSpec(shapes[1], dtype)]
    return tf.function(function, input_signature=signature, autograph=False)


@pytest.fixture
def of_sequences():
    """Logits, and labels of which three quarters are those of the largest logits."""
    logits = np.random.default_rng(0).standard_normal((4, 5, 3)).astype("float32")
    labels = logits.argmax(-1).astype("int32")
    labels[0] = (labels[0] + 1) % 3
    return logits, labels


def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(tensorflow_backend):
    net = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(3)])
    assert_the_loss_is_the_mean_over_all_labels(tensorflow_backend, net)


def test_accuracy_is_traced_in_a_function(tensorflow_backend):
    logits = tensorflow_backend.asarray(np.eye(3, dtype="float32"))
    labels = tensorflow_backend.asarray(np.array([0, 1, 0]))
    traced = tf.function(tensorflow_backend.accuracy, autograph=False)
    np.testing.assert_allclose(traced(logits, labels), 2 / 3, rtol=1e-6)


@shapes
def test_accuracy_is_that_of_labels_whose_shape_is_not_known_yet(
    tensorflow_backend, of_sequences, shapes
):
    found = _traced(tensorflow_backend.accuracy, shapes)(*of_sequences)
    np.testing.assert_allclose(found, 0.75, rtol=1e-6)


class Scaled(tf.Module):
    """It is given logits, and has one parameter."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(1.0)

    def __call__(self, logits):
        return logits * self.factor


@shapes
def test_cross_entropy_is_that_of_labels_whose_shape_is_not_known_yet(
    tensorflow_backend, of_sequences, shapes
):
    logits, labels = of_sequences
    learner = tensorflow_backend.learner(Scaled(), loss="cross_entropy")
    found, _ = _traced(lambda x, y: learner.evaluate((x,), y), shapes)(logits, labels)
    np.testing.assert_allclose(found, cross_entropy(logits, labels), rtol=1e-5)


@pytest.mark.parametrize("known", ["neither", "of the logits", "ranks"])
def test_accuracy_does_not_broadcast_labels_whose_shape_was_not_known(
    tensorflow_backend, of_sequences, known
):
    logits, labels = of_sequences
    traced = _traced(tensorflow_backend.accuracy, SHAPES[known])
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(logits, labels[:, :1])


@shapes
def test_labels_that_are_no_integers_are_refused_whatever_their_shape(tensorflow_backend, shapes):
    traced = _traced(tensorflow_backend.accuracy, shapes, "float32")
    with pytest.raises(UnsupportedValueError, match="a label is the number of a class"):
        traced.get_concrete_function()


@pytest.mark.parametrize("shapes", [([None, 3], [None, 1]), ([4, 3], [None, None])], ids=str)
def test_labels_of_which_enough_is_known_are_refused_when_a_function_is_traced(
    tensorflow_backend, shapes
):
    traced = _traced(tensorflow_backend.accuracy, shapes)
    with pytest.raises(UnsupportedValueError, match="one label for each row"):
        traced.get_concrete_function()
