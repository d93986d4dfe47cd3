"""The functions of the user's that training calls: what they take, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from d2ldev.contract.training import Signature
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.operations.arguments import class_refusal
from d2ldev.program import spell

if TYPE_CHECKING:
    import inspect


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


_WEIGHTS = "sample_weight"


def needs_weights(function: Any) -> bool:
    """Tell whether a loss cannot be called without the weights of the examples."""
    return any(
        each.name == _WEIGHTS and each.default is each.empty for each in _parameters_of(function)
    )


def weigh_loss(function: Any, loss: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
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
        function: called in this order, as in torch, Gluon and Optax. If its first parameter has
            the name of a target, it gets ``y`` first: see
            ``begins_with_target``. If it takes no target (see ``takes_target``), it gets the
            prediction alone.
        weighs: whether it may be given ``sample_weight``, too.

    Raises:
        UnsupportedValueError: for an object that keeps a running value, such as a
            ``keras.metrics.Metric``. For a function of a prediction and weights without a target.
            For a function that cannot be called with these operands.
    """
    if isinstance(function, type):
        argument = "loss" if weighs else ""
        raise class_refusal(f"compare predictions by {describe(function)}", function, argument)
    if hasattr(function, "update_state") and hasattr(function, "reset_state"):
        raise UnsupportedValueError(
            f"compare predictions by {describe(function)}",
            "it keeps a running value over all batches, and a loss is the value of one",
            "metrics=[metric], and loss='mse' or another loss",
        )
    if takes_target(function):
        _check_operands(function, 2, weighs=weighs)
        if not begins_with_target(function):
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


# The names of targets in the losses of the frameworks, in scikit-learn and in the book.
_TARGETS = ("y", "y_true", "label", "labels", "labels_true", "target", "targets")


def begins_with_target(function: Callable[..., Any]) -> bool:
    """Tell whether a loss, a metric or its update gets ``y`` first: by its first parameter's name.

    Beside the name of another target ``y`` is the prediction. In the book and in Chainer ``t`` is
    such a name, too.

    >>> [begins_with_target(f) for f in (lambda y, y_hat: 0, lambda y, t: 0, lambda t, y: 0)]
    [True, False, False]
    >>> begins_with_target(lambda a, b: 0)
    False
    """
    names = [each.name for each in _parameters_of(function) if _is_positional(each)]
    is_prediction = names[:1] == ["y"] and not {*names[1:2]}.isdisjoint((*_TARGETS, "t"))
    return not is_prediction and not {*names[:1]}.isdisjoint(_TARGETS)


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _is_required(parameter: inspect.Parameter) -> bool:
    return _is_positional(parameter) and parameter.default is parameter.empty


def update_call(metric: object, update: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return how a metric is updated with a batch, as it is called everywhere: ``(prediction, y)``.

    Args:
        metric: the metric that keeps a running value.
        update: its method. Called in this order, as in torchmetrics. If its first parameter has
            the name of a target, it gets ``y`` first, as in Keras and Gluon. If it takes
            keywords alone, it gets ``logits=`` and ``labels=``, as in NNX.

    Raises:
        UnsupportedValueError: for a method that cannot be called with these operands.
    """
    parameters = _parameters_of(update)
    if parameters and not any(map(_takes_position, parameters)):
        _check_bind(metric, update, logits=None, labels=None)
        return lambda prediction, y: _update_by_name(metric, update, prediction, y)
    # One with a prediction alone, or with weights after it, would take y for something else.
    if not takes_target(update):
        problem = f"its {update.__name__} takes no target beside a prediction"
        raise _update_refusal(metric, update, problem)
    _check_bind(metric, update, None, None)
    if begins_with_target(update):
        return lambda prediction, y: update(y, prediction)
    return update


def _takes_position(parameter: inspect.Parameter) -> bool:
    return _is_positional(parameter) or parameter.kind is parameter.VAR_POSITIONAL


def _update_by_name(metric: object, update: Callable[..., Any], prediction: Any, y: Any) -> Any:
    try:
        return update(logits=prediction, labels=y)
    except TypeError as error:  # one with ``**names`` says only now which of them it needs
        problem = f"its {update.__name__}(logits=..., labels=...) raised: {error}"
        raise _update_refusal(metric, update, problem, "*, logits, labels, **_") from error


def _check_bind(metric: object, update: Callable[..., Any], *operands: Any, **names: Any) -> None:
    import inspect

    try:
        inspect.Signature(_parameters_of(update)).bind(*operands, **names)
    except TypeError as error:
        problem = f"it cannot be updated with a prediction and y: {error}"
        raise _update_refusal(metric, update, problem) from error


def _update_refusal(
    metric: object, update: Callable[..., Any], problem: str, operands: str = "prediction, y"
) -> UnsupportedValueError:
    name = update.__name__
    return UnsupportedValueError(
        f"compare predictions by {describe(metric)}",
        problem,
        f"class Mine({type(metric).__name__}): def {name}(self, {operands}): super().{name}(...)",
    )


def check_number(attempted: str, value: Any, call: str) -> None:
    """Refuse what a metric returned if it is neither a tensor nor a number.

    Args:
        attempted: the current operation, for messages.
        value: what it returned.
        call: the function's name with its parameters.
    """
    if hasattr(value, "shape") or isinstance(value, Real):
        return
    raise UnsupportedValueError(
        attempted,
        f"{call.partition('(')[0]} returns {describe(value)} and not one number",
        f"def {call}: return number",
    )


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


def take_mean(function: Any, value: object, argument: str) -> str:
    """Return the line that takes the mean of a loss or a metric.

    An object without a name in the program has settings that the line cannot repeat.

    Args:
        function: the loss or the metric.
        value: its result.
        argument: how the line names it: ``'loss={}'``.

    >>> def absolute(y_true, y_pred): ...
    >>> import numpy as np
    >>> take_mean(absolute, np.zeros(2), 'loss={}')
    'loss=lambda y_true, y_pred: absolute(y_true, y_pred).mean()'
    """
    name = spell(function) or getattr(function, "__name__", "").replace("<lambda>", "")
    if not name and isinstance(getattr(function, "reduction", None), str):
        return "reduction='mean'"
    shown = name or "loss_fn"
    operands = "y_true, y_pred" if begins_with_target(function) else "prediction, y"
    text = f"lambda {operands}: {write_mean(value, f'{shown}({operands})')}"
    return argument.format(text) + ("" if name else f", after {shown} = ...")


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
