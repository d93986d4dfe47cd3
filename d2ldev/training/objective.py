"""``Objective``: the loss of a training, its weight, and the wrong labels.

A helper for ``training`` of the backends: each learner has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from d2ldev.contract import Framework, TrainingSettings, Weighted
from d2ldev.contract.training import NO_LABEL, Portion, WeightedLoss
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.operations.examples import number_of_examples
from d2ldev.training.functions import (
    comparison,
    describe_output,
    needs_weights,
    output_refusal,
    take_mean,
    weigh_loss,
    write_mean,
)

# How many batches may pass before the labels that are noted on a device are read.
_MOST_NOTED = 1024

Found = tuple[Any, Any, tuple[Any, ...]]
"""The loss of a batch, its ``Learner.weight``, and what ``Objective.take`` notes."""


class Objective:
    """Computes the loss of a batch, and checks all that it is computed from.

    A label of ``'cross_entropy'`` is the number of a class, or ``NO_LABEL``. The loss leaves out
    any other label on the device. So no wrong label reaches a kernel or the parameters. It returns
    the wrong labels, which ``check_labels`` reads later: no step waits.

    Args:
        framework: whose tensors they are.
        settings: of the training; checked already.
        losses: the framework's own, by the names in ``LOSSES``: ``(prediction, y, weights)`` to a
            loss and its ``Learner.weight``. Shapes are checked already. ``'cross_entropy'`` also
            returns a tuple of integers on the device. Each is a wrong label, or ``NO_LABEL``. The
            least and the greatest one are enough. ``()`` says that no label is wrong.
        divide: returns the quotient of a sum and a weight, 0 for a weight of 0. Also the weight
            as a scalar of the framework on the device of the sum, without a gradient. None for a
            learner without a loss of the user's own.

    Raises:
        UnsupportedValueError: for a metric that keeps a running value.
    """

    def __init__(
        self,
        framework: Framework,
        settings: TrainingSettings,
        losses: Mapping[str, Callable[..., tuple[Any, ...]]],
        divide: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    ) -> None:
        self._framework, self._settings, self._divide = framework, settings, divide
        given: Any = settings.loss
        self._named = losses.get(given) if isinstance(given, str) else None
        self._loss: Any = None
        if not isinstance(given, str):
            self._loss = comparison(given, weighs=True)
            self._weighed = weigh_loss(given, self._loss)
            self._needs_weights = needs_weights(given)
        self._known: set[Any] = set()  # shapes that fit; a step only looks them up
        self._noted: list[tuple[tuple[Any, ...], int, int | None]] = []

    def compare(self, prediction: Any, y: Any) -> Found:
        """Return the loss of a prediction; ``y`` may be a ``Weighted``.

        Raises:
            UnsupportedValueError: if the loss is not a scalar, or for operands that do not fit.
        """
        weights = None
        if self._named is not None:
            target = y
            if isinstance(y, Weighted):
                target, weights = y
            self._check(prediction, target, weights)
            found: Any = self._named(prediction, target, weights)
            return found if len(found) == 3 else (*found, ())
        if self._loss is None:
            return _loss_of_model(prediction), None, ()
        if isinstance(y, Weighted):
            value = self._weighed(prediction, *y)
        elif self._needs_weights:
            raise UnsupportedValueError(
                f"compute the loss {describe(self._settings.loss)}",
                "it needs sample_weight, and a batch has none",
                "yield {'x': X, 'y': y, 'sample_weight': weights}, or sample_weight=None in the "
                "loss",
            )
        else:
            value = self._loss(prediction, y)
        loss, weight = self._take_mean(value)
        shape = getattr(loss, "shape", None)
        if shape is None or tuple(shape):
            fix = take_mean(self._settings.loss, loss, "loss={}")
            raise _loss_refusal("compute the loss of a batch", shape, loss, fix)
        return loss, weight, ()

    def compute(self, model: Any, batch: Any, *, is_step: bool) -> Found:
        """Return the loss of a batch that a model's own method gives.

        For ``TrainingSettings.methods``. The loss is None if a method other than ``training_step``
        returned None, because it has logged its loss itself.

        Args:
            model: the model in training, or in use.
            batch: as the data has it.
            is_step: whether it is for a step, or for an evaluation.

        Raises:
            UnsupportedValueError: if the method returned something else.
        """
        in_step, in_evaluation = self._settings.methods or ("", "")
        method = in_step if is_step else in_evaluation
        loss, weight = self._take_mean(getattr(model, method)(batch))
        self.check_own(loss, model, method)
        return loss, weight, ()

    def check_own(self, loss: Any, model: Any, method: str) -> None:
        """Check that a model's own method returned a scalar; see ``compute``."""
        attempted = f"compute the loss of a batch with {type(model).__name__}.{method}"
        if loss is None:
            if method == "training_step":
                problem = "it returned None, and not the loss"
                raise UnsupportedValueError(attempted, problem, "return loss")
            return
        shape = getattr(loss, "shape", None)
        if shape is None or tuple(shape):
            raise _loss_refusal(attempted, shape, loss, f"return {write_mean(loss, 'loss')}")

    def weigh(self, inputs: Any, y: Any, portion: Portion | None = None) -> BatchWeight:
        """Return the weights of a batch in a step, where all elements of its target count alike.

        With a named loss they are the elements of the target, and else the examples.

        Args:
            inputs, y: of ``Learner.step``.
            portion: the shard of the batch, if several processes train.
        """
        settings = self._settings
        if is_named(settings):
            shape = tuple((y.y if isinstance(y, Weighted) else y).shape) or (1,)
            length, each = shape[0], prod(shape[1:])
        else:
            batch = inputs[0] if settings.methods is not None else {"inputs": inputs, "y": y}
            length, each = number_of_examples(self._framework, batch) or 1, 1
        number, length = (length, length) if portion is None else portion
        return BatchWeight(float(number * each), float(max(1, length * each)))

    # -- labels -----------------------------------------------------------------------------------

    def take(self, found: Found, prediction: Any, batch: int | None) -> tuple[Any, Any]:
        """Return the loss and its weight, and note the wrong labels for later.

        Args:
            found: the result of ``compare`` or ``compute``.
            prediction: of the same batch, or of a shard of it.
            batch: ``Learner.batch``, which the error names.
        """
        loss, weight, wrong = found
        if wrong:
            self._noted.append((wrong, prediction.shape[-1], batch))
            if len(self._noted) >= _MOST_NOTED:
                self.check_labels()
        return loss, weight

    def check_labels(self) -> None:
        """Read the labels that are noted; see ``Learner.check_labels``."""
        noted, self._noted = self._noted, []
        tensors = self._framework.tensors
        by_place: dict[Any, tuple[list[Any], list[int]]] = {}
        for number, (wrong, *_) in enumerate(noted):
            for x in filter(tensors.has_values, wrong):  # others are only traced
                place = tensors.device_of(x), tensors.dtype_of(x)
                labels, numbers = by_place.setdefault(place, ([], []))
                labels.append(x)
                numbers.append(number)
        found: list[tuple[int, int]] = []
        for labels, numbers in by_place.values():
            values = tensors.to_numpy(tensors.stack(labels)).tolist()
            found += (each for each in zip(numbers, values, strict=True) if each[1] != NO_LABEL)
        if found:
            number, label = min(found)
            raise _label_refusal(label, *noted[number][1:])

    # -- checks -----------------------------------------------------------------------------------

    def _check(self, prediction: Any, y: Any, weights: Any) -> None:
        """Check the shapes that a named loss compares: frameworks would broadcast them."""
        name: Any = self._settings.loss
        if not hasattr(prediction, "shape"):
            raise output_refusal(f"compute the loss {name!r}", prediction, "loss")
        shapes = _shape_of(prediction), _shape_of(y), _shape_of(weights)
        key = *shapes, y.dtype
        if key in self._known:
            return
        # As tuples: ``torch.Size`` has another text.
        first, second, third = (None if each is None else tuple(each) for each in shapes)
        if first is not None and second is not None:
            if name == "cross_entropy":
                check_shapes_of_labels(first, second, self._framework.tensors.dtype_of(y))
            elif not _are_same(first, second):
                dtype = self._framework.tensors.dtype_of(y)
                raise _shapes_refusal(first, second, dtype)
            if weights is not None and third is not None:
                _check_weights(second, third)
        self._known.add(key)

    def _take_mean(self, loss: Any) -> tuple[Any, Any]:
        """Return a loss of the user's own as a mean, and its ``Learner.weight``.

        Raises:
            UnsupportedValueError: for a ``WeightedLoss`` of something other than scalars, or with a
                negative number as its weight.
        """
        if self._divide is None or not isinstance(loss, WeightedLoss):
            return loss, None
        for name, x in loss._asdict().items():
            is_number = name == "weight" and isinstance(x, (int, float))
            shape = getattr(x, "shape", () if is_number else None)
            problem = ""
            if shape is None or tuple(shape):
                found = describe(x) if shape is None else f"of shape {tuple(shape)},"
                problem = f"{found} not a scalar"
            elif is_number and not x >= 0:  # that of a tensor would make the host wait
                problem = f"{x}, less than 0" if x < 0 else f"{x}"
            if problem:
                raise UnsupportedValueError(
                    "compute the loss of a batch",
                    f"the {name} of its WeightedLoss is {problem}",
                    "d2ldev.WeightedLoss(total, weight): sums of weighted losses, and of weights",
                )
        return self._divide(*loss)


