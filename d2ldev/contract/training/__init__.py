"""The area ``training``: train a model, load its data, and keep the state of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d2ldev.contract.tensors import Tensor
from d2ldev.contract.training.batches import (
    NO_LABEL,
    Portion,
    Sharded,
    Weighted,
    WeightedLoss,
    bounds,
    shard_refusal,
)
from d2ldev.contract.training.calls import (
    Signature,
    TargetRule,
    find_roles,
    separate,
)
from d2ldev.contract.training.steps import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    WEIGHT_DECAY,
    Learner,
    TrainingSettings,
    optimizer_refusal,
    state_refusal,
)
from d2ldev.device import Device
from d2ldev.errors import NotBegunError, UnsupportedValueError, describe

__all__ = [
    "ADAGRAD_EPSILON",
    "ADAM_EPSILON",
    "BETAS",
    "MOMENTUM",
    "NO_LABEL",
    "WEIGHT_DECAY",
    "Learner",
    "Portion",
    "Sharded",
    "Signature",
    "TargetRule",
    "Training",
    "TrainingSettings",
    "Weighted",
    "WeightedLoss",
    "bounds",
    "find_roles",
    "optimizer_refusal",
    "separate",
    "shard_refusal",
    "state_refusal",
]


class Training:
    """Methods a framework implements about training.

    A framework that cannot train leaves all of it out, and says so in ``Framework.cannot``.

    Attributes:
        loader_types: the classes of its loaders, for the methods that take one.
    """

    loader_types: tuple[type, ...] = ()

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        """Return a learner for a placed model; the settings are checked.

        An optimizer object in the settings may be on another device. The learner moves it to the
        model's device: ``place(framework, optimizer, device)``.

        Raises:
            UnsupportedValueError: for a model or an optimizer that the framework does not know. So
                is a name of an optimizer that d2ldev does not have: see ``optimizer_refusal``. For
                a model with nothing to train, unless it is only evaluated.
            NotBegunError: by default.
        """
        raise NotBegunError("Training.learner", f"train {describe(model)}")

    def defaults(self, model: Any) -> tuple[Any, Any]:
        """Return the model's own loss and optimizer, for a user who names neither.

        A compiled Keras model has its own. None stands for a missing loss of such a model.
        """
        return "mse", "sgd"

    def module_class(self, methods: type) -> type:
        """Return D2L's ``Module`` for the framework: a class of models with the methods.

        Called once for ``d2ldev.native``, which names the class.

        Args:
            methods: a class whose ``__init__`` calls the framework's. What the book's ``Module``
                of the framework has otherwise, the returned class overrides.

        Raises:
            UnsupportedValueError: if the framework has no class of models.
        """
        raise UnsupportedValueError(
            "derive a model from d2l.Module",
            "the framework has no class of models",
            "from d2ldev.native import torch as d2l",
        )

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share of labels whose class has the largest logit, and how many count.

        Args:
            prediction: of shape ``(n, ..., classes)``.
            y: integers of any width, of shape ``(n, ...)``. Those that are ``NO_LABEL`` do not
                count.

        Returns:
            Two scalars in float32, on the device. Without a label that counts, both are 0.

        Raises:
            NotBegunError: by default.
        """
        raise NotBegunError("Training.accuracy", "measure the accuracy of a prediction")

    # -- feeding ----------------------------------------------------------------------------------

    def shard_loader(self, loader: Any, rank: int, size: int) -> Any:
        """Return a loader that reads this process's shard of each batch, and yields ``Sharded``.

        Called by ``Trainer.shard_data``. The batches have the same order, and the loader is one of
        ``loader_types``.

        Args:
            loader: of ``loader_types``.
            rank, size: the number of the process, from 0, and how many there are.

        Raises:
            UnsupportedValueError: for a loader whose examples cannot be chosen by number.
        """
        raise shard_refusal(loader)

    def order_of(self, loader: Any) -> list[Any]:
        """Return the objects that decide the order of a loader's batches; None does not count.

        They are the loader, its dataset, its samplers and its generators. One with ``set_epoch`` is
        told the number of each epoch. Processes of the loader with a copy of the dataset are told,
        too, or end. A run saves the state of one with ``get_state`` and ``set_state``. The state is
        a nesting that ``save`` takes; a framework wraps a generator where it is not. With
        ``random_state`` and the random numbers of Python and NumPy it decides the next order.
        ``set_state`` raises a ``CheckpointError`` for a wrong state, and changes nothing then.

        Args:
            loader: of ``loader_types``, or any other data.
        """
        batches = getattr(loader, "batch_sampler", None)
        # A ``batch_sampler`` of the user's has the sampler itself.
        return [
            loader,
            getattr(loader, "dataset", None),
            getattr(loader, "sampler", None),
            batches,
            getattr(batches, "sampler", None),
        ]

    # -- resuming ---------------------------------------------------------------------------------

    def random_state(self, device: Device) -> Any:
        """Return the state of the framework's random numbers, as a nesting that ``save`` takes.

        Of a state that cannot be read, a framework may draw a new seed, set it, and return it.
        """
        return None

    def check_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        """Return a function that restores a random state; nothing changes before its call.

        Raises:
            CheckpointError: if the state is invalid (``state_refusal``).
        """
        return lambda: None
