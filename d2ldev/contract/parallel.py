"""The area ``parallel``: train one model on several devices, or in several processes.

The data yields the global batch, and the framework splits it. The loss is a mean over the global
batch. So the parameters after a step are those of one device, to rounding. A layer or a loss that
looks at the whole batch is an exception: docs/explanation/what-several-gpus-change.md.

Source: D2L, sections 13.5 and 13.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.contract.tensors import Tensor
from d2ldev.contract.training import Learner, TrainingSettings
from d2ldev.device import Device
from d2ldev.errors import D2LDevError, NotBegunError, UnsupportedValueError, describe, text_of
from d2ldev.nesting.walk import join_path
from d2ldev.options import Statistics

if TYPE_CHECKING:
    from d2ldev.contract.group import Group


class Parallel:
    """Methods a framework implements about several devices.

    A framework leaves out the methods that it cannot implement, and names them in
    ``Framework.cannot``: ``learner``, or ``join`` and ``learner_of_group``.

    With ``'train on several GPUs in one process'`` there, ``Trainer.fit`` starts a process for each
    device, and does not call ``learner``.

    Attributes:
        joins_at_start: whether to call ``join`` when the framework is loaded. Some engines have to
            know of the other processes before they look for devices.
    """

    joins_at_start = False

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return a tensor's examples from ``start`` up to ``stop``, on its device; maybe a view.

        Called for each shard of a batch.

        Args:
            x: of shape ``(n, ...)``.
            start, stop: from 0 to n; they may be the same.
        """
        return x[start:stop, ...]  # as the array API has it, for more axes than one

    def twin(self, model: Any) -> Any:
        """Return a copy of a model, on its device, that shares nothing with it.

        Called by ``replicate``, for each device.

        Raises:
            UnsupportedValueError: for what cannot be copied by itself, such as an optimizer, which
                belongs to a model.
        """
        raise twin_refusal(model)

    def reduce(self, obj: Any) -> Any:
        """Return what ``__reduce__`` would: how ``pickle`` creates an object again.

        Called for each object that ``fit`` sends to a process for each device.

        Returns:
            ``NotImplemented`` for what ``pickle`` itself sends.
        """
        return NotImplemented

    def batch_norms(self, model: Any) -> Sequence[BatchNorm]:
        """Return the batch normalizations of a model, and the statistics that they use.

        Called before several devices or processes train it. Also where a shard of a batch would
        have one example, which has no variance.
        """
        return ()

    def learner(self, model: Any, settings: TrainingSettings, devices: Sequence[Device]) -> Learner:
        """Return a model that several devices of this process train.

        Args:
            model: on the first of the devices, where ``sync`` leaves it.
            settings: of the training.
            devices: two or more different ones.

        Returns:
            A learner for the global batch: its inputs, targets, losses and predictions are on the
            first device. A batch may have fewer examples than there are devices.

        Raises:
            UnsupportedValueError: for a model or an optimizer that it cannot train.
            NotBegunError: by default.
        """
        attempted = f"train {describe(model)} on {len(devices)} devices"
        raise NotBegunError("Parallel.learner", attempted)

    # -- several processes ------------------------------------------------------------------------

    def find_launch(self) -> str:
        """Return what says that this process is one of several, beside ``RANK`` and ``WORLD_SIZE``.

        Returns:
            The variable of the framework's own launcher, such as ``TF_CONFIG``. Or the name of the
            engine that the program has started itself, such as ``torch.distributed``. Empty for a
            process alone.
        """
        return ""

    def join(self, group: Group) -> None:
        """Start the framework's own engine between the processes of a group.

        It is called once in each process: when the framework is loaded, with ``joins_at_start``,
        else before the first ``learner_of_group``. ``group.addresses`` has a free address for each
        process. If possible, the engine stops waiting for other processes after ``2 *
        group.timeout`` seconds. The group itself detects a lost process after ``group.timeout``.

        Raises:
            UnsupportedValueError: if the engine cannot be started.
        """

    def gpu_library(self, device: Device) -> tuple[str, str | None]:
        """Return the library that sends data between the GPUs of processes, and the GPU it uses.

        It is called after ``join``, for each GPU on which this process trains. Such a library needs
        a different GPU for each process.

        Returns:
            The name of the library, such as ``'NCCL'``, and an identifier of the GPU, such as
            ``'GPU-8932...'``. It is the same in all processes. None if nobody says it: an index
            names another GPU in each process that may see some of them only. The name is empty if
            the data goes through the host's memory. Then processes may share a GPU, or use the CPU.
        """
        return "", None

    def learner_of_group(self, model: Any, settings: TrainingSettings, group: Group) -> Learner:
        """Return a model that this process and the others of a group train together.

        It is called in all processes. They begin with the parameters of rank 0.

        Args:
            model: on this process's device, where ``sync`` leaves it.
            settings: of the training.
            group: the processes; ``join`` has started their engine. Without an engine,
                ``group.gather('the gradients', values)`` alone suffices. It sends what JSON holds.
                Name the exchange of a step ``'the gradients'``: errors about a lost process quote
                it.

        Returns:
            A learner for this process's shard of a batch: inputs, targets, losses and predictions.
            The loss of a step may be that of the whole batch, in all processes. Its ``weight`` is
            always this process's part of the batch's weight. ``portion`` is set before each
            ``step``. A step uses the gradients of the mean over the whole batch,
            clipped by their global norm. So all processes have the same parameters after it.
            ``evaluate``, ``predict`` and ``components`` belong to this process alone.

        Raises:
            UnsupportedValueError: for a model or an optimizer that it cannot train.
            NotBegunError: by default.
        """
        attempted = f"train {describe(model)} in {group.size} processes"
        raise NotBegunError("Parallel.learner_of_group", attempted)


