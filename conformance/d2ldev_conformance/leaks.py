"""Find changes that a test leaves behind.

Such changes may make the next test pass or fail: environment variables, threads, files, replaced
functions, and d2ldev's own selection. ``detect_leaks`` compares the state before and after a test.
It restores what it can, so that one leak is one failure. Then it raises a ``LeakError`` that names
all leaks.

Each test has its own empty working directory and temporary directory. So a file that is found there
afterwards was made by this test, not by another process.

Held by ``tests/suite/test_fixtures.py``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from d2ldev import settings
from d2ldev.framework.testing import MODULES
from d2ldev.registry import selection as registry
from d2ldev.scopes import every_scopes
from d2ldev_conformance.provision import find_lasting

# pytest says in it which test is running, and which phase of it.
_NOT_THE_TESTS = "PYTEST_CURRENT_TEST"
# How long a thread may take to end that was told to, in seconds.
_GRACE = 1.0


class LeakError(AssertionError):
    """A block left something behind.

    Args:
        leaks: one sentence for each thing.
    """

    def __init__(self, leaks: Iterable[str]) -> None:
        self.leaks = tuple(leaks)
        super().__init__(_text(self.leaks))


@contextmanager
def detect_leaks(
    extra_modules: Iterable[ModuleType] = (), folder: Path | None = None
) -> Iterator[None]:
    """Fail if the block leaves anything behind.

    pytest's own ``tmp_path`` has to be outside: call ``tmp_path_factory.getbasetemp()`` before.

    Args:
        extra_modules: where functions may not be replaced either, besides ``os``, ``builtins``,
            NumPy and d2ldev's modules: a framework's.
        folder: holds the working and the temporary directory of one block after the other. Two new
            directories for each test take as long as a short test. The default is a new folder.

    Raises:
        LeakError: if the block ended well and left something behind. To an exception of the block
            the leaks are added as a note.
    """
    leaks: list[str] = []
    try:
        # Threads come first at the end, because one that still runs can change the rest.
        with (
            files(leaks, folder),
            environment(leaks),
            selection(leaks),
            patches(leaks, extra_modules),
            threads(leaks),
        ):
            yield
    except BaseException as error:
        if leaks:
            error.add_note(_text(leaks))
        raise
    if leaks:
        raise LeakError(leaks)


def _text(leaks: Iterable[str]) -> str:
    return "\n  ".join(["the test left something behind:", *leaks])


@contextmanager
def files(leaks: list[str], folder: Path | None = None) -> Iterator[None]:
    """Find files left in the working or temporary directory, and another working directory."""
    if folder is None:
        with (
            tempfile.TemporaryDirectory(prefix="d2ldev-leaks-") as made,
            files(leaks, Path(made).resolve()),
        ):
            yield
        return
    inside = _inside(folder)
    for directory in inside.values():
        directory.mkdir(exist_ok=True)
    # Fixtures of several tests may have left files for these tests, or their processes have.
    before = {path for directory in inside.values() for path in directory.rglob("*")}
    with (
        chdir(inside["working"]),
        children_use(folder),
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(tempfile, "tempdir", str(inside["temporary"]))
        try:
            yield
        finally:
            if _current_directory() != inside["working"]:
                leaks.append(f"the working directory was changed to {_current_directory()}")
            for kind, directory in inside.items():
                for path in sorted({*directory.rglob("*")} - before):
                    name = path.relative_to(directory).as_posix()
                    leak = f"a file in the {kind} directory: {name}"
                    if kind == "temporary":
                        if _lasts(name, "LASTING_FILES"):
                            continue
                        leak += ". Name a file that the framework keeps as long as the process in "
                        leak += "provision.LASTING_FILES, with * for any text"
                    leaks.append(leak)
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)


@contextmanager
def children_use(folder: Path) -> Iterator[None]:
    """Have processes that the block starts make temporary files where ``files`` looks for them.

    A run whose tests share a folder enters it once, around all of them. Then no test changes an
    environment variable. A new variable moves the list of all, and MXNet's threads crash if they
    read it at that moment.
    """
    temporary = str(_inside(folder)["temporary"])
    tempfile.gettempdir()  # is kept: fixtures of several tests do not make their files there
    with pytest.MonkeyPatch.context() as patched:
        for name in ("TMPDIR", "TEMP", "TMP"):
            if os.environ.get(name) != temporary:
                patched.setenv(name, temporary)
        yield


def _inside(folder: Path) -> dict[str, Path]:
    return {"working": folder / "working", "temporary": folder / "temporary"}


def _current_directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed
        return None


@contextmanager
def environment(leaks: list[str]) -> Iterator[None]:
    """Find environment variables that were set, changed or removed."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in sorted({*before, *os.environ} - {_NOT_THE_TESTS}):
            was, now = before.get(name), os.environ.get(name)
            if was != now:
                leaks.append(f"the environment variable {name}: {was!r} became {now!r}")
                if was is None:
                    del os.environ[name]
                else:
                    os.environ[name] = was


