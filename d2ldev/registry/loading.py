"""From the name of a backend to its framework: entry points, and what is broken.

Held by ``tests/core/registry/test_registry.py``.
"""

from __future__ import annotations

import os
from traceback import walk_tb

import d2ldev.settings as settings
from d2ldev.contract import INTERFACE, Framework
from d2ldev.contract.abilities import check_cannot, check_precision, set_precision
from d2ldev.contract.framework import count_gpus
from d2ldev.dependencies import write_install
from d2ldev.device import gpu
from d2ldev.errors import BackendNotInstalledError, D2LDevError, UnknownBackendError, quote
from d2ldev.options import nearest
from d2ldev.registry.discovery import (
    ALIASES,
    FALLBACK,
    PREFERENCE,
    available_backends,
    canonical_name,
    choices,
    distributions_of,
    find_backends,
    find_bare_folder,
    find_missing_modules,
    is_hidden,
    packages_of,
)


def load(name: str, source: str) -> Framework:
    """Make a known framework, with the virtual GPUs, strictness and precision that were asked for.

    Args:
        name: its name among the entry points.
        source: where the name came from, for a message: ``" (from D2LDEV_BACKEND='x')"``, or empty.

    Raises:
        BackendNotInstalledError: if what it needs is missing, or fails to import.
    """
    is_strict = settings.is_strict()
    precision = settings.matmul_precision()
    settings.memory_grows()  # a misspelt policy is an error on machines without a GPU, too
    framework = _make(framework_class(name, source), name, source, settings.virtual_gpus())
    if is_strict:
        framework.state.strictness.everywhere()
    if precision is not None:
        attempted = f"set the precision of products (from {settings.MATMUL_PRECISION})"
        fix = f"{settings.MATMUL_PRECISION}=highest"
        set_precision(framework, check_precision(framework, precision, attempted, fix))
    # Only in a launch: a program that has started the engine itself may use the devices. Only
    # ``fit`` refuses it.
    if framework.parallel.joins_at_start and settings.peers() is not None:
        from d2ldev.distributed.membership import join_group

        join_group(framework)
    return framework


def count_real_gpus(name: str) -> int:
    """Return how many GPUs a known framework finds in the machine, whatever virtual ones there are.

    A temporary instance is asked, so that virtual ones can still be made.

    Raises:
        BackendNotInstalledError: as ``load``.
    """
    framework = _make(framework_class(name), name, "", None)
    gpus = map(gpu, range(count_gpus(framework)))
    return sum(framework.devices.platform(device) != "virtual" for device in gpus)


def framework_class(name: str, source: str = "") -> type[Framework]:
    """Return the class of a known backend, whose framework is imported if its module does that.

    Raises:
        BackendNotInstalledError: as ``load``.
    """
    point = find_backends()[name]
    install = _install_line(name)
    if problem := conflict(name):
        fix = " or ".join(f"pip uninstall {each}" for each in distributions_of(name))
        raise _refusal(name, source, problem, f"{fix}: the one that you do not trust")
    _check_folders(name, source)
    try:
        missing_modules = find_missing_modules(name)
        cls = None if missing_modules else point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A framework that is there but broken: a missing shared library, a NumPy too new. So is a
        # module that wants the process to end.
        place = "" if install else find_place(error, point.module.partition(".")[0])
        problem = f"{point.value} fails to import: {type(error).__name__}: {error}{place}"
        fix = f"reinstall it: {install}" if install else "mend it, or reinstall it"
        problem, fix = _describe_warning(point.value, error) or (problem, fix)
        raise _refusal(name, source, problem, fix) from error
    if missing_modules:
        missing = " and ".join(missing_modules)
        packages = dict.fromkeys(module.partition(".")[0] for module in missing_modules)
        fix = install or f"install {' and '.join(packages)}, which {point.value} needs"
        raise _refusal(name, source, f"{missing} is not installed", fix)
    if isinstance(cls, type) and issubclass(cls, Framework):
        _check_interface(cls, point.value, name, source)
        return cls
    problem = f"{point.value} is not a subclass of d2ldev.framework.Framework"
    fix = "mend the entry point of its distribution, or uninstall it"
    raise _refusal(name, source, problem, fix)


def _check_folders(name: str, source: str) -> None:
    """Check that no folder hides a backend's package or what it needs."""
    own = find_backends()[name].module.partition(".")[0]
    for package in (own, *packages_of(name)):
        if not (folder := find_bare_folder(package)):
            continue
        where = os.path.dirname(os.path.abspath(folder))
        place = "the working directory" if where == os.getcwd() else where
        if is_hidden(package):
            problem = f"a folder {package} in {place} hides the package {package}"
            raise _refusal(name, source, problem, "start Python elsewhere, or rename the folder")
        if package == own:
            problem = f"the folder {package} in {place} has no __init__.py"
            raise _refusal(name, source, problem, f"touch {os.path.join(folder, '__init__.py')}")


def find_place(error: BaseException, package: str) -> str:
    """Return the line of a package at which an error arose, in brackets; empty if there is none."""
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == package:
            place = f" ({frame.f_code.co_filename}:{line})"
    # Its own text has the name of the file and the line, of a module that has no frame yet.
    return "" if isinstance(error, SyntaxError) else place


