"""Who trains a model: this process alone, or together with the others of a launch."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from d2ldev.areas import Framework, Learner
from d2ldev.areas.training import Labels
from d2ldev.device import Device
from d2ldev.errors import CheckpointError, text_of
from d2ldev.files.load import from_bytes
from d2ldev.files.save import to_bytes
from d2ldev.operations.placing import list_needed_tensors
from d2ldev.operations.processes import Portions
from d2ldev.training.callbacks import notify
from d2ldev.training.log import DeviceLog, means_of
from d2ldev.training.order import Order, check_random_states, random_states

if TYPE_CHECKING:
    from d2ldev.processes.group import Group


class Counts(NamedTuple):
    """What a batch counts.

    Args:
        examples: how many it has.
        in_loss: the weight of this process's loss in the mean over the examples.
        in_metrics: the weight of its metrics.
        in_accuracy: the weight of the accuracy, of which a label may be left out.
    """

    examples: int
    in_loss: float
    in_metrics: float
    in_accuracy: float


class Team(Protocol):
    """The processes that train a model together, as one of them sees them.

    Attributes:
        is_first: whether this process writes files, and shows the progress.
        has_failed: whether an error in a hook, in any process, ends the run.
        splits: whether this process computes with a portion of each batch, split on the host.
    """

    is_first: bool
    has_failed: bool
    splits: bool

    def work(self) -> AbstractContextManager[Any]:
        """Return the block of a run."""

    def begin_data(self, *, is_trained: bool) -> None:
        """Begin to go through data, to train or to evaluate on."""

    def select(self, batch: Any) -> Any:
        """Return this process's portion of a batch, on the host."""

    def count(
        self, learner: Learner, number: int, y: Any, examples: int, labels: Labels | None
    ) -> Counts:
        """Return what the next batch counts, and set the learner's portion of it.

        Args:
            learner: computes with the batch.
            number: the position of the batch in the epoch, from 0.
            y: its target.
            examples: how many it has.
            labels: what the host has seen of the labels of the whole batch.
        """

    def means(self, log: DeviceLog) -> dict[str, float]:
        """Return the means over the examples of an epoch."""

    def log_state(self, log: DeviceLog) -> dict[str, Any]:
        """Return the state of a log, with the sums over all processes."""

    def meet(self, model: Any) -> None:
        """Come together before the learner of a model is made."""

    def begin(self, learner: Learner, names: Iterable[str], max_epochs: int, saving: Any) -> None:
        """Begin a run."""

    def begin_epoch(self, epoch: int, device: Device, data: Sequence[Any] = ()) -> None:
        """Begin an epoch that goes through data, to train and to evaluate on."""

    def notify(self, listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
        """Call the listeners of a hook."""

    def stops(self, is_wanted: bool) -> bool:
        """Return whether the run ends before the next batch; a group calls it before each one."""

    def stops_after_epoch(self, is_wanted: bool) -> bool:
        """Return whether the run ends with this epoch; called after each one."""

    def end_batches(self) -> None:
        """Note the end of the batches of an epoch, before its last step."""

    def of_the_first(self, label: str, value: Any) -> Any:
        """Return the value of the first process."""

    def end(self) -> None:
        """End a run in which no error has ended the loop."""

    def raise_failure(self) -> None:
        """Raise the error of a hook that has ended the run, when the model is handed back."""


class SingleProcess:
    """A process that trains a model by itself."""

    is_first = True
    has_failed = False
    splits = False

    def work(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin_data(self, *, is_trained: bool) -> None:
        pass

    def select(self, batch: Any) -> Any:
        return batch

    def count(
        self, learner: Learner, number: int, y: Any, examples: int, labels: Labels | None
    ) -> Counts:
        return Counts(examples, examples, examples, examples)

    def means(self, log: DeviceLog) -> dict[str, float]:
        return log.means()

    def log_state(self, log: DeviceLog) -> dict[str, Any]:
        return log.state_dict()

    def meet(self, model: Any) -> None:
        pass

    def begin(self, learner: Learner, names: Iterable[str], max_epochs: int, saving: Any) -> None:
        pass

    def begin_epoch(self, epoch: int, device: Device, data: Sequence[Any] = ()) -> None:
        pass

    def notify(self, listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
        notify(listeners, *operands)

    def stops(self, is_wanted: bool) -> bool:
        return is_wanted

    def stops_after_epoch(self, is_wanted: bool) -> bool:
        return is_wanted

    def end_batches(self) -> None:
        pass

    def of_the_first(self, label: str, value: Any) -> Any:
        return value

    def end(self) -> None:
        pass

    def raise_failure(self) -> None:
        pass


class ProcessGroup:
    """A process that trains a model together with the others of its group.

    Args:
        framework: whose model it is.
        group: the processes.
    """

    has_failed = False
    splits = True

    def __init__(self, framework: Framework, group: Group) -> None:
        self._framework = framework
        self._group = group
        self.is_first = group.rank == 0
        self._epoch = self._place = "the first epoch"
        self._portions = Portions(framework, group)
        self._model: Any = None
        # The error of a hook of this process, and in words those of all.
        self._failure: BaseException | None = None
        self._problems: list[str | None] = []

    def work(self) -> AbstractContextManager[Any]:
        return self._group.work()

    def begin_data(self, *, is_trained: bool) -> None:
        self._place = self._epoch if is_trained else f"the evaluation after {self._epoch}"
        self._portions = Portions(self._framework, self._group, self._model if is_trained else None)

    def select(self, batch: Any) -> Any:
        return self._portions.select(batch)

    def count(
        self, learner: Learner, number: int, y: Any, examples: int, labels: Labels | None
    ) -> Counts:
        portion = self._portions.next(f"batch {number} of {self._place}", y, labels)
        learner.portion = portion
        length, in_accuracy = portion.length, float(portion.number)
        if labels is not None and labels.counts is not None:
            share = self._portions.share_of_labels(portion, labels, is_weighted=False)
            in_accuracy = length * share
        return Counts(length, portion.share * length, portion.number, in_accuracy)

    def means(self, log: DeviceLog) -> dict[str, float]:
        return means_of(self._totals(log, f"the end of {self._place}"))

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

    def meet(self, model: Any) -> None:
        """Compare the models, which an engine may not do."""
        self._model = model
        tensors = list_needed_tensors(self._framework, model, "compare the models of processes")
        content = ", ".join(f"{name} {self._kind(x)}" for name, x in tensors)
        self._group.gather("the model", content=content)

    def _kind(self, x: Any) -> str:
        try:
            return f"{self._framework.tensors.dtype_of(x)}{list(x.shape)}"
        except Exception:  # it has no shape before the first batch
            return "of no shape yet"

    def begin(self, learner: Learner, names: Iterable[str], max_epochs: int, saving: Any) -> None:
        """Compare how the processes train the model, and when they save it."""
        named = {
            name: value if isinstance(value, (str, int, float)) else "an object"
            for name, value in learner.settings._asdict().items()
        }
        saved = {**saving._asdict(), "checkpoint": saving.checkpoint is not None}
        content = f"{max_epochs} epochs, {named}, the numbers {list(names)}, {saved}"
        self._group.renew_stop()
        self._group.gather("the beginning of the run", content=content)

    def begin_epoch(self, epoch: int, device: Device, data: Sequence[Any] = ()) -> None:
        """Go on with the random numbers of rank 0, and its orders, so that all read in one order.

        Data of another kind than that of rank 0 stays as it is: its batches are compared.
        """
        self._epoch = self._place = f"epoch {epoch}"
        framework, text = self._framework, None
        orders = [Order(each) for each in data]
        if self.is_first:
            states = random_states(framework, device)
            states["orders"] = [each.own_state() if each.is_common else None for each in orders]
            text = base64.b64encode(to_bytes(framework, states)).decode()
        text = self.of_the_first(f"the beginning of {self._epoch}", text)
        if not self.is_first:
            states = from_bytes(framework, base64.b64decode(text))
            check_random_states(framework, states, device)()
            for order, state in zip(orders, states["orders"], strict=True):
                if order.is_common and state is not None:
                    with suppress(CheckpointError):
                        order.check_own(state)()

    def notify(self, listeners: Sequence[Callable[..., Any]], *operands: Any) -> None:
        """Call the listeners; keep an error until all processes end together.

        The others are in the next step already, and wait for this process in the engine. A model
        of which each process has a shard can only be gathered by all of them.
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
        found = self._group.gather(f"the checkpoint after {self._epoch}", own)
        self.has_failed = any(has_failed for _, has_failed in found)
        return self.has_failed or any(wanted for wanted, _ in found)

    def end_batches(self) -> None:
        # An engine may wait in what ends an epoch for one that is at another batch, without an end.
        self._group.mark(f"the end of {self._place}")

    def of_the_first(self, label: str, value: Any) -> Any:
        return self._group.gather(label, value)[0]

    def end(self) -> None:
        error = self._failure
        problem = None if error is None else f"{type(error).__name__}: {text_of(error)}"
        self._problems = self._group.gather("the end of the run", problem)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        for rank, problem in enumerate(self._problems):
            if problem is not None:
                raise self._group.make_lost_error(rank, f"it ended with {problem}")
