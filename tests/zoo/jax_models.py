"""The models of JAX in the zoo. ``MODELS`` is the table."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from zoo import SIZE, Model

Rng = np.random.Generator


class Seed:
    """The seed of the next model: JAX has no global one."""

    value = 0

    def key(self) -> jax.Array:
        return jax.random.key(self.value)


seed = Seed()


def floats(rng: Rng, *shape: int) -> np.ndarray:
    return rng.normal(size=(SIZE, *shape)).astype("float32")


def integers(rng: Rng, high: int, *shape: int) -> np.ndarray:
    return rng.integers(high, size=(SIZE, *shape)).astype("int32")


def vectors(rng: Rng) -> Any:
    return floats(rng, 6), integers(rng, 5)


def images(rng: Rng) -> Any:
    return floats(rng, 16, 16, 3), integers(rng, 5)


def sequences(rng: Rng) -> Any:
    return floats(rng, 7, 6), integers(rng, 5)


def tokens(rng: Rng) -> Any:
    return {"mask": np.ones((SIZE, 7), bool), "ids": integers(rng, 60, 7), "y": integers(rng, 5)}


# -- Flax NNX: the layers of Flax, put together as its guides do ----------------------------------


class ConvolutionalNet(nnx.Module):
    """Convolutions and batch normalization."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.first(x)))
        return self.last(nnx.avg_pool(x, (4, 4), (4, 4)).mean(axis=(1, 2)))


class Transformer(nnx.Module):
    """Embeddings, attention with a mask, and layer normalization; two layers in a ``List``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(60, 8, rngs=rngs)
        self.layers = nnx.List(
            [nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs) for _ in range(2)]
        )
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, ids: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = self.embed(ids)
        seen = None if mask is None else nnx.make_attention_mask(mask, mask)
        for layer in self.layers:
            x = x + layer(self.norm(x), mask=seen)
        return self.last(x.mean(axis=1))


class Recurrent(nnx.Module):
    """An LSTM over a sequence."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.LSTMCell(6, 8, rngs=rngs))
        self.last = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.rnn(x)[:, -1])


class Adapted(nnx.Module):
    """A layer with LoRA, and one with a weight norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        self.last = nnx.WeightNorm(nnx.Linear(8, 5, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


class Scanned(nnx.Module):
    """Three blocks with stacked parameters, by ``nnx.vmap`` and ``nnx.scan``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(6, 6, rngs=rngs)

        self.blocks = make(rngs)
        self.last = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: nnx.Linear) -> jax.Array:
            return nnx.tanh(block(x))

        return self.last(forward(x, self.blocks))


# fmt: off
FLAX = [
    Model("flax", "Conv and BatchNorm", lambda: ConvolutionalNet(nnx.Rngs(seed.value)), images, "cross_entropy"),
    Model("flax", "MultiHeadAttention", lambda: Transformer(nnx.Rngs(seed.value)), tokens, "cross_entropy"),
    Model("flax", "RNN of LSTMCell", lambda: Recurrent(nnx.Rngs(seed.value)), sequences, "cross_entropy"),
    Model("flax", "LoRALinear and WeightNorm", lambda: Adapted(nnx.Rngs(seed.value)), vectors, "cross_entropy"),
    Model("flax", "nnx.scan", lambda: Scanned(nnx.Rngs(seed.value)), vectors, "cross_entropy"),
]
# fmt: on


# -- Equinox: models for one example, under jax.vmap ----------------------------------------------


class OfBatch(eqx.Module):
    """A model of Equinox for a batch, as its documentation does it with ``jax.vmap``."""

    net: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.vmap(self.net)(x)


class Attention(eqx.Module):
    """Attention over a sequence."""

    attention: eqx.nn.MultiheadAttention
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        self.attention = eqx.nn.MultiheadAttention(2, 6, key=key)
        self.last = eqx.nn.Linear(6, 5, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.attention(x, x, x).mean(axis=0))


class Gru(eqx.Module):
    """The recurrent classifier of Equinox's examples."""

    cell: eqx.nn.GRUCell
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        self.cell = eqx.nn.GRUCell(6, 8, key=key)
        self.last = eqx.nn.Linear(8, 5, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        step = lambda state, row: (self.cell(row, state), None)  # noqa: E731
        return self.last(jax.lax.scan(step, jnp.zeros(8), x)[0])


def _convolution(key: jax.Array) -> Any:
    conv = eqx.nn.Conv2d(3, 4, 3, stride=4, key=key)
    layers = [conv, jax.nn.relu, jnp.ravel, eqx.nn.Linear(64, 5, key=key)]
    return eqx.nn.Sequential(
        [eqx.nn.Lambda(f) if not isinstance(f, eqx.Module) else f for f in layers]
    )


def channels_first(rng: Rng) -> Any:
    return floats(rng, 3, 16, 16), integers(rng, 5)


# fmt: off
EQUINOX = [
    Model("equinox", "MLP", lambda: OfBatch(eqx.nn.MLP(6, 5, 8, 2, key=seed.key())), vectors, "cross_entropy"),
    Model("equinox", "Conv2d", lambda: OfBatch(_convolution(seed.key())), channels_first, "cross_entropy"),
    Model("equinox", "MultiheadAttention", lambda: OfBatch(Attention(seed.key())), sequences, "cross_entropy"),
    Model("equinox", "GRUCell", lambda: OfBatch(Gru(seed.key())), sequences, "cross_entropy"),
]
# fmt: on


# -- the optimizers of optax, each with one model -------------------------------------------------


class Mlp(nnx.Module):
    """A network for the optimizers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.tanh(self.first(x)))


def _optax(name: str, make: Any) -> Model:
    build = lambda: Mlp(nnx.Rngs(seed.value))  # noqa: E731
    return Model("optax", name, build, vectors, "cross_entropy", optimizer=lambda _: make())


_contrib = optax.contrib
# fmt: off
OPTAX = [
    _optax("adamw", lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 10))),
    _optax("adafactor", lambda: optax.adafactor(1e-3)),
    _optax("lamb", lambda: optax.lamb(1e-3)),
    _optax("lion", lambda: optax.lion(1e-3)),
    _optax("sm3", lambda: optax.sm3(1e-3)),
    _optax("adan", lambda: optax.adan(1e-3)),
    _optax("rprop", lambda: optax.rprop(1e-3)),
    _optax("lbfgs", lambda: optax.lbfgs()),
    _optax("MultiSteps", lambda: optax.MultiSteps(optax.adam(1e-3), 2)),
    _optax("multi_transform", lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.sgd(1e-2, 0.9, True))),
    _optax("inject_hyperparams", lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)),
    _optax("apply_if_finite", lambda: optax.apply_if_finite(optax.adam(1e-3), 3)),
    _optax("contrib.schedule_free", lambda: _contrib.schedule_free_adamw(1e-3)),
    _optax("contrib.prodigy", lambda: _contrib.prodigy()),
    _optax("contrib.muon", lambda: _contrib.muon(1e-3)),
    _optax("contrib.sam", lambda: _contrib.sam(optax.sgd(1e-2), optax.chain(_contrib.normalize(), optax.sgd(5e-2)))),
]

MODELS = [*FLAX, *EQUINOX, *OPTAX]
# fmt: on
