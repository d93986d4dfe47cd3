"""Several devices: batches that are split, and objects of which each device has one.

Source: D2L, sections 13.5 and 13.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from d2ldev.device import Device
from d2ldev.errors import UnsupportedValueError
from d2ldev.framework import Framework, Tensor
from d2ldev.nesting.kinds import OBJECT
from d2ldev.nesting.walk import Flattened, flatten
from d2ldev.operations import creation, moving, placing


def split(framework: Framework, batch: Any, devices: Sequence[Device]) -> list[Any]:
    """Return a part of a batch for each device, on it; see ``Backend.split``.

    Args:
        framework: whose tensors are in the batch.
        batch: a nesting.
        devices: one or more that exist.
    """
    return [part.operands for part in _parts(framework, batch, devices, is_filled=False)]


class Part(NamedTuple):
    """What a device has of a batch.

    Args:
        operands: the nesting, on the device.
        number: how many examples of the batch are in it.
        share: which part of them, from 0 to 1.
    """

    operands: Any
    number: int
    share: float


def parts_to_train_on(
    framework: Framework, batch: Any, devices: Sequence[Device], *, is_filled: bool = False
) -> list[Part]:
    """Return a part of a batch for each device, with its share in the mean over the batch.

    Args:
        framework, batch, devices: see ``split``.
        is_filled: whether a part of no examples has the first one of the batch as its operands, so
            that a model can compute with it.

    Raises:
        UnsupportedValueError: if its tensors do not agree in a number of examples, or it has none.
    """
    parts = _parts(framework, batch, devices, is_filled)
    if not parts[0].number:
        raise UnsupportedValueError(
            "split a batch", "it has no examples", "leave empty batches out of the data"
        )
    return parts


def _parts(
    framework: Framework, batch: Any, devices: Sequence[Device], is_filled: bool
) -> list[Part]:
    attempted = f"split a batch over {len(devices)} devices"
    flat = flatten(moving.on_the_host(framework, batch), framework.kinds, attempted)
    shapes = {key: creation.shape_of(x, attempted) for key, x in flat.tensors.items()}
    length = _examples(flat, shapes, attempted)
    least, more = divmod(length, len(devices))
    parts, start = [], 0
    for number, device in enumerate(devices):
        count = least + (number < more)
        first, last = (start, start + count) if count or not is_filled else (0, min(1, length))
        rows = {
            key: _rows(framework, x, first, last, attempted)
            for key, x in flat.tensors.items()
            if shapes[key]
        }
        operands = moving.to(framework, flat.unflatten(rows), device)
        parts.append(Part(operands, count, count / length if length else 0.0))
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


def _examples(flat: Flattened, shapes: dict[int, tuple[int, ...]], attempted: str) -> int:
    """Return how many examples a batch has: the one length that its tensors have."""
    tensors = {int(shape[0]): flat.tensors[key] for key, shape in shapes.items() if shape}
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
