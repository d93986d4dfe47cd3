"""D2L 6.7.3: ``backend.summarize(net)`` tells which numbers of a model training changes.

A user who has frozen a part of a model sees there whether it is frozen.
"""

from __future__ import annotations

from d2ldev_conformance.provision import freezables, untrainable_models
from d2ldev_conformance.requirement import requirement

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
