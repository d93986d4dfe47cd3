"""The book's hooks: override them, patch them onto the class, or set them on a trainer.

Source: D2L, sections 3.2.4 and 6.7.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from d2ldev._backend import Backend
from d2ldev.active import backend as handle
from d2ldev.contract import Learner
from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.training.callbacks import list_listeners
from d2ldev.training.module import is_data_module
from d2ldev.typing import Callback, DeviceLike, History


class TrainerState:
    """The attributes of a ``Trainer`` for its hooks, and the hooks.

    It has no ``__init__``, because the book's ``__init__`` would not call it.
    """

    backend: Backend = handle
    gpus: Sequence[DeviceLike] = ()
    epoch = train_batch_idx = val_batch_idx = num_train_batches = num_val_batches = 0
    should_stop: bool = False
    history: History
    train_dataloader: Iterable[Any]
    val_dataloader: Iterable[Any] | None
    _learner: Learner | None = None
    _model: Any = None

    @property
    def device(self) -> Device:
        """The device that it trains on: the first of ``gpus``, or the CPU."""
        return self.backend.device(self.gpus[0]) if self.gpus else CPU

    @device.setter
    def device(self, device: DeviceLike) -> None:
        place = self.backend.device(device)
        self.gpus = [] if place is CPU else [place]

    @property
    def model(self) -> Any:
        """The model after the last step; None before ``fit``.

        Use it from then on. Some frameworks move the model itself, and others make a new one. A
        ``prepare_model`` that returns nothing sets it to the placed model, as in the book.
        """
        if self._learner is None:
            return self._model
        return self._learner.sync()["model"]

    @model.setter
    def model(self, model: Any) -> None:
        self._model, self._learner = model, None

    def prepare_data(self, data: Any) -> None:
        """Set the two loaders from a ``DataModule``, once and first. You may override it.

        Args:
            data: an object with ``train_dataloader()``; its ``val_dataloader()`` is optional.

        Raises:
            UnsupportedValueError: if it has no loader.

        >>> class Data:
        ...     def train_dataloader(self):
        ...         return [(np.ones((8, 2), 'float32'), np.zeros((8, 1), 'float32'))]
        >>> history = d2ldev.Trainer(1).fit(backend.mlp([2, 1]), Data())
        """
        if not is_data_module(data):
            raise UnsupportedValueError(
                f"get the loaders of {describe(data)}",
                "it has no train_dataloader, as a DataModule has",
                "trainer.fit(model, batches) takes the batches themselves",
            )
        self.train_dataloader = data.train_dataloader()
        if self.train_dataloader is None:
            raise UnsupportedValueError(
                f"get the loaders of {describe(data)}",
                f"{type(data).__name__}.train_dataloader returned None",
                "return the loader from it: return self.get_dataloader(train=True)",
            )
        self.val_dataloader = data.val_dataloader() if hasattr(data, "val_dataloader") else None

    def prepare_model(self, model: Any) -> Any:
        """Return the model on the device, before its first batch. You may override it.

        Args:
            model: the model that ``fit``, ``validate`` or ``predict`` got.

        >>> net = d2ldev.Trainer(1, num_gpus=1).prepare_model(backend.mlp([2, 1]))
        >>> set(backend.placement(net).values())
        {Device('gpu', 0)}
        """
        return self.backend.place(model, self.device)

    def prepare_batch(self, batch: Any) -> Any:
        """Return a batch on the device; called once for each batch. You may override it.

        Args:
            batch: a batch of the data.

        >>> class Scaled(d2ldev.Trainer):
        ...     def prepare_batch(self, batch):
        ...         X, y = batch
        ...         return super().prepare_batch((X / 255, y))
        """
        return self.backend.to(batch, self.device)

    def on_step_end(self, step: int, loss: Any) -> None:
        """Do nothing after a step of the optimizer. Override it, or define it in a callback.

        ``self.model`` is the model after the step. JAX updates the user's own object at the end of
        the epoch.

        Args:
            step: the number of the batch in the run, from 0. With ``accumulate_grad_batches``, the
                number of the step's last batch.
            loss: the loss of that batch before the step, a scalar tensor on the device. Reading
                its value waits for the device.

        >>> class Impatient(d2ldev.Trainer):
        ...     def on_step_end(self, step, loss):
        ...         self.should_stop = step == 99
        """

    def on_epoch_end(self, epoch: int, history: History) -> None:
        """Do nothing after an epoch. Override it, or define it in a callback.

        The checkpoint of the epoch is saved afterwards, with your changes of the model and the
        optimizer. An exception ends the run, and leaves the checkpoint of the epoch before.

        Args:
            epoch: the number of the epoch, from 0.
            history: the history so far, with this epoch.

        >>> class Talkative(d2ldev.Trainer):
        ...     def on_epoch_end(self, epoch, history):
        ...         print(epoch, history['loss'])
        >>> X, y = np.zeros((8, 2), 'float32'), np.zeros((8, 1), 'float32')
        >>> history = Talkative(1).fit(backend.mlp([2, 1]), [(X, y)])
        0 [0.0]
        """

    def _call_prepare_model(self, model: Any) -> Any:
        """Return the result of ``prepare_model``, or the ``self.model`` that it set."""
        self._model = None
        model_on_device = self.prepare_model(model)
        if model_on_device is None:
            model_on_device = self._model
        if model_on_device is None:
            if model is None:
                problem, fix = "None is not a model", "trainer.fit(net, data)"
                raise UnsupportedValueError("train None", problem, fix)
            raise UnsupportedValueError(
                f"train {describe(model)}",
                f"{type(self).__name__}.prepare_model returned None, and has set no self.model",
                "return the model from it, placed: return self.backend.place(model, self.device)",
            )
        return model_on_device


# The book's ``add_to_class`` patches the class later.
_HOOKS = {
    name: getattr(TrainerState, name)
    for name in ("prepare_data", "prepare_model", "prepare_batch", "on_step_end", "on_epoch_end")
}


def call_prepare_batch(trainer: TrainerState, batch: Any) -> Any:
    """Return the result of ``prepare_batch``; None is an error."""
    result = trainer.prepare_batch(batch)
    if result is None:
        raise UnsupportedValueError(
            f"train on a batch, {describe(batch)}",
            f"{type(trainer).__name__}.prepare_batch returned None",
            "return the batch from it: return self.backend.to(batch, self.device)",
        )
    return result


def is_overridden(trainer: TrainerState, hook: str) -> bool:
    """Return whether a hook is the user's: in a subclass, on the class, or on the object."""
    return getattr(getattr(trainer, hook), "__func__", None) is not _HOOKS[hook]


def find_listeners(
    trainer: TrainerState, callbacks: Sequence[Callback], hook: str
) -> list[Callable[..., Any]]:
    """Return the functions to call for a hook, in order: the trainer's own first."""
    own = [getattr(trainer, hook)] if is_overridden(trainer, hook) else []
    return [*own, *list_listeners(callbacks, hook)]
