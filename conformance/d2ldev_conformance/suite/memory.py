"""The memory of an object: where it is, and who can write into it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from d2ldev import Backend, UnsupportedValueError
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.suite.data import assert_same, flip_bits

_HOST = ("cpu", "virtual")
"""The platforms of devices that have one memory."""


class Held:
    """The memory that an object has now, whatever becomes of the object.

    Args:
        backend: the backend under test.
        obj: whatever ``named_tensors`` takes.

    Attributes:
        values: the values in it, by name.
    """

    def __init__(self, backend: Backend, obj: Any) -> None:
        named = backend.named_tensors(obj, gradients=True)
        self._backend = backend
        self.values = {name: backend.to_numpy(x) for name, x in named.items()}
        self._addresses = set(self._find_addresses(named.values()))
        self._writes = [write for x in named.values() for write in self._list_writes(x)]

    def check_apart(self, copy: Any) -> None:
        """Check that a copy of the object shows nothing that is written into this memory.

        The copy is not read before. A framework may copy only then.

        Args:
            copy: of the object, with the same names.
        """
        self.overwrite()
        named = self._backend.named_tensors(copy, gradients=True)
        found = {name: x for name, x in named.items() if name in self.values}
        assert found
        for name, x in found.items():
            assert_same(self._backend.to_numpy(x), self.values[name])
        assert self._addresses.isdisjoint(self._find_addresses(found.values()))

    def overwrite(self) -> int:
        """Write other values by each way that the framework has; return how many have worked."""
        return sum(map(_succeeds, self._writes))

    def _list_writes(self, x: Any) -> Iterable[Callable[[], object]]:
        """Yield functions that write into the memory of a tensor, or fail."""
        tensors, values = framework_of(self._backend).tensors, self._backend.to_numpy(x)
        ways: tuple[Callable[[], Any], ...] = (
            # Not the tensor itself: ``place`` may give it other memory.
            lambda: tensors.detach(x)[...],
            # Not ``np.asarray(x)``, which takes each number of what has neither of the two.
            lambda: np.asarray(memoryview(x)),
            lambda: x.__array__(),
            lambda: np.from_dlpack(tensors.dlpack_of(x)),
        )
        for look in ways if values.size else ():
            other = flip_bits(values).flat[0].item()
            with suppress(Exception):  # whatever a framework says of what it does not do
                yield partial(operator.setitem, look(), ..., other)

    def _find_addresses(self, xs: Iterable[Any]) -> Iterable[tuple[object, int]]:
        for x in xs:
            device = self._backend.device_of(x)
            is_host = self._backend.platform(device) in _HOST
            try:
                if framework_of(self._backend).tensors.nbytes(x):
                    yield ("host" if is_host else device), self._backend.address(x)
            except UnsupportedValueError:  # it has several
                pass


def _succeeds(write: Callable[[], object]) -> bool:
    try:
        write()
    except Exception:  # immutable, in the words of a framework
        return False
    return True


def flip_tensor(backend: Backend, x: Any) -> Any:
    """Return a tensor with other values, or the same one if no NumPy array has its dtype."""
    if backend.dtype_of(x) not in backend.dtype_names:
        return x
    return backend.asarray(flip_bits(backend.to_numpy(x)), device=backend.device_of(x))
