"""Find the backends, and whether their requirements are installed, without an import.

The entry-point group ``d2ldev.backends`` lists all backends, the built-in ones included. An entry
point names a subclass of ``Framework``. Its package lists the required modules in a tuple
``requires`` of strings (default: none). It lists packages for its framework in ``libraries``, and
flags for virtual GPUs in ``environment``. d2ldev reads the source of the package and does not run
it. So no code of a package runs before its backend is chosen.

Held by ``tests/core/registry/test_registry.py`` and ``tests/core/registry/test_third_parties.py``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.machinery import PathFinder, SourceFileLoader

# Not from ``typing``: its import takes as long as all the rest of ``import d2ldev``.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Iterable
    from importlib.metadata import Distribution, EntryPoint
    from typing import Any

GROUP = "d2ldev.backends"
ALIASES = {"pytorch": "torch", "tf": "tensorflow"}
PREFERENCE = ("torch", "jax", "tensorflow", "mxnet")
FALLBACK = "reference"
LOADED_FIRST = ("mxnet",)
"""The frameworks to load before all others: MXNet's library crashes if TensorFlow's is loaded."""


def find_backends(*, refresh: bool = False) -> dict[str, EntryPoint]:
    """Return every backend that an installed distribution announces, by name.

    Args:
        refresh: look again, for what was installed since.
    """
    if refresh:
        _points.cache_clear()
        read_required_modules.cache_clear()
        libraries_of.cache_clear()
        read_environment.cache_clear()
        _has_distribution.cache_clear()
    return {name: next(iter(points.values())) for name, points in _points().items()}


def distributions_of(name: str) -> list[str]:
    """Return the distributions that announce a known backend; more than one is a conflict."""
    return list(_points()[name])


@cache
def _points() -> dict[str, dict[str, EntryPoint]]:
    """Return name -> distribution -> entry point."""
    from importlib.metadata import MetadataPathFinder

    # Python 3.11 leaves these out of ``importlib.invalidate_caches``, as an instance's method.
    MetadataPathFinder().invalidate_caches()
    found: dict[str, dict[str, EntryPoint]] = {}
    # Read once for all the backends of a distribution: it takes most of a millisecond.
    names: dict[Distribution | None, str | None] = {None: None}
    for point in _entry_points():
        if point.dist is not None and point.dist not in names:
            names[point.dist] = point.dist.name
        # Of a distribution whose metadata is gone, Python gives None.
        name = names[point.dist] or point.value
        found.setdefault(canonical_name(point.name), {}).setdefault(name, point)
    return found


def _entry_points() -> Iterable[EntryPoint]:
    """Return the entry points of all distributions whose file of them can be read."""
    from importlib.metadata import distributions, entry_points

    try:
        return entry_points(group=GROUP)
    except Exception:  # one file of any distribution is enough
        found: list[EntryPoint] = []
        for distribution in distributions():
            with suppress(Exception):
                found += distribution.entry_points.select(group=GROUP)
        return found


def find_missing_modules(name: str) -> list[str]:
    """Return the missing modules that a known backend needs, without importing any module.

    Raises:
        Exception: as ``read_required_modules``.
    """
    return [module for module in read_required_modules(name) if not is_installed(module)]


def lacks_modules(name: str) -> bool:
    """Return whether a backend is known, its package can be read, and a module is missing."""
    try:
        return bool(find_missing_modules(name))
    except Exception:
        return False


@cache
def read_required_modules(name: str) -> tuple[str, ...]:
    """Return what a known backend needs, as the source of its package says.

    Raises:
        ModuleNotFoundError: if there is no such package.
        SyntaxError: if its source cannot be read.
        TypeError: if ``requires`` is not written there as a string or a tuple of strings.
    """
    return _read_variable(name, "requires")


@cache
def libraries_of(name: str) -> tuple[str, ...]:
    """Return the packages whose classes are a known backend's, besides those that it needs.

    Raises:
        Exception: as ``read_required_modules``.
    """
    return _read_variable(name, "libraries")


@cache
def read_environment(name: str) -> tuple[str, ...]:
    """Return the flags with which a known framework makes virtual GPUs when it starts.

    Each is the name of an environment variable and a flag in it, ``'FLAGS=--cpu-devices={cpus}'``.

    Raises:
        Exception: as ``read_required_modules``.
    """
    return _read_variable(name, "environment")


def read_package(asked: Callable[[str], tuple[str, ...]], name: str) -> tuple[str, ...]:
    """Return what a backend's package says; nothing if it is gone, or cannot be read."""
    try:
        return asked(name)
    except Exception:
        return ()


