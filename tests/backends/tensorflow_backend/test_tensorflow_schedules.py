"""A learning rate on Keras' schedule goes on where it was when a run is resumed."""

import keras
import numpy as np
import pytest

import d2ldev
from d2ldev.training.trainer import Trainer

KERAS = keras.optimizers.schedules
# Four batches an epoch, and four epochs: what happens in step 8 and after it tells the runs apart.
SCHEDULES = {
    "exponential": lambda: KERAS.ExponentialDecay(0.1, 4, 0.5),
    "cosine": lambda: KERAS.CosineDecay(0.1, 16),
    "piecewise constant": lambda: KERAS.PiecewiseConstantDecay([6, 10], [0.1, 0.05, 0.005]),
    "warm-up": lambda: KERAS.CosineDecay(0.0, 6, warmup_target=0.1, warmup_steps=10),
}


def trained(backend, epochs, num_gpus, optimizer, seed=0, **options):
    """The history and the parameters; the model and the order begin with the seed."""
    inputs = np.linspace(-1, 1, 28, dtype="float32").reshape(14, 2)
    data = d2ldev.ArrayLoader(inputs, inputs[:, :1] ** 2, batch_size=4, shuffle=True, seed=seed)
    trainer = Trainer(epochs, num_gpus, backend=backend)
    net = backend.mlp([2, 4, 1], seed=seed)
    history = trainer.fit(net, data, optimizer=optimizer, **options)
    return history, trainer.model.get_weights()


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    backend, tmp_path, optimizer, schedule, num_gpus
):
    def fresh():
        return getattr(keras.optimizers, optimizer)(SCHEDULES[schedule]())

    path = tmp_path / "run.safetensors"
    expected, parameters = trained(backend, 4, num_gpus, fresh())
    trained(backend, 2, num_gpus, fresh(), checkpoint=path)
    history, resumed = trained(backend, 4, num_gpus, fresh(), 9, checkpoint=path, resume=True)
    assert history == expected
    assert len(resumed) == len(parameters) == 4
    for x, y in zip(resumed, parameters, strict=True):
        np.testing.assert_array_equal(x, y)
