"""``Trainer`` on JAX: data from anywhere, and the user's model holds what was learnt."""

import numpy as np
import optax
import pytest
from flax import nnx
from nnx_models import Convolutional

from d2ldev import UnsupportedValueError, cpu, gpu
from d2ldev.training.trainer import Trainer

RANDOM = np.random.default_rng(0)
IMAGES = [
    (RANDOM.random((4, 8, 8, 3), dtype=np.float32), RANDOM.integers(0, 2, 4)) for _ in range(3)
]
OPTIONS = {"loss": "cross_entropy", "optimizer": "adam"}


@pytest.fixture
def net():
    return Convolutional(nnx.Rngs(0, dropout=1))


@pytest.mark.parametrize(("num_gpus", "device"), [(0, cpu()), (1, gpu(0))])
def test_a_model_is_trained_on_the_trainers_device(backend, net, num_gpus, device):
    with backend.strict():
        trainer = Trainer(3, num_gpus, backend=backend)
        history = trainer.fit(net, IMAGES, IMAGES, metrics=["accuracy"], **OPTIONS)
    assert sorted(history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert history["val_loss"][-1] < history["val_loss"][0]
    assert set(backend.placement(net).values()) == {device}


def test_the_users_model_holds_what_was_learnt(backend, net):
    before = np.asarray(net.dense.kernel[...])
    trainer = Trainer(1, backend=backend)
    trainer.fit(net, IMAGES, **OPTIONS)
    assert trainer.model is net
    assert not np.array_equal(net.dense.kernel[...], before)


def test_the_users_model_holds_it_after_an_error_in_the_loop_too(backend, net):
    def failing():
        for count in range(3):
            if count == 2:
                raise OSError("the disk is gone")
            yield IMAGES[count]

    before = np.asarray(net.dense.kernel[...])
    trainer = Trainer(1, num_gpus=1, backend=backend)
    with pytest.raises(OSError, match="disk"):
        trainer.fit(net, failing(), **OPTIONS)
    assert trainer.model is net
    assert not np.array_equal(net.dense.kernel[...], before)
    assert set(backend.placement(net).values()) == {gpu(0)}


def test_and_after_an_error_while_a_step_is_traced(backend, net):
    trainer = Trainer(1, backend=backend)
    with pytest.raises(UnsupportedValueError):
        trainer.fit(net, [*IMAGES, (IMAGES[0][0], np.ones(4, np.float32))], loss="mse")
    assert net.dense.kernel[...].shape == (64, 2)


def test_a_callback_sees_what_was_learnt_and_may_change_it(backend, net):
    seen = []

    def watch(epoch, history):
        seen.append(np.asarray(net.dense.bias[...]))
        net.dense.bias[...] = net.dense.bias[...] * 0

    # With a rate of 0 from the second epoch on, it stays as the first callback made it.
    schedule = optax.piecewise_constant_schedule(0.1, {3: 0.0})
    trainer = Trainer(2, backend=backend, callback=watch)
    trainer.fit(net, IMAGES, loss="cross_entropy", optimizer=optax.sgd(schedule))
    assert seen[0].any()
    assert not seen[1].any()


def test_a_killed_run_is_resumed_to_the_last_bit(backend, tmp_path):
    def fit(epochs, **options):
        trainer = Trainer(epochs, num_gpus=1, backend=backend)
        net = Convolutional(nnx.Rngs(0, dropout=1))
        history = trainer.fit(net, IMAGES, **OPTIONS, **options)
        return history, [np.asarray(x) for x in _leaves(net)]

    path = tmp_path / "run.safetensors"
    expected, parameters = fit(4)
    fit(2, checkpoint=path)
    history, resumed = fit(4, checkpoint=path, resume=True)
    assert history == expected
    for x, y in zip(resumed, parameters, strict=True):
        np.testing.assert_array_equal(x, y)


def _leaves(net):
    return [x[...] for _, x in nnx.to_flat_state(nnx.state(net, (nnx.Param, nnx.BatchStat)))]
