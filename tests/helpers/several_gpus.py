"""Several GPUs against one of them, for the frameworks' own tests."""

import numpy as np

from d2ldev import Trainer

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""For float32: devices add up the gradients of parts in another order."""

FEATURES, CLASSES = 6, 3


def flat_batches(examples=13, batch_size=5):
    """Return batches ``(n, 6)`` with labels of 3 classes, of sizes that two do not share evenly."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(examples, FEATURES)).astype("float32")
    labels = random.integers(0, CLASSES, examples).astype("int32")
    starts = range(0, examples, batch_size)
    return [(inputs[i : i + batch_size], labels[i : i + batch_size]) for i in starts]


PAIR = [(np.ones((2, 32), "float32"), np.arange(2, dtype="int32"))]
"""A batch of two examples, of which a layer of dropout shows its masks."""


def train(backend, make, data, num_gpus, fits=1, **options):
    """Train a model that ``make()`` returns; what it has, by name, and the last history.

    Args:
        backend: the backend.
        make: makes the same model each time.
        data: batches, to train with and to evaluate on.
        num_gpus: how many.
        fits: how often.
        options: of ``fit``; ``optimizer`` may be a function of the model; ``precision``,
            ``accumulate_grad_batches`` and ``gradient_clip_val`` are the trainer's;
            ``reads_shard`` is whether a process of a launch reads its part of the data only.
    """
    names = ("precision", "accumulate_grad_batches", "gradient_clip_val")
    of_trainer = {name: options.pop(name) for name in names if name in options}
    reads_shard = options.pop("reads_shard", False)
    trainer = Trainer(2, num_gpus, backend=backend, **of_trainer)
    if reads_shard:
        data = trainer.shard_data(data)
    trainer.model = make()
    if callable(options.get("optimizer")):
        options["optimizer"] = options["optimizer"](trainer.model)
    for _ in range(fits):
        history = trainer.fit(trainer.model, data, data, **options)
    values = backend.named_tensors(trainer.model)
    return {name: backend.to_numpy(x) for name, x in values.items()}, history


def assert_same_as_one(backend, make, data, num_gpus=2, tolerance=TOLERANCE, **options):
    """Check that several GPUs learn what one of them learns."""
    values, history = train(backend, make, data, num_gpus, **options)
    expected, curves = train(backend, make, data, 1, **options)
    assert len(values) == len(expected)
    for value, wanted in zip(values.values(), expected.values(), strict=True):
        np.testing.assert_allclose(value, wanted, **tolerance)
    assert list(history) == list(curves)
    for name, curve in curves.items():
        np.testing.assert_allclose(history[name], curve, **tolerance)
