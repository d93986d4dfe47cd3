"""``backend``: the handle that stands for the active backend, resolved at every call.

It has every method of ``Backend``, each of which asks ``active_backend()`` and calls that one's.
They are made from the interface's own signatures, so that a call costs one function more
(some 40 ns), not a search through ``__getattr__`` (some 400 ns), and nothing is said twice.
"""

from __future__ import annotations

from functools import update_wrapper
from types import FunctionType
from typing import Any, cast

from d2ldev.interface import Backend
from d2ldev.registry import selection as registry
from d2ldev.registry.selection import active_backend


class ActiveBackend:
    """The active backend: ``isinstance(backend, Backend)``, with its methods and attributes."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        # What the interface does not know: ``name``, ``kinds``, a third party's own methods.
        return getattr(active_backend(), name)

    def __dir__(self) -> list[str]:
        return dir(active_backend())

    def __repr__(self) -> str:
        return f"<the active backend: {active_backend().name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_handle, ()


def _forward(name: str, method: FunctionType) -> Any:
    """A method that calls the active backend's of the same name and signature."""
    # ``contextmanager`` makes a function that takes anything, and keeps the one with the names.
    wrapped: FunctionType = getattr(method, "__wrapped__", method)
    code = wrapped.__code__
    positional = code.co_varnames[1 : code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    parameters = ", ".join(["self", *positional, *(["*", *keywords] if keywords else [])])
    arguments = ", ".join([*positional, *(f"{keyword}={keyword}" for keyword in keywords)])
    namespace: dict[str, Any] = {}
    # The text is made of the interface's own names. It is a function of the registry's module,
    # so that it reads ``active_backend``'s variables itself: calling that would be half the cost.
    exec(  # noqa: S102
        f"def {name}({parameters}):\n"
        f"    return (_scoped.get() or _process or _resolve()).{name}({arguments})",
        vars(registry),
        namespace,
    )
    forward = namespace[name]
    forward.__defaults__ = wrapped.__defaults__
    forward.__kwdefaults__ = wrapped.__kwdefaults__
    return update_wrapper(forward, method)


for _name in dir(Backend):
    _method = getattr(Backend, _name)
    if isinstance(_method, FunctionType) and not _name.startswith("_"):
        setattr(ActiveBackend, _name, _forward(_name, _method))
Backend.register(ActiveBackend)

backend = cast("Backend", ActiveBackend())
"""``from d2ldev import backend``: the active backend."""


def _the_handle() -> Backend:
    return backend
