"""Metrics that keep a running value over an epoch, by the methods of their libraries.

Held by the requirement ``fit.keeps-running-values``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from d2ldev._backend import Backend, framework_of
from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError
from d2ldev.nesting.kinds import OBJECT
from d2ldev.nesting.walk import flatten
from d2ldev.options import Loss
from d2ldev.settings import peers
from d2ldev.training.functions import check_number, describe_output, update_call
from d2ldev.training.log import DeviceLog
from d2ldev.training.team import Portioned, Team

# The methods of a metric that keeps a running value: take a batch, return the value, begin again.
# The first ones belong to torchmetrics and NNX, the others to Keras and Gluon.
_CONVENTIONS = (
    ("update", "compute", "reset"),
    ("update_state", "result", "reset_state"),
    ("update", "get", "reset"),
)


# How many batches wait for an exchange between processes, which waits for the device.
_BLOCK = 16


# The runs that count with a metric at present: the last one to begin has reset it.
_counting: WeakValueDictionary[int, RunningMetric] = WeakValueDictionary()


class RunningMetric:
    """A metric that keeps a running value, by its public methods.

    Args:
        backend: the backend of the predictions.
        name: the name in the history.
        metric: an object with the methods of one of ``_CONVENTIONS``.
        methods: these methods.

    Raises:
        UnsupportedValueError: if it cannot be updated with a prediction and ``y``.
    """

    def __init__(
        self, backend: Backend, name: str, metric: Any, methods: tuple[str, str, str]
    ) -> None:
        self._backend, self._name = backend, name
        self._update_name, self._compute_name, self._reset_name = methods
        self._kinds = framework_of(backend).state.kinds
        self._device: Device | None = None
        self._take(metric)
        # Whether ``compute`` combines the values of all processes, as torchmetrics does.
        self.combines_processes = getattr(metric, "sync_on_compute", False) is True
        self.has_examples = False

    def _take(self, metric: Any) -> None:
        """Use a metric, or the one that a move has made of it."""
        self._metric = metric
        # Once, and not in each batch: it reads the signature.
        self._update = update_call(metric, getattr(metric, self._update_name))

    def begin(self, *, splits: bool) -> None:
        """Begin an epoch.

        Args:
            splits: whether several processes compute with portions of the batches.
        """
        if peers() is not None:
            self._check_processes(splits=splits)
        getattr(self._metric, self._reset_name)()
        self._device, self.has_examples = None, False
        _counting[id(self._metric)] = self

    def _check_processes(self, *, splits: bool) -> None:
        """Refuse a metric that would combine the processes of a launch once too often."""
        if not _finds_combining(self._metric) or (splits and self.combines_processes):
            return
        raise UnsupportedValueError(
            f"measure {self._name} in several processes",
            "a metric in its attributes combines the processes itself, and d2ldev does so, too"
            if splits
            else "it combines the processes itself, and validate uses all data in each process",
            "sync_on_compute=False when you make the metric",
        )

    def update(self, prediction: Any, y: Any, device: Device | None) -> None:
        """Update the metric with a batch, or with a shard of it.

        Args:
            prediction, y: of the batch.
            device: the device of the model's predictions, where the metric computes.
        """
        self._check_owner()
        if self._device is not device and device is not None:
            self._device = device
            if self._kinds[type(self._metric)] is OBJECT:
                self._take(self._backend.place(self._metric, device))
            elif self._kinds.method_of(type(self._metric), 0) is not None:
                self._take(self._backend.to(self._metric, device))
            _counting[id(self._metric)] = self
        with scope_of(self._backend, device):
            found = self._update(prediction, y)
        if found is not self._metric and type(found) is type(self._metric):
            raise UnsupportedValueError(
                f"measure {self._name}",
                "its update returns another metric, and leaves the metric itself as it is",
                "an object of yours: def update(self, prediction, y): self.metric = "
                "self.metric.update(...), with compute() and reset()",
            )
        self.has_examples = True

    def compute(self) -> float:
        """Return the value of the epoch."""
        self._check_owner()
        with scope_of(self._backend, self._device):
            value = getattr(self._metric, self._compute_name)()
        if self._compute_name == "get" and isinstance(value, tuple):  # with its name before it
            value = value[1]
        shape = tuple(getattr(value, "shape", ()))
        if shape or isinstance(value, (Mapping, tuple, list)):
            found = f"an array of shape {shape}" if shape else f"a {type(value).__name__}"
            raise UnsupportedValueError(
                f"measure {self._name}",
                f"{self._compute_name}() returns {found}, and not one number",
                "metrics={'a': ..., 'b': ...}, a metric for each number",
            )
        check_number(f"measure {self._name}", value, f"{self._compute_name}(self)")
        log = DeviceLog(self._backend, values=False)
        log.add(**{self._name: value})
        return log.last()[self._name]

    def _check_owner(self) -> None:
        if _counting.get(id(self._metric)) is not self:
            raise UnsupportedValueError(
                f"measure {self._name}",
                "its metric was reset within the epoch, for another name or for another call",
                f"metrics={{{self._name!r}: copy.deepcopy(metric)}}, a metric for each of them",
            )


def _finds_combining(metric: Any) -> bool:
    """Return whether a metric, or one in its attributes, combines the processes by itself."""
    seen, found = set(), [metric]
    while found:
        x = found.pop()
        if id(x) in seen or isinstance(x, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(x))
        attributes = getattr(x, "__dict__", {})
        if attributes.get("sync_on_compute") is True:
            return True
        found += x.values() if isinstance(x, dict) else attributes.values()
        found += x if isinstance(x, (list, tuple)) else ()
    return False


class RunningMetrics:
    """The metrics of a loop that keep a running value.

    In several processes each metric gets the whole batch, in every process. So each process has the
    value of all examples. A metric that combines the processes itself gets the shard of its own
    process.

    Args:
        backend: the backend of the predictions.
        metrics: all metrics of the loop, by their names.
        team: the processes.
        loss: the loss; with ``'model'`` a metric gets the logits and the labels.
    """

    def __init__(
        self, backend: Backend, metrics: Mapping[str, Any], team: Team, loss: Loss
    ) -> None:
        self._backend, self._team, self._takes_output = backend, team, loss == "model"
        self._metrics = {
            name: each for name, each in metrics.items() if isinstance(each, RunningMetric)
        }
        self._whole = [each for each in self._metrics.values() if not each.combines_processes]
        self._waiting: list[Portioned] = []

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def check_saving(self) -> None:
        """Refuse a checkpoint within an epoch, which has no state of such a metric."""
        for name in self._metrics:
            raise UnsupportedValueError(
                f"measure {name} and save within an epoch",
                "a checkpoint within an epoch has no state of a metric that keeps a running value",
                "leave out checkpoint_every, and the run saves after each epoch",
            )

    def begin(self) -> None:
        """Begin an epoch."""
        self._waiting.clear()
        for each in self._metrics.values():
            each.begin(splits=self._team.splits)

    def update(self, prediction: Any, y: Any, *, has_examples: bool) -> None:
        """Update the metrics with a batch.

        Args:
            prediction, y: of this process's portion of the batch.
            has_examples: whether the portion has examples.
        """
        if self._takes_output:
            prediction, y = find_logits(prediction, y, "measure a running value")
        if has_examples:
            device = device_of_prediction(self._backend, prediction)
            for each in self._metrics.values():
                if each.combines_processes:
                    each.update(prediction, y, device)
        self._waiting.append(Portioned((prediction, y), has_examples))
        if len(self._waiting) == (_BLOCK if self._team.splits else 1):
            self._update_whole()

    def _update_whole(self) -> None:
        """Update the metrics that get whole batches."""
        waiting, self._waiting = self._waiting, []
        if not waiting or not self._whole:
            return
        for prediction, y in self._team.gather_batches(waiting):
            device = device_of_prediction(self._backend, prediction)
            for each in self._whole:
                each.update(prediction, y, device)

    def compute(self) -> dict[str, float]:
        """Return the values of the epoch, which are the same in all processes."""
        self._update_whole()
        lacking = [
            name
            for name, each in self._metrics.items()
            if each.combines_processes and not each.has_examples
        ]
        for rank, names in enumerate(self._team.gather("the metrics", lacking)):
            if names:
                raise UnsupportedValueError(
                    f"measure {names[0]} in several processes",
                    f"the process of rank {rank} had no example, and its metric cannot combine",
                    "batches with an example for each process, or sync_on_compute=False when you "
                    "make the metric",
                )
        values = {name: each.compute() for name, each in self._metrics.items()}
        first: dict[str, float] = self._team.broadcast_from_first("the values of metrics", values)
        return first


def find_methods(metric: Any) -> tuple[str, str, str] | None:
    """Return the methods of an object that keeps a running value; None for any other."""
    for methods in _CONVENTIONS:
        if all(callable(getattr(metric, each, None)) for each in methods):
            return methods
    return None


def find_logits(output: Any, batch: Any, attempted: str) -> tuple[Any, Any]:
    """Return the ``logits`` of a model's output, and the ``labels`` of a batch.

    Raises:
        UnsupportedValueError: if there are none, or if the model may have shifted the labels.
    """
    logits, labels = (
        x.get(name) if isinstance(x, Mapping) else getattr(x, name, None)
        for x, name in ((output, "logits"), (batch, "labels"))
    )
    rank = len(getattr(logits, "shape", ()))
    problem = f"the logits have {rank} dimensions, and the model may have shifted the labels"
    if logits is None or labels is None:
        problem = f"there are no {'logits' if logits is None else 'labels'}; "
        problem += describe_output(output) if logits is None else "the batch needs the key 'labels'"
    elif rank == 2:
        return logits, labels
    raise UnsupportedValueError(
        f"{attempted} with loss='model'",
        problem,
        "metrics=[function], with def function(output, batch): ...",
    )


def device_of_prediction(backend: Backend, prediction: Any) -> Device | None:
    """Return the device of the first tensor in a prediction; None without one."""
    flat = flatten(prediction, framework_of(backend).state.kinds, "measure a prediction")
    return next(map(backend.device_of, flat.tensors.values()), None)


def scope_of(backend: Backend, device: Device | None) -> AbstractContextManager[Any]:
    """Return a block whose operations run on a device.

    Outside a ``tf.function``, TensorFlow computes on its default device, not on the operands' one.
    """
    return nullcontext() if device is None else backend.on(device)