def packages_of(name: str) -> set[str]:
    """Return the packages of a backend's framework, and of the libraries that belong to it."""
    modules = *read_package(read_required_modules, name), *read_package(libraries_of, name)
    return {module.partition(".")[0] for module in modules}


def _read_variable(name: str, variable: str) -> tuple[str, ...]:
    package = find_backends()[name].module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    loader: Any = spec.loader
    if not hasattr(loader, "get_source"):  # pytest's, which rewrites what a plugin of its is in
        loader = SourceFileLoader(package, spec.origin or "")
    # Not at the top: ``import d2ldev`` would take half as long again.
    import ast

    # A package without source tells nothing.
    for statement in ast.parse(loader.get_source(package) or "").body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=value)
            ) if target == variable:
                return _as_modules(package, variable, value)
    return ()


def _as_modules(package: str, variable: str, written: ast.expr | None) -> tuple[str, ...]:
    import ast

    try:
        names = ast.literal_eval(written)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        names = None
    modules = (names,) if isinstance(names, str) else names
    if isinstance(modules, (tuple, list)) and all(isinstance(name, str) for name in modules):
        return tuple(modules)
    raise TypeError(f"{variable!r} in {package} is not written as a tuple of strings")


def available_backends() -> list[str]:
    """Return the names of the backends whose framework is installed, in the order of preference.

    Neither a framework nor a backend's package is imported: whether they work shows when they are
    used.

    >>> 'reference' in available_backends()
    True
    """
    names = sorted(find_backends(), key=rank)
    return [name for name in names if _is_available(name)]


def rank(name: str) -> tuple[int, str]:
    """Return the order of preference, as a key to sort names by."""
    if name in PREFERENCE:
        return PREFERENCE.index(name), name
    return len(PREFERENCE) + (name == FALLBACK), name


def _is_available(name: str) -> bool:
    try:
        return not find_missing_modules(name)
    except Exception:
        return False  # a package that is gone, or cannot be read


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing the packages above it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    folders = () if spec is None else tuple(spec.submodule_search_locations or ())
    # ``importlib.util.find_spec`` would import the packages above a module.
    for name in below:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations)
    # A namespace package has no origin. So does any folder that happens to have the name.
    return spec is not None and (spec.origin is not None or any(map(_has_distribution, folders)))


@cache
def _has_distribution(folder: str) -> bool:
    """Return whether an installed distribution has a file in the folder of a package."""
    from importlib.metadata import distributions

    package = os.path.basename(folder)
    for distribution in distributions():
        with suppress(Exception):  # files of others that cannot be read
            if str(distribution.locate_file(package)) == folder and any(
                file.parts[0] == package for file in distribution.files or ()
            ):
                return True
    return False


def find_bare_folder(package: str) -> str:
    """Return the folder that Python takes for a package, without ``__init__.py``; or nothing."""
    spec = None if package in sys.modules else importlib.util.find_spec(package)
    if spec is None or spec.origin is not None:
        return ""
    return next(iter(spec.submodule_search_locations or ()), "")


def is_hidden(package: str) -> bool:
    """Return whether a bare folder hides a package, as in the working directory.

    Python finds the folder before an editable installation, which has a finder of its own.
    """
    finders = [each for each in sys.meta_path if each is not PathFinder]
    specs = (each.find_spec(package, None) for each in finders if hasattr(each, "find_spec"))
    return any(spec is not None and spec.origin is not None for spec in specs)


def canonical_name(name: str) -> str:
    """Return a backend's name without regard to case, white space and aliases."""
    name = name.strip().lower()
    return ALIASES.get(name, name)


def choices() -> str:
    """Return what is known and what is installed, for messages."""
    known = ", ".join(sorted(find_backends(), key=rank))
    return f"known: {known}; installed: {', '.join(available_backends())}"