LEAST_WEIGHT = 1e-20
"""How much an element of weight 0 counts: so no mean is taken over nothing."""


class BatchWeight(NamedTuple):
    """The weights of a batch in a step, where all elements of its target count alike.

    Args:
        own: of the examples that this process has; 0 if it has none.
        whole: of the whole batch.
    """

    own: float
    whole: float

    def relative(self, weight: Any, reference: float) -> Any:
        """Return the factor of the loss in a step of several batches or shards.

        The step takes the gradients of these products. It divides their sum by the sum of the
        factors. A factor is near 1, so that float16 holds the gradients.

        Args:
            weight: the ``Learner.weight`` of the loss.
            reference: the same number for all batches and processes of a step: the ``whole`` of
                the first batch.
        """
        if weight is None or not self.own:
            return self.own / reference
        return (weight + self.own * LEAST_WEIGHT) / reference


def is_named(settings: TrainingSettings) -> bool:
    """Tell whether the loss of a training is a named one, which compares and knows its weight."""
    is_named = isinstance(settings.loss, str) and settings.loss != "model"
    return is_named and settings.methods is None


def _loss_of_model(output: Any) -> Any:
    """Return the loss that a model has computed: the key or the attribute ``loss`` of its output.

    Raises:
        UnsupportedValueError: if the output has none, or it is not a scalar.
    """
    attempted = "train with loss='model'"
    has_key = isinstance(output, Mapping) and "loss" in output
    loss = output["loss"] if has_key else getattr(output, "loss", None)
    if loss is None:
        found = "loss is None" if has_key or hasattr(output, "loss") else describe_output(output)
        raise UnsupportedValueError(
            attempted,
            f"the model has returned no loss: {found}",
            "yield the labels with the inputs, {'x': X, 'labels': y}; and return {'loss': loss} "
            "from the model",
        )
    shape = getattr(loss, "shape", None)
    if shape is None or tuple(shape):
        raise _loss_refusal(
            attempted, shape, loss, f"return {write_mean(loss, 'loss')} as the loss"
        )
    return loss


