"""Batches that are dicts: Flax's modules get their inputs by name."""

import numpy as np
import pytest
from flax import linen, nnx

from d2ldev import UnsupportedValueError
from d2ldev.training.trainer import Trainer

RANDOM = np.random.default_rng(0)
X, MASK, Y = (RANDOM.random((8, 3), dtype=np.float32) for _ in range(3))
ORDERS = [{"mask": MASK, "x": X, "y": Y}, {"y": Y, "x": X, "mask": MASK}]


class Masked(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x, mask=None, scale=1):
        return self.linear(x) * mask * scale


class Whatever(Masked):
    def __call__(self, *inputs):
        return super().__call__(*inputs)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        return linen.Dense(3)(x) * mask


def wrapped():
    return nnx.bridge.ToNNX(Linen(), rngs=nnx.Rngs(0)).lazy_init(X, MASK)


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("batch", ORDERS, ids=lambda batch: "".join(batch))
@pytest.mark.parametrize("model", [Masked, wrapped])
def test_a_dict_gives_inputs_by_name(backend, model, batch, num_gpus):
    net = model()
    expected = np.mean((np.asarray(net(X, MASK)) - Y) ** 2)
    history = Trainer(1, num_gpus, backend=backend).fit(net, [batch], [batch], lr=0.0)
    assert history["loss"] == pytest.approx([expected], rel=1e-5)
    assert history["val_loss"] == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_module_that_takes_anything_gets_inputs_in_their_order(backend, num_gpus):
    net = Whatever()
    expected = np.mean((np.asarray(net(X, MASK)) - Y) ** 2)
    batch = {"z": X, "b": MASK, "a": Y}  # JAX sorts the keys of a dict
    history = Trainer(1, num_gpus, backend=backend).fit(net, [batch])
    assert history["loss"] == pytest.approx([expected], rel=1e-5)


def test_a_gap_between_inputs_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match="'mask' before 'scale'"):
        Trainer(1, backend=backend).fit(Masked(), [{"x": X, "scale": MASK, "y": Y}])
