"""The command itself: its version, its help, and what it costs those who do not use it."""

import subprocess
import sys

from command_line import run_command
from processes import run_python

import d2ldev


def test_the_version_is_the_packages():
    assert run_command("--version").stdout == f"d2ldev {d2ldev.__version__}\n"


def test_the_help_lists_the_commands():
    text = run_command("--help").stdout
    assert all(command in text for command in ("doctor", "tour", "conformance"))


def test_an_unknown_command_is_a_usage_error():
    assert run_command("dcotor").returncode == 2


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "d2ldev", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"d2ldev {d2ldev.__version__}\n"


def test_importing_d2ldev_imports_neither_typer_nor_rich():
    code = """
    import sys
    import d2ldev
    show(sorted({"typer", "rich", "d2ldev.cli"} & sys.modules.keys()))
    """
    assert run_python(code) == [[]]


def test_the_help_needs_no_framework_and_chooses_no_backend():
    done = run_command("--help", hide=False, D2LDEV_BACKEND="no-such-backend")
    assert done.returncode == 0
