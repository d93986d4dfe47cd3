"""D2L 5.6: dropout in training, and none in evaluation.

Dropout is for training alone. A model that drops values in use answers one question in many ways.
"""

from __future__ import annotations

from d2ldev_conformance.provision import networks
from d2ldev_conformance.requirement import requirement

SOURCE = "D2L 5.6"


@requirement("train.drops-in-training-only", section="6.7.3")
def test_each_step_of_a_network_drops_other_values_and_an_evaluation_none(backend, place, network):
    """Drop other values in each step, and none in an evaluation."""
    net = networks(backend)[network](place)
    learner = backend.learner(net, loss="cross_entropy", lr=0.0)
    batch = (backend.rand((32, 4), seed=1, device=place),)
    labels = backend.zeros(32, dtype="int32", device=place)
    # Without a rate nothing is learned: the losses differ by what was dropped.
    first, second = (float(backend.to_numpy(learner.step(batch, labels)[0])) for _ in range(2))
    assert first != second
    first, second = (float(backend.to_numpy(learner.evaluate(batch, labels)[0])) for _ in range(2))
    assert first == second
