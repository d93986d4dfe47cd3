"""What a type checker says of ``Trainer``, its data and its callbacks.

mypy and pyright read it: ``tox -e types``. Each ``type: ignore`` is an error that both have to
find. Nothing here is run.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, TensorDataset

from d2ldev import (
    ArrayLoader,
    Backend,
    Broadcast,
    CSVLogger,
    Device,
    DeviceLog,
    EarlyStopping,
    Schedule,
    TensorBoardLogger,
    Trainer,
    backend,
    backend_of,
)
from d2ldev import torch as d2l
from d2ldev.framework import Learner
from d2ldev.typing import Callback, DataModule, History

Batch = tuple[torch.Tensor, torch.Tensor]


def show(epoch: int, history: History) -> None:
    """Show an epoch."""


def show_without_types(number, numbers):
    print(number, numbers)


class Watcher:
    """A callback with both hooks, whose parameters have names of its own."""

    def on_step_end(self, number: int, value: torch.Tensor) -> None:
        print(number, value.item())

    def on_epoch_end(self, number: int, numbers: History) -> bool:
        return number in range(len(numbers))


class StepWatcher:
    """A callback with one hook."""

    def on_step_end(self, step: int, loss: torch.Tensor) -> None:
        print(step, loss.item())


class WrongWatcher:
    """An object without a hook that the Trainer calls."""

    def on_train_end(self) -> None:
        print("end")


class WrongHook:
    """A hook that takes something else."""

    def on_epoch_end(self, epoch: int) -> None:
        print(epoch)


def check_callbacks(path: str, scheduler: torch.optim.lr_scheduler.StepLR) -> None:
    Trainer(1, callbacks=show)
    Trainer(1, callbacks=show_without_types)
    Trainer(1, callbacks=lambda epoch, history: print(epoch, history["loss"][-1]))
    Trainer(1, callbacks=Watcher())
    Trainer(1, callbacks=StepWatcher())
    Trainer(1, callbacks=[show, Watcher(), StepWatcher()])
    Trainer(1, callbacks=(EarlyStopping(), Schedule(scheduler), CSVLogger(path)))
    Trainer(1, callbacks=TensorBoardLogger(path))
    Trainer(1, callbacks=None)
    watchers = [Watcher(), Watcher()]
    Trainer(1, callbacks=watchers)
    callback: Callback = Watcher()
    Trainer(1, callbacks=callback)
    Trainer(1, callbacks=3)  # type: ignore[arg-type]
    Trainer(1, callbacks="show")  # type: ignore[arg-type]
    Trainer(1, callbacks=WrongWatcher())  # type: ignore[arg-type]
    Trainer(1, callbacks=WrongHook())  # type: ignore[arg-type]
    Trainer(1, callbacks=EarlyStopping)  # type: ignore[arg-type]
    Trainer(1, callbacks=[show, 3])  # type: ignore[list-item]
    Trainer(1, callbacks=lambda epoch: print(epoch))  # type: ignore[arg-type]
    Trainer(1, callbacks=scheduler)  # type: ignore[arg-type]
    Schedule(3)  # type: ignore[arg-type]


class Data:
    """A data module of a user's program."""

    def train_dataloader(self) -> DataLoader[Batch]:
        X = torch.ones(4, 1)  # noqa: N806
        return DataLoader(TensorDataset(X, X))  # type: ignore[arg-type]

    def val_dataloader(self) -> list[Batch]:
        return []


class DataOfTheBook:
    """A data module as the book has it, without types."""

    def train_dataloader(self):
        return []


class NoData:
    """An object without batches."""


