"""Training: steps of training of Flax's models, and accuracy.

Flax and Optax take longer to import than JAX, and are imported with the first learner.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from d2ldev import UnsupportedValueError
from d2ldev.framework import (
    NO_LABEL,
    Framework,
    Learner,
    Tensor,
    Training,
    TrainingSettings,
    describe,
    import_optional,
)
from d2ldev_jax.keras import is_layer
from d2ldev_jax.models import is_linen


def check_libraries() -> None:
    """Check that what trains models is installed.

    Raises:
        PackageNotInstalledError: without Flax or Optax.
    """
    for module in ("optax", "flax.nnx"):  # which needs the former
        import_optional(module, "train or evaluate a model", extra="jax")


class JaxTraining(Training):
    """Flax's ``nnx`` modules, which optax's optimizers train.

    JAX has no random state; the streams of random keys in a model are variables of it.

    Args:
        framework: whose arrays are trained.
    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        check_libraries()
        was_trained = settings.optimizer is None and hasattr(model, "trainer")
        if is_linen(model) and (was_trained or settings.methods is not None):
            from d2ldev_jax.training.book import BooksLearner

            return BooksLearner(self._framework, model, settings)
        from d2ldev_jax.training.learner import JaxLearner

        return JaxLearner(self._framework, model, settings)

    def defaults(self, model: Any) -> tuple[Any, Any]:
        if is_layer(model) and getattr(model, "compiled", False):
            raise UnsupportedValueError(
                f"train {describe(model)} with the settings that it was compiled with",
                "on JAX d2ldev does not read them",
                "loss='mse', and optimizer=model.optimizer to train it",
            )
        return super().defaults(model)

    def module_class(self, methods: type) -> type:
        check_libraries()
        from d2ldev_jax.training.book import make_module_class

        return make_module_class(methods)

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labels = widen_labels(y)
        is_right = jnp.sum(jnp.argmax(prediction, -1) == labels, dtype=jnp.float32)
        number = jnp.sum(labels != NO_LABEL, dtype=jnp.float32)
        return is_right / jnp.maximum(number, 1), number


def widen_labels(y: Tensor) -> Tensor:
    """Return labels in a dtype that has ``NO_LABEL``. No unsigned label becomes negative."""
    dtype = jnp.int32 if y.dtype.itemsize < 8 else jnp.int64
    labels = y.astype(dtype)
    if jnp.issubdtype(y.dtype, jnp.unsignedinteger):
        labels = jnp.where(labels < 0, jnp.iinfo(dtype).max, labels)
    return labels
