"""Who decides how much GPU memory a framework takes at the start: ``D2LDEV_GPU_MEMORY``.

By default JAX takes three quarters of a GPU, and TensorFlow all of it, as soon as they use one, so
that no other framework fits beside them. d2ldev asks both to take what they need; only before the
framework has initialised its GPU, and not if the user has said something else, in the framework's
own variables or with ``D2LDEV_GPU_MEMORY=framework``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from d2ldev import settings
from d2ldev.errors import MemoryPolicyWarning, warn


def user_has_chosen(variables: Iterable[str]) -> bool:
    """Return whether the framework's memory is to be left as it is.

    Args:
        variables: the framework's own environment variables for it.

    Raises:
        UnsupportedValueError: if ``D2LDEV_GPU_MEMORY`` has another value than it can have.
    """
    return not settings.memory_grows() or any(variable in os.environ for variable in variables)


def warn_too_late(framework: str, before: str) -> None:
    """Say that a framework already holds its GPU's memory, and how to prevent it.

    Args:
        framework: its name.
        before: what has to be set before it is used, as ``VARIABLE=value``.
    """
    warn(
        f"{framework} had initialised its GPU before d2ldev was first used, and may hold most of "
        f"its memory. fix: use d2ldev first, set {before}, or "
        f"{settings.GPU_MEMORY}=framework to agree",
        MemoryPolicyWarning,
    )
