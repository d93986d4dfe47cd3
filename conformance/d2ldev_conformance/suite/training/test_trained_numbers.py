"""D2L 6.7.3: ``backend.summarize(net)`` tells which numbers of a model training changes.

A user who has frozen a part of a model sees there whether it is frozen.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev_conformance.provision import freezables, untrainable_models
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import read_saved_values

SECTION = "6.7.3"
SOURCE = "contract"


@requirement("show.untrained", section=SECTION)
def test_a_summary_tells_that_nothing_is_trained(backend, place, frozen_model):
    """Count no number as trained in a model that trains nothing."""
    total = backend.summarize(untrainable_models(backend)[frozen_model](place)).total
    assert total.trained == 0


@requirement("show.frozen", section=SECTION)
def test_a_summary_follows_what_is_frozen(backend, place, freezable):
    """Count fewer numbers as trained, or as many, while a part is frozen, and as many after it.

    Some parts, such as running means, are never trained.
    """
    build, freeze = freezables(backend)[freezable]
    net = build(place)
    before = backend.summarize(net).total
    freeze(net, True)
    frozen = backend.summarize(net).total
    freeze(net, False)
    after = backend.summarize(net).total
    assert frozen.trained <= before.trained == after.trained
    assert frozen.parameters + frozen.buffers == before.parameters + before.buffers
    assert frozen.nbytes == before.nbytes == after.nbytes


@requirement("show.trained-numbers-change", section=SECTION)
@pytest.mark.parametrize("is_frozen", [False, True], ids=["free", "frozen"])
def test_a_summary_counts_what_a_step_changes(backend, freezable, is_frozen):
    """Count as trained the numbers of the parameters that a step changes, frozen ones not.

    A step changes buffers as well, such as running means, also with a learning rate of 0.
    """
    build, freeze = freezables(backend)[freezable]
    labels = backend.asarray([0, 1] * 16, dtype="int32")
    counts = []
    for lr in (0.0, 0.1):
        net = build(backend.cpu())
        freeze(net, is_frozen)
        before, total = read_saved_values(backend, net), backend.summarize(net).total
        # Adam, as the gradient of a bias before a normalization is some rounding alone.
        learner = backend.learner(net, loss="cross_entropy", optimizer="adam", lr=lr)
        learner.step((backend.randn((32, 4), seed=1),), labels)
        after = read_saved_values(backend, learner.sync()["model"])
        assert list(after) == list(before)
        counts.append(sum(x.size for name, x in before.items() if np.any(x != after[name])))
    assert counts[1] - counts[0] == total.trained
