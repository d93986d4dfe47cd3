"""``d2ldev conformance``: the installed suite, run by pytest in its own process.

A new process can still choose the number of virtual GPUs, and does not have the command's imports.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from d2ldev import settings
from d2ldev.cli.screen import complain, environment, exit_status
from d2ldev.dependencies import write_install
from d2ldev.display import make_printable
from d2ldev.distributed.signals import handle_signals
from d2ldev.errors import D2LDevError
from d2ldev.registry import discovery, loading

SUITE = "d2ldev_conformance"
# pytest's exit status for wrong options.
USAGE_ERROR = 4
# pytest's exit status if it selects no test.
NO_TESTS = 5
# The file in the folder of a report that pytest writes itself.
JUNIT = "conformance.junit.xml"
# The folder of a run's report, by the number of virtual GPUs.
_FOLDERS = {None: "machine", 0: "cpu"}


@dataclass(frozen=True)
class Request:
    """The options of the command; see ``main.conformance``. pytest gets ``extra`` unchanged."""

    name: str
    require_gpus: int | None = None
    virtual_gpus: int | None = None
    report: Path | None = None
    profile: str | None = None
    only: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def command(request: Request, suite: Path) -> list[str]:
    """Return the command line of the process that runs the suite.

    Args:
        request: the options of the command.
        suite: the folder of the suite's package, which holds its ``pytest.ini``.
    """
    # By its folder: given a name, pytest would also load the conftest.py of the user's tests.
    argv = [sys.executable, "-m", "pytest", str(suite), "--d2ldev-backend", request.name]
    if request.require_gpus is not None:
        argv += ["--d2ldev-require-gpus", str(request.require_gpus)]
    if request.report is not None:
        argv += ["--d2ldev-report", str(request.report)]
        argv += ["--junitxml", str(request.report / JUNIT)]
    if request.profile is not None:
        argv += ["--d2ldev-profile", request.profile]
    for module in request.only:
        argv += ["--d2ldev-only", module]
    # Only the suite's settings: those of a project in the working directory could turn warnings
    # into errors, or deselect tests.
    argv += ["-p", "no:cacheprovider", "-c", str(suite / "pytest.ini"), "--rootdir", str(suite)]
    return [*argv, *request.extra]


def list_runs(request: Request, profiles: Mapping[str, Any]) -> list[Request]:
    """Return the requests of a profile: one for each number of virtual GPUs that it has.

    A request without a profile, or with a number of virtual GPUs, stays the only one.

    Args:
        request: the options of the command.
        profiles: the profiles of the suite, by name.
    """
    name = discovery.canonical_name(request.name)
    profile = profiles.get(request.profile or "")
    is_known = name in discovery.find_backends()
    if request.virtual_gpus is not None or profile is None or not is_known:
        return [request]  # pytest lists the choices
    numbers = profile.processes(loading.framework_class(name).max_virtual_gpus)
    real = None
    if {0, None} <= {*numbers}:  # without real GPUs both are the CPU alone
        real = loading.count_real_gpus(name)
        numbers = [each for each in numbers if each is not None or real]
    return [
        replace(
            request,
            virtual_gpus=number,
            require_gpus=(request.require_gpus or real) if number is None else number,
            report=request.report and request.report / _FOLDERS.get(number, f"virtual-{number}"),
        )
        for number in numbers
    ]


def run(request: Request) -> int:
    """Run the suite and return the exit status: pytest's, or 4 without pytest or hypothesis.

    After several runs it is the highest status.
    """
    if not _has_packages():
        return USAGE_ERROR
    try:
        # The core imports no module of the suite; it finds the suite by its name.
        requests = list_runs(request, importlib.import_module(f"{SUITE}.profiles").PROFILES)
    except D2LDevError as error:
        complain(str(error))
        return exit_status(error)
    suite = _find_suite()
    statuses = {_status_of(each, suite) for each in requests}
    if len(statuses) > 1:
        statuses -= {NO_TESTS}  # -k may select tests in only some of the runs
    return max(statuses)


def merge(places: Sequence[Path], folder: Path | None, given: Sequence[str]) -> int:
    """Write the matrix of reports and return the exit status: 0, or 1 for a report that is refused.

    It is 4 without pytest or hypothesis, without a folder for the matrix, and with options of runs.

    Args:
        places: the reports, or folders of them.
        folder: the folder for the matrix.
        given: the options of runs that the user has given.
    """
    if not _has_packages() or _refuse_options("merge reports", "--merge", given, "runs nothing"):
        return USAGE_ERROR
    if folder is None:
        complain("cannot merge reports: no folder for the matrix\n  fix: add --report DIR")
        return USAGE_ERROR
    try:
        notes = importlib.import_module(f"{SUITE}.matrix").merge_reports(places, folder)
    except D2LDevError as error:
        complain(str(error))
        return exit_status(error)
    for note in notes:
        sys.stdout.write(f"note: {make_printable(note)}\n")  # a report may have anything in it
    sys.stdout.write(f"{folder / 'matrix.html'}\n")
    return 0


def compare(places: Sequence[Path], given: Sequence[str]) -> int:
    """Print what changed between reports and return the exit status.

    It is 0, or 1 if something that passed does not pass now, or began to fail. A report that is
    refused has the status 1, too. It is 4 as for ``merge``, and without two places.

    Args:
        places: the old reports and the new ones: each a report, or a folder of them.
        given: the options that the user has given, and that a comparison does not take.
    """
    why = "runs and writes nothing"
    if not _has_packages() or _refuse_options("compare reports", "--compare", given, why):
        return USAGE_ERROR
    if len(places) != 2:
        complain(
            f"cannot compare reports: {len(places)} given, and it takes the old and the new\n"
            "  fix: d2ldev conformance --compare OLD NEW"
        )
        return USAGE_ERROR
    try:
        comparison = importlib.import_module(f"{SUITE}.comparison").compare_reports(*places)
    except D2LDevError as error:
        complain(str(error))
        return exit_status(error)
    sys.stdout.write(f"{comparison.text}\n")
    return int(comparison.is_worse)


def _refuse_options(attempted: str, action: str, given: Sequence[str], why: str) -> bool:
    """Name the options that an action does not take; return whether there are any.

    Args:
        attempted: what the user asks for: ``'merge reports'``.
        action: the option that asks for it: ``'--merge'``.
        given: the other options.
        why: what the action does instead.
    """
    options = " and ".join(given)
    if given:
        complain(
            f"cannot {attempted} with {options}: {action} {why}\n"
            f"  fix: leave out {options}, or {action}"
        )
    return bool(given)


def try_mutants(request: Request, refused: Sequence[str]) -> int:
    """Try plausible mistakes on a backend, print a table, and return the exit status.

    It is 1 if a mutant is not caught or not judged, or if the backend fails without one. It is 4
    without pytest or hypothesis, and with options that mutants do not take. It is 5 if none was
    tried.

    Args:
        request: the options of the command.
        refused: the options that mutants do not take and the user has given.
    """
    why = "runs the suite with options of its own"
    if not _has_packages() or _refuse_options("try mutants", "--mutants", refused, why):
        return USAGE_ERROR
    trials = importlib.import_module(f"{SUITE}.trials")
    try:
        areas = importlib.import_module(f"{SUITE}.progress").read_modules(request.only)
    except ValueError as error:
        complain(f"cannot try mutants: {error}\n  fix: --only with one of these names")
        return USAGE_ERROR
    try:
        if request.report is not None:
            request.report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        complain(f"cannot write the report: {error}\n  fix: --report with a folder of your own")
        return USAGE_ERROR
    try:
        name = loading.find_name(request.name)
        most = loading.framework_class(name).max_virtual_gpus
        is_open = request.virtual_gpus is None and settings.virtual_gpus() is None
        if is_open and not loading.count_real_gpus(name):
            request = replace(request, virtual_gpus=min(most, 2) or None)
        begin = time.monotonic()
        sys.stdout.write(f"Mutants of {request.name}: the requirements that should catch them\n")
        sys.stdout.flush()
        groups = _Groups()
        with handle_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), groups.end):
            start = partial(_start, request, groups, trials.PRINTED)
            verdicts = trials.try_mutants(start, areas, _tell_verdict)
    except D2LDevError as error:
        complain(str(error).replace("conformance NAME", f"conformance {request.name}"))
        return exit_status(error)
    lines = trials.format_verdicts(verdicts, time.monotonic() - begin)
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    if request.report is not None:
        trials.write_verdicts(request.name, verdicts, request.report)
    outcomes = {each.outcome for each in verdicts}
    if outcomes <= {*trials.UNTRIED}:
        return NO_TESTS
    return int(not outcomes.isdisjoint(("not caught", "not judged")))


def _tell_verdict(verdict: Any) -> None:
    sys.stdout.write(f"{verdict.outcome}: {verdict.mutant.name}, {verdict.seconds:.0f} s\n")
    sys.stdout.flush()


class _Groups(set[int]):
    """The groups of the processes that run now; none begins after ``end``."""

    is_over = False

    def end(self, *_signal: object) -> None:
        """End each group, and raise ``KeyboardInterrupt``."""
        self.is_over = True
        for group in tuple(self):
            _end_group(group)
        raise KeyboardInterrupt


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _start(
    request: Request,
    groups: _Groups,
    printed_name: str,
    options: Sequence[str],
    folder: Path,
    limit: float,
) -> int | None:
    """Run the suite with options; see ``d2ldev_conformance.trials.Start``."""
    folder.mkdir(parents=True)
    suite = _find_suite()
    # The processes are two at once, and have temporary folders of their own.
    own = ["-p", "no:xdist", f"--basetemp={folder / 'temporary'}", "--tb=short", "-q"]
    argv = command(replace(request, only=(), report=folder, extra=(*options, *own)), suite)
    variables = environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    if request.virtual_gpus is not None:
        variables[settings.VIRTUAL_GPUS] = str(request.virtual_gpus)
    with (folder / printed_name).open("w", encoding="utf-8") as printed:
        # In a group of its own, with the processes that its tests start.
        process = subprocess.Popen(  # noqa: S603
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        groups.add(process.pid)
        try:
            status = None if groups.is_over else process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            groups.discard(process.pid)
            _end_group(process.pid)
            process.wait()
    if groups.is_over:
        raise KeyboardInterrupt
    return status


def _find_suite() -> Path:
    """Return the folder of the suite's package."""
    return Path(str(importlib.util.find_spec(SUITE).origin)).parent  # type: ignore[union-attr]


def _has_packages() -> bool:
    """Return whether the packages of the suite are installed; name the first that is not."""
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            complain(
                f"cannot run the conformance suite: {module} is not installed\n"
                f"  fix: {write_install('test')}"
            )
            return False
    return True


def _status_of(request: Request, suite: Path) -> int:
    sys.stdout.write(f"The conformance suite on {request.name}\n")
    sys.stdout.flush()
    variables = environment()
    if request.virtual_gpus is not None:
        variables[settings.VIRTUAL_GPUS] = str(request.virtual_gpus)
    with subprocess.Popen(command(request, suite), env=variables) as process:  # noqa: S603
        while True:
            try:
                status = process.wait()
            except KeyboardInterrupt:
                continue  # pytest got the interrupt, too, and still writes its report
            # A signal that ends the process sets the status, as in a shell.
            return status if status >= 0 else 128 - status
