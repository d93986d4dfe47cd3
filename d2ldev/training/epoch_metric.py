"""``EpochMetric``: a function of all predictions and labels of an epoch.

Held by the requirements ``fit.measures-whole-epochs`` and ``*.measure-whole-epochs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from d2ldev.active import backend_of
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.training.functions import check_number, comparison, describe_output
from d2ldev.typing import TensorT


class EpochMetric:
    """Compute a function of all predictions and labels of an epoch, such as scikit-learn's.

    Many values of an epoch are not the mean over its batches. An example is the F1 score. This
    metric keeps the predictions and the labels on the host. It calls the function once, after the
    epoch. The transfer waits for the device in each batch. In several processes each of them keeps
    all examples.

    Args:
        function: ``(y_true, y_pred) -> number``, or ``(prediction, y) -> number``. If its first
            parameter has the name of a target, such as ``y_true``, it gets ``y`` first. It gets
            NumPy arrays with the examples of the epoch along the first axis.

    >>> def largest_error(y_true, y_pred):
    ...     return abs(y_true - y_pred).max()
    >>> X, y = np.zeros((8, 2), 'float32'), np.arange(8, dtype='float32')[:, None]
    >>> data = d2ldev.ArrayLoader(X, y, batch_size=4, shuffle=False)
    >>> metrics = {'worst': d2ldev.EpochMetric(largest_error)}
    >>> d2ldev.Trainer(1).validate(backend.mlp([2, 1]), data, metrics=metrics)
    {'loss': 17.5, 'worst': 7.0}

    The Trainer calls its three methods. A loop of your own does the same:

    >>> metric = d2ldev.EpochMetric(largest_error)
    >>> for X, y in data:
    ...     metric.update(X[:, :1], y)
    >>> float(metric.compute())
    7.0
    >>> metric.reset()
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        if isinstance(function, type) or not callable(function):
            raise UnsupportedValueError(
                f"measure {describe(function)} over an epoch",
                "it is not a function (y_true, y_pred) -> number",
                "EpochMetric(sklearn.metrics.r2_score)",
            )
        self._function = function
        self._compare = comparison(function)
        self._batches: list[tuple[Any, Any]] = []
        self.name = getattr(function, "__name__", type(function).__name__)

    def __repr__(self) -> str:
        return f"EpochMetric({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._function,)  # without the batches

    def reset(self) -> None:
        """Forget all batches."""
        self._batches.clear()

    def update(self, prediction: TensorT, y: TensorT) -> None:
        """Keep a batch on the host.

        Args:
            prediction, y: a tensor of any framework, or a NumPy array. Its first axis are the
                examples.

        Raises:
            UnsupportedValueError: for several tensors.
        """
        self._batches.append((self._to_host(prediction), self._to_host(y)))

    def compute(self) -> float:
        """Return the value of the function for all batches since ``reset``.

        Raises:
            UnsupportedValueError: if the batches have examples of different shapes.
        """
        value: float = self._compare(*map(self._join, zip(*self._batches, strict=True)))
        call = f"{self.name}(y_true, y_pred)"
        check_number(f"measure {self.name} over an epoch", value, call)
        return value

    def _to_host(self, x: Any) -> Any:
        if isinstance(x, (Mapping, tuple, list)):
            raise UnsupportedValueError(
                f"measure {self.name} over an epoch",
                f"the prediction or the target is not one tensor: {describe_output(x)}",
                "metrics={'name': metric}, an object of yours with update(prediction, y), "
                "compute() and reset()",
            )
        return x if isinstance(x, np.ndarray) else backend_of(x).to_numpy(x)

    def _join(self, arrays: Sequence[Any]) -> Any:
        if len(shapes := sorted({x.shape[1:] for x in arrays})) > 1:
            raise UnsupportedValueError(
                f"measure {self.name} over an epoch",
                f"the examples of its batches have the shapes {shapes}",
                "metrics={'name': metric}, an object of yours with update(prediction, y), "
                "compute() and reset()",
            )
        return np.concatenate(arrays)
