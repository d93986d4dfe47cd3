"""The pytest plugin: it chooses the backend, skips tests with a reason, and writes the report.

Every pytest run of an environment with d2ldev loads it. Without ``--d2ldev-backend`` it only offers
its options.

No run passes without testing. A backend that was asked for and cannot be used ends the run with an
error. So do fewer GPUs than ``--d2ldev-require-gpus``, and a test of the suite without a
requirement. The exit status is 5 if nothing was tested. It is 1 if a method is not begun, or if a
module of ``--d2ldev-only`` passes no test.

It has to work under every pytest from 8.0 on and beside other plugins. Warnings are errors only if
they come from d2ldev or from the backend under test. Held by ``tests/suite/test_other_plugins.py``.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from d2ldev.framework.testing import MODULES, framework_of
from d2ldev_conformance.profiles import PROFILES, Profile, Traits
from d2ldev_conformance.progress import (
    count_by_module,
    find_undone_modules,
    format_counts,
    read_modules,
    tell_progress,
    was_tested,
)
from d2ldev_conformance.requirement import SUITE, module_of, requirement_of

if TYPE_CHECKING:
    from d2ldev import Backend
    from d2ldev_conformance.known_gaps import Gap
    from d2ldev_conformance.report import Report

_BACKEND: pytest.StashKey[Backend] = pytest.StashKey()
_REPORT: pytest.StashKey[Report] = pytest.StashKey()
_GAPS: pytest.StashKey[list[Gap]] = pytest.StashKey()
_NEXT: pytest.StashKey[str] = pytest.StashKey()  # the last line of the run
_NOTES: pytest.StashKey[list[str]] = pytest.StashKey()
_ONLY: pytest.StashKey[Sequence[str]] = pytest.StashKey()


_SELECTING = ("keyword", "markexpr", "deselect", "--d2ldev-requirement", "--d2ldev-profile")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the options of the suite."""
    group = parser.getgroup("d2ldev", "d2ldev's conformance suite")
    group.addoption(
        "--d2ldev-backend", metavar="NAME", help="the backend to run the conformance suite on"
    )
    group.addoption(
        "--d2ldev-require-gpus",
        metavar="N",
        type=int,
        default=0,
        help="fail with fewer than N GPUs; virtual GPUs count, too",
    )
    group.addoption(
        "--d2ldev-requirement",
        metavar="ID",
        action="append",
        help="check only this requirement; may be repeated",
    )
    group.addoption(
        "--d2ldev-profile",
        metavar="NAME",
        choices=sorted(PROFILES),
        help=f"check a profile's requirements for the present GPUs: {', '.join(PROFILES)}",
    )
    group.addoption(
        "--d2ldev-only",
        metavar="MODULE",
        action="append",
        default=[],
        help=f"check only this module of the backend; may be repeated: {', '.join(MODULES)}",
    )
    group.addoption(
        "--d2ldev-report", metavar="DIR", help="the folder for conformance.json and its page"
    )
    group.addoption(
        "--d2ldev-mutant",
        metavar="NAME",
        help="put this mistake into the backend: see d2ldev conformance NAME --mutants",
    )
    group.addoption(
        "--d2ldev-commit",
        metavar="COMMIT",
        default="",
        help="the commit for the report if d2ldev was installed from a wheel",
    )


