"""Models of Keras and TensorFlow, each with batches for it."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from training_batches import label_batches


def convolutional():
    """Return convolution, batch normalisation, dropout, and a layer with a loss of its own."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=1),
            layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1)),
        ]
    )


def recurrent():
    """Return an embedding, an LSTM and a GRU."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(10, 8),
            layers.LSTM(4, return_sequences=True),
            layers.GRU(4),
            layers.Dense(2),
        ]
    )


def two_inputs():
    """Return a functional model with two inputs and a layer that is used twice."""
    first, second = keras.Input((3,)), keras.Input((3,))
    shared = layers.Dense(4)
    joined = layers.Concatenate()([shared(first), shared(second)])
    return keras.Model([first, second], layers.Dense(2)(joined))


class Subclassed(keras.Model):
    """A model that makes its variables with the first batch, and takes two inputs."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.dropout = layers.Dropout(0.3, seed=1)
        self.outer = layers.Dense(2)

    def call(self, first, second, training=False):
        """Return the sum of both, through two layers."""
        return self.outer(self.dropout(self.hidden(first + second), training=training))


class Plain(tf.Module):
    """A ``tf.Module``, with noise in training that it draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2).astype(np.float32))
        self.bias = tf.Variable(tf.zeros(2), trainable=False)
        self.generator = tf.random.Generator.from_seed(1)

    def __call__(self, x, training):
        """Apply a linear layer."""
        if training:
            x = x + 0.1 * self.generator.normal(tf.shape(x))
        return x @ self.weight + self.bias


def _images(random):
    return (random.random((4, 8, 8, 3), dtype=np.float32),)


def _tokens(random):
    return (random.integers(0, 10, (4, 5)).astype(np.int32),)


def _pairs(random):
    return random.random((4, 3), dtype=np.float32), random.random((4, 3), dtype=np.float32)


def _rows(random):
    return (random.random((4, 3), dtype=np.float32),)


INPUTS = {
    convolutional: _images,
    recurrent: _tokens,
    two_inputs: _pairs,
    Subclassed: _pairs,
    Plain: _rows,
}


def build(backend, model, device):
    """Return a model on a device, with the same parameters each time."""
    keras.utils.set_random_seed(0)
    return backend.place(model(), device)


def batches(backend, model, device, count=6):
    """Return batches of inputs and labels on a device, the same each time."""
    return label_batches(backend, INPUTS[model], device, count)
