"""Batches: from what a loader yields to tensors of one backend on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from d2ldev.device import CPU
from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.nesting.walk import TENSOR, flatten
from d2ldev.operations.moving import tensors_of_data

if TYPE_CHECKING:
    from d2ldev.interface import Backend, DeviceLike


def bring(backend: Backend, batch: Any, device: DeviceLike) -> Any:
    """A batch on a device, whoever made it.

    Args:
        backend: whose tensors are wanted.
        batch: what ``to`` takes.
        device: where to. None makes tensors in the host's memory of what is none of the backend's,
            and leaves the rest where it is.

    Returns:
        The batch; what was there already is the same object.
    """
    if device is not None:
        return backend.to(batch, device)
    attempted = "make tensors of a batch"
    flat = flatten(batch, backend.kinds, attempted)
    return flat.unflatten(tensors_of_data(backend, flat, CPU, attempted))


def inputs_and_target(
    batch: Any, names: Sequence[str] = (), takes_mapping: bool = False
) -> tuple[tuple[Any, ...], Any]:
    """What a model is called with, and what its prediction is compared with.

    Args:
        batch: ``(X, y)``, or more inputs before ``y``; or a mapping whose ``'y'``, else whose
            last value, is the target. Several inputs of a mapping are given by name, if all of
            them are among the names, else in the order of the mapping.
        names: what the model calls its inputs, in order; empty if it does not say.
        takes_mapping: whether it is called with one mapping that has these keys.

    Raises:
        UnsupportedValueError: if there are not two things in it, or an input is left out before
            another one.
    """
    if isinstance(batch, Mapping):
        values = dict(batch)
        target = values.pop("y") if "y" in values else (values.popitem()[1] if values else None)
        parts = (*_by_name(values, names, takes_mapping), target)
    else:
        parts = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    if len(parts) < 2:
        raise UnsupportedValueError(
            f"train on a batch, {describe(batch)}",
            "a batch has inputs and a target",
            "yield (X, y) from the data, or override Trainer.prepare_batch",
        )
    return parts[:-1], parts[-1]


def _by_name(values: dict[Any, Any], names: Sequence[str], takes_mapping: bool) -> Iterable[Any]:
    """Inputs in the order of their names, if they are the model's, else as they are."""
    if not values or not all(key in names for key in values):
        return values.values()
    if takes_mapping:
        return (values,)
    if len(values) == 1:
        return values.values()
    given = [name in values for name in names]
    ordered = names[: len(names) - given[::-1].index(True)]
    missing = [name for name in ordered if name not in values]
    if missing:
        everything = ", ".join(f"{name!r}: ..." for name in ordered)
        raise UnsupportedValueError(
            f"call a model with {', '.join(map(repr, values))}",
            f"it takes {', '.join(map(repr, missing))} before {ordered[-1]!r}, which a batch lacks",
            f"yield {{{everything}, 'y': y}}, or a tuple of all of them and y",
        )
    return [values[name] for name in ordered]


def count_of(backend: Backend, y: Any) -> int:
    """How many examples a batch has: the length of its target's first axis, 1 if it has none.

    Of a target that is a nesting, that of the first tensor in it.
    """
    if backend.kinds[type(y)] is not TENSOR:
        flat = flatten(y, backend.kinds, "count the examples of a batch")
        y = next(iter((*flat.tensors.values(), *flat.others.values())), None)
    shape = tuple(getattr(y, "shape", ()))
    return int(shape[0]) if shape else 1
