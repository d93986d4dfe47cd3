"""Check the settings of a training, make its learner, and measure its accuracy."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from d2ldev.contract import Framework, Learner, Tensor, TrainingSettings
from d2ldev.contract.abilities import require
from d2ldev.contract.parallel import check_batch_norms
from d2ldev.device import CPU, Device
from d2ldev.distributed.membership import join_group
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.kinds import OBJECT
from d2ldev.operations import creation, moving
from d2ldev.operations.arguments import class_refusal
from d2ldev.operations.inventory import list_named_tensors
from d2ldev.operations.mixing import mismatch, operands_of
from d2ldev.operations.other_backends import function_of_another_backend, of_another_backend
from d2ldev.options import Loss
from d2ldev.training.functions import output_refusal
from d2ldev.training.objective import check_shapes_of_labels
from d2ldev.typing import Inputs

if TYPE_CHECKING:
    from d2ldev.contract.group import Group

_LEARNING_RATE = 0.01


def complete(
    framework: Framework,
    model: Any,
    settings: TrainingSettings,
    *,
    loss: Loss | None,
    lr: float | None,
    is_trained: bool,
) -> TrainingSettings:
    """Return the settings, completed with those of a compiled model, with Python's own numbers.

    Args:
        framework: whose model it is.
        model: as it was given.
        settings: as they were given, except for the loss and the learning rate. None as the
            optimizer is the model's own.
        loss: None is the model's own.
        lr: the learning rate; None is 0.01, or the optimizer's own.
        is_trained: whether it is, or only evaluated.

    Raises:
        UnsupportedValueError: if nobody has given a loss, or something was given that would have
            no effect.
    """
    attempted = f"{'train' if is_trained else 'evaluate'} {type(model).__name__}"
    for given in (model, settings.optimizer):
        # An optimizer of optax is a container of functions.
        if framework.state.kinds[type(given)] is not OBJECT:
            foreign = of_another_backend(framework, attempted, given)
            if foreign is not None:
                raise foreign
    if isinstance(loss, type):
        raise class_refusal(f"{attempted} with the loss {describe(loss)}", loss, "loss")
    if callable(loss):
        fix = f"a function of the {framework.name} backend's own tensors, or loss='mse'"
        foreign = function_of_another_backend(framework, attempted, loss, fix=fix)
        if foreign is not None:
            raise foreign
    optimizer = settings.optimizer
    lacks_optimizer = is_trained and optimizer is None
    if loss is None or lacks_optimizer:
        # Only then: a model may have been compiled with values that d2ldev cannot use.
        default_loss, default_optimizer = framework.training.defaults(model)
        loss = default_loss if loss is None else loss
        optimizer = default_optimizer if lacks_optimizer else optimizer
    if loss is None:
        raise UnsupportedValueError(
            f"train {describe(model)}",
            "it was compiled without a loss",
            "model.compile(..., loss='mse'), or fit(..., loss='mse')",
        )
    # The framework refuses a class or a function of an optimizer, with this rate in the fix.
    is_made = not isinstance(optimizer, (str, type, FunctionType, partial))
    if is_trained and lr is not None and is_made:
        compiled = "the optimizer that it was compiled with"
        raise UnsupportedValueError(
            f"train {describe(model)} with lr={describe(lr)}",
            f"{compiled if lacks_optimizer else describe(optimizer)} has a learning rate of "
            "its own",
            "leave lr out",
        )
    rate = _LEARNING_RATE if lr is None else lr
    checked = check_settings(framework, settings._replace(loss=loss, optimizer=optimizer, lr=rate))
    if not is_trained:
        of_training = {
            "optimizer": optimizer is not None,
            "lr": lr is not None,
            "gradient_clip_val": checked.gradient_clip_val > 0,
            "accumulate_grad_batches": checked.accumulate_grad_batches > 1,
        }
        ignored = ", ".join(f"{name}=" for name, is_given in of_training.items() if is_given)
        if ignored:
            raise UnsupportedValueError(
                f"evaluate {describe(model)} with {ignored}",
                "with is_trained=False nothing would look at it",
                f"leave out {ignored}, or is_trained=False",
            )
    return checked


def make_learner(
    framework: Framework,
    model: Any,
    settings: TrainingSettings,
    devices: Sequence[Device],
    group: Group | None,
) -> Learner:
    """Return a model that is trained step by step; see ``Backend.learner``.

    Args:
        framework: whose model it is.
        model: placed already.
        settings: those that ``complete`` returned.
        devices: those that train it together; none is the one where the model is.
        group: the processes that train it together.

    Raises:
        UnsupportedValueError: if the framework cannot train it, or not so.
    """
    if group is not None and group is not join_group(framework):
        raise UnsupportedValueError(
            f"train with group={describe(group)}",
            "it is not the group of this process",
            "group=backend.join_group(), in a process of d2ldev launch",
        )
    are_several = group is not None or len(devices) > 1
    if are_several or settings.accumulate_grad_batches > 1:
        _check_reduction(settings)
    if settings.batch_norm is not None and are_several:
        check_batch_norms(framework.parallel.batch_norms(model), settings.batch_norm)
    if group is not None:
        from d2ldev.distributed.portions import check_devices  # only a launch needs it

        tensors = list_named_tensors(framework, model)
        places = devices or [framework.tensors.device_of(x) for _, x in tensors]
        check_devices(framework, group, places)
        made = framework.parallel.learner_of_group(model, settings, group)
        _require_portion(made)
        return made
    if len(devices) < 2:
        return framework.training.learner(model, settings)
    attempted = f"train on {len(devices)} devices"
    fix = f"one device: devices=['{devices[0]}'], or gpus = ['{devices[0]}'] of a Trainer"
    for ability in ("train on several GPUs", "train on several GPUs in one process"):
        require(framework, ability, attempted, fix)
    return framework.parallel.learner(model, settings, devices)


def _check_reduction(settings: TrainingSettings) -> None:
    """Refuse a loss that returns a sum if several shards or batches make a step.

    Losses of torch and Keras have the attribute ``reduction``, and torch's functions an argument.
    """
    loss = settings.loss
    reduction = None if settings.methods else getattr(loss, "reduction", None)
    if isinstance(loss, partial):
        reduction = loss.keywords.get("reduction")
    if reduction in ("sum", "mean_with_sample_weight"):
        raise UnsupportedValueError(
            f"train with the loss {describe(loss)} where several shards or batches make a step",
            f"its reduction is {reduction!r}, and its values count as means over the examples",
            "a loss with reduction='mean', or a function that returns "
            "d2ldev.WeightedLoss(sum, weight)",
        )


def needs_processes(framework: Framework) -> bool:
    """Return whether several GPUs of one machine need a process for each GPU."""
    others = "train on several GPUs", "train in several processes"
    is_possible = not any(each in framework.cannot for each in others)
    return is_possible and "train on several GPUs in one process" in framework.cannot


def _require_portion(learner: Learner) -> None:
    """Let the first step of several processes refuse to train without ``learner.portion``."""
    # The learner does not refer to itself: a cycle would keep the processes' engine alive.
    reference = weakref.ref(learner)

    def check_and_step(inputs: Inputs, y: Any) -> tuple[Any, Any]:
        learner: Any = reference()
        if learner.portion is None:
            raise UnsupportedValueError(
                "take a step in several processes",
                "the learner does not know the shard of the batch that this process has",
                "Trainer(max_epochs=1).fit(model, data), which reads it from the data",
            )
        del vars(learner)["step"]
        found: tuple[Any, Any] = learner.step(inputs, y)
        return found

    if "step" not in vars(learner):  # a learner without an optimizer refuses each step
        vars(learner)["step"] = check_and_step


def check_settings(framework: Framework, settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of a training with Python's own numbers.

    Raises:
        UnsupportedValueError: if they cannot be used, or the framework cannot train with them.
    """
    settings = settings.check()
    if callable(settings.loss) or settings.loss == "model":
        attempted = f"train with the loss {describe(settings.loss)}"
        require(framework, "train with a loss of your own", attempted, "loss='mse'")
    precision = settings.precision
    require(framework, f"train in {precision}", f"train with precision={precision!r}")
    return settings


def accuracy(framework: Framework, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of labels whose class has the largest logit, and how many labels count.

    See ``Backend.accuracy``.
    """
    attempted = "measure the accuracy of a prediction"
    if isinstance(prediction, (Mapping, tuple, list)):
        raise output_refusal(attempted, prediction, "metrics")
    for x in (prediction, y):
        creation.require_tensor(framework, x, attempted)
    require(framework, "train", attempted)
    rows = creation.shape_of(prediction, attempted, is_known=False)
    shape = creation.shape_of(y, attempted, is_known=False)
    check_shapes_of_labels(rows, shape, framework.tensors.dtype_of(y))
    try:
        return framework.training.accuracy(prediction, y)
    except Exception as error:  # of sparse tensors above all
        operands = operands_of(framework, (), {"prediction": prediction, "y": y})
        if len({device for _, device in operands}) > 1:
            raise mismatch("accuracy", operands) from error
        native = framework.devices.native(CPU)
        ours = moving.copy_refusal(framework, error, attempted, native, [prediction, y])
        if ours is None:
            raise
        raise ours from error
