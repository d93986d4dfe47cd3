"""Models are trained on a virtual GPU under ``strict()``, with the losses of the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from d2ldev import DeviceMismatchError, gpu

LABELS = np.array([0, 1])
RANDOM = np.random.default_rng(0)


class Convolutional(nnx.Module):
    data = RANDOM.random((2, 8, 8, 3), dtype=np.float32)

    def __init__(self, rngs):
        self.convolution = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.convolution(x))), (2, 2), (2, 2))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


class Attentive(nnx.Module):
    data = RANDOM.integers(0, 10, (2, 5))

    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.dense = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.dense(self.norm(x + self.attention(x)).mean(1))


class Recurrent(nnx.Module):
    data = RANDOM.random((2, 5, 3), dtype=np.float32)

    def __init__(self, rngs):
        self.recurrent = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs))
        self.dense = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.recurrent(x)[:, -1])


def made(backend, model, device):
    """A model and its optimizer, placed, with data that is there."""
    net = backend.place(model(nnx.Rngs(0, dropout=1)), device)
    optimizer = backend.place(nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param), device)
    return net, optimizer, backend.asarray(model.data, device=device)


def step(net, optimizer, x, y):
    def loss(net):
        return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()

    value, gradients = nnx.value_and_grad(loss)(net)
    optimizer.update(net, gradients)
    return value


@pytest.mark.parametrize("step", [step, nnx.jit(step)], ids=["eager", "jit"])
@pytest.mark.parametrize("model", [Convolutional, Attentive, Recurrent])
def test_nnx_trains_where_it_was_placed(backend, model, step):
    losses = {}
    for device in ("cpu", "gpu:1"):
        net, optimizer, x = made(backend, model, device)
        y = backend.asarray(LABELS, device=device)
        with backend.strict():
            losses[device] = [float(step(net, optimizer, x, y)) for _ in range(3)]
    assert losses["gpu:1"] == losses["cpu"]
    assert set(backend.placement({"net": net, "optimizer": optimizer}).values()) == {gpu(1)}


def linen_step(module, transform):
    def step(params, state, x):
        value, gradients = jax.value_and_grad(lambda p: (module.apply(p, x) ** 2).mean())(params)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@pytest.mark.parametrize("compiled", [lambda step: step, jax.jit], ids=["eager", "jit"])
def test_linen_and_optax_train_where_they_were_placed(backend, compiled):
    module = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(2)])
    schedule = optax.cosine_decay_schedule(0.1, 10)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    losses = {}
    for device in ("cpu", "gpu:1"):
        params = backend.place(module.init(jax.random.key(0), Recurrent.data[:, 0]), device)
        x = backend.asarray(Recurrent.data[:, 0], device=device)
        run, losses[device] = compiled(linen_step(module, transform)), []
        with backend.strict():
            state = transform.init(params)
            for _ in range(3):
                params, state, value = run(params, state, x)
                losses[device].append(float(value))
    assert losses["gpu:1"] == losses["cpu"]
    assert set(backend.placement(params).values()) == {gpu(1)}


@pytest.mark.parametrize("model", [Convolutional, Attentive, Recurrent])
def test_a_model_that_was_not_placed_is_not_moved_in_silence(backend, model):
    net = model(nnx.Rngs(0, dropout=1))  # nothing of it is committed
    x = backend.asarray(model.data, device="gpu:1")
    with backend.strict(), pytest.raises(DeviceMismatchError):
        net(x)


class Nested(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


def test_nor_is_one_of_linen_s(backend):
    module, x = Nested(), backend.ones((2, 3), device="gpu:1")
    params = module.init(jax.random.key(0), jnp.ones((2, 3)))
    with backend.strict(), pytest.raises(DeviceMismatchError):
        module.apply(params, x)
