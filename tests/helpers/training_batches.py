"""Batches to train with, the same for every framework."""

import numpy as np


def label_batches(backend, draw, device, count):
    """Return inputs and labels of two classes on a device, the same each time.

    ``draw`` takes one batch's inputs, NumPy's arrays for four examples, from a generator.
    """
    random = np.random.default_rng(0)
    drawn = [(draw(random), random.integers(0, 2, 4)) for _ in range(count)]
    return [
        (
            tuple(backend.asarray(x, device=device) for x in inputs),
            backend.asarray(y.astype(np.int32), device=device),
        )
        for inputs, y in drawn
    ]


def linear_model_and_batch(backend):
    """Return a linear model on the second virtual GPU, and a batch for it."""
    return backend.mlp([2, 1], device="gpu:1"), (
        (backend.rand((4, 2), seed=0, device="gpu:1"),),
        backend.rand((4, 1), seed=1, device="gpu:1"),
    )
