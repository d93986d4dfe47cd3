"""Models and optimizers: their tensors, and how to move them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d2ldev.framework import Models, NotBegunError, Tensor


class TinygradModels(Models):
    """The models and optimizers of tinygrad."""

    types = ()  # the classes that ``parts`` takes apart

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> Any:
        raise NotBegunError("Models.mlp")
