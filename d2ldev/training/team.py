"""``Team``: the processes that train a model, one alone or the group of a launch."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from d2ldev.contract import Framework, Learner
from d2ldev.device import Device
from d2ldev.distributed.portions import Portions
from d2ldev.distributed.random_states import check_random_states, random_states
from d2ldev.errors import CheckpointError, UnsupportedValueError, text_of
from d2ldev.files.load import from_bytes
from d2ldev.files.save import to_bytes
from d2ldev.nesting.walk import Flattened, flatten
from d2ldev.operations.inventory import list_needed_tensors
from d2ldev.operations.moving import to_numpy
from d2ldev.training.callbacks import notify
from d2ldev.training.log import DeviceLog, means_of
from d2ldev.training.order import Order

if TYPE_CHECKING:
    from d2ldev.contract.group import Group


# The length of a text of a process in a message, which has the texts of all processes.
_PIECE = 1 << 24


class Counts(NamedTuple):
    """The weights of a batch in the means over the examples.

    Args:
        examples: the number of its examples.
        in_loss: the weight of this process's loss, unless ``Learner.weight`` is another one.
        in_metrics: the weight of its metrics.
    """

    examples: int
    in_loss: float
    in_metrics: float


class Portioned(NamedTuple):
    """A process's portion of a batch.

    Args:
        operands: a nesting of tensors.
        has_examples: whether the portion has examples; without them the operands are others.
    """

    operands: Any
    has_examples: bool


class Team:
    """A team of one process: it has nobody to wait for. ``ProcessGroup`` is one of several.

    Attributes:
        is_first: whether this process writes files, and shows the progress.
        has_failed: whether an error in a hook of any process ends the run.
        splits: whether each process computes with a portion of each batch, split on the host.
    """

    is_first = True
    has_failed = False
    splits = False

    def work(self) -> AbstractContextManager[Any]:
        """Return the block of a run."""
        return nullcontext()

    def begin_data(self, *, is_trained: bool) -> None:
        """Begin an iteration over data, to train or to evaluate on."""

    def select(self, batch: Any) -> Any:
        """Return this process's portion of a batch, on the host."""
        return batch

    def count(self, learner: Learner, number: int, examples: int, each: int) -> Counts:
        """Return the weights of the next batch, and set the learner's portion of it.

        Args:
            learner: the learner that computes with the batch.
            number: the position of the batch in the epoch, from 0.
            examples: the number of its examples here.
            each: the weight of an example in the loss.
        """
        return _count_alone(examples, each)

    def means(self, log: DeviceLog) -> dict[str, float]:
        """Return the means over the batches of an epoch; the last value where nothing counts."""
        return means_of(log.state_dict()["totals"], log.last())

    def gather(self, label: str, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        return [value]

    def gather_batches(self, batches: Sequence[Portioned]) -> list[Any]:
        """Return the operands of batches, with the examples of all processes."""
        return [operands for operands, _ in batches]

    def log_state(self, log: DeviceLog) -> dict[str, Any]:
        """Return the state of a log, with the sums over all processes."""
        return log.state_dict()

    def compare_models(self, model: Any) -> None:
        """Compare the model with the models of the other processes, before it gets a learner."""

    def begin_run(
        self, learner: Learner, names: Iterable[str], max_epochs: int, saving: Any
    ) -> None:
        """Begin a run, and compare its settings with the other processes."""

    def begin_epoch(self, epoch: int, device: Device, data: Sequence[Any] = ()) -> None:
        """Begin an epoch.

        Args:
            epoch: its number, from 0.
            device: the device of the model.
            data: the data to train on, and the data to evaluate on.
        """

    def notify(self, listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
        """Call the listeners of a hook."""
        notify(listeners, *operands)

    def stops(self, is_wanted: bool) -> bool:
        """Return whether the run ends before the next batch; a group asks before each one."""
        return is_wanted

    def stops_after_epoch(self, is_wanted: bool) -> bool:
        """Return whether the run ends with this epoch; called after each epoch."""
        return is_wanted

    def end_batches(self) -> None:
        """Mark the end of the batches of an epoch, before its last step."""

    def broadcast_from_first(self, label: str, value: Any) -> Any:
        """Return the value of the first process."""
        return value

    def end_run(self) -> None:
        """End a run whose loop has raised no error."""

    def raise_failure(self) -> None:
        """Raise the error of a hook that ended the run, once the user has the model."""


@lru_cache(maxsize=64)  # most batches have as many examples
def _count_alone(examples: int, each: int) -> Counts:
    return Counts(examples, examples * each, examples)


class ProcessGroup(Team):
    """A process that trains a model together with the others of its group.

    Args:
        framework: the framework of the model.
        group: the processes.
    """

    splits = True

    def __init__(self, framework: Framework, group: Group) -> None:
        self._framework = framework
        self._group = group
        self.is_first = group.rank == 0
        self._epoch = self._place = "the first epoch"
        self._portions = Portions(framework, group)
        self._model: Any = None
        # The error of a hook in this process, and the texts of the errors in all processes.
        self._failure: BaseException | None = None
        self._problems: list[str | None] = []

    def work(self) -> AbstractContextManager[Any]:
        return self._group.work()

    def begin_data(self, *, is_trained: bool) -> None:
        self._place = self._epoch if is_trained else f"the evaluation after {self._epoch}"
        self._portions = Portions(self._framework, self._group, self._model if is_trained else None)

    def select(self, batch: Any) -> Any:
        return self._portions.select(batch)

    def count(self, learner: Learner, number: int, examples: int, each: int) -> Counts:
        portion = self._portions.next(f"batch {number} of {self._place}")
        learner.portion = portion
        return Counts(portion.length, portion.number * each, portion.number)

    def means(self, log: DeviceLog) -> dict[str, float]:
        return means_of(self._totals(log, f"the end of {self._place}"), log.last())

    def gather(self, label: str, value: Any) -> list[Any]:
        return self._group.gather(f"{label} of {self._place}", value)

    def gather_batches(self, batches: Sequence[Portioned]) -> list[Any]:
        framework, attempted = self._framework, "combine the predictions of several processes"
        flats = [flatten(operands, framework.state.kinds, attempted) for operands, _ in batches]
        own = [
            [to_numpy(framework, x) for x in flat.tensors.values()] if has_examples else None
            for flat, (_, has_examples) in zip(flats, batches, strict=True)
        ]
        text = base64.b64encode(to_bytes(framework, own)).decode()
        longest = max(self.gather("the size of predictions", len(text)))
        pieces = [
            self.gather("the predictions for metrics", text[start : start + _PIECE])
            for start in range(0, longest, _PIECE)
        ]
        texts = ["".join(each) for each in zip(*pieces, strict=True)]
        processes = [from_bytes(framework, base64.b64decode(each)) for each in texts]
        return [
            self._join(flat, [each for each in shards if each is not None], attempted)
            for flat, shards in zip(flats, zip(*processes, strict=True), strict=True)
        ]

    def _join(self, flat: Flattened, shards: Sequence[Any], attempted: str) -> Any:
        """Return a nesting with the examples of all shards, where this process's portion is."""
        tensors, devices, found = self._framework.tensors, self._framework.devices, {}
        for (key, x), arrays in zip(flat.tensors.items(), zip(*shards, strict=True), strict=True):
            if not x.shape:
                raise UnsupportedValueError(
                    attempted,
                    "a scalar tensor in the prediction or in the target has no examples",
                    "a model that returns the prediction alone, or a metric for one process",
                )
            native, dtype = devices.native(tensors.device_of(x)), tensors.dtype_of(x)
            whole = np.concatenate(arrays)
            found[key] = tensors.from_data(whole, tensors.dtype(dtype), native)
        return flat.unflatten(found)

    def log_state(self, log: DeviceLog) -> dict[str, Any]:
        return {**log.state_dict(), "totals": self._totals(log, "a checkpoint within an epoch")}

    def _totals(self, log: DeviceLog, label: str) -> dict[str, list[float]]:
        totals: dict[str, list[float]] = {}
        for process in self._group.gather(label, log.state_dict()["totals"]):
            for name, (total, weight) in process.items():
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += weight
        return totals

    def compare_models(self, model: Any) -> None:
        """Compare the models of all processes: an engine may not do it."""
        self._model = model
        tensors = list_needed_tensors(self._framework, model, "compare the models of processes")
        content = ", ".join(f"{name} {self._kind(x)}" for name, x in tensors)
        self._group.gather("the model", content=content)

    def _kind(self, x: Any) -> str:
        try:
            return f"{self._framework.tensors.dtype_of(x)}{list(x.shape)}"
        except Exception:  # a lazy tensor has no shape yet
            return "of no shape yet"

    def begin_run(
        self, learner: Learner, names: Iterable[str], max_epochs: int, saving: Any
    ) -> None:
        """Compare the settings of the processes, and when they save the state."""
        settings = {
            name: value if isinstance(value, (str, int, float)) else "an object"
            for name, value in learner.settings._asdict().items()
        }
        is_saved = {name: getattr(saving, name) is not None for name in ("checkpoint", "best")}
        times = {**saving._asdict(), **is_saved}
        content = f"{max_epochs} epochs, {settings}, the numbers {list(names)}, {times}"
        self._group.renew_stop()
        self._group.gather("the beginning of the run", content=content)

    def begin_epoch(self, epoch: int, device: Device, data: Sequence[Any] = ()) -> None:
        """Take the random numbers and the orders of the data from rank 0.

        Data of another kind than on rank 0 does not change: the processes compare its batches.
        """
        self._epoch = self._place = f"epoch {epoch}"
        framework, text = self._framework, None
        orders = [Order(each) for each in data]
        if self.is_first:
            states = random_states(framework, device)
            states["orders"] = [each.own_state() if each.is_common else None for each in orders]
            text = base64.b64encode(to_bytes(framework, states)).decode()
        text = self.broadcast_from_first(f"the beginning of {self._epoch}", text)
        if not self.is_first:
            states = from_bytes(framework, base64.b64decode(text))
            check_random_states(framework, states, device)()
            for order, state in zip(orders, states["orders"], strict=True):
                if order.is_common and state is not None:
                    with suppress(CheckpointError):
                        order.check_own(state)()

    def notify(self, listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
        """Call the listeners; keep an error until all processes end together.

        The other processes may already wait for this one in the next step.
        """
        if self._failure is None:
            try:
                notify(listeners, *operands)
            except BaseException as error:
                self._failure = error

    def stops(self, is_wanted: bool) -> bool:
        return self._group.stops(bool(is_wanted) or self._failure is not None)

    def stops_after_epoch(self, is_wanted: bool) -> bool:
        own = [bool(is_wanted), self._failure is not None]
        everyone = self._group.gather(f"the checkpoint after {self._epoch}", own)
        self.has_failed = any(has_failed for _, has_failed in everyone)
        return self.has_failed or any(is_wanted for is_wanted, _ in everyone)

    def end_batches(self) -> None:
        # At the end of an epoch an engine could wait for ever for a process in another batch.
        self._group.mark(f"the end of {self._place}")

    def broadcast_from_first(self, label: str, value: Any) -> Any:
        return self._group.gather(label, value)[0]

    def end_run(self) -> None:
        error = self._failure
        problem = None if error is None else f"{type(error).__name__}: {text_of(error)}"
        self._problems = self._group.gather("the end of the run", problem)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        for rank, problem in enumerate(self._problems):
            if problem is not None:
                raise self._group.make_lost_error(rank, f"it ended with {problem}")