@contextmanager
def threads(leaks: list[str]) -> Iterator[None]:
    """Find threads that were started and have not ended."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        for thread in threading.enumerate():
            # A thread that Python did not start is a framework's own; nobody can join it.
            if thread in before or isinstance(thread, threading._DummyThread):
                continue
            thread.join(_GRACE)
            if thread.is_alive() and not _lasts(thread.name, "LASTING_THREADS"):
                fix = "Name a thread that the framework ends with the process in "
                fix += "provision.LASTING_THREADS, with * for numbers"
                leaks.append(f"the thread {thread.name!r} is still running. {fix}")


def _lasts(name: str, what: str) -> bool:
    """Return whether a framework in use keeps what has this name as long as the process."""
    return any(
        fnmatchcase(name, pattern)
        for framework in registry.list_loaded_frameworks()
        for pattern in find_lasting(framework, what)
    )


class _Look(NamedTuple):
    """What an owner has at a moment.

    Args:
        owner: a module, a class, a framework or an area.
        values: what it has, in its order.
        content: the same by name.
        classes: those that are made in it, if it is a module.
    """

    owner: Any
    values: list[Any]
    content: dict[str, Any]
    classes: list[type]


# By the id of the owner: what ``patches`` saw last. Nearly every owner is as it was then. To
# see that takes less time than another look, before and after every test.
_looks: dict[int, _Look] = {}


@contextmanager
def patches(leaks: list[str], extra_modules: Iterable[ModuleType] = ()) -> Iterator[None]:
    """Find replaced functions: of ``os``, ``builtins``, NumPy, d2ldev and ``extra_modules``."""
    looks = list(_look_at_all(extra_modules))
    _looks.clear()
    _looks.update((id(look.owner), look) for look in looks)
    try:
        yield
    finally:
        for owner, values, before, _ in looks:
            if _has_all(owner, values):
                continue
            now = vars(owner).copy()
            functions = _functions(before)
            changed = {name for name, value in functions.items() if now.get(name) is not value}
            if not isinstance(owner, ModuleType):
                added = _functions(now).keys() - before.keys()
                changed |= {name for name in added if _inherits(owner, name)}
            for name in sorted(changed):
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
                    # So MonkeyPatch of pytest before 9.2 puts back what an object inherits:
                    # https://github.com/pytest-dev/pytest/issues/10644
                    if now[name] == getattr(owner, name):
                        continue
                leaks.append(f"{_name_of(owner)}.{name} was replaced")


def _has_all(owner: Any, values: list[Any]) -> bool:
    """Return whether an owner has these values and no others; equal ones are the same here.

    It asks only a value that is another object. This is the fastest comparison.
    """
    try:
        return [*vars(owner).values()] == values
    except Exception:  # some cannot be compared, as arrays
        return False


def _look_at(owner: Any) -> _Look:
    """Return what an owner has: as the last look found it, if nothing at all has changed."""
    kept = _looks.get(id(owner))
    if kept is not None and kept.owner is owner and _has_all(owner, kept.values):
        return kept
    content = vars(owner).copy()
    name = owner.__name__ if isinstance(owner, ModuleType) else None
    classes = [
        value
        for value in content.values()
        if name and isinstance(value, type) and getattr(value, "__module__", None) == name
    ]
    return _Look(owner, [*content.values()], content, classes)


def _look_at_all(extra_modules: Iterable[ModuleType]) -> Iterator[_Look]:
    """Yield every module, class, framework and area whose functions are watched."""
    for name in ("os", "builtins", "numpy"):
        if name in sys.modules:
            yield _look_at(sys.modules[name])
    yield from map(_look_at, extra_modules)
    # Of thousands of modules a hundred are ours.
    for name in [name for name in list(sys.modules) if name.startswith("d2ldev")]:
        look = _look_at(sys.modules[name])
        yield look
        yield from map(_look_at, look.classes)
    for framework in registry.list_loaded_frameworks():
        yield _look_at(framework)
        areas = (vars(framework)[module] for module in MODULES if module in vars(framework))
        yield from map(_look_at, areas)


def _inherits(owner: Any, name: str) -> bool:
    """Tell whether a name of a class or a backend hides one that it inherits."""
    bases = owner.__mro__[1:] if isinstance(owner, type) else [type(owner)]
    return any(hasattr(base, name) for base in bases)


def _functions(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if callable(value) or isinstance(value, (classmethod, property))
    }


def functions_of_modules(modules: Mapping[str, ModuleType]) -> dict[str, Any]:
    """Return every function of every module, and of every class made in one, by name."""
    found: dict[str, Any] = {}
    for name, module in list(modules.items()):
        if not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{attribute}"] = value
            # ``isinstance`` would ask the value itself, and some warn when they are asked.
            if issubclass(type(value), type) and getattr(value, "__module__", None) == name:
                for method, function in list(vars(value).items()):
                    if callable(function):
                        found[f"{name}.{attribute}.{method}"] = function
    return found


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return f"an object of {type(owner).__qualname__}"


@contextmanager
def selection(leaks: list[str]) -> Iterator[None]:
    """Find another active backend, scopes that were not left, and another number of virtual GPUs.

    The first use of ``d2ldev.backend`` chooses the process's backend, which is such a change:
    call ``d2ldev.set_backend`` before.
    """
    before = registry.get_selection()
    chosen = settings.choose_virtual_gpus(None)
    settings.choose_virtual_gpus(chosen)
    entered = {scopes: scopes.entries() for scopes in every_scopes}
    try:
        yield
    finally:
        now = registry.set_selection(before)
        if now.framework is not before.framework:
            leaks.append(f"the active backend: {_format(before)} became {_format(now)}")
        changed = settings.choose_virtual_gpus(chosen)
        if changed != chosen:
            leaks.append(f"virtual_gpus: {chosen} became {changed}")
        for scopes in list(every_scopes):
            for entry in reversed(scopes.entries()):
                if entry not in entered.get(scopes, ()):
                    leaks.append(f"a scope that was not left, {scopes.name}: {entry.value!r}")
                    scopes.leave(entry)


def _format(selection: registry.Selection) -> str:
    return "none" if selection.framework is None else selection.framework.name
