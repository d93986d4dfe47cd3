"""How many bytes the tensors on each virtual GPU hold, and the most they ever held.

A storage is counted once, when its memory is taken over, and no more when it dies: views share
it, and the CPU's names for its memory are not counted at all.
"""

from __future__ import annotations

import threading
import weakref

import torch

_lock = threading.RLock()  # a storage may die while another one is being counted
_used: dict[int, int] = {}
_peak: dict[int, int] = {}


class _Watch(weakref.ref):  # type: ignore[type-arg]
    """A reference to a storage that knows what it held."""

    __slots__ = ("index", "size")
    index: int
    size: int


# A reference that is itself dropped is never called. Kept by identity: as keys, references
# would be compared by the storages that they refer to.
_watched: dict[int, _Watch] = {}


def count(storage: torch.UntypedStorage, index: int) -> None:
    """Count a storage that was made on a virtual GPU, for as long as it lives."""
    size = storage.nbytes()
    watch = _Watch(storage, _forget)
    watch.index, watch.size = index, size
    with _lock:
        _watched[id(watch)] = watch
        _used[index] = used = _used.get(index, 0) + size
        if used > _peak.get(index, 0):
            _peak[index] = used


def _forget(watch: _Watch) -> None:
    with _lock:
        del _watched[id(watch)]
        _used[watch.index] -= watch.size


def used_and_peak(index: int) -> tuple[int, int]:
    """The bytes held on a virtual GPU now, and the most that were."""
    with _lock:
        return _used.get(index, 0), _peak.get(index, 0)


def reset_peak(index: int) -> None:
    """Forget what was held on a virtual GPU before."""
    with _lock:
        _peak[index] = _used.get(index, 0)
