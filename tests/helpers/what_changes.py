"""Measure what several GPUs change, and read what the page of documentation says of it."""

import re
from pathlib import Path

import numpy as np
from d2ldev_conformance.provision import networks, networks_with_batch_norm

from d2ldev import Trainer, UnsupportedValueError, WeightedLoss

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "what-several-gpus-change.md"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def read_column(framework):
    """Return what the first table of the page says of a framework: a word for each row."""
    text = PAGE.read_text()
    lines = text[text.index("| |") : text.index("\n\n", text.index("| |"))].splitlines()
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    number = names.index(framework)
    return {cells[0]: re.match(r"\w+", cells[number]).group() for cells in rows}


# -- losses and metrics of users, with operators that all frameworks have --------------------------


def _squares(prediction, y):
    return [(prediction[i, 0] - y[i, 0]) ** 2 for i in range(y.shape[0])]


def mean_of_examples(prediction, y):
    return sum(_squares(prediction, y)) / y.shape[0]


def _sums_of(prediction, y):
    weights = [y[i, 1] for i in range(y.shape[0])]
    return sum(x * w for x, w in zip(_squares(prediction, y), weights, strict=True)), sum(weights)


def mean_of_weights(prediction, y):
    total, weight = _sums_of(prediction, y)
    return total / weight


def loss_with_weight(prediction, y):
    return WeightedLoss(*_sums_of(prediction, y))


def total(prediction, y):
    return sum(_squares(prediction, y))


class Reduced:
    """A loss object as those of PyTorch and Keras are."""

    reduction = "sum"

    def __call__(self, prediction, y):
        return total(prediction, y)


def comparison(prediction, y):
    rows = range(y.shape[0])
    return sum((prediction[i, 0] - prediction[j, 0] - 1) ** 2 for i in rows for j in rows) / len(
        rows
    )


def mean_error(prediction, y):
    found = mean_of_examples(prediction, y)
    return found.mean() if hasattr(found, "mean") else found  # MXNet's has an axis


def no_mean(prediction, y):
    return mean_error(prediction, y) ** 2


class Centering(Trainer):
    """A trainer that subtracts the mean of a batch."""

    def prepare_batch(self, batch):
        x, y = super().prepare_batch(batch)
        return x - sum(x[i] for i in range(x.shape[0])) / x.shape[0], y


class Noisy:
    """Data that is changed at random when it is read."""

    def __iter__(self):
        for x, y in _batches():
            yield x + np.random.normal(size=x.shape).astype("float32"), y


class Losses:
    """A callback that keeps the losses of steps."""

    def __init__(self, backend):
        self.backend, self.losses = backend.name, []

    def on_step_end(self, step, loss):
        self.losses.append(float(loss))

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


# -- runs ------------------------------------------------------------------------------------------


def _batches():
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(n, 4)).astype("float32"), random.uniform(1, 3, (n, 2)).astype("f4"))
        for n in (8, 5)
    ]


def _fit(backend, num_gpus, net=None, data=None, cls=Trainer, callbacks=None, **options):
    backend.seed(0)
    np.random.seed(0)
    trainer = cls(2, num_gpus, backend=backend, callbacks=callbacks)
    net = backend.mlp([4, 8, 1], seed=0) if net is None else net(backend.cpu())
    history = trainer.fit(net, data or _batches(), lr=0.05, **options)
    values = backend.named_tensors(trainer.model)
    # The loss comes last.
    numbers = [history[name] for name in history if name != "loss"]
    return [*(backend.to_numpy(x) for x in values.values()), *numbers, history["loss"]]


def _learn_with(loss):
    return lambda backend, number: _fit(backend, number, loss=loss)


def _measure_with(metric):
    def measure(backend, number):
        options = {"loss": mean_of_examples, "metrics": [metric], "val_data": _batches()}
        return _fit(backend, number, **options)

    return measure


def _normalize(backend, number):
    (net, *_) = networks_with_batch_norm(backend).values()
    random = np.random.default_rng(0)
    data = [(random.normal(3, 2, (8, 4)).astype("float32"), np.arange(8, dtype="int32") % 2)]
    return _fit(backend, number, net, data, loss="cross_entropy")


def _drop(backend, number):
    (net, *_) = networks(backend).values()
    half = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    # Equal halves have the same statistics for batch normalization.
    data = [(np.concatenate([half, half]), np.arange(16, dtype="int32") % 2)]
    return _fit(backend, number, net, data, loss="cross_entropy")[-1][:1]


def _watch(backend, number):
    losses = Losses(backend)
    _fit(backend, number, loss=mean_of_examples, callbacks=losses)
    return [losses.losses]


ROWS = {
    "your own loss, a mean over the examples": _learn_with(mean_of_examples),
    "your own loss, a mean over tokens or weights": _learn_with(mean_of_weights),
    "the same as a `WeightedLoss`": _learn_with(loss_with_weight),
    "your own loss, a sum": _learn_with(total),
    'a loss object with `reduction="sum"`': _learn_with(Reduced()),
    "a loss or a model that compares the examples of a batch": _learn_with(comparison),
    "batch normalization": _normalize,
    "dropout, noise and other random layers": _drop,
    "data that changes at random": lambda backend, number: _fit(
        backend, number, data=Noisy(), loss=mean_of_examples
    ),
    "a `prepare_batch` that looks at the whole batch": lambda backend, number: _fit(
        backend, number, cls=Centering, loss=mean_of_examples
    ),
    "a metric function, a mean over the examples": _measure_with(mean_error),
    "a metric function, not a mean over the examples": _measure_with(no_mean),
    "the loss that `on_step_end` gets": _watch,
}
"""What a run on a number of GPUs finds for each row: numbers that may be compared."""


def measure(backend):
    """Return for each row whether two GPUs and one find the same, to rounding."""
    return {row: compare(backend, row) for row in ROWS}


def compare(backend, row):
    """Return ``'same'`` or ``'differs'`` for a row; ``'refused'`` if two GPUs refuse to train."""
    one = ROWS[row](backend, 1)
    try:
        two = ROWS[row](backend, 2)
    except UnsupportedValueError:
        return "refused"
    pairs = zip(one, two, strict=True)
    is_same = all(np.allclose(a, b, **TOLERANCE) for a, b in pairs)
    return "same" if is_same else "differs"
