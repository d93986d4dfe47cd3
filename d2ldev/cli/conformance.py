"""``d2ldev conformance``: the installed suite, run by pytest in a process of its own.

The process is a new one, because the number of virtual GPUs is fixed when a backend is first used,
and so that no import of the command line is in the way.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d2ldev import settings
from d2ldev.cli.screen import complain, environment, exit_status
from d2ldev.errors import D2LDevError
from d2ldev.registry import discovery, loading

SUITE = "d2ldev_conformance"
# pytest's own status for "it could not be run as it was asked to".
USAGE_ERROR = 4
# And for "no test was selected".
NO_TESTS = 5
# Of the report, by the number of virtual GPUs.
_FOLDERS = {None: "machine", 0: "cpu"}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; see the options of ``main.conformance``.

    ``extra`` are further arguments for pytest, as they are.
    """

    name: str
    require_gpus: int | None = None
    virtual_gpus: int | None = None
    report: Path | None = None
    profile: str | None = None
    extra: tuple[str, ...] = ()


def command(request: Request, suite: Path) -> list[str]:
    """Return the command line of the process that runs the suite.

    Args:
        request: what was asked for.
        suite: the folder of the suite's package, which holds its ``pytest.ini``.
    """
    # By its folder: beside a name pytest would load the conftest.py of the user's own tests.
    argv = [sys.executable, "-m", "pytest", str(suite), "--d2ldev-backend", request.name]
    if request.require_gpus is not None:
        argv += ["--d2ldev-require-gpus", str(request.require_gpus)]
    if request.report is not None:
        argv += ["--d2ldev-report", str(request.report)]
    if request.profile is not None:
        argv += ["--d2ldev-profile", request.profile]
    # The settings are the suite's own: those of a project in the working directory could turn
    # warnings into errors, or leave tests out.
    argv += ["-p", "no:cacheprovider", "-c", str(suite / "pytest.ini"), "--rootdir", str(suite)]
    return [*argv, *request.extra]


def list_runs(request: Request, profiles: Mapping[str, Any]) -> list[Request]:
    """Return the requests of a profile: one for each number of virtual GPUs that it has.

    A request that names a number of virtual GPUs stays the only one, and so does one without a
    profile.

    Args:
        request: what was asked for.
        profiles: the profiles of the suite, by name.
    """
    name = discovery.canonical_name(request.name)
    profile = profiles.get(request.profile or "")
    is_known = name in discovery.find_backends()
    if request.virtual_gpus is not None or profile is None or not is_known:
        return [request]  # pytest names the choices
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

    Of several runs it is the worst one.
    """
    for module in ("pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            complain(
                f"cannot run the conformance suite: {module} is not installed\n"
                "  fix: pip install 'd2ldev[test]'"
            )
            return USAGE_ERROR
    os.getcwd()  # pytest would end with a traceback in a folder that is gone
    try:
        # The core imports no module of the suite; it finds the suite by its name.
        requests = list_runs(request, importlib.import_module(f"{SUITE}.profiles").PROFILES)
    except D2LDevError as error:
        complain(str(error))
        return exit_status(error)
    suite = Path(str(importlib.util.find_spec(SUITE).origin)).parent  # type: ignore[union-attr]
    statuses = {_status_of(each, suite) for each in requests}
    if len(statuses) > 1:
        statuses -= {NO_TESTS}  # what -k names may be in some of the runs only
    return max(statuses)


def _status_of(request: Request, suite: Path) -> int:
    # Where the output cannot be written, this says so in one line, and pytest in a hundred.
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
                continue  # pytest was interrupted as well, and still writes its report
            # A process that a signal ended has that signal's status, as in a shell.
            return status if status >= 0 else 128 - status
