"""Metrics that keep a running value, functions of a whole epoch, and metrics by a dict of names.

Many values of an epoch are not the mean over its batches, such as the F1 score. The libraries of
metrics share a few public methods, and the Trainer uses these alone.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

import d2ldev
from d2ldev import CheckpointError, EpochMetric, Trainer, UnsupportedValueError
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"
SOURCE = "contract, Metrics"
EPOCHS = 2


class Errors:
    """The root of the mean square of all errors of an epoch; negative if they are, in the sum."""

    def __init__(self):
        self.found = []

    def reset(self):
        """Forget all errors."""
        self.found = []

    def update(self, prediction, y):
        """Keep the errors of a batch."""
        read = d2ldev.backend_of(prediction).to_numpy
        self.found.append(read(prediction) - read(y))

    def compute(self):
        """Return the root."""
        return take_root(0, np.concatenate(self.found))


class ErrorsOfKeras:
    """The same with the methods of a ``keras.metrics.Metric``."""

    def __init__(self):
        self.errors = Errors()

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Keep the errors of a batch."""
        assert sample_weight is None
        self.errors.update(y_pred, y_true)

    def result(self):
        """Return the root."""
        return self.errors.compute()

    def reset_state(self):
        """Forget all errors."""
        self.errors.reset()


class ErrorsOfGluon(Errors):
    """The same with the methods of a Gluon metric."""

    compute = None

    def update(self, labels, preds):
        """Keep the errors of a batch."""
        super().update(preds, labels)

    def get(self):
        """Return a name, and the root."""
        return "errors", Errors.compute(self)


class ErrorsByName(Errors):
    """The same with the keywords of NNX."""

    def update(self, *, logits, labels, **_):
        """Keep the errors of a batch."""
        super().update(logits, labels)


def take_root(y_true, y_pred):
    """Return the root of the mean square of errors, with the sign of their sum."""
    errors = y_pred - y_true
    return np.sign(errors.sum()) * np.sqrt((errors**2).mean())


METRICS = {
    "update and compute": Errors,
    "update_state and result": ErrorsOfKeras,
    "update and get": ErrorsOfGluon,
    "update by name": ErrorsByName,
}


def raise_targets(batches):
    """Return batches whose targets are greater than all predictions."""
    return [(X, y + np.float32(100)) for X, y in batches]


def check_root(history, name):
    """Check a root of the mean square: it is that of the loss, and negative."""
    for prefix in ("", "val_"):
        roots = -np.sqrt(history[f"{prefix}loss"])
        np.testing.assert_allclose(history[f"{prefix}{name}"], roots, rtol=1e-5)


