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
        is_tensor = hasattr(kind, "__dlpack__") and kind.__module__ != "numpy"
        text = _signature(value) if is_tensor else str.__str__(_short.repr(value))
    except Exception:
        text = object.__repr__(value)
    # Not at the top: ``import d2ldev`` would take half as long again.
    import re

    text = re.sub(r"\n\s*", " ", text)
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
    "<class 'object'>, a type,"
    """
    kind = type(value).__name__
    is_vowel = kind[0] in "aeiouAEIOU" or kind == "ndarray"
    return f"{quote(value)}, {'an' if is_vowel else 'a'} {kind},"


class InvalidDeviceError(D2LDevError, ValueError):
    """The value names no device: ``gpu(-1)``, ``'gpu:x'``, another framework's device."""


class UnsupportedValueError(D2LDevError, TypeError, ValueError):
    """A value that the call does not take: no tensor, no container, no dtype, no shape.

    Some frameworks raise a ``TypeError`` where others raise a ``ValueError``; this is both.
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
    """No backend of that name is known."""


class BackendNotInstalledError(D2LDevError, ImportError):
    """The backend is known, but what it needs is not installed or fails to import."""


class PackageNotInstalledError(D2LDevError, ImportError):
    """A package that only some calls need is not installed, or fails to import."""


class DeviceUnavailableError(D2LDevError, RuntimeError):
    """The device is a valid one, but this machine does not have it."""


class DeviceMismatchError(D2LDevError, RuntimeError):
    """An operation has operands on different devices."""


class ScopeError(D2LDevError, RuntimeError):
    """A framework's own setting, such as its default device, cannot be changed here."""


class OutOfDeviceMemoryError(D2LDevError, MemoryError):
    """The device has too little free memory for a tensor or a model."""


class CheckpointError(D2LDevError, ValueError):
    """A file of parameters cannot be read or does not fit."""


class PeerLostError(D2LDevError, RuntimeError):
    """Another process of a launch has ended, or sends no heartbeat."""


class D2LDevWarning(UserWarning):
    """The base class of every warning of d2ldev."""


class BackendFallbackWarning(D2LDevWarning):
    """No framework is installed, so the reference backend is used."""


class MemoryPolicyWarning(D2LDevWarning):
    """A framework reserved GPU memory before d2ldev could ask it to take only what it needs."""


class DeviceInitializationWarning(D2LDevWarning):
    """The framework found hardware, but could not initialise it."""


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
