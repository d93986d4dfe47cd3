"""The tensors that are still there: what fills a device, and where it was made."""

from __future__ import annotations

import ctypes
import sys
import tracemalloc
from typing import NamedTuple

from d2ldev.contract import DeviceLike, Framework, Tensor
from d2ldev.device import Device
from d2ldev.operations import devices


class LiveTensor(NamedTuple):
    """A tensor that something in this process still holds; the tensor itself is not held by it.

    Args:
        kind: the name of its class: ``'Parameter'``.
        shape: its sizes.
        dtype: the name of its dtype.
        nbytes: the bytes of its elements. A view shares them with its base.
        device: where it is.
        made: the lines that made it, ``'file:line'``, the outermost first. Lines of d2ldev and of
            the framework are left out. The last one is the user's, if the trace is deep enough.
            Empty unless Python traced memory then, by ``tracemalloc.start(50)`` or
            ``PYTHONTRACEMALLOC=50``. Of an object whose memory the framework reuses, they are those
            of the first object there, or none.

    >>> X = backend.ones((500, 3), device='gpu:0')
    >>> [x.nbytes for x in backend.live_tensors('gpu:0') if x.shape == (500, 3)]
    [6000]
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device: Device
    made: tuple[str, ...]


def live_tensors(framework: Framework, device: DeviceLike) -> list[LiveTensor]:
    """Return the tensors that are still there, the largest first; see ``Backend.live_tensors``."""
    wanted = None if device is None else devices.resolve(framework, device, "look for tensors")
    folders = _folders(framework)
    found = (_describe(framework, x, wanted, folders) for x in framework.tensors.live())
    return sorted(filter(None, found), key=lambda live: -live.nbytes)


def _folders(framework: Framework) -> tuple[str, ...]:
    """Return the folders, or files, of d2ldev, of a backend, and of the backend's packages."""
    classes = (*type(framework).__mro__, *framework.tensors.types, *framework.models.types)
    roots = {name.partition(".")[0] for name in (__name__, *(cls.__module__ for cls in classes))}
    modules = [sys.modules.get(name) for name in roots.union(framework.distributions)]
    files = [file for module in modules if (file := getattr(module, "__file__", None))]
    return tuple(file.removesuffix("__init__.py") for file in files)


def _describe(
    framework: Framework, x: Tensor, wanted: Device | None, folders: tuple[str, ...]
) -> LiveTensor | None:
    """Return what is said of a tensor; None if it is elsewhere, or has no bytes."""
    tensors = framework.tensors
    try:
        device = tensors.device_of(x)
        if wanted not in (None, device):
            return None
        shape = tuple(int(size) for size in x.shape)
        dtype, nbytes = tensors.dtype_of(x), tensors.nbytes(x)
    except Exception:  # it is only traced, or has no memory yet: each says so in its own way
        return None
    return LiveTensor(type(x).__name__, shape, dtype, nbytes, device, _trace_origin(x, folders))


def _trace_origin(x: Tensor, folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines that made an object, as far as Python has traced them, to the user's own."""
    if not tracemalloc.is_tracing():
        return ()
    found = tracemalloc.get_object_traceback(x)
    if found is None and sys.version_info < (3, 12):
        found = _traceback_of_one_with_attributes(x)
    frames = list(found or ())
    files = ["", *(frame.filename for frame in frames)]
    # MXNet's own code is in part in strings.
    while files[-1].startswith(folders) or (
        files[-1] == "<string>" and files[-2].startswith(folders)
    ):
        files.pop()
    return tuple(map(str, frames[: len(files) - 1] or frames))


def _traceback_of_one_with_attributes(x: Tensor) -> tracemalloc.Traceback | None:
    """Return the traceback of an object with a ``__dict__``, which Python 3.11 does not find.

    It looks for the memory behind the two pointers to the attributes, which are before the
    collector's two: https://github.com/python/cpython/blob/3.11/Modules/_tracemalloc.c.
    """
    ask = ctypes.pythonapi["_PyTraceMalloc_GetTraceback"]
    ask.restype, ask.argtypes = ctypes.py_object, (ctypes.c_uint, ctypes.c_size_t)
    frames = ask(0, id(x) - 4 * ctypes.sizeof(ctypes.c_void_p))
    return None if frames is None else tracemalloc.Traceback(frames)
