"""A learning rate on optax's schedule goes on where it was when a run is resumed."""

import numpy as np
import optax
import pytest

import d2ldev
from d2ldev.training.trainer import Trainer

# Four batches an epoch, and four epochs: what happens in step 8 and after it tells the runs apart.
OPTIMIZERS = {
    "exponential": lambda: optax.sgd(optax.exponential_decay(0.1, 4, 0.5)),
    "cosine": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 16)),
    "piecewise constant": lambda: optax.adagrad(
        optax.piecewise_constant_schedule(0.1, {6: 0.5, 10: 0.1})
    ),
    "warm-up, injected": lambda: optax.inject_hyperparams(optax.rmsprop)(
        learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 16)
    ),
}


def trained(backend, epochs, num_gpus, optimizer, seed=0, **options):
    """The history and the parameters; the model and the order begin with the seed."""
    inputs = np.linspace(-1, 1, 28, dtype="float32").reshape(14, 2)
    data = d2ldev.ArrayLoader(inputs, inputs[:, :1] ** 2, batch_size=4, shuffle=True, seed=seed)
    trainer = Trainer(epochs, num_gpus, backend=backend)
    net = backend.mlp([2, 4, 1], seed=seed)
    history = trainer.fit(net, data, optimizer=optimizer, **options)
    named = backend.named_tensors(trainer.model)
    return history, {name: backend.to_numpy(x) for name, x in named.items()}


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_where_an_unbroken_one_does(backend, tmp_path, optimizer, num_gpus):
    fresh = OPTIMIZERS[optimizer]
    path = tmp_path / "run.safetensors"
    expected, parameters = trained(backend, 4, num_gpus, fresh())
    trained(backend, 2, num_gpus, fresh(), checkpoint=path)
    history, resumed = trained(backend, 4, num_gpus, fresh(), 9, checkpoint=path, resume=True)
    assert history == expected
    assert len(parameters) == 4
    np.testing.assert_equal(resumed, parameters)
