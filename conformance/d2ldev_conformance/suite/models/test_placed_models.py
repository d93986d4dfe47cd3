"""D2L 6.7.3, "Neural Networks and GPUs": many models at once, and exact layers.

A layer may compute in another precision than a product, and programs place models in threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from d2ldev_conformance.provision import classifiers
from d2ldev_conformance.requirement import requirement

SOURCE = "contract"


@requirement(
    "precision.highest-in-every-layer",
    section="6.7.1",
    source="contract, How precise are products?",
)
@pytest.mark.needs_gpus(1)
def test_a_network_in_the_highest_precision_is_that_of_the_cpu(backend, classifier, place):
    """Compute each layer of a network at ``'highest'`` as the CPU does, to rounding.

    Convolutions have a switch of their own in some frameworks.
    """
    build, shape = classifiers(backend)[classifier]
    batch = np.random.default_rng(1).standard_normal((4, *shape)).astype("float32")
    net = build(backend.cpu())
    with backend.matmul_precision("highest"):
        expected = backend.to_numpy(net(backend.asarray(batch)))
        net = backend.place(net, place)
        with backend.on(place):
            found = backend.to_numpy(net(backend.asarray(batch)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@requirement("threads.models-at-once", section="6.7.3")
def test_many_threads_place_models_at_once(backend, place):
    """Place models of many threads at once, each of them whole.

    Servers load several models at once.
    """

    def place_model(seed):
        net = backend.place(backend.mlp([3, 4, 1], seed=seed), place)
        return set(backend.placement(net).values())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(place_model, range(16))) == [{place}] * 16
