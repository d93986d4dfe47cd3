"""Batches: from what a loader yields to tensors of one framework on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import DeviceLike, Framework
from d2ldev.nesting.kinds import TENSOR, UNKNOWN
from d2ldev.operations import creation, moving
from d2ldev.registry.selection import framework_of


def bring(framework: Framework, batch: Any, device: DeviceLike) -> Any:
    """Bring a batch to a device, whoever made it.

    Args:
        framework: whose tensors are wanted.
        batch: its tensors, NumPy arrays, or another framework's tensors, which are copied by way
            of the host; or any nesting of them in tuples, lists, dicts, and what ``to`` takes.
        device: where to. None makes tensors in the host's memory of what is none of the
            framework's, and leaves the rest where it is.

    Returns:
        The batch; what was there already is the same object.
    """
    if not _has_foreign(framework, batch):
        return batch if device is None else moving.to(framework, batch, device)
    if isinstance(batch, Mapping):
        return {key: bring(framework, value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        brought = [bring(framework, value, device) for value in batch]
        return type(batch)(*brought) if hasattr(batch, "_fields") else type(batch)(brought)
    if not isinstance(batch, (np.ndarray, np.generic)):
        batch = moving.to_numpy(framework_of(batch), batch)
    return creation.asarray(framework, batch, None, CPU if device is None else device, None)


def _has_foreign(framework: Framework, batch: Any) -> bool:
    """Return whether there is anything in a batch that ``to`` does not move."""
    kind = framework.kinds[type(batch)]
    if kind is TENSOR:  # first: it is asked for every tensor of every batch
        return False
    if isinstance(batch, (list, tuple)):
        return any(_has_foreign(framework, value) for value in batch)
    if isinstance(batch, Mapping):
        return any(_has_foreign(framework, value) for value in batch.values())
    if isinstance(batch, (np.ndarray, np.generic)):
        return True
    return kind is UNKNOWN and _is_tensor(batch)


def _is_tensor(x: Any) -> bool:
    try:
        framework_of(x)
    except UnsupportedValueError:
        return False
    return True
