"""What mypy says of options that are text: each ``type: ignore`` is an error that it has to find.

``mypy --strict`` refuses one that ignores nothing: ``tox -e types``. Nothing here is run.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch

from d2ldev import ArrayLoader, Backend, EarlyStopping, EpochMetric, Schedule, Trainer
from d2ldev.typing import MatmulPrecisionName


def check_trainer(text: str) -> None:
    Trainer(1, num_gpus="auto", precision="bf16", matmul_precision="high")
    Trainer(1, batch_norm="global")
    Trainer(1, num_gpus="all")  # type: ignore[arg-type]
    Trainer(1, precision="bf16-mixed")
    Trainer(1, precision="64-true")  # type: ignore[arg-type]
    Trainer(1, precision="bf-16")  # type: ignore[arg-type]
    Trainer(1, matmul_precision="hihg")  # type: ignore[arg-type]
    Trainer(1, batch_norm="globl")  # type: ignore[arg-type]
    Trainer(1, precision=text)  # type: ignore[arg-type]


def check_fit(trainer: Trainer, net: torch.nn.Module, data: ArrayLoader, anything: Any) -> None:
    trainer.fit(net, data, loss="mse", optimizer="adam", best="best", metrics=["accuracy"])
    trainer.fit(net, data, loss=torch.nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters()))
    trainer.fit(net, data, loss=lambda prediction, y: (prediction - y).abs().mean())
    trainer.fit(net, data, loss=lambda prediction: prediction.mean(), optimizer=anything)
    trainer.fit(net, data, loss="cross-entropy")  # type: ignore[arg-type]
    trainer.fit(net, data, optimizer="Adam")  # type: ignore[arg-type]
    trainer.fit(net, data, best="best", monitor="accuracy", mode="max")
    trainer.fit(net, data, best="best", mode="maximum")  # type: ignore[arg-type]
    trainer.fit(net, data, metrics=["acuracy"])  # type: ignore[list-item]
    trainer.fit(net, data, metrics={"right": "accuracy", "whole": EpochMetric(max)})
    trainer.fit(net, data, metrics={"right": 3})  # type: ignore[dict-item]
    trainer.validate(net, data, loss="mes")  # type: ignore[arg-type]


def check_callbacks(scheduler: torch.optim.lr_scheduler.StepLR) -> None:
    Schedule(scheduler, per="step")
    EarlyStopping("loss", mode="max")
    Schedule(scheduler, per="batch")  # type: ignore[arg-type]
    EarlyStopping("loss", mode="maximum")  # type: ignore[arg-type]


def check_backend(backend: Backend, net: torch.nn.Module) -> None:
    assert_type(backend.matmul_precision(), MatmulPrecisionName)
    backend.matmul_precision(backend.matmul_precision())
    backend.mlp([2, 1], activation="tanh")
    backend.learner(net, loss="bce", optimizer="adamw", precision="fp16")
    backend.matmul_precision("best")  # type: ignore[call-overload]
    backend.mlp([2, 1], activation="rleu")  # type: ignore[arg-type]
    backend.learner(net, optimizer="sdg")  # type: ignore[arg-type]
    backend.learner(net, loss="mes")  # type: ignore[arg-type]
