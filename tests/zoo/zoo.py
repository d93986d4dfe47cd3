"""One model of the zoo: how to build it, its own batch, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

SIZE = 4  # the examples of a batch
Build = Callable[[], Any]
Batch = Callable[[np.random.Generator], Any]


class Model(NamedTuple):
    """A model that nobody here wrote, with random weights and a batch of its own.

    Attributes:
        package: the distribution on PyPI.
        name: the name of its class or of its configuration.
        build: makes the model; the framework's seed decides its weights.
        batch: makes a batch as ``Trainer.fit`` takes it.
        loss: as ``fit`` takes it; None for a model with a ``training_step``.
        random: whether it draws random numbers while it trains, so that runs differ.
        shares: whether its loss compares the examples with each other, so that two GPUs differ.
        optimizer: makes the optimizer of a model; None for AdamW.
    """

    package: str
    name: str
    build: Build
    batch: Batch
    loss: Any = "model"
    random: bool = False
    shares: bool = False
    optimizer: Callable[[Any], Any] | None = None

    @property
    def id(self) -> str:
        """The name of its files and in the report's lines."""
        return f"{self.package}-{self.name}".replace(" ", "-")

    @property
    def distribution(self) -> str:
        """The distribution that has its package: ``keras`` for ``keras.applications``."""
        return self.package.partition(".")[0].replace("_", "-")

    def is_one_of(self, words: list[str]) -> bool:
        """Return whether its name has one of the words; with no words, it has."""
        return not words or any(word in self.id for word in words)


def make_batches(model: Model, number: int) -> list[Any]:
    """Return batches that are the same in each call."""
    return [model.batch(np.random.default_rng(100 + i)) for i in range(number)]
