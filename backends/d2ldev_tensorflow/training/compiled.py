"""Compiled Keras models: the loss and the metrics given to ``compile``; the model's own methods.

Keras keeps them in private objects. No public object has all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from d2ldev.framework import UnsupportedValueError, describe, warn
from d2ldev_tensorflow.models import is_of_keras


def loss_of(model: Any) -> Any:
    """Return the loss of a compiled model, with its weights, as Keras's ``fit`` calls it.

    Return None for a model that was compiled without a loss.

    A function, also one given by name, returns a number for each example. Its targets have the rank
    and the dtype of the prediction. The losses of several outputs are added. The object stays
    the same until the model is compiled again. So functions that were traced with it stay valid.
    """
    given = model._compile_loss
    if given is None:
        return None
    if given not in _LOSSES:
        _LOSSES[given] = _loss_of(given, describe(model))
    return _LOSSES[given]


_LOSSES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _loss_of(given: Any, model: str) -> Any:
    from keras.src.trainers.compile_utils import CompileLoss

    class Compiled(CompileLoss):
        @property
        def metrics(self) -> list[None]:  # Keras keeps the mean loss of each output here
            return [None] * len(self._flat_losses or [None])

        def build(self, y_true: Any, y_pred: Any) -> None:
            try:
                with tf.init_scope():  # Keras makes variables for these means
                    super().build(y_true, y_pred)
            except (KeyError, TypeError, ValueError) as error:
                raise UnsupportedValueError(
                    f"train {model} with the loss that it was compiled with",
                    str(error),
                    "compile(..., loss='mse'), or {name: loss} with the names model.output_names",
                ) from error

    return Compiled(given._user_loss, given._user_loss_weights, output_names=given.output_names)


def metrics_of(model: Any) -> list[Callable[[Any, Any], Any]]:
    """Return those metrics of a compiled model that are means over the examples.

    It warns about the others.
    """
    given = getattr(model, "_compile_metrics", None)
    if given is None:
        return []
    if given._user_weighted_metrics:
        what, fix = "weighted_metrics", "compile(..., metrics=[...])"
        _warn_unused(model, what, "metrics are not weighted", fix)
    measured, others = [], []
    for output, (name, metrics) in enumerate(_by_outputs(model, given)):
        for metric in tf.nest.flatten(metrics):
            if metric is not None and _is_mean(metric):
                measured.append(_make_measure(metric, output, name))
            elif metric is not None:
                others.append(_name_of(metric))
    if others:
        _warn_unused(
            model,
            f"the metrics {', '.join(others)}",
            "they keep a running value over all batches",
            "model.evaluate(X, y) for these, or fit(..., metrics=[function])",
        )
    return measured


def _by_outputs(model: Any, given: Any) -> list[tuple[str | None, Any]]:
    """Return the metrics of each output, with its name; the name is None for a single output."""
    names, metrics = list(given.output_names or ()), given._user_metrics or ()
    if len(names) < 2:
        return [(None, metrics)]
    if isinstance(metrics, Mapping) and metrics.keys() <= {*names}:
        return [(name, metrics.get(name)) for name in names]
    if isinstance(metrics, Mapping) or len(metrics) not in (0, len(names)):
        raise UnsupportedValueError(
            f"measure {describe(model)} with the metrics that it was compiled with",
            f"its outputs are {names}, and the metrics {metrics}",
            "compile(..., metrics={name of an output: [metrics]}), or fit(..., metrics=[function])",
        )
    return list(zip(names, metrics, strict=False))


def _is_mean(metric: Any) -> bool:
    """Return whether a metric, or a metric's name, is the mean of a function over the examples."""
    import keras

    if isinstance(metric, str) and metric in ("accuracy", "acc"):
        return True  # only the first batch tells which function it means
    known = keras.metrics.get(metric)
    update = keras.metrics.MeanMetricWrapper.update_state
    return not isinstance(known, keras.metrics.Metric) or type(known).update_state is update


def _name_of(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    return getattr(metric, "name", "") or getattr(metric, "__name__", type(metric).__name__)


def _make_measure(metric: Any, index: int, output: str | None) -> Callable[[Any, Any], Any]:
    """Return a function: the mean of a metric over a batch, for one output."""
    import keras
    from keras.src.trainers.compile_utils import get_metric

    known: Any = None

    def of_output(y: Any) -> Any:
        return y[output] if isinstance(y, Mapping) and output in y else tf.nest.flatten(y)[index]

    def measure(y_true: Any, y_pred: Any) -> Any:
        nonlocal known
        y_true, y_pred = of_output(y_true), of_output(y_pred)
        known = get_metric(metric, y_true, y_pred) if known is None else known
        # Without the sums that the object keeps: they belong to the user.
        values = known._fn(y_true, y_pred, **known._fn_kwargs)
        return keras.ops.mean(keras.ops.cast(values, "float32"))

    measure.__name__ = f"{output}_{_name_of(metric)}" if output else _name_of(metric)
    return measure


def check_own_methods(model: Any, *names: str) -> None:
    """Check that a model does not override methods that only Keras's own loops call.

    Raises:
        UnsupportedValueError: if a user's class overrides one of these methods.
    """
    if not is_of_keras(model, "Model"):
        return
    theirs = sys.modules["keras"].Model
    own = [name for name in names if getattr(type(model), name) is not getattr(theirs, name)]
    if own:
        raise UnsupportedValueError(
            f"train {describe(model)}",
            f"only Keras's own fit, evaluate and predict call its {', '.join(own)}",
            f"def training_step(self, batch), which returns the loss, in {type(model).__name__}; "
            "or model.fit(...)",
        )


def check_speed(model: Any) -> None:
    """Warn about options of ``compile`` that only speed up Keras's own ``fit``."""
    # Where there are GPUs, Keras sets ``jit_compile`` by itself.
    is_asked = model.jit_compile and not model._resolve_auto_jit_compile()
    settings = {"jit_compile": is_asked, "steps_per_execution": model.steps_per_execution != 1}
    for name, is_unused in settings.items():
        if is_unused:
            problem = "it would change no number"
            _warn_unused(model, name, problem, f"compile(...) without {name}")


def _warn_unused(model: Any, what: str, problem: str, fix: str) -> None:
    message = f"the Trainer leaves out {what}, which {describe(model)} was compiled with: {problem}"
    warn(f"{message}\n  fix: {fix}")