@requirement("fit.keeps-running-values", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("make", METRICS.values(), ids=METRICS)
def test_a_metric_keeps_its_value_over_an_epoch(backend, batches, num_gpus, make):
    """Measure an epoch by an object with ``update``, ``compute`` and ``reset``, or their like.

    Each epoch and each evaluation begins anew. ``torchmetrics``, ``keras.metrics``,
    ``nnx.metrics`` and Gluon have such objects.
    """
    data, metric = raise_targets(batches), make()
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    metrics = {"root": metric}
    history = trainer.fit(backend.mlp([2, 1]), data, data[1:], lr=1e-4, metrics=metrics)
    assert list(history) == ["loss", "root", "val_loss", "val_root", "lr"]
    check_root(history, "root")
    assert all(type(value) is float for value in history["root"])
    found = trainer.validate(trainer.model, data[1:], metrics=metrics)
    assert found["root"] == pytest.approx(history["val_root"][-1])
    assert list(trainer.validate(trainer.model, data, metrics=[metric])) == [
        "loss",
        make.__name__,
    ]


@requirement("fit.measures-whole-epochs", section=SECTION, source=SOURCE)
def test_a_function_gets_all_predictions_and_labels_of_an_epoch(backend, batches, num_gpus):
    """Call the function of an ``EpochMetric`` once with all predictions and labels.

    Functions of scikit-learn take NumPy arrays.
    """
    calls = []

    def root(y_true, y_pred):
        calls.append((y_true, y_pred))
        return take_root(y_true, y_pred)

    data = raise_targets(batches)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    history = trainer.fit(backend.mlp([2, 1]), data, data[1:], lr=1e-4, metrics=[EpochMetric(root)])
    check_root(history, "root")
    assert len(calls) == 2 * EPOCHS
    np.testing.assert_array_equal(calls[0][0], np.concatenate([y for _, y in data]))
    assert all(type(each) is np.ndarray for call in calls for each in call)
    ((prediction, y),) = [calls[-1][::-1]]
    found = np.concatenate([backend.to_numpy(x) for x in trainer.predict(trainer.model, data[1:])])
    np.testing.assert_array_equal(y, np.concatenate([y for _, y in data[1:]]))
    np.testing.assert_allclose(prediction, found, rtol=1e-5)


@requirement("fit.names-its-metrics", section=SECTION, source=SOURCE)
def test_a_dict_gives_metrics_their_names(backend, num_gpus):
    """Take the names in the history from a dict of metrics.

    Two functions of one name, or without one, need names of their own.
    """
    inputs = np.array([[1, 0], [0, 1], [1, 0.1], [0.1, 1]], "float32")
    data = [(inputs, np.array([0, 1, 0, 1], "int32"))]
    metrics = {"share right": "accuracy", "three": lambda *_: 3.0, "four": lambda *_: 4.0}
    trainer = Trainer(1, num_gpus, backend=backend)
    history = trainer.fit(backend.mlp([2, 2]), data, data, loss="cross_entropy", metrics=metrics)
    assert list(history) == [
        "loss",
        *metrics,
        "val_loss",
        *(f"val_{name}" for name in metrics),
        "lr",
    ]
    assert history["val_three"] == [3.0]
    assert history["four"] == [4.0]
    with pytest.raises(UnsupportedValueError, match="'loss'") as error:
        trainer.validate(trainer.model, data, metrics={"loss": "accuracy"})
    assert "another_name" in error.value.fix


class _OfPredictions(Errors):
    def update(self, value, weight=None):
        raise AssertionError("it would take a target for weights")


class _Collection(dict):
    update, compute, reset = Errors.update, Errors.compute, Errors.reset


REFUSED = {
    "a class": (Errors, "it is a class"),
    "a collection in a list": (_Collection(a=Errors()), "several metrics"),
    "no target": (_OfPredictions(), "takes no target"),
    "no value": (object(), "update, compute and reset"),
}


@requirement("fit.refuses-other-metrics", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("case", REFUSED)
def test_an_object_that_is_no_metric_is_refused_at_once(backend, batches, case):
    """Refuse a metric that cannot be updated with a prediction and a target."""
    metric, problem = REFUSED[case]
    trainer = Trainer(1, backend=backend)
    with pytest.raises(UnsupportedValueError, match=problem):
        trainer.fit(backend.mlp([2, 1]), batches, metrics=[metric])
    assert trainer.model is None


class _Several(Errors):
    def compute(self):
        return {"a": 1.0, "b": 2.0}


class _Functional(Errors):
    def update(self, prediction, y):
        return copy.copy(self)


@requirement("fit.refuses-other-metrics", section=SECTION, source=SOURCE)
@pytest.mark.parametrize("metric", [_Several(), _Functional()], ids=["several numbers", "a copy"])
def test_a_metric_that_has_no_number_is_refused(backend, batches, metric):
    """Refuse a metric with several numbers, and a metric that its ``update`` does not change."""
    with pytest.raises(UnsupportedValueError, match="measure other"):
        Trainer(1, backend=backend).validate(
            backend.mlp([2, 1]), batches, metrics={"other": metric}
        )


@requirement("fit.refuses-other-metrics", section=SECTION, source=SOURCE)
def test_a_metric_that_is_reset_within_an_epoch_is_refused(backend, batches):
    """Refuse one metric for two calls at a time, or for two names: each would reset the other."""
    metric, net = Errors(), backend.mlp([2, 1])

    class Nested(Trainer):
        def on_step_end(self, _step, _loss):
            self.validate(self.model, batches, metrics=[metric])

    with pytest.raises(UnsupportedValueError, match="reset within the epoch"):
        Nested(1, backend=backend).fit(net, batches, metrics=[metric])
    with pytest.raises(UnsupportedValueError, match="reset within the epoch"):
        Trainer(1, backend=backend).validate(net, batches, metrics={"a": metric, "b": metric})


@requirement("fit.refuses-other-metrics", section=SECTION, source=SOURCE)
def test_a_checkpoint_within_an_epoch_has_no_running_value(backend, batches, tmp_path):
    """Refuse to save within an epoch, or to resume there, with a metric that keeps a value."""
    path = tmp_path / "run.safetensors"
    options = {"checkpoint": path, "checkpoint_every": 3}
    net = backend.mlp([2, 1])
    with pytest.raises(UnsupportedValueError, match="save within an epoch"):
        Trainer(1, backend=backend).fit(net, batches, metrics={"a": Errors()}, **options)
    assert not path.exists()

    class Stopping(Trainer):
        def on_step_end(self, step, _loss):
            self.should_stop = step == 2

    def one(prediction, _y):
        return 1.0 * prediction.shape[0]

    Stopping(1, backend=backend).fit(net, batches, metrics={"a": one}, **options)
    trainer = Trainer(1, backend=backend)
    with pytest.raises((UnsupportedValueError, CheckpointError), match="within an epoch"):
        trainer.fit(
            backend.mlp([2, 1]), batches, metrics={"a": Errors()}, checkpoint=path, resume=True
        )