def check_fit(trainer: Trainer, net: torch.nn.Module, X: torch.Tensor, n: int) -> None:  # noqa: N803
    loader = DataLoader(TensorDataset(X, X))
    arrays = ArrayLoader(np.ones((4, 1)), X, batch_size=2)
    history = trainer.fit(net, [(X, X)])
    assert_type(history, History)
    assert_type(history["loss"], list[float])
    trainer.fit(net, loader, loader)
    trainer.fit(net, arrays, val_data=[{"x": X, "y": X}])
    trainer.fit(net, (batch for batch in [(X, X)]))
    trainer.fit(net, Data(), metrics=["accuracy", lambda prediction, y: (prediction - y).mean()])
    trainer.fit(net, DataOfTheBook())
    data: DataModule = Data()
    trainer.fit(net, data, arrays)
    trainer.fit(net, n)  # type: ignore[arg-type]
    trainer.fit(net, NoData())  # type: ignore[arg-type]
    trainer.fit(net, arrays, Data())  # type: ignore[arg-type]
    assert_type(trainer.validate(net, loader), dict[str, float])
    assert_type(trainer.validate(net, Data()), dict[str, float])
    trainer.validate(net, n)  # type: ignore[arg-type]
    assert_type(trainer.predict(net, [X, (X, X)]), list[Any])
    trainer.predict(net, NoData())  # type: ignore[arg-type]
    assert_type(trainer.shard_data([(X, X)]), Iterable[Batch])
    trainer.fit(net, trainer.shard_data(loader))


def check_attributes(trainer: Trainer) -> None:
    assert_type(trainer.device, Device)
    assert_type(trainer.history, History)
    assert_type(trainer.train_dataloader, Iterable[Any])
    assert_type(trainer.backend, Backend[Any, Any])
    assert_type(trainer.num_train_batches, int)
    trainer.callbacks = [show]
    trainer.gpus = ["gpu:0", torch.device("cuda:1")]
    trainer.should_stop = True
    trainer.callbacks = 3  # type: ignore[assignment]


class UsersTrainer(Trainer):
    """A subclass with types of its own."""

    def __init__(self, max_epochs: int) -> None:
        self.save_hyperparameters()
        self.gpus = [d2l.gpu(0)]

    def prepare_data(self, data: Data) -> None:
        self.train_dataloader = data.train_dataloader()
        self.val_dataloader = data.val_dataloader()

    def prepare_model(self, model: torch.nn.Module) -> None:
        self.model = model.to("cuda")

    def prepare_batch(self, batch: Batch) -> list[torch.Tensor]:
        return [d2l.to(each, self.device) for each in batch]

    def on_step_end(self, step: int, loss: torch.Tensor) -> None:
        print(step, loss.item())

    def on_epoch_end(self, epoch: int, history: History) -> None:
        self.should_stop = epoch > 3 and history["loss"][-1] < 1


def add_to_class(cls: type) -> Callable[[Callable[..., Any]], None]:
    """Return the book's decorator, which makes a function a method of a class."""

    def add(function: Callable[..., Any]) -> None:
        setattr(cls, function.__name__, function)

    return add


@add_to_class(Trainer)
def prepare_batch(self: Trainer, batch: Batch) -> list[torch.Tensor]:
    return [d2l.to(each, self.device) for each in batch]


@add_to_class(UsersTrainer)
def fit_epoch(self):
    self.model.train()


def check_log(X: torch.Tensor, net: torch.nn.Module) -> None:  # noqa: N803
    log = DeviceLog(d2l, torch.device("cpu"), every=2)
    assert_type(log, DeviceLog[torch.Tensor])
    log.add(len(X), loss=X.mean(), rate=0.1, count=np.float32(3), number=np.ones(()))
    log.add(loss="0.1")  # type: ignore[arg-type]
    assert_type(log.flush(), dict[str, list[float]])
    assert_type(log.means(), dict[str, float])
    log_of_any = DeviceLog(backend)
    assert_type(log_of_any, DeviceLog[Any])
    log_of_any.add(loss=backend.ones(()))
    DeviceLog("torch")  # type: ignore[arg-type]


def check_data(X: torch.Tensor, array: npt.NDArray[np.float32], sizes: Sequence[int]) -> None:  # noqa: N803
    loader = ArrayLoader(X, array, batch_size=2, shuffle=True)
    assert_type(iter(loader), Iterator[tuple[Any, ...]])
    ArrayLoader(sizes, batch_size=2)  # type: ignore[arg-type]
    assert_type(Broadcast([1, 2]).value, list[int])
    assert_type(backend_of(X), Backend[Any, Any])
    backend_of("x")  # type: ignore[arg-type]


def check_learner(net: torch.nn.Module, X: torch.Tensor) -> None:  # noqa: N803
    learner = d2l.learner(net)
    assert_type(learner, Learner[torch.Tensor])
    assert_type(learner.step((X,), X), tuple[torch.Tensor, Any])
    learner.step((X,), 3)  # type: ignore[arg-type]