class BatchNorm(NamedTuple):
    """A batch normalization in a model.

    Args:
        name: the name of the layer, for an error.
        statistics: ``'global'`` for the statistics of the whole batch, ``'local'`` for those of a
            shard.
        fix: what gives the layer the other ones; empty if nothing does.
    """

    name: str
    statistics: Statistics
    fix: str = ""


def check_batch_norms(found: Iterable[BatchNorm], wanted: Statistics) -> None:
    """Check that batch normalizations use the requested statistics.

    Raises:
        UnsupportedValueError: if one has the other statistics.
    """
    for name, statistics, fix in found:
        if statistics != wanted:
            whose = {"global": "the whole batch", "local": "a shard of the batch"}
            none = "" if fix else f", and no layer of the framework has those of {whose[wanted]}"
            raise UnsupportedValueError(
                f"train with batch_norm={wanted!r}",
                f"the statistics of {name} are those of {whose[statistics]}{none}",
                fix or f"batch_norm={statistics!r}, or leave batch_norm out",
            )


def least_examples(found: Iterable[BatchNorm]) -> int:
    """Return the smallest number of examples in a shard from which a model learns."""
    return 2 if any(each.statistics == "local" for each in found) else 1


def gpu_of_process(there: int, local_rank: int) -> int:
    """Return the index of the GPU on which a process trains, if there are ``there`` GPUs.

    A launcher may show each process its own GPU only; a virtual one is the process's own, too.
    """
    return 0 if there == 1 else local_rank


_TWIN_FIX = "backend.replicate(net, devices), and an optimizer for each of them"


def twin_refusal(
    obj: Any,
    problem: str = "it is not a model, which can be copied by itself",
    fix: str = _TWIN_FIX,
) -> UnsupportedValueError:
    """Return the error for an object that cannot be replicated."""
    return UnsupportedValueError(f"replicate {describe(obj)}", problem, fix)


def deep_copy(model: Any, memo: dict[int, Any]) -> Any:
    """Return what ``copy.deepcopy`` makes of a model.

    Args:
        memo: the copies that there are already, by the ids of what they are of.

    Raises:
        UnsupportedValueError: if something in it cannot be copied, with its name.
    """
    import copy  # Python's own looks for a package of Jython's when it is imported

    try:
        return copy.deepcopy(model, {**memo})
    except (D2LDevError, MemoryError):
        raise
    except Exception as error:  # whatever a class's own methods raise
        name = first_failure(model, lambda each: copy.deepcopy(each, {**memo}))
        raise twin_refusal(
            model,
            f"copy.deepcopy fails at {name or 'the model itself'}: {text_of(error)}",
            "give the class of what fails a __deepcopy__, or make a model for each device",
        ) from error


def first_failure(x: Any, attempt: Callable[[Any], object]) -> str:
    """Return the dotted name of the innermost value of an object at which a function fails.

    Args:
        x: an object at which it fails.
        attempt: the function, such as ``copy.deepcopy``.

    Returns:
        Names of attributes, keys and indices; empty if it fails at ``x`` and at nothing inside.
    """
    return _first_failure(x, attempt, {id(x)})


def _first_failure(x: Any, attempt: Callable[[Any], object], seen: set[int]) -> str:
    for label, value in _members_of(x):
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            attempt(value)
        except Exception:
            name = _first_failure(value, attempt, seen)
            return join_path(str(label), name) if name else str(label)
    return ""


def _members_of(x: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(x, (list, tuple)):
        return enumerate(x)
    return list((x if isinstance(x, dict) else getattr(x, "__dict__", {})).items())
