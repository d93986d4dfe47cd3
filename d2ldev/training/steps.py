"""A step of training: the inputs of a model, the loss by its name, and the operands of the loss.

Helpers for ``training`` of the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.contract import Framework, TrainingSettings, Weighted
from d2ldev.contract.training import Portion, Signature, WeightedLoss
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.operations.examples import number_of_examples

if TYPE_CHECKING:
    import inspect


def loss_among(
    settings: TrainingSettings,
    losses: Mapping[str, Callable[..., tuple[Any, Any]]],
    take_mean: Callable[[Any, Any], tuple[Any, Any]],
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return the loss of a training: a framework's own of that name, or the function given.

    Args:
        settings: of the training; checked already.
        losses: the framework's own, by the names in ``LOSSES``: ``(prediction, y, weights)`` to a
            loss and its ``Learner.weight``.
        take_mean: see ``mean_and_weight``.

    Returns:
        A function ``(prediction, y)``, which takes a ``Weighted`` too. It returns the loss and its
        ``Learner.weight``.

    Raises:
        UnsupportedValueError: for a metric that keeps a running value.
    """
    given = settings.loss
    if given == "model":
        return lambda output, _y: (_loss_of_model(output), None)
    if isinstance(given, str):
        named = losses[given]

        def compare_by_name(prediction: Any, y: Any) -> Any:
            if not hasattr(prediction, "shape"):
                raise output_refusal(f"compute the loss {given!r}", prediction, "loss")
            return named(prediction, *(y if isinstance(y, Weighted) else (y,)))

        return compare_by_name
    loss: Callable[..., Any] = comparison(given, weighs=True)
    weighed = _weigh_loss(given, loss)
    needs_weights = any(
        each.name == _WEIGHTS and each.default is each.empty for each in _parameters_of(given)
    )

    def compare(prediction: Any, y: Any) -> Any:
        if isinstance(y, Weighted):
            return mean_and_weight(weighed(prediction, *y), take_mean)
        if needs_weights:
            raise UnsupportedValueError(
                f"compute the loss {describe(given)}",
                f"it needs {_WEIGHTS}, and a batch has none",
                f"yield {{'x': X, 'y': y, {_WEIGHTS!r}: weights}}, or {_WEIGHTS}=None in the loss",
            )
        return mean_and_weight(loss(prediction, y), take_mean)

    return compare


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


def describe_output(output: Any) -> str:
    """Return what a model has returned, in a few words: a mapping by its keys."""
    if isinstance(output, Mapping):
        return f"it returns a {type(output).__name__} with {', '.join(map(repr, output.keys()))}"
    return f"it returns a {type(output).__name__}"


def output_refusal(attempted: str, output: Any, argument: str) -> UnsupportedValueError:
    """Return the error of a named loss or metric of a model that returns no tensor.

    Args:
        attempted: what has failed.
        output: what the model has returned.
        argument: the argument that takes a function, ``'loss'`` or ``'metrics'``.
    """
    part, hint = "out", ""
    if isinstance(output, Mapping) and len(output):
        keys = list(output.keys())
        part = f"out[{('logits' if 'logits' in keys else keys[0])!r}]"
        hint = ", or loss='model' for the loss that it computes" if "loss" in keys else ""
    elif isinstance(output, (tuple, list)):
        part = "out[0]"
    elif hasattr(output, "logits"):
        part = "out.logits"
    text = f"lambda out, y: f({part}, y)"
    fix = f"loss={text}, with a function f of the framework{hint}"
    if argument == "metrics":
        fix = f"metrics=[{text}], where f may be backend.accuracy"
    return UnsupportedValueError(
        attempted, f"the model returns no tensor: {describe_output(output)}", fix
    )


