"""D2L 6.7.3: labels are the numbers of classes, one for each row of logits, on every framework.

Frameworks read labels in other ways, and broadcast wrong ones without a sign. A loss of the wrong
labels still falls.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import Trainer, UnsupportedValueError
from d2ldev.framework import Weighted
from d2ldev_conformance.provision import models_of_sequences
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_run, read_saved_values

SECTION = "6.7.3"
SOURCE = "contract, Labels"
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


def _learner(backend, device, features=2, classes=3):
    net = backend.mlp([features, classes], device=device)
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
    """Take labels of each integer dtype in ``accuracy``.

    200 classes do not fit into int8, and overflow.
    """
    logits = np.zeros((4, MANY), "float32")
    logits[range(4), [0, 5, 100, 127]] = 1
    found = [_accuracy(backend, place, logits, [0, 5, 100, 1], dtype=name) for name in integers]
    assert found == [0.75] * len(integers)
    logits[3, MANY - 1] = 2
    assert _accuracy(backend, place, logits, [0, 5, 1, MANY - 1], dtype="uint8") == 0.75


@requirement("labels.accuracy-sequences", section=SECTION)
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5)], ids=str)
def test_accuracy_is_the_mean_over_all_labels_of_sequences(backend, place, shape):
    """Return the mean of ``accuracy`` over all labels of sequences.

    A mean of means weighs short sequences too much.
    """
    logits = _logits(*shape, 3)
    labels = logits.argmax(-1).astype("int32")
    labels[0] = (labels[0] + 1) % 3
    labels[1:, ..., 0] = (labels[1:, ..., 0] + 1) % 3
    expected = (logits.argmax(-1) == labels).mean()
    np.testing.assert_allclose(_accuracy(backend, place, logits, labels), expected, rtol=1e-6)


@requirement("labels.accuracy-refuses", section=SECTION)
@pytest.mark.needs("train")
@pytest.mark.parametrize("wrong", WRONG)
def test_accuracy_refuses_labels_that_do_not_match_the_logits(backend, place, wrong):
    """Refuse in ``accuracy`` labels that do not match the logits.

    Broadcast labels give an accuracy that looks right.
    """
    logits, labels = (backend.asarray(x, device=place) for x in (_logits(4, 3), WRONG[wrong]))
    with pytest.raises(UnsupportedValueError):
        backend.accuracy(logits, labels)


@requirement("labels.accuracy-refuses-foreign-arrays", section=SECTION)
@pytest.mark.needs("train")
def test_accuracy_refuses_tensors_of_other_backends_and_other_objects(backend):
    """Refuse in ``accuracy`` arrays of other libraries.

    A NumPy array would be computed with on the host.
    """
    logits, labels = _logits(4, 3), np.array([0, 1, 2, 0], "int32")
    with pytest.raises(UnsupportedValueError, match="not a tensor"):
        backend.accuracy(backend.asarray(logits), labels)
    with pytest.raises(UnsupportedValueError, match="not a tensor"):
        backend.accuracy(logits, backend.asarray(labels))


@requirement("labels.cross-entropy-of-every-width", section=SECTION)
def test_cross_entropy_takes_labels_of_every_integer_dtype(backend, place, integers):
    """Take labels of each integer dtype in cross-entropy.

    Data sets store labels in one byte.
    """
    x = _logits(4, 2)
    for name, labels in [
        *((name, [0, 5, 100, 127]) for name in integers),
        ("uint8", [0, 5, 128, MANY - 1]),
    ]:
        learner = _learner(backend, place, classes=MANY)
        losses, expected = _losses(backend, place, learner, x, labels, dtype=name)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@requirement("labels.cross-entropy-sequences", section=SECTION, source="PyTorch, CrossEntropyLoss")
def test_cross_entropy_is_the_mean_over_all_labels_of_sequences(backend, place, model_of_sequences):
    """Return the mean of cross-entropy over all labels of sequences."""
    net = models_of_sequences(backend)[model_of_sequences](place)
    learner = backend.learner(net, loss="cross_entropy")
    labels = np.arange(20, dtype="int32").reshape(4, 5) % 3
    losses, expected = _losses(backend, place, learner, _logits(4, 5, 2), labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@requirement("labels.cross-entropy-refuses", section=SECTION)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_cross_entropy_refuses_labels_that_do_not_match_the_logits(backend, place, wrong, method):
    """Refuse in cross-entropy labels that do not match the logits.

    One-hot rows and columns have other meanings in other frameworks.
    """
    learner = _learner(backend, place)
    x, labels = (backend.asarray(x, device=place) for x in (_logits(4, 2), WRONG[wrong]))
    with pytest.raises(UnsupportedValueError):
        getattr(learner, method)((x,), labels)


def _values(backend, learner):
    return read_saved_values(backend, learner.sync()["model"])


def _after_a_step(backend, device, labels, weights=None):
    """Return the loss before a step on (4, 2) inputs, and the parameters after it."""
    backend.seed(0)
    net = backend.mlp([2, 3], device=device, seed=0)
    learner = backend.learner(net, loss="cross_entropy", lr=0.5)
    kept = [i for i, label in enumerate(labels) if label is not None]
    x = backend.asarray(_logits(4, 2)[kept], device=device)
    y = backend.asarray(np.array([labels[i] for i in kept], "int32"), device=device)
    if weights is not None:
        weights = backend.asarray(np.array(weights, "float32")[kept], device=device)
        y = Weighted(y, weights)
    loss, _ = learner.step((x,), y)
    return float(backend.to_numpy(loss)), _values(backend, learner)


def _assert_same_step(step, expected):
    assert step[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        np.testing.assert_allclose(step[1][name], value, rtol=1e-4, atol=1e-6)


@requirement("labels.leave-out", section=SECTION, source="PyTorch, CrossEntropyLoss")
@pytest.mark.parametrize("weights", [None, [1, 3, 0.5, 2]], ids=["equal", "weighted"])
def test_a_step_leaves_out_the_label_for_none(backend, place, weights):
    """Leave out the label -100, and take the mean over the others.

    Padding is not a class.

    The mean is over the labels that count.
    """
    step = _after_a_step(backend, place, [0, -100, 2, -100], weights)
    _assert_same_step(step, _after_a_step(backend, place, [0, None, 2, None], weights))


@requirement("labels.leave-out", section=SECTION)
def test_a_batch_without_labels_has_no_loss_and_changes_nothing(backend, place):
    """Give a batch without labels the loss 0, and change nothing.

    A mean over nothing is NaN, which spreads to all parameters.
    """
    loss, values = _after_a_step(backend, place, [-100] * 4)
    assert loss == 0
    before = read_saved_values(backend, backend.mlp([2, 3], device=place, seed=0))
    for name, value in before.items():
        np.testing.assert_array_equal(values[name], value)


@requirement("labels.leave-out-infinite-rows", section=SECTION)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("weights", [None, [1, 3, 0.5, 2]], ids=["equal", "weighted"])
def test_an_example_without_a_label_may_have_infinite_logits(backend, place, weights):
    """Leave out an example without a label, also if its logits are infinite.

    Padding may overflow. 0 times an infinite loss is NaN, and so is its derivative.
    """
    x, runs = _logits(4, 64), []
    y = backend.asarray(np.array([0, -100, 2, -100], "int32"), device=place)
    target = y
    if weights is not None:
        target = Weighted(y, backend.asarray(np.array(weights, "float32"), device=place))
    for x[1] in (1.0, 3e38):  # 200 sums of 64 such numbers, and some overflow
        learner = _learner(backend, place, features=64, classes=200)
        inputs = (backend.asarray(x, device=place),)
        losses = [learner.evaluate(inputs, target)[0], learner.step(inputs, target)[0]]
        parameters = read_saved_values(backend, learner.sync()["model"])
        runs.append([*(backend.to_numpy(loss) for loss in losses), *parameters.values()])
    for finite, infinite in zip(*runs, strict=True):
        assert np.allclose(finite, infinite, rtol=1e-5, atol=1e-7)


@requirement("labels.leave-out-of-sequences", section=SECTION, source="PyTorch, CrossEntropyLoss")
def test_the_ends_of_sequences_are_left_out(backend, place, model_of_sequences):
    """Leave out the labels -100 at the ends of sequences.

    Padding must not be learned.
    """
    net = models_of_sequences(backend)[model_of_sequences](place)
    learner = backend.learner(net, loss="cross_entropy")
    labels = np.arange(20, dtype="int32").reshape(4, 5) % 3
    labels[0, 1:], labels[2, 3:] = -100, -100
    x, y = backend.asarray(_logits(4, 5, 2), device=place), backend.asarray(labels, device=place)
    loss, prediction = learner.evaluate((x,), y)
    logits = backend.to_numpy(prediction).astype("float64")
    logarithms = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[labels >= 0]
    expected = -logarithms[range(len(logarithms)), labels[labels >= 0]].mean()
    assert float(backend.to_numpy(loss)) == pytest.approx(expected, rel=1e-5)


@requirement("labels.accuracy-leaves-out", section=SECTION)
def test_accuracy_leaves_out_the_label_for_none(backend, place):
    """Leave out the label -100 in ``accuracy``.

    Padding counted as an error hides the real accuracy.
    """
    logits = np.eye(3, dtype="float32")[[0, 1, 2, 0]]
    assert _accuracy(backend, place, logits, [0, -100, 1, -100], dtype="int32") == 0.5
    assert _accuracy(backend, place, logits, [-100] * 4, dtype="int32") == 0


# -1 counts from the end in Python.
@requirement("labels.cross-entropy-out-of-range", section=SECTION)
@pytest.mark.parametrize("label", [-1, -101, 3, 10**6])
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_label_that_is_not_a_class_is_left_out_and_named(backend, label, method):
    """Leave out a label that is not the number of a class, and name it in ``check_labels``.

    Python's -1 would be the last class.
    """
    _assert_left_out_and_named(backend, backend.cpu(), label, method)


@requirement("labels.out-of-range-on-a-gpu", section=SECTION)
@pytest.mark.needs_gpus(1)
@pytest.mark.parametrize(("label", "method"), [(-1, "step"), (3, "step"), (10**6, "evaluate")])
def test_a_label_on_a_gpu_is_left_out_and_named_at_the_end(backend, label, method):
    """Name at the end a label on a GPU that is not a class, and go on.

    A check in each step would make the GPU wait.

    The GPU can be used afterwards, and the model has learned from the other examples.
    """
    _assert_left_out_and_named(backend, backend.gpu(0), label, method)


def _assert_left_out_and_named(backend, place, label, method):
    """Check the loss of a batch with a wrong label, and the error that comes later."""
    x = _logits(4, 2)
    found, expected = (_learner(backend, place) for _ in range(2))
    losses = []
    for learner, labels in ((found, [0, -100, 2, label]), (expected, [0, -100, 2, -100])):
        y = backend.asarray(np.array(labels, "int32"), device=place)
        loss, _ = getattr(learner, method)((backend.asarray(x, device=place),), y)
        losses.append(float(backend.to_numpy(loss)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    expected.check_labels()
    with pytest.raises(UnsupportedValueError, match=f"the label {label}:.* 3 classes"):
        found.check_labels()
    found.check_labels()  # it is said once
    for name, value in _values(backend, expected).items():
        np.testing.assert_allclose(_values(backend, found)[name], value, rtol=1e-4, atol=1e-6)


def _fit(backend, place, batch, **options):
    trainer = Trainer(1, backend=backend)
    trainer.device = place
    net = backend.mlp([2, 3], seed=0)
    history = trainer.fit(net, [batch, batch], loss="cross_entropy", **options)
    return history, trainer


@requirement("labels.fit-refuses", section=SECTION)
@pytest.mark.needs("train")
@pytest.mark.parametrize("kind", ["of NumPy", "on the host", "on the device"])
def test_fit_names_the_label_and_keeps_the_trained_parameters(backend, place, kind):
    """Name such a label in ``fit``, and keep the trained parameters.

    One wrong row must not cost a run.
    """
    y = np.array([0, 1, 7, 2], "int32")
    if kind != "of NumPy":
        y = backend.asarray(y, device=place if kind == "on the device" else "cpu")
    trainer = Trainer(1, backend=backend)
    trainer.device = place
    net = backend.mlp([2, 3], seed=0)
    with pytest.raises(UnsupportedValueError, match="the label 7:"):
        trainer.fit(net, [(_logits(4, 2), y)], loss="cross_entropy")
    for value in read_saved_values(backend, trainer.model).values():
        assert np.isfinite(value).all()
    with pytest.raises(UnsupportedValueError, match="the label 7:"):
        trainer.validate(trainer.model, [(_logits(4, 2), y)], loss="cross_entropy")


@requirement("labels.fit-looks-at-the-first-batch", section=SECTION)
@pytest.mark.needs("train")
def test_fit_names_a_label_of_the_first_batch_before_the_next_one(backend, place):
    """Name a wrong label of the first batch in ``fit`` before it takes the next one.

    Wrong labels are mostly wrong in every batch, and an epoch may take hours.
    """
    drawn = []

    def batches():
        for number in range(10):
            drawn.append(number)
            yield _logits(4, 2), np.array([0, 1, 7, 2], "int32")

    trainer = Trainer(1, backend=backend)
    trainer.device = place
    steps = []
    trainer.on_step_end = lambda step, _: steps.append(step)
    with pytest.raises(UnsupportedValueError, match="the label 7:"):
        trainer.fit(backend.mlp([2, 3], seed=0), batches(), loss="cross_entropy")
    assert steps == []
    assert len(drawn) < 10


@requirement("labels.fit-refuses", section=SECTION)
@pytest.mark.needs("train")
def test_fit_names_a_label_of_a_later_batch_at_the_end_of_the_epoch(backend, place):
    """Name a label of a later batch at the end of the epoch."""
    right, wrong = (np.array([0, 1, label, 2], "int32") for label in (2, 7))
    trainer = Trainer(2, backend=backend)
    trainer.device = place
    steps = []
    trainer.on_step_end = lambda step, _: steps.append(step)
    data = [(_logits(4, 2), y) for y in (right, wrong, right)]
    with pytest.raises(UnsupportedValueError, match="the label 7:"):
        trainer.fit(backend.mlp([2, 3], seed=0), data, loss="cross_entropy")
    assert steps == [0, 1, 2]


@requirement("labels.fit-names-the-batch", section=SECTION)
@pytest.mark.needs("train")
@pytest.mark.parametrize(
    "gpus", [0, pytest.param(2, marks=[pytest.mark.needs_gpus(2), pytest.mark.starts_processes])]
)
@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_the_first_batch_with_a_wrong_label_is_named(backend, gpus, verb):
    """Name the first batch with a wrong label at the end of the epoch.

    Nobody finds one label in a million.
    """
    right, seven, nine = (np.array([0, 1, label, 2], "int32") for label in (2, 7, 9))
    data = [(_logits(4, 2), y) for y in (right, right, right, seven, right, nine)]
    trainer = Trainer(1, gpus, backend=backend)
    with pytest.raises(UnsupportedValueError, match=r"batch 3 .*the label 7:"):
        getattr(trainer, verb)(backend.mlp([2, 3], seed=0), data, loss="cross_entropy")


@requirement("labels.unsigned", section=SECTION)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_no_unsigned_label_is_the_label_for_none(backend, place, integers, method):
    """Take an unsigned label for what it is, and never for -100.

    NumPy turns -100 into 156, or into a number near 2**32 or 2**64. Then each framework would treat
    padding in its own way.
    """
    for name in (each for each in integers if each.startswith("uint")):
        labels = np.array([0, -100, 2, 1]).astype(name)
        y = backend.asarray(labels, dtype=name, device=place)
        learner = _learner(backend, place)
        getattr(learner, method)((backend.asarray(_logits(4, 2), device=place),), y)
        with pytest.raises(UnsupportedValueError, match=r"the label [0-9]+:"):
            learner.check_labels()
        logits = np.eye(3, dtype="float32")[[0, 1, 2, 1]]
        assert _accuracy(backend, place, logits, labels, dtype=name) == 0.75


@requirement("labels.fit-leaves-out", section=SECTION)
def test_fit_and_validate_leave_out_the_label_for_none(backend, place):
    """Leave out the label -100 in ``fit`` and ``validate``.

    Both compute the means by themselves.
    """
    x, y = _logits(4, 2), np.array([0, -100, 2, -100], "int32")
    options = {"val_data": [(x, y)], "metrics": ["accuracy"]}
    history, trainer = _fit(backend, place, (x, y), **options)
    options["val_data"] = [(x[::2], y[::2])]
    expected, other = _fit(backend, place, (x[::2], y[::2]), **options)
    assert_same_run(
        (read_saved_values(backend, trainer.model), history),
        (read_saved_values(backend, other.model), expected),
    )


@requirement("labels.of-weight-zero", section=SECTION)
def test_a_label_with_weight_zero_may_have_any_value(backend, place):
    """Accept any label for an example of weight 0.

    Padding has no class.
    """
    batch = {"x": _logits(4, 2), "y": np.array([0, -1, 2, 7], "int32")}
    history, _ = _fit(backend, place, {**batch, "sample_weight": np.array([1, 0, 2, 0], "float32")})
    assert np.isfinite(history["loss"]).all()
