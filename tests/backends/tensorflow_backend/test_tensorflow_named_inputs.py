"""Batches that are dicts: Keras' models and ``tf.Module``s get their inputs by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from d2ldev import UnsupportedValueError
from d2ldev.training.trainer import Trainer

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 3)).astype("float32")
MASK = RANDOM.random((8, 3)).astype("float32")
Y = RANDOM.normal(size=(8, 3)).astype("float32")
ORDERS = [{"mask": MASK, "x": X, "y": Y}, {"y": Y, "x": X, "mask": MASK}]


@pytest.fixture(scope="module", autouse=True)
def _datasets_were_prefetched(tensorflow_backend):
    """AutoGraph leaves files behind when TensorFlow's prefetching is used first."""
    dataset = tf.data.Dataset.from_tensor_slices(ORDERS[0]).batch(4)
    assert len(list(tensorflow_backend.prefetch(dataset, "gpu:0"))) == 2


def functional(nested):
    """``dense(x) * mask``, with inputs that are nested so."""
    keras.utils.set_random_seed(0)
    x, mask = keras.Input((3,), name="x"), keras.Input((3,), name="mask")
    return keras.Model(nested(x, mask), layers.Dense(3)(x) * mask)


class Called(keras.Model):
    """It is built with the first batch."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(0)
        self.dense = layers.Dense(3)

    def call(self, x, mask, training=False):
        """The sum, where the mask has it."""
        return self.dense(x) * mask


class Plain(tf.Module):
    """Without Keras."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.eye(3))

    def __call__(self, x, mask):
        """The product, where the mask has it."""
        return x @ self.weight * mask


MODELS = {
    "list": lambda: functional(lambda x, mask: [x, mask]),
    "mapping": lambda: functional(lambda x, mask: {"x": x, "mask": mask}),
    "mapping that is not sorted": lambda: functional(lambda x, mask: {"mask": mask, "x": x}),
    "call": Called,
    "tf.Module": Plain,
}


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("batch", ORDERS, ids=lambda batch: "".join(batch))
@pytest.mark.parametrize("model", MODELS)
def test_a_dict_gives_inputs_by_name(backend, model, batch, num_gpus):
    net = MODELS[model]()
    trainer = Trainer(1, num_gpus, backend=backend)
    history = trainer.fit(net, [batch], [batch], lr=0.0)
    kernel = net.trainable_variables[0].numpy()
    expected = np.mean((X @ kernel * MASK - Y) ** 2)
    assert history["loss"] == pytest.approx([expected], rel=1e-5)
    assert history["val_loss"] == pytest.approx([expected], rel=1e-5)


def test_a_dataset_of_dicts_gives_inputs_by_name(backend):
    losses = [
        Trainer(1, 1, backend=backend).fit(
            MODELS["list"](), tf.data.Dataset.from_tensor_slices(batch).batch(8)
        )["loss"]
        for batch in ORDERS
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("batch", [(X, MASK, Y), {"x": X, "other": MASK, "y": Y}])
def test_inputs_without_the_names_of_a_mapping_are_refused(backend, batch):
    with pytest.raises(UnsupportedValueError, match="its inputs have names") as error:
        Trainer(1, backend=backend).fit(MODELS["mapping"](), [batch])
    assert "{'x': ..., 'mask': ..., 'y': y}" in error.value.fix


def test_a_gap_between_inputs_is_refused(backend):
    class Gapped(keras.Model):
        def call(self, x, scale=1, mask=1):
            raise AssertionError("the mask would be the scale")

    with pytest.raises(UnsupportedValueError, match="'scale' before 'mask'"):
        Trainer(1, backend=backend).fit(Gapped(), [ORDERS[0]])


@pytest.mark.parametrize("built", [True, False])
def test_a_sequential_model_takes_its_one_input_by_any_name(backend, built):
    net = keras.Sequential(([keras.Input((3,))] if built else []) + [layers.Dense(3)])
    history = Trainer(1, backend=backend).fit(net, [{"pixels": X, "y": Y}])
    assert history["loss"][0] > 0
