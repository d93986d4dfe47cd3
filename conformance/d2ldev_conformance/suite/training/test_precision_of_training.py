"""The precision of float32 products in training.

Two trainings can only be compared if their products have the same precision.
"""

from __future__ import annotations

import numpy as np
import pytest

import d2ldev
from d2ldev import Trainer
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.1"
SOURCE = "contract, How precise are products?"


@requirement("precision.of-a-training", section=SECTION)
def test_a_trainer_trains_in_its_precision_and_restores_the_old_one(backend, place):
    """Train in the trainer's precision, and restore the earlier one."""
    found = []
    with backend.matmul_precision("medium") as medium:
        pass

    class Watching(Trainer):
        def prepare_batch(self, batch):
            found.append(backend.matmul_precision())
            return super().prepare_batch(batch)

        def on_step_end(self, step, loss):
            found.append(backend.matmul_precision())

    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    gpus = 0 if place is backend.cpu() else 1
    trainer = Watching(1, gpus, backend=backend, matmul_precision="medium")
    before = backend.matmul_precision()
    trainer.fit(backend.mlp([2, 1]), [(x, y)])
    trainer.validate(trainer.model, [(x, y)])
    trainer.predict(trainer.model, [(x, y)])
    assert len(found) >= 4
    assert set(found) == {medium}
    assert backend.matmul_precision() == before


def curve(backend, num_gpus, model, optimizer, lr):
    """Return the losses of a training in the highest precision."""
    random = np.random.default_rng(2)
    inputs = random.standard_normal((128, 16)).astype("float32")
    labels = np.argmax(inputs[:, :3] ** 2 + inputs[:, 3:6], axis=1).astype("int32")
    data = [(inputs[i : i + 32], labels[i : i + 32]) for i in range(0, 128, 32)]
    trainer = Trainer(5, num_gpus, backend=backend, matmul_precision="highest")
    return trainer.fit(model, data, loss="cross_entropy", optimizer=optimizer, lr=lr)["loss"]


LAYERS = [16, 64, 64, 3]
CURVE = 1e-5
"""How far a loss may be off. In float32 the frameworks differ by 8e-7 at most on CPUs; with factors
that were rounded to TensorFloat-32 it is 1e-4."""


@requirement("precision.same-curve", section=SECTION)
@pytest.mark.needs_gpus(1)
def test_the_losses_on_a_gpu_are_those_of_the_cpu(backend):
    """Train on a GPU at ``'highest'`` with the losses of the CPU, to 1e-5.

    TensorFloat-32 is off by ten times as much.
    """
    on_the_cpu, losses = (
        curve(backend, gpus, backend.mlp(LAYERS, seed=1), "momentum", 0.1) for gpus in (0, 1)
    )
    np.testing.assert_allclose(losses, on_the_cpu, rtol=CURVE)
    assert losses[-1] < 0.9 * losses[0]


@requirement("precision.curves-agree", section=SECTION)
def test_the_losses_are_those_of_the_reference_and_so_of_every_framework(backend, place, tmp_path):
    """Train at ``'highest'`` with the losses of the reference backend, to 1e-5.

    Each framework then has the curve of each other.
    """
    reference = d2ldev.get_backend("reference")
    net = reference.mlp(LAYERS, seed=1)
    reference.save(net, tmp_path / "net")
    expected = curve(reference, 0, net, "momentum", 0.1)
    net = backend.load_into(backend.mlp(LAYERS), tmp_path / "net")
    losses = curve(backend, int(place.kind == "gpu"), net, "momentum", 0.1)
    np.testing.assert_allclose(losses, expected, rtol=CURVE)
    assert losses[-1] < 0.9 * losses[0]
