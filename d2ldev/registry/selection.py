"""Which framework is active, and how that is changed.

Held by ``tests/core/registry/test_selection.py`` and ``tests/core/registry/test_registry.py``.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import d2ldev.settings as settings
from d2ldev.contract import Framework
from d2ldev.contract.framework import count_gpus
from d2ldev.dependencies import write_install
from d2ldev.device import CPU, gpu, gpus_in_words
from d2ldev.errors import (
    BackendFallbackWarning,
    D2LDevError,
    DeviceUnavailableError,
    UnsupportedValueError,
    quote,
    warn,
)
from d2ldev.locks import Lock
from d2ldev.nesting.kinds import OBJECT, TENSOR
from d2ldev.registry.discovery import (
    FALLBACK,
    PREFERENCE,
    available_backends,
    canonical_name,
    choices,
    find_backends,
    lacks_modules,
    libraries_of,
    rank,
    read_environment,
    read_package,
    read_required_modules,
)
from d2ldev.registry.loading import fallback_refusal, load, name_refusal
from d2ldev.scopes import Entry, Scopes, trace_as

# A forked child cannot import a half-imported framework, because Python's lock of the module stays
# locked there. An import takes seconds.
_lock = Lock(patience=30)
_loaded: dict[str, Framework] = {}
_by_type: dict[type, Framework] = {}

scoped: Scopes[Framework] = Scopes("d2ldev_backends")
"""The frameworks of the blocks ``with use_backend(name):``."""


class Selection(NamedTuple):
    """The framework of the process, and what decided it.

    Args:
        framework: None until it is resolved.
        reason: in words.
    """

    framework: Framework | None
    reason: str


_selection = Selection(None, "")
# Whether any block of ``use_backend`` was entered so far; the objects that cache a framework.
_had_blocks = False
_keepers: list[object] = []


# -- by name ----------------------------------------------------------------------------------


def get_framework(name: str, source: str = "") -> Framework:
    """Return the framework of a backend's name; the same object every time.

    Args:
        name: as for ``d2ldev.get_backend``.
        source: where it came from, for a message; empty if the user wrote it.

    Raises:
        UnknownBackendError: if no such backend is known.
        BackendNotInstalledError: if its framework is missing, or fails to import.
    """
    key = canonical_name(name)
    framework = _loaded.get(key)
    if framework is not None:
        return framework
    with _lock:
        if key not in _loaded:
            importlib.invalidate_caches()  # it may have been installed a moment ago
            if key not in find_backends() and key not in find_backends(refresh=True):
                raise name_refusal(name, source)
            _loaded[key] = load(key, source)
        return _loaded[key]


def is_loaded(name: str) -> bool:
    """Return whether the backend of a canonical name was used so far."""
    return name in _loaded


def list_loaded_frameworks() -> list[Framework]:
    """Return the frameworks that were used so far."""
    return list(_loaded.values())


def frameworks_in_use() -> list[Framework]:
    """Return the frameworks that were used so far, the active one first if there is one."""
    active = scoped.value.get() or _selection.framework
    found = list_loaded_frameworks() if active is None else [active, *list_loaded_frameworks()]
    return list(dict.fromkeys(found))


# -- the active one ---------------------------------------------------------------------------


def active_framework() -> Framework:
    """Return the framework behind ``from d2ldev import backend``, here and now.

    The first of these decides: the innermost ``use_backend`` of this thread or task,
    ``set_backend``, ``D2LDEV_BACKEND``. Otherwise it is the first installed of torch, jax,
    tensorflow, mxnet, or else the only other installed one. The last resort is the reference
    backend, with a ``BackendFallbackWarning``.
    """
    return scoped.value.get() or _selection.framework or _resolve()


def enter(framework: Framework) -> Entry[Framework]:
    """Make a framework the active one in this thread or task, until ``scoped.leave(entry)``."""
    global _had_blocks
    with _lock:
        _had_blocks = True
        _forget()
    return scoped.enter(framework)


class _Computed:
    """The active framework as an attribute for ``trace_as``."""

    framework = property(operator.call)

    def __call__(self) -> Framework:
        return active_framework()


_computed = _Computed()


class _ActiveFramework:
    """The active framework as an attribute of an object.

    Every call of the handle reads it. Reading an attribute takes a fifth of the time of a function
    call. So the object caches it, until ``set_backend`` changes it. After the first block of
    ``use_backend`` it caches nothing, because its threads and tasks may outlive it.
    """

    @trace_as(lambda *_: _computed.framework)
    def __get__(self, owner: FollowsSelection, cls: type) -> Framework:
        # ``active_framework``, without a call.
        framework = scoped.value.get() or _selection.framework or _resolve()
        if not _had_blocks:
            with _lock:
                if not _had_blocks and framework is _selection.framework:
                    _keepers.append(owner)
                    object.__setattr__(owner, "_framework", framework)
                    object.__setattr__(owner, "_known_framework", framework)
        return framework


class FollowsSelection:
    """An object whose ``_framework`` is the active framework."""

    _framework = _ActiveFramework()
    # The same while the object caches it, else None. Python reads an attribute of the object
    # faster if its class has none of this name.
    _known_framework: Framework | None


def _forget() -> None:
    while _keepers:
        keeper = _keepers.pop()
        object.__setattr__(keeper, "_known_framework", None)
        with suppress(AttributeError):
            object.__delattr__(keeper, "_framework")


def selection_reason() -> str:
    """Return why the active backend is the active one, in words."""
    active_framework()
    return _selection.reason if scoped.value.get() is None else "use_backend"


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
    """Return what ``D2LDEV_BACKEND`` and the installed frameworks say; nothing is imported."""
    text = settings.backend_name()
    if text:
        variable = settings.BACKEND
        return Choice(text, f" (from {variable}={text!r})", f"{variable}={text.strip()}")
    preferred = ", ".join(PREFERENCE)
    names = available_backends()
    for name in names:
        if name in PREFERENCE:
            return Choice(name, "", f"{name} is the first that is installed of {preferred}")
    none = f"none of {preferred} is installed"
    others = [name for name in names if name != FALLBACK]
    if len(others) == 1:
        return Choice(others[0], " (the only one installed)", f"{none}, and no other")
    several = f", and none of {', '.join(others)} is preferred" if others else ""
    return Choice(FALLBACK, "", none + several)


def _resolve() -> Framework:
    global _selection
    with _lock:
        if _selection.framework is not None:
            return _selection.framework
        name, source, reason = choice()
        if name == FALLBACK and not source and lacks_modules(FALLBACK):
            raise fallback_refusal(reason)
        framework = get_framework(name, source)
        _selection = Selection(framework, reason)
        if name != FALLBACK or source:
            return framework
        warn(
            f"{reason}: the {FALLBACK} backend is used, which computes on the CPU only and trains "
            f"nothing but its own MLP. fix: {write_install('torch')}, or set "
            f"{settings.BACKEND}={FALLBACK}",
            BackendFallbackWarning,
        )
        return framework


def get_selection() -> Selection:
    """Return the framework of the process, if it is resolved, and what decided it."""
    return _selection


def set_selection(new: Selection) -> Selection:
    """Make a framework the process's active one, in every thread; return what was before."""
    global _selection
    with _lock:
        before, _selection = _selection, new
        _forget()
    return before


