"""Which backend is active, and how that is changed.

Held by ``tests/test_selection.py`` and ``tests/test_registry.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.errors import (
    BackendFallbackWarning,
    D2LDevError,
    UnsupportedValueError,
    shown,
)
from d2ldev.registry.discovery import (
    BROKEN,
    FALLBACK,
    PREFERENCE,
    available_backends,
    canonical_name,
    choices,
    known_backends,
    rank,
    required_modules,
)
from d2ldev.registry.loading import load, unknown

if TYPE_CHECKING:
    from d2ldev.interface import Backend

VARIABLE = "D2LDEV_BACKEND"

_lock = threading.RLock()
_loaded: dict[str, Backend] = {}
_by_type: dict[type, Backend] = {}

# The backend of the innermost ``use_backend`` of this thread or task; None outside of any.
_scoped: ContextVar[Backend | None] = ContextVar("d2ldev_backend", default=None)
# Each ``use_backend`` that was entered and not left, with its backend. Not a stack of tokens: a
# generator that is closed late leaves its block after one that was entered later.
_entered: ContextVar[tuple[tuple[use_backend, Backend], ...]] = ContextVar(
    "d2ldev_entered_backends", default=()
)
# The process's backend, once it is resolved, and what decided it.
_process: Backend | None = None
_reason = ""


# -- by name ----------------------------------------------------------------------------------


def get_backend(name: str | Backend) -> Backend:
    """The backend of a name; the same object every time.

    Args:
        name: ``'torch'``, ``'jax'``, ``'tensorflow'``, ``'mxnet'``, ``'reference'``, the name of
            any entry point, or a backend, which is returned.

    Raises:
        UnknownBackendError: if no such backend is known.
        BackendNotInstalledError: if its framework is missing, or fails to import.
    """
    return _get(name, "")


def _get(name: str | Backend, source: str) -> Backend:
    if not isinstance(name, str):
        return _checked_instance(name)
    key = canonical_name(name)
    backend = _loaded.get(key)
    if backend is not None:
        return backend
    with _lock:
        if key not in _loaded:
            importlib.invalidate_caches()  # it may have been installed a moment ago
            if key not in known_backends() and key not in known_backends(refresh=True):
                raise unknown(name, source)
            _loaded[key] = load(key, source)
        return _loaded[key]


def _checked_instance(backend: Any) -> Backend:
    from d2ldev.active import ActiveBackend
    from d2ldev.interface import Backend

    if isinstance(backend, ActiveBackend):
        # The handle itself as the active backend would ask itself for ever.
        return active_backend()
    if not isinstance(backend, Backend):
        raise UnsupportedValueError(
            f"use {shown(backend)} as a backend",
            "it is neither a name nor a backend",
            f"d2ldev.get_backend({FALLBACK!r})",
        )
    return backend


def is_loaded(name: str) -> bool:
    """Whether the backend of a canonical name was used so far."""
    return name in _loaded


def loaded_backends() -> list[Backend]:
    """The backends that were used so far."""
    return list(_loaded.values())


# -- the active one ---------------------------------------------------------------------------


def active_backend() -> Backend:
    """The backend that ``from d2ldev import backend`` stands for here and now.

    The innermost ``use_backend`` of this thread or task; else ``set_backend``'s; else the one
    that ``D2LDEV_BACKEND`` names; else the first installed of torch, jax, tensorflow, mxnet;
    else the reference backend, with a ``BackendFallbackWarning``.
    """
    return _scoped.get() or _process or _resolve()


def selection_reason() -> str:
    """Why the active backend is the active one, in words."""
    active_backend()
    return "use_backend" if _scoped.get() is not None else _reason


class Choice(NamedTuple):
    """Which backend is the process's unless ``set_backend`` says otherwise, and why.

    Args:
        name: as it was written.
        source: where the name came from, for a message; empty if d2ldev chose it.
        reason: in words.
    """

    name: str
    source: str
    reason: str


def choice() -> Choice:
    """What ``D2LDEV_BACKEND`` and the installed frameworks say; nothing is loaded."""
    text = os.environ.get(VARIABLE, "")
    if text.strip():
        return Choice(text, f" (from {VARIABLE}={text!r})", f"{VARIABLE}={text.strip()}")
    preferred = ", ".join(PREFERENCE)
    for name in available_backends():
        if name in PREFERENCE:
            return Choice(name, "", f"{name} is the first that is installed of {preferred}")
    return Choice(FALLBACK, "", f"none of {preferred} is installed")


def _resolve() -> Backend:
    global _process, _reason
    with _lock:
        if _process is not None:
            return _process
        name, source, _reason = choice()
        _process = _get(name, source)
        if name != FALLBACK or source:
            return _process
        warnings.warn(
            f"{_reason}: the {FALLBACK} backend is used, which computes on the CPU only and "
            f"cannot train. fix: pip install 'd2ldev[torch]', or say {VARIABLE}={FALLBACK}",
            BackendFallbackWarning,
            stacklevel=3,
        )
        return _process


def set_backend(name: str | Backend) -> Backend:
    """Make a backend the process's active one, in every thread; returned.

    Inside ``use_backend``, that one stays active until its block ends.

    Raises:
        UnknownBackendError, BackendNotInstalledError: as ``get_backend``; nothing changes then.
    """
    global _process, _reason
    backend = get_backend(name)
    with _lock:
        _process, _reason = backend, "set_backend"
    return backend


class use_backend:  # noqa: N801  # it reads as a verb in a with statement
    """Make a backend the active one for the length of a block, in this thread or task only.

    Leaving restores exactly what was, also under exceptions. One object can be entered
    again, also inside its own block.

    Args:
        name: as for ``get_backend``.

    >>> with use_backend('reference') as backend:
    ...     backend.name
    'reference'
    """

    def __init__(self, name: str | Backend) -> None:
        self._name = name

    def __enter__(self) -> Backend:
        backend = get_backend(self._name)
        _entered.set((*_entered.get(), (self, backend)))
        _scoped.set(backend)
        return backend

    def __exit__(self, *exception: object) -> None:
        entered = list(_entered.get())
        for index in reversed(range(len(entered))):
            if entered[index][0] is self:
                del entered[index]
                break
        _entered.set(tuple(entered))
        _scoped.set(entered[-1][1] if entered else None)


# -- from a tensor ----------------------------------------------------------------------------


def backend_of(x: Any) -> Backend:
    """The backend whose tensor ``x`` is, importing no framework that is not there already.

    Raises:
        UnsupportedValueError: if it is no tensor of any backend.
    """
    backend = _by_type.get(type(x))
    if backend is not None:
        return backend
    broken: D2LDevError | None = None
    for name in _imported_backends():
        try:
            backend = get_backend(name)
        except D2LDevError as error:
            broken = broken or error  # it may still be the tensor of another
            continue
        if isinstance(x, backend.tensor_types):
            if len(_by_type) < 1024:
                _by_type[type(x)] = backend
            return backend
    raise UnsupportedValueError(
        f"tell the backend of a {type(x).__module__}.{type(x).__qualname__}",
        f"it is no tensor of an imported framework; {choices()}",
        "x = backend.asarray(x) makes a tensor",
    ) from broken


def backend_of_loader(x: Any) -> Backend | None:
    """The backend whose framework's loader ``x`` is; None if it is none that a backend can read.

    The classes' modules are asked first: a framework that happens to be imported is left alone.
    """
    roots = {cls.__module__.partition(".")[0] for cls in type(x).__mro__}
    for name in _imported_backends():
        if not roots.intersection(required_modules(name)):
            continue
        try:
            backend = get_backend(name)
        except D2LDevError:
            continue  # it is gone through then, as any other iterable, which is right, too
        if isinstance(x, backend.loader_types):
            return backend
    return None


def _imported_backends() -> list[str]:
    """The backends whose frameworks are imported, by name, the preferred ones first."""
    return [name for name in sorted(known_backends(), key=rank) if _is_imported(name)]


def _is_imported(name: str) -> bool:
    """Whether what a backend needs is imported: only then can a tensor of it exist."""
    if name in _loaded:
        return True
    try:
        requires = required_modules(name)
    except BROKEN:
        return False  # a broken third-party package: not this tensor's
    return bool(requires) and all(module in sys.modules for module in requires)
