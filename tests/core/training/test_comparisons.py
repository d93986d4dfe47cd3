"""Losses and metrics: in which order they are called, and which cannot be averaged."""

import collections

import numpy as np
import pytest

from d2ldev import EpochMetric, Trainer, UnsupportedValueError, WeightedLoss, gpu
from d2ldev.framework import Objective, TrainingSettings, Weighted
from d2ldev.training.functions import comparison, update_call, weigh_loss
from d2ldev.training.metrics import find_metrics


def contract_order(prediction, y):
    return f"{prediction} against {y}"


def keras_order(y_true, y_pred, sample_weight=None):
    return f"{y_pred} against {y_true}"


def keras_order_and_more(y_true, *others):
    return f"{others[0]} against {y_true}"


def target_first(target, pred):
    return f"{pred} against {target}"


def labels_first(labels, logits):
    return f"{logits} against {labels}"


def label_of_gluon_first(label, pred):
    return f"{pred} against {label}"


def y_first(y, y_hat):
    return f"{y_hat} against {y}"


def clusters_first(labels_true, labels_pred):
    return f"{labels_pred} against {labels_true}"


def y_is_the_prediction(y, target):
    return f"{y} against {target}"


def y_before_t(y, t):
    return f"{y} against {t}"


def optax_order(predictions, targets=None):
    return f"{predictions} against {targets}"


class KerasLoss:
    def __call__(self, y_true, y_pred):
        return f"{y_pred} against {y_true}"


class Module:
    """An object that is called as a ``torch.nn.Module`` or a Gluon block is."""

    def __call__(self, *arguments, **options):
        return self.forward(*arguments, **options)

    def forward(self, prediction, label):
        return f"{prediction} against {label}"


class ModuleInKerasOrder(Module):
    def forward(self, y_true, y_pred):
        return f"{y_pred} against {y_true}"


class BlockInKerasOrder(Module):
    """A Gluon block that is written for both of its modes."""

    def forward(self, *arguments):
        return self.hybrid_forward("F", *arguments)

    def hybrid_forward(self, F, y_true, y_pred):  # noqa: N803  # as Gluon has it
        return f"{y_pred} against {y_true}"


class ComputedAtOnce(Module):
    """A metric like those of torchmetrics: its call gives the batch's value."""

    def update(self, prediction, label):
        raise AssertionError("the value of a batch was asked for")

    def reset(self):
        raise AssertionError("the value of a batch was asked for")


class Running:
    """A metric like a ``keras.metrics.Metric``."""

    def __call__(self, *arguments, **options):
        raise AssertionError("this is a running value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        raise AssertionError("this is a running value")

    result = reset_state = __call__


BATCH = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
FUNCTIONS = [
    contract_order,
    keras_order,
    keras_order_and_more,
    target_first,
    labels_first,
    label_of_gluon_first,
    y_first,
    clusters_first,
    y_is_the_prediction,
    y_before_t,
    optax_order,
    KerasLoss(),
    Module(),
    ModuleInKerasOrder(),
    BlockInKerasOrder(),
    ComputedAtOnce(),
    # What is written in C does not say what its parameters are called.
    "{} against {}".format,
]
IDS = [getattr(each, "__name__", type(each).__name__) for each in FUNCTIONS]


def take_mean(total, weight):
    return total / weight, weight


def objective(loss):
    return Objective(None, TrainingSettings(loss=loss), {}, take_mean)


def test_a_loss_may_tell_its_weight():
    def weigh_all(prediction, y, sample_weight=None):
        return WeightedLoss(np.float32(6), 4 if sample_weight is None else sample_weight)

    loss = objective(weigh_all).compare
    assert loss("prediction", "y") == (1.5, 4, ())
    assert loss("prediction", Weighted("y", 3)) == (2.0, 3, ())


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (WeightedLoss(np.ones(3), 3), r"the sum of its WeightedLoss is of shape \(3,\), not a"),
        (WeightedLoss(np.float32(3), np.ones(3)), r"the weight of its WeightedLoss is of shape"),
        (WeightedLoss(3.0, 3), "the sum of its WeightedLoss is"),
        (
            WeightedLoss(np.float32(3), "3"),
            "weight of its WeightedLoss is '3', a str, not a scalar",
        ),
    ],
)
def test_a_weighted_loss_has_scalars(found, problem):
    loss = objective(lambda prediction, y: found).compare
    with pytest.raises(UnsupportedValueError, match=problem) as error:
        loss("prediction", "y")
    assert error.value.fix == (
        "d2ldev.WeightedLoss(total, weight): sums of weighted losses, and of weights"
    )


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
def test_a_loss_is_called_in_the_order_that_its_first_parameter_says(function):
    assert comparison(function, weighs=True)("prediction", "y") == "prediction against y"


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
def test_a_metric_is_called_in_the_order_that_its_first_parameter_says(reference, function):
    (measure,) = find_metrics(reference, [function]).values()
    with pytest.raises(UnsupportedValueError, match="returns 'prediction against y', a str, and"):
        measure("prediction", "y")


