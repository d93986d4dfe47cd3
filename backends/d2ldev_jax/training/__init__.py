"""Training: steps of training of Flax's models, and accuracy.

Flax and Optax take longer to import than JAX, and are imported with the first learner.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from d2ldev.framework import Framework, Learner, Settings, Tensor, Training


class JaxTraining(Training):
    """Flax's ``nnx`` modules, which optax's optimizers train.

    JAX has no random state; the streams of random keys in a model are variables of it.

    Args:
        framework: whose arrays are trained.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: Settings) -> Learner:
        from d2ldev_jax.training.learner import JaxLearner

        return JaxLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        return jnp.mean(jnp.argmax(prediction, -1) == y, dtype=jnp.float32)
