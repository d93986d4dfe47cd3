"""Copies between devices: where the user wrote one, and nowhere else.

Source: D2L, section 6.7.2.2, "Copying".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from d2ldev.device import CPU, Device
from d2ldev.errors import D2LDevError, UnsupportedValueError, describe
from d2ldev.nesting.walk import OBJECT, PLAIN, TENSOR, Flattened, every, flatten
from d2ldev.operations.devices import Resolution
from d2ldev.primitives import DeviceLike, Tensor

if TYPE_CHECKING:
    import numpy as np

    from d2ldev.interface import Backend

Copies = Callable[[list[Tensor], Device, str], list[Tensor]]
"""What copies tensors to a device, as ``_copies`` does."""


class Moving(Resolution):
    """The part of the contract that moves and copies tensors, and takes them in and out."""

    def to(self, x: Any, device: DeviceLike) -> Any:
        """Move a tensor, or every tensor in a nesting, to a device.

        Args:
            x: a tensor, or any nesting of dicts, lists, tuples, namedtuples, dataclasses and
                ``d2ldev.register_container``'s; None, numbers and strings stay as they are.
                NumPy arrays and other frameworks' tensors are data: in their place comes a tensor
                with their values.
            device: where to.

        Returns:
            ``x`` itself if it is there already (``to(x, device) is x``), else a copy on
            ``device``. Containers come back as what they were, tied leaves tied; a container
            in which nothing moved is itself.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
            OutOfDeviceMemoryError: if its memory does not suffice.
            UnsupportedValueError: if ``x`` holds something else, which the message names.
                Nothing has moved then.
        """
        try:
            target = self._devices[device]
        except Exception:  # unknown so far, or not hashable
            target = self._existing(device, "move a tensor")[0]
        kinds = self.kinds
        if kinds[type(x)] is TENSOR:
            if self.device_of(x) is target:
                return x
            return self._copies([x], target, _moving("a tensor", target))[0]
        device_of = self.device_of
        try:
            if every(x, kinds, lambda tensor: device_of(tensor) is target, [10_000]):
                return x
        except Exception:  # noqa: S110
            pass  # a cycle, or a container that cannot be walked: the walk below names it
        return self._moved(x, target, _moving("a batch", target))

    def copy(self, x: Any, device: DeviceLike = None) -> Any:
        """Copy a tensor, or every tensor in a nesting, into new memory.

        Args:
            x: as in ``to``, without data that is no tensor of this backend.
            device: where to; None leaves each tensor on its device.

        Returns:
            A copy that shares no memory with ``x``, also when it was there already. Leaves
            that were tied to each other are tied again.

        Raises:
            As ``to``.
        """
        target = None if device is None else self._existing(device, "copy a tensor")[0]
        if self.kinds[type(x)] is TENSOR:
            return self._copies([x], target or self.device_of(x), "copy a tensor")[0]
        return self._copied(x, target, "copy a tensor")

    def to_numpy(self, x: Tensor) -> np.ndarray[Any, Any]:
        """The values of a tensor in a NumPy array that the caller owns.

        Returns:
            A new, writable array of the same shape and dtype; bfloat16 and float8 are those of
            ``ml_dtypes``.

        Raises:
            UnsupportedValueError: if ``x`` is no tensor of this backend.
        """
        if kinds_name := self._foreign(x):
            raise self._refusal("make a NumPy array", x, "", kinds_name)
        try:
            return self._to_numpy(x)
        except Exception as error:
            # Described only now: the text of a tensor takes longer than its values.
            attempted = f"make a NumPy array of {describe(x)}"
            self._raise_translated(error, attempted, self._native(CPU))

    def from_dlpack(self, x: Any) -> Tensor:
        """A tensor on the memory of another framework's tensor, without a copy.

        Args:
            x: anything with ``__dlpack__`` and ``__dlpack_device__``, or a tensor of a backend.

        Raises:
            UnsupportedValueError: if the protocol does not allow it: no such method, a dtype
                without a number in DLPack, a tensor that needs gradients, read-only memory.
        """
        try:
            return self._from_dlpack(x if self.kinds[type(x)] is TENSOR else _exported(x))
        except D2LDevError:
            raise
        except Exception as error:
            raise UnsupportedValueError(
                f"take over the memory of {describe(x)}",
                f"{type(error).__name__}: {error}",
                "copy instead: backend.asarray(d2ldev.backend_of(x).to_numpy(x))",
            ) from error

    def _moved(self, x: Any, target: Device, attempted: str) -> Any:
        return moved(self, x, target, attempted, self._copies)  # type: ignore[arg-type]

    def _copied(self, x: Any, target: Device | None, attempted: str) -> Any:
        flat = flatten(x, self.kinds, attempted)
        for leaf in flat.others.values():
            raise self._refusal(attempted, leaf, flat.name_of(leaf), self._foreign(leaf))
        tensors = flat.tensors
        if not tensors:
            return x
        values = list(tensors.values())
        device_of = self.device_of
        device = target or device_of(values[0])
        if target is None and [x for x in values if device_of(x) is not device]:
            return flat.unflatten(self._copies_where_they_are(tensors, attempted))
        copies = self._copies(values, device, attempted)
        return flat.unflatten(dict(zip(tensors, copies, strict=True)))

    def _copies_where_they_are(
        self, tensors: dict[int, Tensor], attempted: str
    ) -> dict[int, Tensor]:
        """Copies by the same keys; those of one device together, as a framework may make them."""
        groups: dict[Device, dict[int, Tensor]] = {}
        for key, tensor in tensors.items():
            groups.setdefault(self.device_of(tensor), {})[key] = tensor
        return {
            key: new
            for device, group in groups.items()
            for key, new in zip(
                group, self._copies(list(group.values()), device, attempted), strict=True
            )
        }

    def _copies(self, tensors: list[Tensor], device: Device, attempted: str) -> list[Tensor]:
        """Copies of several tensors on a device; all of them, or an exception."""
        native = self._natives.get(device) or self._existing(device, attempted)[1]
        try:
            return self._copy_all(tensors, native)
        except Exception as error:
            self._raise_translated(error, attempted, native)

    def _raise_translated(self, error: Exception, attempted: str, native: Any) -> NoReturn:
        """Raise an exception of the framework's as what it means where a tensor was copied."""
        if (translated := self._translated(error, attempted, native)) is None:
            raise error
        raise translated from error

    def _translated(self, error: Exception, attempted: str, native: Any) -> D2LDevError | None:
        """What an exception of the framework's means where a tensor was to be copied.

        None if it means something else: the driver tells of work that was queued long before.
        """
        if isinstance(error, D2LDevError):
            return None
        if self._is_out_of_memory(error):
            return self._out_of_memory(error, attempted, native)
        if isinstance(error, (NotImplementedError, TypeError, ValueError)):
            return UnsupportedValueError(
                attempted,
                f"{self.name} says: {type(error).__name__}: {error}",
                "give it as a dense tensor of a dtype in backend.dtype_names",
                [self._from_native(native)],
            )
        return None

    def _foreign(self, x: Any) -> str:
        """What a value is instead of a tensor of this backend; empty if it is one."""
        kind = self.kinds[type(x)]
        if kind is TENSOR:
            return ""
        return "a plain value" if kind is PLAIN else f"no tensor of the {self.name} backend"

    def _refusal(self, attempted: str, x: Any, name: str, what: str) -> UnsupportedValueError:
        where = f" at {name}" if name else ""
        fix = "backend.asarray(x, device=device) makes a tensor of numbers and NumPy arrays"
        if isinstance(x, self.object_types):
            fix = "model = backend.place(model, device) moves models and optimizers"
        elif hasattr(_exported(x), "__dlpack__") and type(x).__module__ != "numpy":
            fix = "x = backend.from_dlpack(x) takes over another framework's tensor"
        elif not hasattr(x, "__array__"):
            register = f"d2ldev.register_container({type(x).__name__}, children, rebuild)"
            fix = f"take it out of the batch, or {register}"
        problem = f"{describe(x)}{where} is {what}"
        return UnsupportedValueError(attempted, problem, fix)