@pytest.mark.parametrize("function", FUNCTIONS, ids=IDS)
def test_a_metric_of_an_epoch_is_called_in_that_order(function):
    metric = EpochMetric(function)
    metric.update(np.full(2, 5), np.full(2, 7))
    with pytest.raises(UnsupportedValueError, match=r"returns '\[5 5\] against \[7 7\]', a str"):
        metric.compute()


@pytest.mark.parametrize("function", FUNCTIONS[:11], ids=IDS[:11])
def test_a_running_metric_is_updated_in_that_order(reference, function):
    class Kept:
        def __init__(self):
            self.update, self.reset = function, lambda: None

        def compute(self):
            return 1.0

    assert update_call(Kept(), function)("prediction", "y") == "prediction against y"


class NoValue:
    def reset(self):
        pass

    def update(self, prediction, y):
        pass

    def compute(self):
        return None


def no_value(prediction, y):
    return None


@pytest.mark.parametrize(
    ("metric", "fix"),
    [
        (NoValue(), "def compute(self): return number"),
        (no_value, "def no_value(prediction, y): return number"),
        (EpochMetric(no_value), "def no_value(y_true, y_pred): return number"),
    ],
)
def test_a_metric_that_returns_no_number_is_refused(reference, metric, fix):
    trainer = Trainer(1, backend=reference)
    with pytest.raises(UnsupportedValueError, match="returns None, a NoneType, and not") as error:
        trainer.fit(reference.mlp([2, 1]), [BATCH], metrics=[metric])
    assert error.value.fix == fix


class MeanOfValues(Running):
    def update_state(self, values, sample_weight=None):
        raise AssertionError("it takes no target")


def test_the_fix_names_the_method_that_the_metric_has(reference):
    with pytest.raises(UnsupportedValueError, match="its update_state takes no target") as error:
        find_metrics(reference, [MeanOfValues()])
    assert error.value.fix == (
        "class Mine(MeanOfValues): def update_state(self, prediction, y): super().update_state(...)"
    )


