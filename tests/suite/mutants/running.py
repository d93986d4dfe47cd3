"""A process that gives mutants to the conformance suite, each in a forked child of its own.

What a child needs is imported once, before it is forked. Nothing that a mutant does reaches another
one, and one that hangs is killed. A child, and the processes that it starts, find its own mutant
among the installed backends: to read the packages of hundreds would take longer than the tests.

It reads one JSON object a line: ``name``, ``point`` (``module:class``), ``virtual_gpus``,
``is_nightly``, ``requirements``, ``folder``, where the report and what pytest printed are put, and
``time_limit`` in seconds. It answers with one line: the exit status of pytest, or what ended it
instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import d2ldev_conformance
import pytest
from d2ldev_conformance.catalogue import list_explanations
from forking import wait_for_child
from processes import extend_path, make_distribution

import mutants
from d2ldev import settings
from d2ldev.registry.discovery import find_backends


def main() -> None:
    """Answer requests until there are no more."""
    modules = [
        importlib.import_module(module.name)
        for package in (mutants, d2ldev_conformance)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    files = _files(modules)
    importlib.import_module("d2ldev.cli.screen")  # for the warnings of a machine
    list_explanations()  # for the reports
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with contextlib.redirect_stdout(io.StringIO()):  # for what pytest imports when it is needed
        pytest.main(["--markers", "-c", f"{d2ldev_conformance.__path__[0]}/pytest.ini"])
    # A child would go through, and so copy, all that is here whenever it collects garbage.
    gc.freeze()
    for line in sys.stdin:
        print(_outcome(files, **json.loads(line)), flush=True)


def _files(modules: list[ModuleType]) -> dict[str, set[str]]:
    """Return the files in which the tests of each requirement are."""
    found: dict[str, set[str]] = {}
    for module in modules:
        for function in filter(inspect.isfunction, vars(module).values()):
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "requirement":
                    found.setdefault(mark.args[0], set()).add(module.__file__)
    return found


def _outcome(files: dict[str, set[str]], time_limit: float, **request: Any) -> str:
    child = os.fork()
    if not child:
        _run(files, **request)
    status = wait_for_child(child, time_limit)
    return f"killed after {time_limit} seconds" if status is None else f"exit status {status}"


def _run(
    files: dict[str, set[str]],
    *,
    name: str,
    point: str,
    virtual_gpus: int,
    is_nightly: bool,
    requirements: list[str],
    folder: str,
) -> None:
    """Run the suite in this process, and end it."""
    status = 70  # of an error in here
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        announced = Path(folder, "announced")
        make_distribution(announced, name, {name: point})
        sys.path.insert(0, str(announced))
        os.environ["PYTHONPATH"] = extend_path([announced])
        find_backends(refresh=True)
        printed = os.open("printed.txt", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(printed, stream)
        os.environ[settings.VIRTUAL_GPUS] = str(virtual_gpus)
        # The tests are imported already: their assertions cannot be rewritten any more.
        arguments = ["-qx", "--assert=plain", "--tb=native", "-W", "error"]
        arguments += [f"--basetemp={folder}/inner", "-p", "no:cacheprovider"]
        arguments += ["-p", "d2ldev_conformance.plugin"]
        arguments += [f"--d2ldev-backend={name}", f"--d2ldev-report={folder}"]
        arguments += ["--d2ldev-profile=nightly"] if is_nightly else []
        arguments += [f"--d2ldev-requirement={requirement}" for requirement in requirements]
        status = pytest.main(arguments + sorted(set().union(*map(files.get, requirements))))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
