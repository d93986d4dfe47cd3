"""Steps of training in several processes that share the parameters among them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from d2ldev.framework import Framework, Settings, Tensor
from d2ldev.processes.group import Group
from d2ldev_jax.training.learner import JaxLearner
from d2ldev_jax.training.places import ShardedProcesses


class JaxShardLearner(JaxLearner):
    """A module of which each of several processes holds a part of the arrays.

    The user's module stays on the host, whole. The first batch tells on which device of this
    process its part is; ``sync`` gathers what was learned.

    Args:
        framework: whose arrays are trained.
        model: what is trained.
        settings: how.
        group: the processes.
    """

    def __init__(self, framework: Framework, model: Any, settings: Settings, group: Group) -> None:
        self._group = group
        super().__init__(framework, model, settings)

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._spread(inputs)
        return super().step(inputs, y)

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        self._spread(inputs)
        return super().evaluate(inputs, y)

    def leave(self) -> None:
        """Leave the model as it was gathered last: the other processes may not gather it now."""

    def _spread(self, inputs: tuple[Any, ...]) -> None:
        if self._places.split is not None:
            return
        (native, *_), *_ = (x.devices() for x in jax.tree.leaves(inputs) if jnp.ndim(x))
        self._places_from = partial(ShardedProcesses, self._group, native)
        self.replace(self.parts)
