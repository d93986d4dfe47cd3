"""Models of Flax's ``nnx``, each with batches for it."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from training_batches import label_batches


class Convolutional(nnx.Module):
    """Convolution, batch normalisation and dropout: what differs between training and use."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.convolution(x))), (2, 2), (2, 2))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


class Attentive(nnx.Module):
    """An embedding and attention."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.dense = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.dense((x + self.attention(x)).mean(1))


class Recurrent(nnx.Module):
    """An LSTM and a GRU."""

    def __init__(self, rngs):
        self.long = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs))
        self.gated = nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs))
        self.dense = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.gated(self.long(x))[:, -1])


class TwoInputs(nnx.Module):
    """Two inputs, and a parameter that is used twice."""

    def __init__(self, rngs):
        self.shared = nnx.Linear(3, 4, rngs=rngs)
        self.again = self.shared
        self.dense = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, first, second):
        return self.dense(jnp.concatenate([self.shared(first), self.again(second)], -1))


def _images(random):
    return (random.random((4, 8, 8, 3), dtype=np.float32),)


def _tokens(random):
    return (random.integers(0, 10, (4, 5)).astype(np.int32),)


def _sequences(random):
    return (random.random((4, 5, 3), dtype=np.float32),)


def _pairs(random):
    return random.random((4, 3), dtype=np.float32), random.random((4, 3), dtype=np.float32)


INPUTS = {Convolutional: _images, Attentive: _tokens, Recurrent: _sequences, TwoInputs: _pairs}


def build(backend, model, device):
    """Return a model on a device, with the same parameters each time."""
    return backend.place(model(nnx.Rngs(0, dropout=1)), device)


def batches(backend, model, device, count=6):
    """Return batches of inputs and labels on a device, the same each time."""
    return label_batches(backend, INPUTS[model], device, count)
