"""``d2ldev`` in a process of its own, whose environment is said."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import forking
from processes import extend_path

PROGRAM = Path(__file__).with_name("program_without_frameworks.py")
LIBRARIES = (
    *("array_api_strict", "numpy", "rich.markdown", "rich.progress", "typer.main"),
    # Newer versions of typer need it.
    *(("pydantic.type_adapter", "pydantic.types") if find_spec("pydantic") else ()),
)
"""What the command imports: as long as none of its variables matters to them, once for all."""


def run_command(*arguments, columns=100, path=(), hide=True, before="", after="", **environment):
    """Run ``d2ldev`` with the reference backend, unless ``environment`` says otherwise.

    Args:
        arguments: of the command line.
        columns: the width of the terminal.
        path: folders to be searched for modules and distributions.
        hide: whether no framework is installed there, whatever is installed here.
        before, after: what a shell does before the command, and what follows it in its line.
        environment: variables to set; None for one that shall not be set.
    """
    inherited = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    variables = inherited | {
        "D2LDEV_BACKEND": "reference",
        "COLUMNS": str(columns),
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": extend_path(path),
        **environment,
    }
    variables = {name: value for name, value in variables.items() if value is not None}
    program = [PROGRAM] if hide else ["-m", "d2ldev"]
    if not before and not after and all(name.startswith("D2LDEV_") for name in environment):
        return forking.run(
            LIBRARIES, [*program, *arguments], cwd=os.getcwd(), env=variables, timeout=120
        )
    return subprocess.run(
        ["bash", "-c", f'{before}"$@" {after}', "bash", sys.executable, *program, *arguments],
        env=variables,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
