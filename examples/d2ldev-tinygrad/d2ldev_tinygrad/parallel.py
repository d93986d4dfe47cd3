"""Parallel: a copy of a model for each device."""

from __future__ import annotations

from typing import Any

from d2ldev.framework import Parallel, deep_copy, twin_refusal
from tinygrad import Tensor, nn

from d2ldev_tinygrad.models import TinygradModels


class TinygradParallel(Parallel):
    """Copies of models of tinygrad."""

    def twin(self, model: Any) -> Any:
        if not isinstance(model, TinygradModels.types) or isinstance(model, nn.optim.Optimizer):
            raise twin_refusal(model)
        return deep_copy(model, {id(x): _copy(x) for x in nn.state.get_state_dict(model).values()})


def _copy(x: Tensor) -> Tensor:
    return Tensor(x.uop.clone()).is_param_(x.is_param).realize()
