"""The one error family.

Every error names the attempt, the reason, the devices, and the line that fixes it. Each class is
also the built-in exception that a caller without d2ldev would catch.

Held by ``tests/core/package/test_errors.py`` and the requirements ``errors.*`` of the suite.
"""

from __future__ import annotations

import reprlib
import sys
import warnings
from collections.abc import Iterable

# Not from ``typing``: its import takes as long as all the rest of ``import d2ldev``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LONGEST = 4000


class D2LDevError(Exception):
    """The base class of every error that d2ldev raises.

    Args:
        attempted: the operation, as in ``"move a tensor to gpu:1"``.
        problem: the reason for the error.
        fix: the line of code, or the command, that fixes it.
        devices: the devices involved, the most important first.

    >>> try:
    ...     backend.ones(2, device='gpu:9')
    ... except D2LDevError as error:
    ...     print(error)
    cannot make a tensor on gpu:9: reference has 2 GPUs here
      devices: cpu, gpu:0, gpu:1
      fix: use one that exists: backend.try_gpu(9) is cpu here
    """

    def __init__(
        self, attempted: str, problem: str, fix: str, devices: Iterable[object] = ()
    ) -> None:
        self.attempted = attempted
        self.problem = problem
        self.fix = fix
        self.devices = tuple(str(device) for device in devices)
        # All four go into ``args``, so that the error survives pickling between processes.
        super().__init__(attempted, problem, fix, self.devices)

    def __str__(self) -> str:
        # What a file or a framework says may be of any length.
        cut = "..." if len(self.problem) > _LONGEST else ""
        # What ``describe`` returns ends in a comma, for a sentence that goes on.
        attempted = self.attempted.removesuffix(",")
        lines = [f"cannot {attempted}: {self.problem[:_LONGEST]}{cut}"]
        if self.devices:
            lines.append(f"  devices: {', '.join(self.devices)}")
        lines.append(f"  fix: {self.fix}")
        # A path, or a name in a file, may have half of a surrogate pair, which cannot be printed.
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode()

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows in a notebook: IPython asks for this method."""
        from d2ldev.display import render_traceback

        return render_traceback(self)


# A ``repr`` goes through a nesting as often as it has paths, and a message shows its beginning.
_short = reprlib.Repr()
_short.maxlevel = 4
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = 8
_short.maxdeque = _short.maxarray = 8
_short.maxstring = _short.maxlong = _short.maxother = 1000


def quote(value: object) -> str:
    """Return the ``repr`` of a value for a message: one short line, and no error of its own."""
    try:
        # The ``repr`` of a tensor waits for its values, and torch ends the process if their memory
        # is freed. Of a subclass of ``str``, its own ``__str__`` is not called.
        kind = type(value)
        is_array = hasattr(kind, "shape") and hasattr(kind, "dtype")
        is_tensor = (is_array or hasattr(kind, "__dlpack__")) and kind.__module__ != "numpy"
        text = _signature(value) if is_tensor else str.__str__(_short.repr(value))
        if is_array and (len(text) > 60 or "\n" in text):
            text = _signature(value)
    except Exception:
        text = object.__repr__(value)
    if "\n" in text:  # as of a model, whose first line says little
        text = f"<{type(value).__name__}>"
    return f"{text[:57]}..." if len(text) > 60 else text


def _signature(x: Any) -> str:
    return f"<{type(x).__name__} of shape {tuple(x.shape)} and dtype {x.dtype}>"


def text_of(value: object) -> str:
    """Return the text of an exception or a label for a message: never an error of its own."""
    try:
        return str.__str__(str(value))
    except Exception:
        return object.__repr__(value)


def describe(value: object) -> str:
    """Return a value in a few words, for a message.

    >>> describe(object)
    "<class 'object'>, a class,"
    """
    kind, text = type(value).__name__, quote(value)
    if isinstance(value, type):  # its own class is a word of Python's, such as ``ABCMeta``
        kind = "class"
    is_vowel = kind[0] in "aeiouAEIOU" or kind == "ndarray"
    article = "an" if is_vowel else "a"
    return f"{article} {kind}" if text == f"<{kind}>" else f"{text}, {article} {kind},"


class InvalidDeviceError(D2LDevError, ValueError):
    """The value names no device: ``gpu(-1)``, ``'gpu:x'``, another framework's device.

    Use a ``Device``, a string such as ``'gpu:1'``, or the backend's own device object.

    >>> backend.ones(2, device='gpu:x')
    Traceback (most recent call last):
    d2ldev.errors.InvalidDeviceError: cannot read 'gpu:x' as a device: not a device name
      fix: device=backend.try_gpu(), or a string: 'cpu', 'gpu', 'gpu:1', 'cuda:1'
    """


class UnsupportedValueError(D2LDevError, TypeError, ValueError):
    """A value that the call does not take: no tensor, no container, no dtype, no shape.

    The message quotes the value, and names its place in a nesting. Some frameworks raise a
    ``TypeError`` where others raise a ``ValueError``; this is both.

    >>> backend.full(2, 0.25, dtype='int32')
    Traceback (most recent call last):
    d2ldev.errors.UnsupportedValueError: cannot make a tensor: 0.25 does not fit into int32
      fix: dtype='float32'
    """


class NotBegunError(D2LDevError, NotImplementedError):
    """The author of a backend has not written a method of the interface yet.

    The conformance suite counts it apart from failures. It does not derive from
    ``UnsupportedValueError``, because a test may expect a refused value.

    Args:
        method: its name in the interface: ``'Models.mlp'``.
        attempted: the operation that needs it.
    """

    def __init__(self, method: str, attempted: str = "") -> None:
        self.method = method
        super().__init__(
            attempted or f"call {method}",
            f"the backend has no {method} yet",
            "use another backend for it: D2LDEV_BACKEND=torch. The author of this one writes "
            f"{method}, or names it in Framework.cannot",
        )
        self.args = (method, attempted)


class UnknownBackendError(D2LDevError, ValueError):
    """No backend of that name is known.

    The message lists the known and the installed names, and where the name came from: a call, or
    ``D2LDEV_BACKEND``.

    >>> d2ldev.get_backend('refrence')
    Traceback (most recent call last):
    d2ldev.errors.UnknownBackendError: cannot use the backend 'refrence': no backend ...
      fix: did you mean 'reference'? D2LDEV_BACKEND=reference, or d2ldev.set_backend('reference')
    """


class BackendNotInstalledError(D2LDevError, ImportError):
    """The backend is known, but what it needs is not installed or fails to import.

    If the framework is installed and fails to import, its own error is the cause of this one.

    >>> d2ldev.get_backend('mxnet')
    Traceback (most recent call last):
    d2ldev.errors.BackendNotInstalledError: cannot use the mxnet backend: mxnet is not installed...
      fix: pip install ...
    """


class PackageNotInstalledError(D2LDevError, ImportError):
    """A package that only some calls need is not installed, or fails to import.

    d2ldev without an extra brings NumPy alone: docs/versions.md lists the extras.

    >>> from d2ldev.framework import import_optional
    >>> import_optional('no_package', 'log a run', install='pip install no-package')
    Traceback (most recent call last):
    d2ldev.errors.PackageNotInstalledError: cannot log a run: no_package cannot be imported: ...
      fix: pip install no-package
    """


class DeviceUnavailableError(D2LDevError, RuntimeError):
    """The device is a valid one, but this machine does not have it.

    d2ldev never uses the CPU instead. ``backend.try_gpu(i)`` is the GPU or the CPU. Without a GPU,
    ``D2LDEV_VIRTUAL_GPUS=2`` makes virtual ones.

    >>> d2ldev.Trainer(max_epochs=1, num_gpus=4)
    Traceback (most recent call last):
    d2ldev.errors.DeviceUnavailableError: cannot train on 4 GPUs: reference has 2 GPUs here
      devices: cpu, gpu:0, gpu:1
      fix: num_gpus=2
    """


class DeviceMismatchError(D2LDevError, RuntimeError):
    """An operation has operands on different devices.

    It is raised in ``backend.strict()``, and under ``D2LDEV_STRICT=1``. Move one of the operands.

    >>> X, Y = backend.ones(2, device='gpu:0'), backend.ones(2, device='gpu:1')
    >>> with backend.strict():
    ...     X + Y
    Traceback (most recent call last):
    d2ldev.errors.DeviceMismatchError: cannot run add: Expected all tensors to be on the same...
      devices: gpu:0, gpu:1
      fix: Y = backend.to(Y, 'gpu:0')
    """


class ScopeError(D2LDevError, RuntimeError):
    """A framework's own setting, such as its default device, cannot be changed here.

    The block ends in another thread than it began in. Or it ends within a block of the
    framework's own that began later. End the inner block first, in the thread that entered it.

    >>> import torch                                                       # doctest: +SKIP
    >>> block = backend.on('gpu:1')                                        # doctest: +SKIP
    >>> device = block.__enter__()                                         # doctest: +SKIP
    >>> with ThreadPoolExecutor() as pool:                                 # doctest: +SKIP
    ...     pool.submit(block.__exit__, None, None, None).result()
    Traceback (most recent call last):
    d2ldev.errors.ScopeError: cannot end the block of backend.on('gpu:1'): it was entered in ...
      fix: close the generator in the thread that entered it. ...
    """


class OutOfDeviceMemoryError(D2LDevError, MemoryError):
    """The device has too little free memory for a tensor or a model.

    The call that makes or copies it raises. JAX itself returns before it knows. So from 16 MiB on,
    d2ldev compares the size with the free memory. It waits for a tensor of more than 1 GiB, or of
    more than a quarter of the free memory.

    >>> backend.zeros((10**6, 10**9), device='gpu:0')
    Traceback (most recent call last):
    d2ldev.errors.OutOfDeviceMemoryError: cannot make a tensor of shape (1000000, 1000000000): ...
      devices: gpu:0
      fix: use a smaller batch, or free tensors; backend.memory(device) shows the memory
    """


class CheckpointError(D2LDevError, ValueError):
    """A file of parameters cannot be read or does not fit.

    The message lists each name that is missing, unexpected, or of another shape or dtype. Nothing
    has changed then. ``load_into(..., strict=False)`` reads what matches.

    >>> backend.load('missing.safetensors')
    Traceback (most recent call last):
    d2ldev.errors.CheckpointError: cannot load missing.safetensors: No such file or directory
      fix: give the path of a file that can be read
    """


class PeerLostError(D2LDevError, RuntimeError):
    """Another process of a launch has ended, or sends no heartbeat.

    A process that could not run for a minute needs a larger ``D2LDEV_PEER_TIMEOUT``. The
    checkpoint of the last epoch is whole: start the program again with ``resume=True``, or use
    ``d2ldev launch --restarts``.

    >>> history = trainer.fit(net, batches, checkpoint='run.safetensors')  # doctest: +SKIP
    Traceback (most recent call last):
    d2ldev.errors.PeerLostError: cannot train in 2 processes: rank 1 on here is lost: ...
      fix: start the program again: fit(..., checkpoint='run.safetensors', resume=True) goes on ...
    """


class D2LDevWarning(UserWarning):
    """The base class of every warning of d2ldev; it points to your own line.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter('error', d2ldev.D2LDevWarning)    # an error from now on
    ...     X = backend.ones(2)
    """


class BackendFallbackWarning(D2LDevWarning):
    """No framework is installed, so the reference backend is used.

    Install one, as with ``pip install torch``, or set ``D2LDEV_BACKEND=reference``.
    """


class MemoryPolicyWarning(D2LDevWarning):
    """A framework reserved GPU memory before d2ldev could ask it to take only what it needs.

    Use d2ldev before the framework's first use of a GPU. ``D2LDEV_GPU_MEMORY=framework`` leaves
    JAX and TensorFlow alone.
    """


class DeviceInitializationWarning(D2LDevWarning):
    """The framework found hardware, but could not initialise it.

    It has the framework's reason, and the backend counts no GPU. ``d2ldev doctor`` shows the build
    of the framework and the driver.
    """


def warn(message: str, category: type[D2LDevWarning] = D2LDevWarning) -> None:
    """Show a warning that points to the user's own line, wherever in d2ldev it is raised."""
    # ``skip_file_prefixes`` of ``warnings.warn`` came with Python 3.12.
    level, frame = 1, sys._getframe()
    while frame is not None and (
        (module := frame.f_globals.get("__name__", "")).startswith("d2ldev")
        or module == "contextlib"
    ):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
