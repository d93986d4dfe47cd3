"""``d2ldev`` in a process of its own, whose environment is said."""

import os
import subprocess
import sys

from processes import FRAMEWORKS, extend_path

_HIDE = f"""
import sys
sys.modules.update(dict.fromkeys({FRAMEWORKS}))
"""
_START = """
from d2ldev.cli import run_command
run_command()
"""


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
    return subprocess.run(
        [
            *("bash", "-c", f'{before}"$@" {after}', "bash"),
            *(sys.executable, "-c", (_HIDE if hide else "") + _START, *arguments),
        ],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
