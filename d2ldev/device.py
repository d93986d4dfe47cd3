"""``Device``: a small, interned value that says where a tensor is.

There is one object for each device. So devices are compared with ``is``, and hash at the speed of
C. A ``Device`` does not belong to a framework. ``device.native`` is the active backend's own
object.

Source: D2L, section 6.7.1, "Computing Devices".
"""

from __future__ import annotations

import operator
import re
import sys
from contextlib import AbstractContextManager
from functools import total_ordering
from typing import Any, NoReturn, Protocol

from d2ldev.errors import InvalidDeviceError, quote
from d2ldev.scopes import Scopes

_CPU = "cpu"
_GPU = "gpu"
# The frameworks' own words for "the accelerator that is there".
_ACCELERATORS = frozenset({_GPU, "cuda", "rocm", "xpu", "mps"})
# No machine has GPUs of 100 digits, and Python does not read numbers of any length.
_SPELLING = re.compile(r"([a-z]+)(?::([0-9]{1,100}))?", re.ASCII)
_FIX = "device=backend.try_gpu(), or a string: 'cpu', 'gpu', 'gpu:1', 'cuda:1'"

_interned: dict[tuple[str, int], Device] = {}


def _check_index(kind: str, index: object) -> int:
    if type(index).__name__ in ("bool", "bool_"):  # NumPy 1 takes its own ``bool_`` for an integer
        problem = "an index is an integer, and True is not one"
    else:
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except Exception:  # whatever a value's own ``__index__`` raises
            problem = f"an index is an integer, not a {type(index).__name__}"
        else:
            if number >= 0:
                return number
            problem = "indices count from 0"
    raise InvalidDeviceError(f"make {kind}({quote(index)})", problem, _FIX)


@total_ordering
class Device:
    """A place for tensors: the CPU, or the GPU with an index.

    ``Device('cpu')`` is the one CPU whatever its index, ``Device('gpu')`` is ``gpu:0``.
    Nothing checks that the device exists; creating or copying onto it does.

    Args:
        kind: ``'cpu'`` or ``'gpu'``.
        index: the number of the GPU, from 0. Anything that is an integer to Python
            (``operator.index``), except a ``bool``.

    Raises:
        InvalidDeviceError: for another kind, a negative index or one that is not an integer.

    >>> Device('gpu', 1)
    Device('gpu', 1)
    >>> str(Device('gpu', 1)), str(Device('cpu'))
    ('gpu:1', 'cpu')
    >>> Device('cpu', 3) is Device('cpu')
    True
    >>> sorted([Device('gpu', 1), Device('gpu'), Device('cpu')])
    [Device('cpu'), Device('gpu', 0), Device('gpu', 1)]
    """

    __slots__ = ("__weakref__", "index", "kind")

    kind: str
    index: int

    def __new__(cls, kind: str, index: int = 0) -> Device:
        if not isinstance(kind, str) or kind not in (_CPU, _GPU):
            raise InvalidDeviceError(
                f"make a device of kind {quote(kind)}", "a device is a 'cpu' or a 'gpu'", _FIX
            )
        index = _check_index(kind, index)
        key = (kind, 0 if kind == _CPU else index)
        device = _interned.get(key)
        if device is None:
            # Not a subclass, because every later call would get it, too.
            device = object.__new__(Device)
            object.__setattr__(device, "kind", key[0])
            object.__setattr__(device, "index", key[1])
            # Atomic: two threads that come here at once get the same object.
            device = _interned.setdefault(key, device)
        return device

    @staticmethod
    def parse(text: str) -> Device:
        """Return the device that a string names.

        Args:
            text: ``'cpu'``, ``'gpu'``, ``'gpu:1'``; ``'cuda'``, ``'rocm'``, ``'xpu'`` and
                ``'mps'`` mean ``'gpu'``. Case and surrounding white space do not matter.

        Raises:
            InvalidDeviceError: for anything else.

        >>> Device.parse('cuda:1')
        Device('gpu', 1)
        """
        match = _SPELLING.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        if match is not None:
            kind, index = match[1], int(match[2] or 0)
            if kind == _CPU:
                return Device(_CPU)
            if kind in _ACCELERATORS:
                return Device(_GPU, index)
        raise InvalidDeviceError(f"read {quote(text)} as a device", "not a device name", _FIX)

    @property
    def native(self) -> Any:
        """The active backend's own object for this device.

        Raises:
            DeviceUnavailableError: if this machine does not have the device.
        """
        return _backend.native(self)

    def __enter__(self) -> Device:
        """Make this the place where the active backend creates tensors (``backend.on``).

        All users of a device share one object. So leaving ends the innermost block of this device.
        A generator with a block of the same device may be closed in between. Then use ``with
        backend.on(device):``, which ends its own block.
        """
        block = _backend.on(self)
        block.__enter__()
        _entered.enter((self, block))
        return self

    def __exit__(self, *exception: Any) -> None:
        # All threads share the object of a device. So it cannot keep the blocks it has entered.
        entry = _entered.find(lambda each: each.value[0] is self)
        if entry is not None:
            _entered.leave(entry)
            entry.value[1].__exit__(*exception)

    def __str__(self) -> str:
        return _CPU if self.kind == _CPU else f"{self.kind}:{self.index}"

    def __repr__(self) -> str:
        return f"Device({self.kind!r})" if self.kind == _CPU else f"Device('gpu', {self.index})"

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>"

    # Equality and hash are the object's own, which is right because devices are interned.

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Device):
            return NotImplemented
        return (self.kind, self.index) < (other.kind, other.index)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle, copy and deepcopy all come back to the interned object.
        return Device, (self.kind, self.index)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Device is immutable: cannot set {name!r} of {self!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Device is immutable: cannot delete {name!r} of {self!r}")


class _Backend(Protocol):
    """The part of the active backend that a device uses."""

    def native(self, device: Device) -> Any: ...

    def on(self, device: Device) -> AbstractContextManager[Device]: ...


class _OfThePackage:
    """The active backend, in a program that has asked the package for nothing so far."""

    def __getattr__(self, name: str) -> Any:
        # The package makes it when it is asked for, and gives it to ``use``.
        return getattr(sys.modules[__package__].backend, name)


_backend: _Backend = _OfThePackage()
# The open blocks of ``with device:``, each with the block of the backend that was active then.
_entered: Scopes[tuple[Device, AbstractContextManager[Device]]] = Scopes("d2ldev_devices")


def use(backend: _Backend) -> None:
    """Let ``device.native`` and ``with device:`` use this backend, the active one's handle."""
    global _backend
    _backend = backend


CPU = Device(_CPU)
"""The CPU."""


def cpu() -> Device:
    """Return the CPU: all of its cores and its memory.

    >>> cpu()
    Device('cpu')
    """
    return CPU


def gpu(i: int = 0) -> Device:
    """Return the GPU of index ``i``; whether it exists is not checked.

    Args:
        i: the index of the GPU, from 0.

    Raises:
        InvalidDeviceError: if ``i`` is negative, or not an integer.

    >>> gpu(1)
    Device('gpu', 1)
    """
    return Device(_GPU, i)


# torch's compiler cannot make an object with slots in a graph. So a machine's devices exist before.
for _index in range(16):
    gpu(_index)


def gpus_in_words(count: int) -> str:
    """Return ``'1 GPU'``, ``'2 GPUs'``, for messages."""
    return f"{quote(count)} GPU{'' if count == 1 else 's'}"