def _shape_of(x: Any) -> tuple[int | None, ...] | None:
    """Return a shape, with None for a length that is not known yet; None if nothing is known."""
    shape = getattr(x, "shape", ())
    try:
        return shape if isinstance(shape, tuple) else tuple(shape)
    except ValueError:  # TensorFlow does not know the rank while it traces
        return None


def _are_same(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> bool:
    if len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(a == b for a, b in pairs if a is not None and b is not None)


def _shapes_refusal(
    prediction: tuple[int | None, ...], y: tuple[int | None, ...], dtype: str
) -> UnsupportedValueError:
    """Return the error of a target that has another shape than its prediction."""
    fix = f"a model whose prediction is of shape {y}, or a loss of your own"
    if dtype.startswith(("int", "uint")) and _are_same(prediction[:-1], y) and prediction[-1] != 1:
        fix = "loss='cross_entropy', for the number of a class in y"
    elif _have_same_size(prediction, y):
        fix = f"y = {_write_reshape('y', prediction)}"
    return UnsupportedValueError(
        "compare a prediction with y", f"it is of shape {prediction}, and y of shape {y}", fix
    )


def _have_same_size(first: tuple[int | None, ...], second: tuple[int | None, ...]) -> bool:
    return None not in first + second and prod(first) == prod(second)  # type: ignore[arg-type]


def _write_reshape(x: str, shape: tuple[int | None, ...]) -> str:
    """Return the text that gives all examples of an array the shape that those of a batch have."""
    return f"{x}.reshape({', '.join(map(str, (-1, *shape[1:])))})"


def check_shapes_of_labels(
    logits: tuple[int | None, ...], labels: tuple[int | None, ...], dtype: str
) -> None:
    """Check that labels are compared with their own logits: frameworks would broadcast.

    Args:
        logits: their shape, ``(n, ..., classes)``; None is a length that is not known yet.
        labels: their shape, ``(n, ...)``.
        dtype: theirs, by name.

    Raises:
        UnsupportedValueError: if there is not one label for each row of logits, or if a label is
            not an integer.
    """
    is_one_each = bool(logits) and _are_same(logits[:-1], labels)
    if is_one_each and dtype.startswith(("int", "uint")):
        return
    problem, fix = "a label is the number of a class", "y = backend.asarray(y, dtype='int32')"
    if not is_one_each:
        problem = "there is one label for each row of logits, which has one number for each class"
        shape = ", ".join(map(str, (*labels, "classes")))
        fix = f"logits of shape ({shape}), the classes last, or a loss of the framework's own"
        if _are_same(logits, labels):
            fix = "y = y.argmax(-1), for labels that are one-hot"
        elif _have_same_size(logits[:-1], labels):
            fix = f"y = {_write_reshape('y', logits[:-1])}"
    raise UnsupportedValueError(
        f"compare logits of shape {logits} with labels of shape {labels} and dtype {dtype}",
        problem,
        fix,
    )


def _check_weights(losses: tuple[int | None, ...], weights: tuple[int | None, ...]) -> None:
    """Check that there is one weight for each example: the first axes of the losses."""
    if not weights or not _are_same(losses[: len(weights)], weights):
        raise UnsupportedValueError(
            "weigh the examples of a batch",
            f"their losses are of shape {losses}, and their weights of shape {weights}",
            "sample_weight of shape (n,), one number for each example",
        )


def _label_refusal(wrong: int, classes: int, batch: int | None) -> UnsupportedValueError:
    """Return the error of a batch with a label that is not a class."""
    of_batch = "a batch" if batch is None else f"batch {batch} (the first is 0)"
    fix = f"labels from 0 to {classes - 1}, or {NO_LABEL} for an example without a label"
    if wrong > 0:
        fix = f"a model with at least {wrong + 1} classes, or {fix}"
    return UnsupportedValueError(
        f"compute the loss of {of_batch} with the label {wrong}",
        f"its prediction has {classes} classes; the label was left out, like {NO_LABEL}",
        fix,
    )


def _loss_refusal(
    attempted: str, shape: Iterable[int] | None, loss: object, fix: str
) -> UnsupportedValueError:
    found = describe(loss) if shape is None else f"of shape {tuple(shape)},"
    return UnsupportedValueError(attempted, f"the loss is {found} not a scalar", fix)