def _describe_warning(value: str, error: BaseException) -> tuple[str, str] | None:
    """Return the problem and the fix of a warning that is an error; None for any other error."""
    if not isinstance(error, Warning):
        return None
    category = type(error).__name__
    problem = f"the import of {value} warns, and warnings are errors here: {category}: {error}"
    package = value.partition(".")[0].partition(":")[0]
    fix = f"warnings.filterwarnings('ignore', {quote(str(error))}) at the top of {package}"
    return problem, f"{fix}, or mend what warns"


def _check_interface(cls: type[Framework], value: str, name: str, source: str) -> None:
    """Check that a class was written for the interface that this d2ldev has."""
    written = getattr(cls, "interface", None)
    if written == INTERFACE:
        return
    if written is None:
        problem = f"{value} states no version of the interface; that of d2ldev is {INTERFACE}"
        raise _refusal(
            name, source, problem, f"interface = {INTERFACE} in the class {cls.__name__}"
        )
    problem = f"{value} is written for interface {written}, and d2ldev has interface {INTERFACE}"
    package = " ".join(distributions_of(name))
    older = isinstance(written, int) and written < INTERFACE
    fix = f"pip install --upgrade {package}" if older else f"a newer d2ldev: {write_install()}"
    raise _refusal(name, source, problem, fix)


def conflict(name: str) -> str:
    """Return why none of the distributions that announce a backend is used; empty if one does."""
    distributions = distributions_of(name)
    if len(distributions) == 1:
        return ""
    return f"more than one distribution announces it: {', '.join(distributions)}"


def _install_line(name: str) -> str:
    """Return the line that installs a backend of d2ldev's own; empty for another one."""
    return write_install(name) if name in (*PREFERENCE, FALLBACK) else ""


def _refusal(name: str, source: str, problem: str, fix: str) -> BackendNotInstalledError:
    attempted = f"use the {name} backend{source}"
    return BackendNotInstalledError(attempted, f"{problem}; {choices()}", fix)


def _make(cls: type[Framework], name: str, source: str, virtual_gpus: int | None) -> Framework:
    value = find_backends()[name].value
    try:
        framework = cls(virtual_gpus=virtual_gpus)
    except (D2LDevError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # Most import their framework only here. A missing shared library is an OSError. Too new a
        # NumPy is an AttributeError.
        what, fix = "cannot be made", "mend its __init__, which takes virtual_gpus=None"
        install = _install_line(name)
        if install or isinstance(error, ImportError):
            what, fix = "fails to import", f"reinstall it: {install or name}"
        place = "" if install else find_place(error, value.partition(":")[0].partition(".")[0])
        problem = f"{value} {what}: {type(error).__name__}: {error}{place}"
        problem, fix = _describe_warning(value, error) or (problem, fix)
        raise _refusal(name, source, problem, fix) from error
    if problem := check_cannot(framework.cannot):
        fix = f"mend it in {cls.__name__}: docs/api/interface.md#names-for-cannot"
        raise _refusal(name, source, f"{value}: {problem}", fix)
    missing = [module for module in ("devices", "tensors") if not hasattr(framework, module)]
    if missing:
        problem = f"{value} lacks the modules {', '.join(missing)}"
        fix = f"make them in its __init__: self.{missing[0]} = ..."
        raise _refusal(name, source, problem, fix)
    return framework


def fallback_refusal(reason: str) -> BackendNotInstalledError:
    """Return the error of a machine with neither a framework nor the reference backend.

    Args:
        reason: why the reference backend is the one to use, in words.
    """
    lacks = " and ".join(find_missing_modules(FALLBACK))
    return BackendNotInstalledError(
        "choose a backend",
        f"{reason}, and the {FALLBACK} backend lacks {lacks}",
        f"{write_install(PREFERENCE[0])}, or another framework; "
        f"{write_install(FALLBACK)} computes without one",
    )


def find_name(name: str, source: str = "") -> str:
    """Return the canonical name of a known backend; it need not be installed.

    Args:
        name: as the user writes it.
        source: where the name came from, for a message.

    Raises:
        UnknownBackendError: if there is none of the name.
    """
    found = canonical_name(name)
    if found not in find_backends():
        raise name_refusal(name, source)
    return found


def name_refusal(name: str, source: str) -> UnknownBackendError:
    """Return the error of an unknown name, with the known one that it is a spelling error of."""
    near = nearest(canonical_name(name), sorted([*find_backends(), *ALIASES]))
    meant, installed = canonical_name(near), available_backends()
    fix = f"{write_install()}: from its source tree alone no backend is found"
    if installed:
        lines = "D2LDEV_BACKEND={0}, or d2ldev.set_backend({0!r})"
        fix = f"choose an installed one: {lines.format(installed[0])}"
        if meant:
            line = lines.format(meant) if meant in installed else _install_line(meant)
            fix = f"did you mean {near!r}? {line or 'install it'}"
    return UnknownBackendError(
        f"use the backend {name!r}{source}",
        f"no backend of that name is known; {choices()}",
        fix,
    )
