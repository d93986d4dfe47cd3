"""What is in evaluation mode in a Flax model that is trained, and in a run that is resumed."""

import numpy as np
import pytest
from flax import nnx
from nnx_models import Attentive, Convolutional, batches, made

from d2ldev.training.trainer import Trainer

RANDOM = np.random.default_rng(0)
IMAGES = [
    (RANDOM.random((4, 8, 8, 3), dtype=np.float32), RANDOM.integers(0, 2, 4)) for _ in range(3)
]


class Normalised(nnx.Module):
    """A model that has no flags but those of its batch normalisation."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dense = nnx.Linear(256, 2, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.norm(self.convolution(x)).reshape(len(x), -1))


def with_a_flag(rngs):
    net = Normalised(rngs)
    net.deterministic = False
    return net


def statistics(net):
    return np.asarray(net.norm.mean[...])


def test_what_was_put_into_evaluation_mode_in_a_model_stays_in_it(backend):
    ((inputs, y),) = batches(backend, Convolutional, "cpu", 1)
    net = made(backend, Convolutional, "cpu")
    net.norm.eval()
    before = np.asarray(net.norm.mean[...])
    learner = backend.learner(net, loss="cross_entropy", lr=0.0)
    losses = {float(learner.step(inputs, y)[0]) for _ in range(2)}
    assert np.array_equal(learner.parts["model"].norm.mean[...], before)
    assert len(losses) == 2  # there is still dropout


def test_the_modes_of_the_users_model_are_left_alone(backend):
    ((inputs, y),) = batches(backend, Convolutional, "cpu", 1)
    net = made(backend, Convolutional, "cpu")
    net.eval()
    learner = backend.learner(net, loss="cross_entropy")
    learner.step(inputs, y)
    assert learner.parts["model"].dropout.deterministic
    # A model that is in evaluation mode as a whole is trained all the same.
    assert net.norm.mean[...].any()


def test_the_only_batch_norm_is_frozen_beside_a_flag_of_the_models_own(backend):
    net = with_a_flag(nnx.Rngs(0))
    net.norm.eval()
    kernel = np.asarray(net.convolution.kernel[...])
    Trainer(2, backend=backend).fit(net, IMAGES, loss="cross_entropy")
    assert not statistics(net).any()
    assert not np.array_equal(net.convolution.kernel[...], kernel)
    assert (net.deterministic, net.norm.use_running_average) == (False, True)


@pytest.mark.parametrize("make", [Normalised, with_a_flag])
def test_a_model_that_was_left_in_evaluation_mode_is_trained(backend, make):
    net = make(nnx.Rngs(0))
    net.eval()
    Trainer(2, backend=backend).fit(net, IMAGES, loss="cross_entropy")
    assert statistics(net).any()
    assert net.norm.use_running_average


@pytest.mark.parametrize("make", [Convolutional, with_a_flag])
def test_what_a_callback_has_put_into_evaluation_mode_stays_in_it_in_a_resumed_run(
    backend, make, tmp_path
):
    """From the second epoch to the fourth, in a run that is killed in between."""

    def run(epochs, path, **options):
        net, seen = make(nnx.Rngs(0, dropout=1)), []

        def freeze(epoch, history):
            seen.append((net.norm.use_running_average, statistics(net)))
            net.norm.set_attributes(use_running_average=1 <= epoch < 4)

        trainer = Trainer(epochs, 1, backend=backend, callback=freeze)
        trainer.fit(net, IMAGES, IMAGES, loss="cross_entropy", checkpoint=path, **options)
        return seen, [np.asarray(x) for _, x in nnx.to_flat_state(nnx.state(net, nnx.Param))]

    expected, parameters = run(6, tmp_path / "unbroken")
    run(3, tmp_path / "run")
    found, resumed = run(6, tmp_path / "run", resume=True)
    assert [flag for flag, _ in expected] == [False, False, True, True, True, False]
    assert [flag for flag, _ in found] == [True, True, False]
    for (_, x), (_, y) in zip(found, expected[3:], strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(resumed, parameters, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_model_in_which_nothing_is_frozen_is_restored_into_one_in_which_something_is(backend):
    learner = backend.learner(made(backend, Convolutional, "gpu:1"), loss="cross_entropy")
    net = made(backend, Convolutional, "gpu:1")
    net.norm.eval()
    other = backend.learner(net, loss="cross_entropy")
    other.restore(learner.state())
    ((inputs, y),) = batches(backend, Convolutional, "gpu:1", 1)
    assert float(other.step(inputs, y)[0]) == float(learner.step(inputs, y)[0])
    assert np.array_equal(statistics(other.parts["model"]), statistics(learner.parts["model"]))
    assert statistics(net).any()


def test_a_flag_that_is_neither_set_nor_unset_is_left_alone(backend):
    learner = backend.learner(made(backend, Attentive, "cpu"), loss="cross_entropy")
    learner.restore(learner.state())
    assert learner.parts["model"].attention.deterministic is None
