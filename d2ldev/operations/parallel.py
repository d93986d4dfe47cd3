"""Several devices: batches that are split, and objects of which each device has one.

Source: D2L, sections 13.5 and 13.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import Framework, Tensor
from d2ldev.nesting.kinds import OBJECT
from d2ldev.nesting.walk import Flattened, flatten
from d2ldev.operations import creation, moving, placing


def counts(examples: int, parts: int) -> list[int]:
    """Return how many examples each part of a batch has; they differ by one at most.

    >>> counts(5, 2), counts(1, 3)
    ([3, 2], [1, 0, 0])
    """
    least, more = divmod(examples, parts)
    return [least + (number < more) for number in range(parts)]


def split(
    framework: Framework, batch: Any, devices: Sequence[Device], *, is_filled: bool = False
) -> list[Any]:
    """Return a part of a batch for each device, on it; see ``Backend.split``.

    Args:
        framework: whose tensors are in the batch.
        batch: a nesting.
        devices: one or more that exist.
        is_filled: whether a part that would be empty has the first example instead, so that a model
            can compute with it.
    """
    attempted = f"split a batch over {len(devices)} devices"
    flat = flatten(moving.on_the_host(framework, batch), framework.kinds, attempted)
    length = _examples(flat, attempted)
    parts, start = [], 0
    for device, count in zip(devices, counts(length, len(devices)), strict=True):
        first, last = (start, start + count) if count or not is_filled else (0, 1)
        rows = {
            key: _rows(framework, x, first, last, attempted)
            for key, x in flat.tensors.items()
            if creation.shape_of(x, attempted)
        }
        parts.append(moving.to(framework, flat.unflatten(rows), device))
        start += count
    return parts


def _rows(framework: Framework, x: Tensor, start: int, stop: int, attempted: str) -> Tensor:
    try:
        return framework.parallel.rows(x, start, stop)
    except Exception as error:  # a sparse tensor, which has no views, or memory that ran out
        native = framework.devices.native(framework.tensors.device_of(x))
        fix = "a batch of dense tensors"
        raise creation.refused(framework, error, attempted, native, fix) from error


def replicate(framework: Framework, obj: Any, devices: Sequence[Device]) -> list[Any]:
    """Return a copy of an object for each device, on it; see ``Backend.replicate``.

    Args:
        framework: whose tensors and models are in it.
        obj: a nesting of them.
        devices: one or more that exist.
    """
    kinds = framework.kinds
    copies = []
    for device in devices:
        flat = flatten(obj, kinds, f"replicate {type(obj).__name__}")
        models = {
            key: framework.parallel.twin(x)
            for key, x in flat.others.items()
            if kinds[type(x)] is OBJECT
        }
        tensors = list(flat.tensors.values())
        new = moving.copy(framework, tensors, device)
        whole = flat.unflatten({**models, **dict(zip(flat.tensors, new, strict=True))})
        copies.append(placing.place(framework, whole, device) if models else whole)
    return copies


def examples(framework: Framework, batch: Any) -> int:
    """Return how many examples a batch of tensors has.

    Raises:
        UnsupportedValueError: if its tensors do not agree, or if it has none.
    """
    attempted = "split a batch"
    number = _examples(flatten(batch, framework.kinds, attempted), attempted)
    if not number:
        raise UnsupportedValueError(
            attempted, "it has no examples", "leave empty batches out of the data"
        )
    return number


def _examples(flat: Flattened, attempted: str) -> int:
    shapes = [(creation.shape_of(x, attempted), x) for x in flat.tensors.values()]
    tensors = {int(shape[0]): x for shape, x in shapes if shape}
    if len(tensors) != 1:
        lengths = [f"{flat.name_of(x) or 'the batch'} has {n}" for n, x in tensors.items()]
        raise UnsupportedValueError(
            attempted,
            "the first axis of its tensors is not the number of examples: "
            + (", ".join(lengths) or "there is none"),
            "a batch whose tensors have the shapes (n, ...), with one n",
        )
    (found,) = tensors
    return found