@cache
def _moving(what: str, device: Device) -> str:
    return f"move {what} to {device}"


def moved(backend: Backend, x: Any, target: Device, attempted: str, copies: Copies) -> Any:
    """A nesting with its tensors, and tensors of its data, on a device.

    Args:
        backend: whose tensors they are.
        x: any nesting.
        target: where to.
        attempted: what the caller is doing, for messages.
        copies: what copies the tensors that are elsewhere.
    """
    flat = flatten(x, backend.kinds, attempted)
    device_of = backend.device_of
    elsewhere = {
        key: tensor for key, tensor in flat.tensors.items() if device_of(tensor) is not target
    }
    changed = tensors_of_data(backend, flat, target, attempted) if flat.others else {}
    if elsewhere:
        new = copies(list(elsewhere.values()), target, attempted)
        changed.update(zip(elsewhere, new, strict=True))
    return flat.unflatten(changed)


def tensors_of_data(
    backend: Backend, flat: Flattened, device: Device, attempted: str
) -> dict[int, Tensor]:
    """Tensors with the values of NumPy arrays and of other frameworks' tensors, by their ids.

    Raises:
        UnsupportedValueError: if there is anything else, or a dtype that is none of the backend's;
            the message names it.
    """
    for leaf in flat.others.values():
        if backend.kinds[type(leaf)] is OBJECT or not (_is_array(leaf) or _is_tensor(leaf)):
            raise backend._refusal(attempted, leaf, flat.name_of(leaf), backend._foreign(leaf))
    made = {}
    for key, leaf in flat.others.items():
        try:
            values = leaf if _is_array(leaf) else _backend_of(leaf).to_numpy(leaf)
            made[key] = backend.asarray(values, device=device)
        except UnsupportedValueError as error:
            name = flat.name_of(leaf)
            problem = f"{describe(leaf)} at {name or 'the top'}: {error.problem}"
            raise UnsupportedValueError(attempted, problem, error.fix) from error
    return made


def _is_array(x: Any) -> bool:
    numpy = sys.modules.get("numpy")  # there is no array where it is not imported
    return numpy is not None and isinstance(x, numpy.ndarray)


def _is_tensor(x: Any) -> bool:
    """Whether a value is a tensor of any framework."""
    try:
        _backend_of(x)
    except UnsupportedValueError:
        return False
    return True


def _backend_of(x: Any) -> Any:
    from d2ldev.registry.selection import backend_of

    return backend_of(x)


def _exported(x: Any) -> Any:
    """What has ``__dlpack__`` for a value: itself, or what its backend puts in its stead."""
    if hasattr(x, "__dlpack__"):
        return x
    try:
        return _backend_of(x)._dlpack_of(x)
    except UnsupportedValueError:
        return x
