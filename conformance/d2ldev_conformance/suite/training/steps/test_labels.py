"""D2L 6.7.3: labels are the numbers of classes, one for each row of logits, on every framework."""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import D2LDevError, UnsupportedValueError
from d2ldev_conformance.provision import models_of_sequences
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"
# More classes than a signed byte can number.
MANY = 200
# Each would be broadcast against logits of shape (4, 3), or compared with them.
WRONG = {
    "a column": np.array([[0], [1], [2], [0]], "int32"),
    "one-hot": np.eye(3, dtype="int32")[[0, 1, 2, 0]],
    "one-hot floats": np.eye(3, dtype="float32")[[0, 1, 2, 0]],
    "one label": np.array([1], "int32"),
    "floats": np.array([0, 1, 2, 0], "float32"),
}


@pytest.fixture
def integers(backend):
    """Every integer dtype that the backend has."""
    return [name for name in backend.dtype_names if name.startswith(("int", "uint"))]


def _logits(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def _accuracy(backend, device, logits, labels, **options):
    found = backend.accuracy(
        backend.asarray(logits, device=device), backend.asarray(labels, device=device, **options)
    )
    assert backend.device_of(found) is device
    assert backend.dtype_of(found) == "float32"
    return float(backend.to_numpy(found))


def _learner(backend, device, classes=3):
    net = backend.mlp([2, classes], device=device)
    return backend.learner(net, loss="cross_entropy")


def _losses(backend, device, learner, x, labels, **options):
    """Return the loss of an evaluation, that of a step, and NumPy's for the prediction."""
    x, y = backend.asarray(x, device=device), backend.asarray(labels, device=device, **options)
    losses = []
    for method in (learner.evaluate, learner.step):
        loss, prediction = method((x,), y)
        losses.append(float(backend.to_numpy(loss)))
    # A step returns the prediction before it, too.
    logits = backend.to_numpy(prediction).astype("float64")
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = np.array(labels)[..., np.newaxis]
    return losses, -np.take_along_axis(logarithms, rows, -1).mean()


@requirement("labels.accuracy-of-every-width", section=SECTION)
def test_accuracy_takes_labels_of_every_integer_dtype(backend, place, integers):
    logits = np.zeros((4, MANY), "float32")
    logits[range(4), [0, 5, 100, 127]] = 1
    found = [_accuracy(backend, place, logits, [0, 5, 100, 1], dtype=name) for name in integers]
    assert found == [0.75] * len(integers)
    logits[3, MANY - 1] = 2
    assert _accuracy(backend, place, logits, [0, 5, 1, MANY - 1], dtype="uint8") == 0.75


@requirement("labels.accuracy-sequences", section=SECTION)
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5)], ids=str)
def test_accuracy_is_the_mean_over_all_labels_of_sequences(backend, place, shape):
    logits = _logits(*shape, 3)
    labels = logits.argmax(-1).astype("int32")
    labels[0] = (labels[0] + 1) % 3
    labels[1:, ..., 0] = (labels[1:, ..., 0] + 1) % 3
    expected = (logits.argmax(-1) == labels).mean()
    np.testing.assert_allclose(_accuracy(backend, place, logits, labels), expected, rtol=1e-6)


@requirement("labels.accuracy-refuses", section=SECTION)
@pytest.mark.parametrize("wrong", WRONG)
def test_accuracy_refuses_what_are_no_labels_of_the_logits(backend, place, wrong):
    logits, labels = (backend.asarray(x, device=place) for x in (_logits(4, 3), WRONG[wrong]))
    with pytest.raises(UnsupportedValueError):
        backend.accuracy(logits, labels)


@requirement("labels.accuracy-refuses-foreign-arrays", section=SECTION)
def test_accuracy_refuses_what_is_no_tensor_of_the_backend(backend):
    logits, labels = _logits(4, 3), np.array([0, 1, 2, 0], "int32")
    with pytest.raises(UnsupportedValueError, match="no tensor"):
        backend.accuracy(backend.asarray(logits), labels)
    with pytest.raises(UnsupportedValueError, match="no tensor"):
        backend.accuracy(logits, backend.asarray(labels))


@requirement("labels.cross-entropy-of-every-width", section=SECTION)
def test_cross_entropy_takes_labels_of_every_integer_dtype(backend, place, integers):
    x = _logits(4, 2)
    for name, labels in [
        *((name, [0, 5, 100, 127]) for name in integers),
        ("uint8", [0, 5, 128, MANY - 1]),
    ]:
        learner = _learner(backend, place, MANY)
        losses, expected = _losses(backend, place, learner, x, labels, dtype=name)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@requirement("labels.cross-entropy-sequences", section=SECTION)
def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(backend, place, model_of_sequences):
    net = models_of_sequences(backend)[model_of_sequences](place)
    learner = backend.learner(net, loss="cross_entropy")
    labels = np.arange(20, dtype="int32").reshape(4, 5) % 3
    losses, expected = _losses(backend, place, learner, _logits(4, 5, 2), labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@requirement("labels.cross-entropy-refuses", section=SECTION)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_cross_entropy_refuses_what_are_no_labels_of_the_logits(backend, place, wrong, method):
    learner = _learner(backend, place)
    x, labels = (backend.asarray(x, device=place) for x in (_logits(4, 2), WRONG[wrong]))
    with pytest.raises(UnsupportedValueError):
        getattr(learner, method)((x,), labels)


def _loss_or_nan(backend, labels, method):
    """Compute on the CPU: after an error in a CUDA kernel torch cannot use the GPU again."""
    learner = _learner(backend, backend.cpu())
    x, y = backend.asarray(_logits(4, 2)), backend.asarray(np.array(labels, "int32"))
    try:
        loss, _ = getattr(learner, method)((x,), y)
        return float(backend.to_numpy(loss))
    except D2LDevError:  # d2ldev does not check the label
        raise
    except Exception:  # a framework's own: each has another
        return float("nan")


# -1 counts from the end in Python, and -100 stands for no label in torch.
@requirement("labels.cross-entropy-out-of-range", section=SECTION)
@pytest.mark.parametrize("label", [-1, -3, -100, 3, 10**6])
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_label_that_is_no_class_gives_no_finite_loss(backend, label, method):
    assert np.isfinite(_loss_or_nan(backend, [0, 1, 2, 0], method))
    assert not np.isfinite(_loss_or_nan(backend, [0, 1, 2, label], method))
