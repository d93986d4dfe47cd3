"""From the name of a backend to its class and its one instance: entry points, and what is broken.

Held by ``tests/test_registry.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d2ldev import virtual
from d2ldev.errors import BackendNotInstalledError, D2LDevError, UnknownBackendError
from d2ldev.operations import strictness
from d2ldev.registry.discovery import (
    ALIASES,
    BROKEN,
    FALLBACK,
    PREFERENCE,
    available_backends,
    canonical_name,
    choices,
    known_backends,
    missing_modules,
)

if TYPE_CHECKING:
    from d2ldev.interface import Backend

_INSTALL = {
    **{name: f"pip install 'd2ldev[{name}]'" for name in PREFERENCE},
    FALLBACK: "pip install d2ldev",
}


def load(name: str, source: str) -> Backend:
    """A new instance of a known backend, with the virtual GPUs and strictness that were asked for.

    Args:
        name: its name among the entry points.
        source: where the name came from, for a message: ``" (from D2LDEV_BACKEND='x')"``, or empty.

    Raises:
        BackendNotInstalledError: if what it needs is missing, or fails to import.
    """
    is_strict = strictness.is_requested()
    backend = _made(backend_class(name, source), name, source, virtual.requested_virtual_gpus())
    if is_strict:
        backend._be_strict()
    return backend


def count_real_gpus(name: str) -> int:
    """How many GPUs a known backend finds in the machine, whatever virtual ones were asked for.

    An instance that is not kept is asked, so that virtual ones can still be made.

    Raises:
        BackendNotInstalledError: as ``load``.
    """
    backend = _made(backend_class(name), name, "", None)
    return sum(backend.platform(device) != "virtual" for device in backend.devices()[1:])


def backend_class(name: str, source: str = "") -> type[Backend]:
    """The class of a known backend, whose framework is imported if its module does that.

    Raises:
        BackendNotInstalledError: as ``load``.
    """
    from d2ldev.interface import Backend

    attempted = f"use the {name} backend{source}"
    point = known_backends()[name]
    install = _INSTALL.get(name, "")
    try:
        missing = missing_modules(name)
        if missing:
            raise BackendNotInstalledError(
                attempted,
                f"{' and '.join(missing)} is not installed; {choices()}",
                install or f"install {' and '.join(missing)}, which {point.value} needs",
            )
        cls = point.load()
    except BackendNotInstalledError:
        raise
    except BROKEN as error:
        # A framework that is there but broken: a missing shared library, a NumPy too new.
        raise BackendNotInstalledError(
            attempted,
            f"{point.value} fails to import: {type(error).__name__}: {error}; {choices()}",
            f"reinstall it: {install}" if install else "reinstall it",
        ) from error
    problem = "is no subclass of d2ldev.interface.Backend"
    if isinstance(cls, type) and issubclass(cls, Backend):
        if not cls.__abstractmethods__:
            return cls
        problem = f"lacks {', '.join(sorted(cls.__abstractmethods__))}"
    raise BackendNotInstalledError(
        attempted,
        f"{point.value} {problem}; {choices()}",
        "mend the entry point of its distribution, or uninstall it",
    )


def _made(cls: type[Backend], name: str, source: str, virtual_gpus: int | None) -> Backend:
    try:
        return cls(virtual_gpus=virtual_gpus)
    except D2LDevError:
        raise
    except BROKEN as error:
        raise BackendNotInstalledError(
            f"use the {name} backend{source}",
            f"{known_backends()[name].value} cannot be made: {type(error).__name__}: {error}; "
            f"{choices()}",
            "mend its __init__, which takes virtual_gpus=None, or choose another backend",
        ) from error


def unknown(name: str, source: str) -> UnknownBackendError:
    """The error of a name that no backend has, with the nearest one that some has."""
    import difflib  # only an error needs it

    names = sorted([*known_backends(), *ALIASES])
    close = difflib.get_close_matches(canonical_name(name), names, 1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    fix = "pip install d2ldev: from its source tree alone no backend is found"
    if installed := available_backends():
        fix = f"{suggestion}D2LDEV_BACKEND={installed[0]}, or d2ldev.set_backend(...)"
    return UnknownBackendError(
        f"use the backend {name!r}{source}",
        f"no backend of that name is known; {choices()}",
        fix,
    )