def mean_and_weight(loss: Any, take_mean: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return a loss of the user's own as a mean, and its ``Learner.weight``.

    Args:
        loss: what the user's function returned.
        take_mean: returns the quotient of a sum and a weight, 0 for a weight of 0. Also the weight
            as a scalar of the framework on the device of the sum, without a gradient.

    Raises:
        UnsupportedValueError: for a ``WeightedLoss`` of something other than scalars, or with a
            negative number as its weight.
    """
    if not isinstance(loss, WeightedLoss):
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
    return take_mean(*loss)


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


def weigh_batch(
    framework: Framework,
    settings: TrainingSettings,
    inputs: Any,
    y: Any,
    portion: Portion | None = None,
) -> BatchWeight:
    """Return the weights of a batch in a step, where all elements of its target count alike.

    With a named loss they are the elements of the target, and else the examples.

    Args:
        framework: whose tensors they are.
        settings: of the training.
        inputs, y: of ``Learner.step``.
        portion: the shard of the batch, if several processes train.
    """
    if is_named(settings):
        shape = tuple((y.y if isinstance(y, Weighted) else y).shape) or (1,)
        length, each = shape[0], prod(shape[1:])
    else:
        batch = inputs[0] if settings.methods is not None else {"inputs": inputs, "y": y}
        length, each = number_of_examples(framework, batch) or 1, 1
    number, length = (length, length) if portion is None else portion
    return BatchWeight(float(number * each), float(max(1, length * each)))


def is_named(settings: TrainingSettings) -> bool:
    """Tell whether the loss of a training is a named one, which compares and knows its weight."""
    is_named = isinstance(settings.loss, str) and settings.loss != "model"
    return is_named and settings.methods is None


_WEIGHTS = "sample_weight"


def _weigh_loss(function: Any, loss: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    """Return a loss of weighted examples: ``(prediction, y, weights) -> loss``.

    Args:
        function: as the user gave it. One that takes no weights is refused when it is given some.
        loss: the same, as it is called everywhere.
    """
    operands = _parameters_of(function)
    known = [each.name for each in operands]
    if _WEIGHTS not in known:

        def refuse(*_: Any) -> Any:
            raise UnsupportedValueError(
                f"weigh examples in the loss {describe(function)}",
                f"it has no parameter {_WEIGHTS}",
                f"loss=lambda prediction, y, {_WEIGHTS}: ..., or a loss by name",
            )

        return refuse
    own = _parameters(function)
    if any(each.name == _WEIGHTS or each.kind is each.VAR_KEYWORD for each in own):
        return lambda prediction, y, weights: loss(prediction, y, **{_WEIGHTS: weights})
    # A Gluon block takes nothing by name.
    between = [each.default for each in operands[2 : known.index(_WEIGHTS)]]
    return lambda prediction, y, weights: loss(prediction, y, *between, weights)


def comparison(
    function: Callable[[Any, Any], Any], *, weighs: bool = False
) -> Callable[[Any, Any], Any]:
    """Return a loss or a metric, as it is called everywhere: ``(prediction, y)``.

    Args:
        function: called in this order, as in torch, Gluon and Optax. If its first parameter is
            named ``y_true``, it gets ``y`` first, as in Keras and scikit-learn. If it takes no
            target (see ``takes_target``), it gets the prediction alone.
        weighs: whether it may be given ``sample_weight``, too.

    Raises:
        UnsupportedValueError: for an object that keeps a running value, such as a
            ``keras.metrics.Metric``. For a function of a prediction and weights without a target.
            For a function that cannot be called with these operands.
    """
    if hasattr(function, "update_state") and hasattr(function, "reset_state"):
        raise metric_refusal(
            function,
            "a function: def accuracy(y_true, y_pred): "
            "return keras.ops.mean(keras.metrics.binary_accuracy(y_true, y_pred))",
        )
    if takes_target(function):
        _check_operands(function, 2, weighs=weighs)
        if first_parameter(function) != "y_true":
            return function
        return lambda prediction, y, *others, **options: function(y, prediction, *others, **options)
    if any(each.name == _WEIGHTS and _is_required(each) for each in _parameters_of(function)):
        raise UnsupportedValueError(
            f"compare predictions by {describe(function)}",
            "it takes the weights of the examples, and no y beside which they are given",
            "loss=lambda prediction, y, sample_weight: ...",
        )
    _check_operands(function, 1, weighs=False)
    alone: Callable[[Any], Any] = function  # type: ignore[assignment]
    return lambda prediction, _y: alone(prediction)


def _check_operands(function: Callable[..., Any], number: int, *, weighs: bool) -> None:
    """Check that a loss or a metric can be called with so many operands."""
    import inspect

    parameters = _parameters_of(function)
    is_weighed = weighs and any(each.name == _WEIGHTS for each in parameters)
    options = {_WEIGHTS: None} if is_weighed else {}
    try:
        inspect.Signature(parameters).bind(*[None] * number, **options)
    except TypeError as error:
        raise UnsupportedValueError(
            f"compare predictions by {describe(function)}",
            f"it cannot be called with a prediction and y, or a prediction alone: {error}",
            "a function of both: lambda prediction, y: ...",
        ) from error


def takes_target(function: Callable[..., Any] | str) -> bool:
    """Tell whether a loss compares a prediction with ``y``.

    It does not if it can be called with a prediction alone. Then its other parameters have
    defaults, are keywords, or are ``sample_weight``. But it compares if its second parameter has
    the name of a target, such as Optax's ``targets=None``. It also does if it takes ``*args``, or
    if Python does not know its parameters. With ``'model'`` the model computes its loss itself.
    """
    if isinstance(function, str):
        return function != "model"
    parameters = _parameters_of(function)
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return True
    operands = [each for each in parameters if _is_positional(each) and each.name != _WEIGHTS]
    others = operands[1:]
    return not operands or any(each.name in _TARGETS or _is_required(each) for each in others)


# The names of targets in the losses of the frameworks and in the book.
_TARGETS = ("y", "y_true", "label", "labels", "target", "targets")


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _is_required(parameter: inspect.Parameter) -> bool:
    return _is_positional(parameter) and parameter.default is parameter.empty


def metric_refusal(metric: object, fix: str) -> UnsupportedValueError:
    """Return the error of a metric that keeps a running value; ``fix`` is a correct metric."""
    return UnsupportedValueError(
        f"compare predictions by {describe(metric)}",
        "it keeps a running value over all batches, but a metric returns the value of one",
        fix,
    )


def check_shapes(prediction: Iterable[int], y: Iterable[int]) -> None:
    """Check the shapes that ``'mse'`` and ``'bce'`` compare: frameworks would broadcast one.

    Raises:
        UnsupportedValueError: if they are not the same.
    """
    if tuple(prediction) != tuple(y):
        raise UnsupportedValueError(
            "compare a prediction with y",
            f"it is of shape {tuple(prediction)}, and y of shape {tuple(y)}",
            "y.reshape(prediction.shape), or a loss of your own",
        )


def check_labels(prediction: Iterable[int | None], y: Iterable[int | None], dtype: str) -> None:
    """Check that labels are compared with their own logits: frameworks would broadcast.

    Args:
        prediction: the shape of the logits, ``(n, ..., classes)``; None is a length that is not
            known yet.
        y: the shape of the labels, ``(n, ...)``.
        dtype: theirs, by name.

    Raises:
        UnsupportedValueError: if there is not one label for each row of logits, or if a label is
            not an integer.
    """
    logits, labels = tuple(prediction), tuple(y)
    rows = logits[:-1]
    is_one_each = len(rows) == len(labels) and (
        rows == labels
        or all(a == b for a, b in zip(rows, labels, strict=True) if None not in (a, b))
    )
    if logits and is_one_each and dtype.startswith(("int", "uint")):
        return
    problem, fix = "a label is the number of a class", "backend.asarray(y, dtype='int64')"
    if not logits or not is_one_each:
        problem = "there is one label for each row of logits, which has one number for each class"
        fix = "y.reshape(prediction.shape[:-1]); y.argmax(-1) of labels that are one-hot"
    raise UnsupportedValueError(
        f"compare logits of shape {logits} with labels of shape {labels} and dtype {dtype}",
        problem,
        fix,
    )


def check_weights(losses: Iterable[int | None], weights: Iterable[int | None]) -> None:
    """Check that there is one weight for each example: frameworks would broadcast.

    Args:
        losses: the shape of the losses, before their mean is taken; None is a length that is not
            known yet.
        weights: that of the weights.

    Raises:
        UnsupportedValueError: if these are not the first axes of the losses.
    """
    known, given = tuple(losses), tuple(weights)
    pairs = zip(known, given, strict=False)
    if not 0 < len(given) <= len(known) or any(a != b for a, b in pairs if None not in (a, b)):
        raise UnsupportedValueError(
            "weigh the examples of a batch",
            f"their losses are of shape {known}, and their weights of shape {given}",
            "sample_weight of shape (n,), one number for each example",
        )


def check_loss(shape: Iterable[int] | None, loss: object, function: Any) -> None:
    """Check that a loss is one number; some frameworks would take the gradient of the sum.

    Args:
        shape: its shape; None if it has none.
        loss: the result of the function.
        function: of the user, as it was given.

    Raises:
        UnsupportedValueError: if it is not a scalar.
    """
    if shape is None or tuple(shape):
        raise _loss_refusal(
            "compute the loss of a batch", shape, loss, f"loss={mean_of(function, loss)}"
        )


def _loss_refusal(
    attempted: str, shape: Iterable[int] | None, loss: object, fix: str
) -> UnsupportedValueError:
    found = describe(loss) if shape is None else f"of shape {tuple(shape)},"
    return UnsupportedValueError(attempted, f"the loss is {found} not a scalar", fix)


def own_loss(
    model: Any,
    methods: tuple[str, str],
    take_mean: Callable[[Any, Any], tuple[Any, Any]],
    batch: Any,
    *,
    is_step: bool,
) -> tuple[Any, Any]:
    """Return the loss of a batch that a model's own method gives, and its ``Learner.weight``.

    For ``TrainingSettings.methods``.

    Args:
        model: the model in training, or in use.
        methods: that of a step and that of an evaluation, such as ``'training_step'`` and
            ``'validation_step'``.
        take_mean: see ``mean_and_weight``.
        batch: as the data has it.
        is_step: which of them.

    Returns:
        A scalar and its weight. The scalar is None if a method other than ``training_step``
        returned None, because it has logged its loss itself.

    Raises:
        UnsupportedValueError: if it returned something else.
    """
    in_step, in_evaluation = methods
    method = in_step if is_step else in_evaluation
    loss, weight = mean_and_weight(getattr(model, method)(batch), take_mean)
    if loss is not None or method == "training_step":
        check_own_loss(loss, model, method)
    return loss, weight


def check_own_loss(loss: Any, model: Any, method: str) -> None:
    """Check that a model's own method returned a scalar.

    Raises:
        UnsupportedValueError: if it is not a scalar.
    """
    attempted = f"compute the loss of a batch with {type(model).__name__}.{method}"
    if loss is None:
        raise UnsupportedValueError(attempted, "it returned None, and not the loss", "return loss")
    shape = getattr(loss, "shape", None)
    if shape is None or tuple(shape):
        raise _loss_refusal(attempted, shape, loss, f"return {write_mean(loss, 'loss')}")


def write_mean(x: object, text: str) -> str:
    """Return the text of the mean of a tensor: its method, or a function if it has none.

    Args:
        x: the tensor.
        text: what computes it.

    >>> import numpy as np
    >>> write_mean(np.zeros(2), 'loss')
    'loss.mean()'
    """
    if hasattr(x, "mean") or not hasattr(x, "shape"):
        return f"{text}.mean()"
    namespace = getattr(x, "__array_namespace__", None)
    return f"{namespace().__name__ if namespace else 'keras.ops'}.mean({text})"


def mean_of(function: Any, value: object) -> str:
    """Return the text of a function that gives the mean of a loss or a metric.

    Args:
        function: the loss or the metric.
        value: its result.

    >>> def absolute(y_true, y_pred): ...
    >>> mean_of(absolute, None)
    'lambda y_true, y_pred: keras.ops.mean(absolute(y_true, y_pred))'
    """
    name = getattr(function, "__name__", f"{type(function).__name__}()").replace("<lambda>", "f")
    if first_parameter(function) == "y_true":
        return f"lambda y_true, y_pred: keras.ops.mean({name}(y_true, y_pred))"
    return f"lambda prediction, y: {write_mean(value, f'{name}(prediction, y)')}"


def first_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the first parameter; None if there is none, or Python cannot tell."""
    return next((each.name for each in _parameters_of(function) if _is_positional(each)), None)


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters with which a function or an object is called.

    The ``__call__`` of a module takes ``*args``, as does the ``forward`` of a Gluon block. Of these
    the method that computes is asked.
    """
    parameters = _parameters(function)
    for name in ("forward", "hybrid_forward"):
        if hasattr(function, name) and any(p.kind is p.VAR_POSITIONAL for p in parameters):
            parameters = _parameters(getattr(function, name))
    return parameters[1:] if parameters and parameters[0].name == "F" else parameters


def read_signature(
    method: Callable[..., Any], *, switches: Iterable[str] = (), by_position: bool = False
) -> Signature:
    """Return the inputs of the method that calls a model. If Python cannot tell, it takes any.

    A method with ``*args`` and ``**kwargs`` passes its inputs on. If it names only options of its
    own, keywords with a default, then no input has a name. An example is the ``apply`` of Flax.

    Args:
        method: bound to the model.
        switches: the names of parameters that the framework sets.
        by_position: whether all inputs have to be given by position.
    """
    parameters = [each for each in _parameters(method) if each.name not in switches]
    named = [
        each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if (
        takes_any
        and takes_rest
        and not any(_is_positional(each) or each.default is each.empty for each in named)
    ):
        named = []
    return Signature(
        names=tuple(each.name for each in named),
        required=frozenset(each.name for each in named if each.default is each.empty),
        most=None if takes_any else sum(map(_is_positional, named)),
        unnamed=frozenset(
            each.name for each in named if by_position or each.kind is each.POSITIONAL_ONLY
        ),
        takes_names=takes_rest and not by_position,
        switches=frozenset(switches),
    )


def _parameters(function: Any) -> list[inspect.Parameter]:
    # A fifth of the time that ``import d2ldev`` takes, and only training asks.
    import inspect

    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C may have no signature, and take anything
        return [inspect.Parameter("operands", inspect.Parameter.VAR_POSITIONAL)]
