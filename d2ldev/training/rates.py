"""The learning rate of an optimizer, by what each framework shows of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from d2ldev.contract import Framework, Learner
from d2ldev.errors import UnsupportedValueError
from d2ldev.operations.inventory import list_named_tensors

RATE = "lr"
"""Its name in the history."""


def find_rate(framework: Framework, learner: Learner) -> float | None:
    """Return the current learning rate of a training, or None if the optimizer does not show it.

    PyTorch shows it in the first of ``param_groups``, Keras and Gluon in ``learning_rate``. Optax
    keeps it in its state if ``optax.inject_hyperparams`` made the optimizer.

    Args:
        framework: the framework of the learner.
        learner: the learner.
    """
    optimizer = learner.settings.optimizer
    if isinstance(optimizer, str):
        return learner.settings.lr
    # None waits for the first batch.
    current = learner.sync()["optimizer"]
    optimizer = optimizer if current is None else current
    rate: Any = getattr(optimizer, "learning_rate", None)
    with suppress(AttributeError, IndexError, KeyError, TypeError):
        rate = optimizer.param_groups[0]["lr"]
    if rate is None:
        with suppress(UnsupportedValueError):  # a class of the user's own
            rate = _find_in_state(framework, optimizer)
    with suppress(TypeError, ValueError):
        return float(rate)
    return None


def _find_in_state(framework: Framework, optimizer: Any) -> Any:
    """Return the rate in the ``hyperparams`` of a state; a variable of NNX is its ``value``.

    Another ``learning_rate`` in a state may be that of a line search.
    """
    for name, x in list_named_tensors(framework, optimizer):
        if name.removesuffix(".value").split(".")[-2:] == ["hyperparams", "learning_rate"]:
            return x
    return None