def _read_only(config: pytest.Config) -> Sequence[str]:
    """Return the modules of ``--d2ldev-only``, in their order."""
    try:
        return read_modules(config.getoption("--d2ldev-only"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the modules that ``--d2ldev-only`` does not name."""
    only = config.stash.get(_ONLY, ())
    is_module = collection_path.parent == SUITE and collection_path.name in MODULES
    return True if only and is_module and collection_path.name not in only else None


def pytest_configure(config: pytest.Config) -> None:
    """Get the backend of ``--d2ldev-backend``, or end the run."""
    config.addinivalue_line(
        "markers", "requirement(id, section): the requirement that a test checks"
    )
    config.addinivalue_line("markers", "needs_gpus(n): the test needs this many GPUs")
    config.addinivalue_line("markers", "needs_real_gpu: the test needs hardware, not a virtual GPU")
    config.addinivalue_line("markers", "needs(ability): the test needs what a framework may lack")
    config.addinivalue_line(
        "markers", "not_provided(name): the backend does not provide this fixture"
    )
    config.addinivalue_line(
        "markers", "nightly: the test takes minutes; the profile nightly runs it"
    )
    config.addinivalue_line(
        "markers", "starts_processes: the test starts processes; the profile quick leaves it out"
    )
    name = config.getoption("--d2ldev-backend")
    if name is None:
        return
    from d2ldev import D2LDevError, set_backend
    from d2ldev.cli.screen import collect_warnings
    from d2ldev_conformance.known_gaps import read_known_gaps
    from d2ldev_conformance.outcomes import Outcomes
    from d2ldev_conformance.provision import check_declared
    from d2ldev_conformance.report import Report

    config.stash[_ONLY] = _read_only(config)
    try:
        # d2ldev's warnings about the machine, for example a missing driver, are not failures.
        with collect_warnings() as notes:
            backend = set_backend(name)
            gpus = backend.num_gpus()
    except D2LDevError as error:
        raise pytest.UsageError(str(error)) from error
    required = config.getoption("--d2ldev-require-gpus")
    if gpus < required:
        raise pytest.UsageError(
            f"{required} GPUs are required, and {backend.name} has {gpus} here: "
            f"{', '.join(map(str, backend.devices()))}"
        )
    mutant, folder = config.getoption("--d2ldev-mutant"), config.getoption("--d2ldev-report")
    if mutant and not folder:
        raise pytest.UsageError(f"--d2ldev-mutant {mutant} needs --d2ldev-report DIR, too")
    _make_folder(folder)
    package = package_of(type(framework_of(backend)))
    for line in warning_filters(package):
        config.addinivalue_line("filterwarnings", line)
    freeze_what_is_loaded()
    check_declared(framework_of(backend))
    config.stash[_GAPS] = read_known_gaps(framework_of(backend))
    config.stash[_BACKEND] = backend
    config.stash[_REPORT] = Report(backend, config.getoption("--d2ldev-commit"))
    config.stash[_NOTES] = notes
    config.pluginmanager.register(Outcomes(backend, package, config.stash[_REPORT]))
    if mutant:
        from d2ldev_conformance.trial import Trial

        trial = Trial(mutant, framework_of(backend), package, Path(folder))
        config.pluginmanager.register(trial)


def warning_filters(*packages: str) -> list[str]:
    """Return pytest's filters that make the warnings of d2ldev and of some packages errors.

    The warnings of pytest, of other plugins and of the framework are not errors. A warning belongs
    to the module that it points to. d2ldev's own warnings point to the user's line.

    Args:
        packages: the packages of backends that are not part of d2ldev.
    """
    ours = "|".join([r"d2ldev(_\w+)?", *map(re.escape, packages)])
    return [
        rf"error:::({ours})(\.|$)",
        "error::d2ldev.D2LDevWarning",
        # pytest's own may point to a test of the suite.
        "default::pytest.PytestWarning",
        # These two are exceptions that nobody caught, in a thread or while an object was deleted.
        "error::pytest.PytestUnhandledThreadExceptionWarning",
        "error::pytest.PytestUnraisableExceptionWarning",
    ]


def package_of(cls: type) -> str:
    """Return the package in which a class is made, or its module if that is in none."""
    return sys.modules[cls.__module__].__package__ or cls.__module__


def _make_folder(folder: str | None) -> None:
    """Make the folder for the report, before the tests have run for nothing."""
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except OSError as error:
        raise pytest.UsageError(f"cannot write the report: {error}") from error


def backend_under_test(config: pytest.Config) -> Backend:
    """Return the backend that ``--d2ldev-backend`` names.

    Raises:
        pytest.UsageError: if it was not given.
    """
    if _BACKEND not in config.stash:
        raise pytest.UsageError("say which backend to test: --d2ldev-backend NAME")
    return config.stash[_BACKEND]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests, and give each the reason to skip it."""
    if _BACKEND not in config.stash:
        return
    from d2ldev_conformance.known_gaps import check_cases
    from d2ldev_conformance.report import platforms

    backend, gaps = config.stash[_BACKEND], config.stash[_GAPS]
    found = set(platforms(backend).values())
    if _has_whole(config, "keyword", "markexpr", "deselect"):
        check_cases(gaps, _group_names(items), found)
    _select(config, items)
    _select_profile(config, items)
    if items and all(map(_waits, items)):
        raise pytest.UsageError(
            "nothing would be tested: all of it takes minutes, add --profile nightly"
        )
    items.sort(key=_stage)
    for item in items:
        if not item.path.is_relative_to(SUITE):
            continue
        requirement = requirement_of(item)
        if requirement is None:
            raise pytest.UsageError(f"{item.nodeid} has no @requirement")
        _skip_by_day(item)
        _skip_without_gpus(item, backend, found)
        for gap in gaps:
            if gap.covers(requirement.id, item.name, found):
                reason = f"{gap.reason} ({gap.link})"
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give each requirement its row: only now no plugin deselects any more."""
    if _REPORT not in session.config.stash:
        return
    for item in session.items:
        requirement = requirement_of(item)
        if requirement is not None and item.path.is_relative_to(SUITE):
            session.config.stash[_REPORT].expect(requirement, item.nodeid)


def freeze_what_is_loaded() -> None:
    """Take what is loaded out of Python's collections of garbage, until the process ends.

    Each would go through all of the framework and all tests again.
    """
    gc.collect()
    gc.freeze()


def _stage(item: pytest.Item) -> int:
    """Return the position of a test's area in the order in which a backend is written."""
    module = module_of(item.path)
    in_suite = item.path.is_relative_to(SUITE) and module in MODULES
    return MODULES.index(module) if in_suite else len(MODULES)


def _group_names(items: list[pytest.Item]) -> dict[str, list[str]]:
    """Return the id of each requirement -> the names of its tests."""
    found: dict[str, list[str]] = {}
    for item in items:
        requirement = requirement_of(item)
        if requirement is not None and item.path.is_relative_to(SUITE):
            found.setdefault(requirement.id, []).append(item.name)
    return found


def _select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests of the requirements that were asked for."""
    wanted = config.getoption("--d2ldev-requirement")
    if not wanted:
        return
    from d2ldev_conformance.catalogue import find_nearest

    found = {item: requirement_of(item) for item in items}
    unknown = set(wanted) - {requirement.id for requirement in found.values() if requirement}
    for each in sorted(unknown):
        near = find_nearest(each)
        raise pytest.UsageError(
            f"no such requirement: {each}; the nearest is {near}"
            if near
            else f"--d2ldev-only leaves out the requirement {each}"
        )
    kept = [item for item, requirement in found.items() if requirement and requirement.id in wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _profile(config: pytest.Config) -> Profile | None:
    """Return the profile that was asked for."""
    name = config.getoption("--d2ldev-profile")
    return PROFILES[name] if name else None


def _select_profile(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave only the tests that the profile has for the virtual GPUs of this process."""
    profile = _profile(config)
    if profile is None:
        return
    virtual_gpus = framework_of(config.stash[_BACKEND]).virtual_gpus or 0
    left_out = [
        item
        for item in items
        if item.path.is_relative_to(SUITE)
        and not (
            profile.selects(_traits(item), virtual_gpus)
            # A process of the nightly profile that has GPUs runs them.
            and not (profile.is_nightly and _waits(item))
        )
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _traits(item: pytest.Item) -> Traits:
    """Return what a profile selects a test by."""
    requirement = requirement_of(item)
    needed = _count_needed_gpus(item)
    return Traits(
        module=module_of(item.path),
        requirement=requirement.id if requirement else "",
        gpus=needed,
        names_gpu=needed > 0 or "gpu" in item.name or _needs_real_gpu(item),
        is_repeated=_is_repeated(item),
        starts_processes=item.get_closest_marker("starts_processes") is not None,
    )


def _is_repeated(item: pytest.Item) -> bool:
    """Return whether a test of a device, or of a number of GPUs, is there for a later GPU, too."""
    gpus = item.config.stash[_BACKEND].num_gpus()
    last = {"place": f"gpu:{min(gpus, 2) - 1}", "num_gpus": 1}  # the suite has tests for two
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return gpus > 0 and any(given.get(name, value) != value for name, value in last.items())


def _waits(item: pytest.Item) -> bool:
    """Return whether a test of the suite takes minutes, and was not asked for."""
    is_nightly = item.get_closest_marker("nightly") is not None
    profile = _profile(item.config)
    has_gpus = item.config.stash[_BACKEND].num_gpus() > 0
    is_asked_for = profile is not None and profile.is_nightly and has_gpus
    return is_nightly and not is_asked_for and item.path.is_relative_to(SUITE)


def _skip_by_day(item: pytest.Item) -> None:
    """Skip what takes minutes unless it was asked for: the report counts what was not tried."""
    if _waits(item):
        item.add_marker(pytest.mark.skip(reason="takes minutes: --profile nightly tries it"))


def _count_needed_gpus(item: pytest.Item) -> int:
    """Return how many GPUs a test needs."""
    return max((mark.args[0] for mark in item.iter_markers("needs_gpus")), default=0)


def _needs_real_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("needs_real_gpu") is not None


def _skip_without_gpus(item: pytest.Item, backend: Backend, platforms: set[str]) -> None:
    gpus = backend.num_gpus()
    needed = _count_needed_gpus(item)
    if _needs_real_gpu(item) and platforms <= {"cpu", "virtual", "broken"}:
        item.add_marker(pytest.mark.skip(reason=f"needs a real GPU; {backend.name} has none here"))
    elif gpus < needed:
        plural = "" if needed == 1 else "s"
        reason = f"needs {needed} GPU{plural}; {backend.name} has {gpus} here"
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, and fail a run that has not done what it was asked to."""
    config = session.config
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist
    if is_worker or config.option.collectonly or _REPORT not in config.stash:
        return
    report = config.stash[_REPORT]
    counts = count_by_module(report.rows())
    if session.exitstatus == pytest.ExitCode.OK:
        if not was_tested(counts):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        elif find_undone_modules(counts, config.stash[_ONLY]):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if folder := config.getoption("--d2ldev-report"):
        report.write(Path(folder), int(session.exitstatus))


def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    """Say how many requirements passed, which did not, and what to write next."""
    has_run = not config.option.collectonly and exitstatus != pytest.ExitCode.USAGE_ERROR
    if not has_run or _REPORT not in config.stash:
        return
    report = config.stash[_REPORT]
    rows = report.rows()
    counts, asked = count_by_module(rows), config.stash[_ONLY]
    terminalreporter.section(f"conformance of {config.stash[_BACKEND].name}")
    for line in format_counts(counts):
        terminalreporter.line(line)
    summary = report.summary()
    terminalreporter.line(
        f"{sum(summary.values())} requirements: "
        + ", ".join(f"{count} {outcome}" for outcome, count in summary.items())
    )
    for note in config.stash[_NOTES]:
        terminalreporter.line(f"warning: {note}")
    for line in report.list_causes():
        terminalreporter.line(line)
    if not was_tested(counts):
        terminalreporter.line("nothing was tested: the exit status is not 0")
    for module in asked:
        if module not in counts or not counts[module]["passed"]:
            terminalreporter.line(f"nothing passed in {module}: the exit status is not 0")
    if _has_whole(config, *_SELECTING):
        config.stash[_NEXT] = tell_progress(counts, report.next_steps())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say what to write next, in the last line: below pytest's list of what was skipped."""
    if _NEXT in config.stash:
        config.pluginmanager.getplugin("terminalreporter").line(config.stash[_NEXT])


def _has_whole(config: pytest.Config, *selecting: str) -> bool:
    """Return whether a run has all tests of each of its modules.

    Args:
        config: the configuration of pytest.
        selecting: the options that leave out tests.
    """
    folders = {SUITE.parent, SUITE}
    return not any(config.getoption(name, None) for name in selecting) and all(
        Path(each).resolve() in folders for each in config.args
    )
