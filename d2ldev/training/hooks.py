"""The book's hooks, which a user overrides, patches onto the class or sets on a trainer.

Source: D2L, sections 3.2.4 and 6.7.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from d2ldev._backend import Backend
from d2ldev.active import backend as handle
from d2ldev.areas import Learner
from d2ldev.device import CPU, Device
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.training.callbacks import list_listeners
from d2ldev.typing import Callback, DeviceLike, History


class TrainerState:
    """What the hooks find on a ``Trainer``, and the hooks themselves.

    It has no ``__init__``, which the book's would not call.
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
        """The device that it trains on: the first of ``gpus``, else the CPU."""
        return self.backend.device(self.gpus[0]) if self.gpus else CPU

    @device.setter
    def device(self, device: DeviceLike) -> None:
        place = self.backend.device(device)
        self.gpus = [] if place is CPU else [place]

    @property
    def model(self) -> Any:
        """The model as it is after the last step; None before ``fit``.

        Go on with it: some frameworks move the model itself, and others make a new one. A
        ``prepare_model`` that returns nothing sets it to what is to be trained, as the book's does.
        """
        if self._learner is None:
            return self._model
        self._learner.sync()
        return self._learner.model

    @model.setter
    def model(self, model: Any) -> None:
        self._model, self._learner = model, None

    def prepare_data(self, data: Any) -> None:
        """Get the loaders of a ``DataModule``, once and before anything else; to be overridden."""
        if not callable(getattr(data, "train_dataloader", None)):
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
        """Move the model to the device, once, before the first batch; to be overridden."""
        return self.backend.place(model, self.device)

    def prepare_batch(self, batch: Any) -> Any:
        """Move a batch to the device, at the boundary of the loop; to be overridden."""
        return self.backend.to(batch, self.device)

    def on_step_end(self, step: int, loss: Any) -> None:
        """Do nothing after a step of the optimizer; to be overridden, or that of a callback.

        ``self.model`` is the model after it; in JAX, the user's own object is brought up to date
        when the epoch ends.

        Args:
            step: the number of its batch in the run, from 0; with
                ``accumulate_grad_batches``, of its last one.
            loss: of that batch before the step, a scalar tensor on the device. To read it waits for
                the device.
        """

    def on_epoch_end(self, epoch: int, history: History) -> None:
        """Do nothing after an epoch; to be overridden, or given as ``callback``.

        Its changes of the model and the optimizer are in the checkpoint, which is saved afterwards.
        An exception in it ends the run; the checkpoint is then that of the epoch before.
        """

    def _find_prepared_model(self, model: Any) -> Any:
        """Return what ``prepare_model`` returned, or has set ``self.model`` to, as the book's."""
        self._model = None
        prepared = self.prepare_model(model)
        if prepared is None:
            prepared = self._model
        if prepared is None:
            raise UnsupportedValueError(
                f"train {describe(model)}",
                f"{type(self).__name__}.prepare_model returned None, and has set no self.model",
                "return the model from it, placed: return self.backend.place(model, self.device)",
            )
        return prepared


# As they are before any user patches the class, as the book's ``add_to_class`` does.
_HOOKS = {
    name: getattr(TrainerState, name)
    for name in ("prepare_data", "prepare_model", "prepare_batch", "on_step_end", "on_epoch_end")
}


def prepare_batch(trainer: TrainerState, batch: Any) -> Any:
    """Return what ``prepare_batch`` returned."""
    prepared = trainer.prepare_batch(batch)
    if prepared is None:
        raise UnsupportedValueError(
            f"train on a batch, {describe(batch)}",
            f"{type(trainer).__name__}.prepare_batch returned None",
            "return the batch from it: return self.backend.to(batch, self.device)",
        )
    return prepared


def is_overridden(trainer: TrainerState, hook: str) -> bool:
    """Tell whether a hook is the user's: of a class, of this object, or patched onto this."""
    return getattr(getattr(trainer, hook), "__func__", None) is not _HOOKS[hook]


def find_listeners(
    trainer: TrainerState, callbacks: Sequence[Callback], hook: str
) -> list[Callable[..., Any]]:
    """Return what is called for a hook, in order: the trainer's own first."""
    own = [getattr(trainer, hook)] if is_overridden(trainer, hook) else []
    return [*own, *list_listeners(callbacks, hook)]