@pytest.mark.parametrize("y", [1, np.int64(1), np.array(1)], ids=["int", "int64", "array"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_examples_without_batches_are_refused(reference, loss, y):
    example = np.ones(2, "float32"), y
    with pytest.raises(UnsupportedValueError, match="y has no axis") as error:
        Trainer(1, backend=reference).fit(reference.mlp([2, 2]), [example], loss=loss)
    assert "DataLoader(dataset, batch_size=32)" in error.value.fix


def test_two_numbers_of_one_name_are_refused(reference):
    """One may be of a metric, and the other of another metric on the data to evaluate on."""

    def one(prediction, y):
        return prediction.sum()

    def val_one(prediction, y):
        return y.sum()

    x, y = np.ones((2, 2), "float32"), np.ones((2, 1), "float32")
    trainer = Trainer(1, backend=reference)
    with pytest.raises(UnsupportedValueError, match="cannot measure 'val_one'"):
        trainer.fit(reference.mlp([2, 1]), [(x, y)], [(x, y)], metrics=[one, val_one])


def test_a_metric_in_the_order_of_keras_keeps_its_name(reference):
    assert list(find_metrics(reference, [keras_order, KerasLoss()])) == [
        "keras_order",
        "KerasLoss",
    ]


def weigh(prediction, y, sample_weight):
    return f"{prediction} against {y} by {sample_weight}"


def weigh_as_in_keras(y_true, y_pred, sample_weight=None):
    return f"{y_pred} against {y_true} by {sample_weight}"


class WeighingBlock(Module):
    """A Gluon block, which takes nothing by name."""

    def __call__(self, *operands):
        return self.forward(*operands)

    def forward(self, prediction, *others):
        return self.hybrid_forward("F", prediction, *others)

    def hybrid_forward(self, F, prediction, y, scale="1", sample_weight=None):  # noqa: N803
        return f"{prediction} against {y} by {sample_weight}" if scale == "1" else scale


@pytest.mark.parametrize("function", [weigh, weigh_as_in_keras, WeighingBlock()])
def test_a_loss_with_the_parameter_is_given_the_weights(function):
    loss = weigh_loss(function, comparison(function, weighs=True))
    assert loss("prediction", "y", "weights") == "prediction against y by weights"


def test_a_loss_without_the_parameter_cannot_weigh():
    loss = objective(contract_order).compare
    with pytest.raises(UnsupportedValueError, match="no parameter sample_weight"):
        loss("prediction", Weighted("y", "weights"))


def test_a_loss_that_needs_weights_is_refused_without_any():
    loss = objective(weigh).compare
    with pytest.raises(UnsupportedValueError, match="needs sample_weight") as error:
        loss("prediction", "y")
    assert error.value.fix.startswith("yield {'x': X, 'y': y, 'sample_weight': weights}")


UNCALLABLE = {
    "no operand": lambda: 0,
    "three operands": lambda prediction, y, z: 0,
    "y by name": lambda prediction, *, y: 0,
    "nothing by position": lambda *, y=None: 0,
}


@pytest.mark.parametrize("function", UNCALLABLE.values(), ids=UNCALLABLE)
def test_a_loss_or_metric_that_cannot_be_called_is_refused_at_once(reference, function):
    with pytest.raises(UnsupportedValueError, match="cannot be called with a prediction"):
        objective(function)
    with pytest.raises(UnsupportedValueError, match="cannot be called with a prediction"):
        find_metrics(reference, [function])


def test_a_metric_that_needs_weights_is_refused(reference):
    with pytest.raises(UnsupportedValueError, match="'sample_weight'"):
        find_metrics(reference, [weigh])


def test_a_loss_that_keeps_a_running_value_is_refused():
    with pytest.raises(UnsupportedValueError, match="running value"):
        objective(Running())


def test_a_metric_of_each_example_is_refused_with_the_call_that_is_right(reference):
    def errors(prediction, y):
        return abs(prediction - y)

    with pytest.raises(UnsupportedValueError, match=r"measure errors.*not a scalar") as error:
        Trainer(1, backend=reference).fit(reference.mlp([2, 1]), [BATCH], metrics=[errors])
    mean = "array_api_strict.mean(errors(prediction, y))"
    assert error.value.fix == f"metrics=[lambda prediction, y: {mean}]"


@pytest.mark.parametrize(
    "nested",
    [lambda x: x, lambda x: [None, {"logits": x}], lambda x: collections.deque([1, x])],
    ids=["tensor", "nesting", "deque"],
)
def test_a_metric_makes_its_tensors_where_the_predictions_are(reference, nested):
    def build(prediction, y):
        return reference.ones(())

    (measure,) = find_metrics(reference, [build]).values()
    prediction = nested(reference.zeros(1, device="gpu:1"))
    assert reference.device_of(measure(prediction, None)) == gpu(1)
