"""A learning rate on MXNet's schedule goes on where it was when a run is resumed."""

import numpy as np
import pytest
from d2ldev_mxnet.framework import mx

import d2ldev
from d2ldev.training.trainer import Trainer

MXNET = mx.lr_scheduler
# Four batches an epoch, and four epochs: what happens in step 8 and after it tells the runs apart.
SCHEDULES = {
    "factor": lambda: MXNET.FactorScheduler(3, 0.5, base_lr=0.1),
    "some factors": lambda: MXNET.MultiFactorScheduler([6, 10], 0.1, base_lr=0.1),
    "polynomial": lambda: MXNET.PolyScheduler(16, 0.1),
    "cosine": lambda: MXNET.CosineScheduler(16, 0.1),
    "warm-up": lambda: MXNET.CosineScheduler(16, 0.1, warmup_steps=10),
}


def handed_in_alone(net, name, schedule):
    """The optimizer, of which d2ldev makes the ``gluon.Trainer``."""
    return mx.optimizer.create(name, learning_rate=0.1, lr_scheduler=schedule)


def in_a_trainer(net, name, schedule):
    """The user's own ``gluon.Trainer``, made before the model is placed."""
    parameters = list(net.collect_params().values())
    return mx.gluon.Trainer(parameters, name, {"learning_rate": 0.1, "lr_scheduler": schedule})


def trained(backend, epochs, num_gpus, make, seed=0, **options):
    """The history and the parameters; the model and the order begin with the seed."""
    inputs = np.linspace(-1, 1, 28, dtype="float32").reshape(14, 2)
    data = d2ldev.ArrayLoader(inputs, inputs[:, :1] ** 2, batch_size=4, shuffle=True, seed=seed)
    trainer = Trainer(epochs, num_gpus, backend=backend)
    net = backend.mlp([2, 4, 1], seed=seed)
    history = trainer.fit(net, data, optimizer=make(net), **options)
    parameters = trainer.model._collect_params_with_prefix()
    return history, {name: x.data().asnumpy() for name, x in parameters.items()}


@pytest.mark.usefixtures("set_np")
@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("made", [handed_in_alone, in_a_trainer])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    backend, tmp_path, made, optimizer, schedule, num_gpus
):
    def fresh(net):
        return made(net, optimizer, SCHEDULES[schedule]())

    path = tmp_path / "run.safetensors"
    expected, parameters = trained(backend, 4, num_gpus, fresh)
    trained(backend, 2, num_gpus, fresh, checkpoint=path)
    history, resumed = trained(backend, 4, num_gpus, fresh, 9, checkpoint=path, resume=True)
    assert history == expected
    assert len(parameters) == 4
    np.testing.assert_equal(resumed, parameters)
