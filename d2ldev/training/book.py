"""The classes of D2L's package that its chapters build on, for ``d2ldev.native``.

The chapters print their additions to these classes. The book's own models, such as its ``MLP``, are
not here.

Source: D2L, section 3.2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from d2ldev.errors import UnsupportedValueError
from d2ldev.training.module import read_arguments


class HyperParameters:
    """A base class that stores the arguments of a method as attributes."""

    hparams: dict[str, Any]

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Store the arguments of the calling method as attributes, and in ``hparams``.

        Args:
            ignore: names to leave out. Names with a leading underscore are always left out.
        """
        self.hparams = read_arguments(sys._getframe(1), ignore)
        for name, value in self.hparams.items():
            setattr(self, name, value)


class ProgressBoard:
    """A board that stores the points of a plot, and shows no figure.

    Attributes:
        xlabel: the label of the axis ``x``.
        xlim: the first and the last ``x``; the book's ``Trainer.prepare_model`` sets it.
        points: label -> the points, each ``(x, y)``.
    """

    xlabel: str | None = None
    xlim: Sequence[float] | None = None

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[float, float]]] = {}
        self._waiting: dict[str, list[tuple[float, float]]] = {}

    def draw(self, x: float, y: float, label: str, every_n: int = 1) -> None:
        """Store a point, or the mean of each ``every_n`` points."""
        waiting = self._waiting.setdefault(label, [])
        waiting.append((x, y))
        if len(waiting) >= every_n:
            xs, ys = zip(*waiting, strict=True)
            waiting.clear()
            mean = sum(xs) / len(xs), sum(ys) / len(ys)
            self.points.setdefault(label, []).append(mean)


class DataModule(HyperParameters):
    """Data with a loader for training and a loader for evaluation.

    Args:
        root: the folder that a subclass reads.
        num_workers: the number of processes of a subclass's loader.
    """

    def __init__(self, root: str = "../data", num_workers: int = 4) -> None:
        self.save_hyperparameters()

    def get_dataloader(self, train: bool) -> Any:
        """Return the batches to train on, or to evaluate on. Override it."""
        raise NotImplementedError(f"def get_dataloader(self, train): ... in {type(self).__name__}")

    def train_dataloader(self) -> Any:
        """Return the batches to train on."""
        return self.get_dataloader(train=True)

    def val_dataloader(self) -> Any:
        """Return the batches to evaluate on."""
        return self.get_dataloader(train=False)


class ModuleMethods(HyperParameters):
    """The methods of D2L's ``Module``, for a framework's class of models.

    A subclass sets ``net``, or overrides ``forward``. It defines ``loss`` and
    ``configure_optimizers``.

    Args:
        plot_train_per_epoch: the number of points of the training loss in each epoch.
        plot_valid_per_epoch: the number of points of the validation loss in each epoch.
    """

    board_class = ProgressBoard
    trainer: Any
    net: Any
    plot_train_per_epoch: int
    plot_valid_per_epoch: int

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()  # of the framework's class
        self.save_hyperparameters()
        self.board = self.board_class()

    def loss(self, y_hat: Any, y: Any) -> Any:
        """Return the loss of a prediction. Override it."""
        raise NotImplementedError(f"def loss(self, y_hat, y): ... in {type(self).__name__}")

    def configure_optimizers(self) -> Any:
        """Return the optimizer of the parameters. Override it."""
        name = type(self).__name__
        raise NotImplementedError(f"def configure_optimizers(self): ... in {name}")

    def forward(self, X: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        """Return the prediction of ``self.net``."""
        return self.net(X, *args, **kwargs)

    def plot(self, key: str, value: Any, train: bool) -> None:
        """Draw a scalar tensor on the board; this waits for the device, as in the book."""
        trainer, board = self.trainer, self.board
        board.xlabel = "epoch"
        if train:
            n = trainer.num_train_batches / self.plot_train_per_epoch
            x = trainer.train_batch_idx / max(trainer.num_train_batches, 1)
        else:
            n = trainer.num_val_batches / self.plot_valid_per_epoch
            x = trainer.epoch + 1
        try:
            y = float(trainer.backend.to_numpy(value))
        except UnsupportedValueError:
            return  # a value that is only traced, as by TensorFlow's step on several GPUs
        board.draw(x, y, ("train_" if train else "val_") + key, every_n=int(n))

    def training_step(self, batch: Any) -> Any:
        """Return the loss of a batch, and plot it."""
        value = self.loss(self(*batch[:-1]), batch[-1])  # type: ignore[operator]
        self.plot("loss", value, train=True)
        return value

    def validation_step(self, batch: Any) -> Any:
        """Return the loss of a batch of the validation data, and plot it."""
        value = self.loss(self(*batch[:-1]), batch[-1])  # type: ignore[operator]
        self.plot("loss", value, train=False)
        return value