# -- virtual GPUs -----------------------------------------------------------------------------


def virtual_gpus(n: int, *, as_cuda: bool | None = None) -> None:
    """Ask for ``n`` virtual GPUs in every backend whose first use comes later.

    A virtual GPU has real data, real computation on the CPU, and real device semantics, but no
    hardware. A framework that makes its devices when it starts gets their number by a variable,
    JAX by ``XLA_FLAGS``.

    Args:
        n: 0 to 8. With 0 the reference backend has none either; its default is two.
        as_cuda: whether PyTorch's virtual GPUs stand for CUDA devices, so that a program that names
            ``'cuda:1'`` runs unchanged. ``True`` makes the active backend at once. None follows the
            variable ``D2LDEV_VIRTUAL_CUDA``. Other frameworks take no notice.

    Raises:
        InvalidDeviceError: if ``n`` is not an integer, or out of range.
        DeviceUnavailableError: if a backend in use already has another number of GPUs, or was made
            with another ``as_cuda``.

    >>> virtual_gpus(2)
    """
    attempted = f"make {quote(n)} virtual GPUs"
    number = settings.check_virtual_gpus(n, attempted, "d2ldev.virtual_gpus(2)")
    wanted = settings.virtual_cuda() if as_cuda is None else bool(as_cuda)
    argument = f", as_cuda={wanted}" if as_cuda is not None else ""
    variable = f" {settings.VIRTUAL_CUDA}=1" if wanted else ""
    for framework in list_loaded_frameworks():
        devices = framework.devices
        count = count_gpus(framework)
        gpus = [gpu(i) for i in range(count)]
        made = sum(devices.platform(device) == "virtual" for device in gpus)
        if framework.max_virtual_gpus and (
            made != number or (made and framework.as_cuda != wanted)
        ):
            raise DeviceUnavailableError(
                f"make {number} virtual GPUs{' that stand for CUDA devices' if wanted else ''}",
                f"the {framework.name} backend is in use already, with {gpus_in_words(count)}",
                f"call d2ldev.virtual_gpus({number}{argument}) before the first use of a backend, "
                f"or set {settings.VIRTUAL_GPUS}={number}{variable}; in a notebook restart the "
                "kernel first",
                [CPU, *gpus],
            )
    settings.choose_virtual_gpus(number)
    set_environment()
    if as_cuda is not None:
        settings.choose_virtual_cuda(wanted)
        if wanted:
            active_framework()


def set_environment() -> None:
    """Add the installed frameworks' flags for the wanted virtual GPUs to the environment.

    A framework then starts with enough devices, even if the program uses it before d2ldev does.
    Nothing is imported, and child processes inherit the flags.
    """
    try:
        cpus = 1 + (settings.virtual_gpus() or 0)
    except D2LDevError:  # the first use of a backend raises it
        return
    for name in available_backends() if cpus > 1 else ():
        for entry in read_package(read_environment, name):
            variable, _, flag = entry.partition("=")
            _add_flag(variable, flag.removesuffix("{cpus}"), cpus)


