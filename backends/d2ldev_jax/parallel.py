"""Several devices: ``jax.sharding``, with a mesh of one axis, over the examples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from d2ldev.device import Device
from d2ldev.framework import Framework, Learner, Parallel, Settings
from d2ldev.framework.parallel import no_twin


class JaxParallel(Parallel):
    """Training on several devices of one process.

    Batch normalization has the statistics of the global batch, and dropout the masks of one device:
    the program is written for the whole batch, and XLA splits it.

    Args:
        framework: whose arrays are trained.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def twin(self, model: Any) -> Any:
        from flax import nnx

        if not isinstance(model, nnx.Module):
            raise no_twin(model)
        return deepcopy(model)

    def learner(self, model: Any, settings: Settings, devices: Sequence[Device]) -> Learner:
        from d2ldev_jax.training.learner import JaxLearner

        return JaxLearner(self._framework, model, settings, devices)
