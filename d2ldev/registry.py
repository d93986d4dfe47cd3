"""Which backends there are, which one is active, and how that is changed.

Backends are found through the entry-point group ``d2ldev.backends``, the built-in ones like
anyone else's. An entry point names a subclass of ``Backend``; the package that holds it
imports no framework until that class is asked for, and says which modules it needs in a
``requires`` tuple (default: none), so that "is it installed?" is answered without importing.

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
from typing import TYPE_CHECKING, Any

from d2ldev.errors import (
    BackendFallbackWarning,
    BackendNotInstalledError,
    D2LDevError,
    UnknownBackendError,
    UnsupportedValueError,
    shown,
)
from d2ldev.virtual import requested_virtual_gpus

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from d2ldev.interface import Backend

GROUP = "d2ldev.backends"
VARIABLE = "D2LDEV_BACKEND"
ALIASES = {"pytorch": "torch", "tf": "tensorflow"}
PREFERENCE = ("torch", "jax", "tensorflow", "mxnet")
FALLBACK = "reference"
_INSTALL = {
    **{name: f"pip install 'd2ldev[{name}]'" for name in PREFERENCE},
    FALLBACK: "pip install d2ldev",
}

_lock = threading.RLock()
_entry_points: dict[str, EntryPoint] | None = None
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


# -- what there is ----------------------------------------------------------------------------


def known_backends(*, refresh: bool = False) -> dict[str, EntryPoint]:
    """Every backend that some installed distribution announces, by name.

    Args:
        refresh: look again, for what was installed since.
    """
    global _entry_points
    if _entry_points is None or refresh:
        from importlib.metadata import MetadataPathFinder, entry_points

        # Python 3.11 leaves these out of ``importlib.invalidate_caches``, as an instance's method.
        MetadataPathFinder().invalidate_caches()
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=GROUP):
            found.setdefault(point.name.lower(), point)
        _entry_points = found
    return _entry_points


def missing_modules(name: str) -> list[str]:
    """What a known backend needs and is not installed, without importing any of it.

    Raises:
        Exception: whatever importing a broken third-party package raises.
    """
    package = importlib.import_module(known_backends()[name].module.partition(".")[0])
    return [module for module in getattr(package, "requires", ()) if not _is_installed(module)]


def available_backends() -> list[str]:
    """The names of the backends whose framework is installed, in the order of preference.

    No framework is imported. A third-party backend whose package cannot be imported is left
    out; ``get_backend`` says why.
    """
    names = sorted(known_backends(), key=_rank)
    return [name for name in names if _is_available(name)]


def _rank(name: str) -> tuple[int, str]:
    if name in PREFERENCE:
        return PREFERENCE.index(name), name
    return len(PREFERENCE) + (name == FALLBACK), name


def _is_available(name: str) -> bool:
    try:
        return not missing_modules(name)
    except Exception:
        return False


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    spec = importlib.util.find_spec(module)
    # A folder that happens to have the name is a namespace package, which has no origin.
    return spec is not None and spec.origin is not None


# -- by name ----------------------------------------------------------------------------------


def canonical_name(name: str) -> str:
    """A backend's name without regard to case, white space and aliases."""
    name = name.strip().lower()
    return ALIASES.get(name, name)


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
                raise _unknown(name, source)
            _loaded[key] = _load(key, source)
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


def _load(name: str, source: str) -> Backend:
    from d2ldev.interface import Backend

    attempted = f"use the {name} backend{source}"
    point = known_backends()[name]
    install = _INSTALL.get(name, "")
    try:
        missing = missing_modules(name)
        if missing:
            raise BackendNotInstalledError(
                attempted,
                f"{' and '.join(missing)} is not installed; {_choices()}",
                install or f"install {' and '.join(missing)}, which {point.value} needs",
            )
        cls = point.load()
    except BackendNotInstalledError:
        raise
    except Exception as error:
        # A framework that is there but broken: a missing shared library, a NumPy too new.
        raise BackendNotInstalledError(
            attempted,
            f"{point.value} fails to import: {type(error).__name__}: {error}; {_choices()}",
            f"reinstall it: {install}" if install else "reinstall it",
        ) from error
    problem = "is no subclass of d2ldev.interface.Backend"
    if isinstance(cls, type) and issubclass(cls, Backend):
        problem = f"lacks {', '.join(sorted(cls.__abstractmethods__))}"
        if not cls.__abstractmethods__:
            return cls(virtual_gpus=requested_virtual_gpus())
    raise BackendNotInstalledError(
        attempted,
        f"{point.value} {problem}; {_choices()}",
        "mend the entry point of its distribution, or uninstall it",
    )


def _unknown(name: str, source: str) -> UnknownBackendError:
    import difflib  # only an error needs it

    names = sorted([*known_backends(), *ALIASES])
    close = difflib.get_close_matches(canonical_name(name), names, 1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    fix = "pip install d2ldev: from its source tree alone no backend is found"
    if installed := available_backends():
        fix = f"{suggestion}{VARIABLE}={installed[0]}, or d2ldev.set_backend(...)"
    return UnknownBackendError(
        f"use the backend {name!r}{source}",
        f"no backend of that name is known; {_choices()}",
        fix,
    )


def _choices() -> str:
    known = ", ".join(sorted(known_backends(), key=_rank))
    return f"known: {known}; installed: {', '.join(available_backends())}"


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


def _resolve() -> Backend:
    global _process, _reason
    with _lock:
        if _process is not None:
            return _process
        text = os.environ.get(VARIABLE, "")
        if text.strip():
            _process = _get(text, f" (from {VARIABLE}={text!r})")
            _reason = f"{VARIABLE}={text.strip()}"
            return _process
        installed = [name for name in available_backends() if name in PREFERENCE]
        if installed:
            _process = get_backend(installed[0])
            _reason = f"{installed[0]} is the first that is installed of {', '.join(PREFERENCE)}"
            return _process
        _process = get_backend(FALLBACK)
        _reason = f"none of {', '.join(PREFERENCE)} is installed"
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
    for name in sorted(known_backends(), key=_rank):
        if not _is_imported(name):
            continue
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
        f"it is no tensor of an imported framework; {_choices()}",
        "x = backend.asarray(x) makes a tensor",
    ) from broken


def _is_imported(name: str) -> bool:
    """Whether what a backend needs is imported: only then can a tensor of it exist."""
    if name in _loaded:
        return True
    try:
        package = importlib.import_module(known_backends()[name].module.partition(".")[0])
    except Exception:
        return False  # a broken third-party package: not this tensor's
    requires = getattr(package, "requires", ())
    return bool(requires) and all(module in sys.modules for module in requires)
