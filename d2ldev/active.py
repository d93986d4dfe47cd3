"""Which backend is active: ``backend``, the handle, and the functions that change it.

The handle is a ``Backend`` that looks up its framework at each call. All its methods are
``Backend``'s.

Held by ``tests/core/registry/``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from d2ldev._backend import Backend, backend_for, framework_of
from d2ldev.contract import Framework
from d2ldev.errors import UnsupportedValueError, quote
from d2ldev.registry.discovery import FALLBACK
from d2ldev.registry.selection import (
    FollowsSelection,
    Selection,
    active_framework,
    enter,
    framework_of_class,
    get_framework,
    scoped,
    set_environment,
    set_selection,
)
from d2ldev.scopes import Entry, call_while_tracing, trace_as
from d2ldev.typing import HasShape


class ActiveBackend(FollowsSelection, Backend):
    """The active backend, resolved at every call."""

    def __init__(self) -> None:
        """Create an empty handle; its first use resolves the backend."""
        object.__setattr__(self, "_known_framework", None)

    def __repr__(self) -> str:
        return f"<the active backend: {self.name}>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        # The attribute would belong to every backend that is active later, too.
        raise AttributeError(f"cannot set {name!r} of d2ldev.backend, which is another one in turn")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"cannot delete {name!r} of d2ldev.backend")

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_handle, ()


backend: Backend = ActiveBackend()
"""``from d2ldev import backend``: the active backend."""
# Before the program uses a framework without d2ldev.
set_environment()


def _the_handle() -> Backend:
    return backend


def active_backend() -> Backend:
    """Return the backend that ``from d2ldev import backend`` stands for here and now."""
    return backend_for(active_framework())


def get_backend(name: str | Backend) -> Backend:
    """Return the backend of a name; the same object every time.

    Args:
        name: ``'torch'``, ``'jax'``, ``'tensorflow'``, ``'mxnet'``, ``'reference'``, the name of
            any entry point, or a backend, which is returned.

    Raises:
        UnknownBackendError: if no such backend is known.
        BackendNotInstalledError: if its framework is missing, or fails to import.
        UnsupportedValueError: if ``name`` is neither a name nor a backend.

    >>> get_backend('reference')
    <the reference backend>
    """
    if isinstance(name, str):
        return backend_for(get_framework(name))
    if isinstance(name, ActiveBackend):
        # If the handle were the active backend, it would look itself up for ever.
        return active_backend()
    if isinstance(name, Backend):
        return name
    raise UnsupportedValueError(
        f"use {quote(name)} as a backend",
        "it is neither a name nor a backend",
        f"d2ldev.get_backend({FALLBACK!r})",
    )


def set_backend(name: str | Backend) -> Backend:
    """Make a backend the process's active one, in every thread; return it.

    Inside ``use_backend``, that one stays active until its block ends.

    Args:
        name: as for ``get_backend``.

    Returns:
        The backend.

    Raises:
        UnknownBackendError, BackendNotInstalledError, UnsupportedValueError: as ``get_backend``;
            nothing changes then.

    >>> set_backend('reference')
    <the reference backend>
    """
    found = get_backend(name)
    set_selection(Selection(framework_of(found), "set_backend"))
    return found


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
        self._entered: list[Entry[Framework]] = []

    def __enter__(self) -> Backend:
        found = get_backend(self._name)
        self._entered.append(enter(framework_of(found)))
        return found

    def __exit__(self, *exception: object) -> None:
        # Another thread or task may have entered the same object.
        entry = scoped.find(lambda each: each in self._entered)
        if entry is not None:
            self._entered.remove(entry)
            scoped.leave(entry)


@call_while_tracing
def _remember_backend(cls: type) -> Backend:
    """Return the backend of a class of tensors, and remember it."""
    found = backend_for(framework_of_class(cls))
    if len(_of_type) < _MOST_TYPES:
        _of_type[cls] = found
    return found


def _backend_of_traced(x: HasShape) -> Backend:
    # The compiler reads the dict only afterwards, and sees the new entry.
    _remember_backend(type(x))
    return _of_type[type(x)]


@trace_as(_backend_of_traced)
def backend_of(x: HasShape) -> Backend:
    """Return the backend whose tensor ``x`` is, importing no framework that is not there already.

    Args:
        x: a tensor of any backend.

    Raises:
        UnsupportedValueError: if it is not a tensor of any backend, such as a NumPy array. If the
            backend of the tensor fails, it gives the reason, and ``__cause__`` is that error.

    >>> backend_of(get_backend('reference').ones(2))
    <the reference backend>
    """
    found = _of_type.get(type(x))
    return _remember_backend(type(x)) if found is None else found


_MOST_TYPES = 1024
_of_type: dict[type, Backend] = {}
"""The backend of each type of tensor that was asked for: who asks has little else to do."""
