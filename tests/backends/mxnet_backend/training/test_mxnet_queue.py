"""MXNet queues operations with their operands until memory is full; a learner bounds its loop."""

import mxnet as mx
import numpy as np
import pytest

from d2ldev import Trainer

STEPS = 40


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_run_lets_eight_batches_be_queued(backend, monkeypatch, num_gpus):
    waited = []
    monkeypatch.setattr(mx.nd.NDArray, "wait_to_read", lambda x: waited.append(x))
    batch = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    def count(steps):
        waited.clear()
        Trainer(1, num_gpus, backend=backend).fit(backend.mlp([2, 1]), [batch] * steps)
        return len(waited)

    # A run also waits for gradients when it lists its model, whatever the number of steps.
    assert count(2 * STEPS) - count(STEPS) == STEPS * max(1, num_gpus) // 4