def _add_flag(variable: str, flag: str, number: int) -> None:
    """Append a flag with a number, unless the variable has it with the same or a greater one."""
    value = os.environ.get(variable, "")
    words = value.split()
    given = [word.removeprefix(flag) for word in words if word.startswith(flag)]
    is_file = bool(words) and not words[0].startswith("-")  # of the user's flags
    # The last one counts.
    if not is_file and (not given or settings.number_in(given[-1]) < number):
        os.environ[variable] = f"{value} {flag}{number}".strip()


# -- from a tensor ----------------------------------------------------------------------------


def framework_of_tensor(x: Any) -> Framework:
    """Return the framework of a tensor, without importing another framework.

    It creates no framework that does not own the tensor, because a new one may change settings.

    Raises:
        UnsupportedValueError: if ``x`` is not a tensor of any framework.
    """
    return framework_of_class(type(x))


def framework_of_class(cls: type) -> Framework:
    """Return the framework of a class of tensors; see ``framework_of_tensor``."""
    if (framework := _by_type.get(cls)) is not None:
        return framework
    broken: D2LDevError | None = None
    for name in _possible_backends(cls):
        try:
            framework = get_framework(name)
        except D2LDevError as error:
            broken = broken or error  # it may still be the tensor of another
            continue
        if issubclass(cls, framework.tensors.types):
            if len(_by_type) < 1024:
                _by_type[cls] = framework
            return framework
    attempted = f"tell the backend of a {cls.__module__}.{cls.__qualname__}"
    if broken is not None:
        raise _unusable_refusal(attempted, broken) from broken
    raise UnsupportedValueError(
        attempted,
        f"it is not a tensor of an imported framework; {choices()}",
        "x = backend.asarray(x) makes a tensor",
    )


def _unusable_refusal(attempted: str, error: D2LDevError) -> UnsupportedValueError:
    """Return the error of an object whose backend cannot be used, with the reason."""
    problem = f"its backend fails: cannot {error.attempted}: {error.problem}"
    return UnsupportedValueError(attempted, problem, error.fix)


def framework_of_loader(x: Any) -> Framework | None:
    """Return the framework of a loader; None if no framework knows it.

    Args:
        x: anything.
    """
    for name in _possible_backends(x):
        try:
            framework = get_framework(name)
        except D2LDevError:
            continue
        if isinstance(x, framework.training.loader_types):
            return framework
    return None


def other_backend_of(framework: Framework, x: Any) -> str:
    """Return the name of another backend that owns ``x``; empty if there is none.

    Nothing is imported. A backend owns the classes of its requirements, and of libraries that
    belong to it alone. If several backends share the library, they are created and asked.

    Args:
        framework: the one that does not know it.
        x: a tensor, a model, an optimizer, a function, or anything else.
    """
    # NumPy's arrays are data to every backend.
    modules = {each for each in _modules_of(x) if not _come_from({each}, ["numpy"])}
    names = [name for name in sorted(find_backends(), key=rank) if name != framework.name]
    for name in names:
        if _has_imported(name, modules):
            return name
    for name in names:
        told = read_package(libraries_of, name)
        libraries = {each for each in told if _come_from(modules, [each])}
        if libraries and _is_imported(read_package(read_required_modules, name)):
            others = [each for each in find_backends() if each != name]
            is_alone = all(
                libraries.isdisjoint(read_package(libraries_of, each)) for each in others
            )
            if is_alone or _knows(name, x):
                return name
    return ""


def _possible_backends(x: Any) -> list[str]:
    """Return the backends that an object may belong to, by name, the preferred ones first.

    They are those in use, and those that are imported and whose modules its class comes from.
    """
    modules = _modules_of(x)
    names = sorted(find_backends(), key=rank)
    return [name for name in names if name in _loaded or _has_imported(name, modules)]


def _modules_of(x: Any) -> set[str]:
    """Return the modules of an object's class and of its bases.

    For a class or a function, return the module with its source.
    """
    classes = [*type(x).__mro__, *(x.__mro__ if isinstance(x, type) else ())]
    modules = [cls.__module__ for cls in classes]
    if isinstance(x, FunctionType):
        modules.append(x.__module__)
    return {*map(str, modules)}


def _come_from(modules: set[str], packages: Iterable[str]) -> bool:
    """Return whether a module is one of some packages and modules, or is in one."""
    return any(f"{module}.".startswith(f"{each}.") for module in modules for each in packages)


def _has_imported(name: str, modules: set[str]) -> bool:
    """Return whether what a backend needs is imported, and a class comes from there."""
    requires = read_package(read_required_modules, name)
    return _come_from(modules, requires) and _is_imported(requires)


def _is_imported(modules: tuple[str, ...]) -> bool:
    return all(module in sys.modules for module in modules)


def _knows(name: str, x: Any) -> bool:
    """Return whether an object is a tensor, a model or an optimizer to a backend."""
    try:
        return get_framework(name).state.kinds[type(x)] in (TENSOR, OBJECT)
    except D2LDevError:
        return False
