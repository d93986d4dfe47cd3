"""The command itself: its version, its help, and what it costs those who do not use it."""

import subprocess
import sys

import pytest
from command_line import run_command
from processes import run_python
from typer.main import get_command

import d2ldev
from d2ldev.cli.main import app


def test_the_version_is_the_packages():
    assert run_command("--version").stdout == f"d2ldev {d2ldev.__version__}\n"


def test_the_help_lists_the_commands():
    text = run_command("--help").stdout
    assert all(command in text for command in ("doctor", "tour", "bench", "conformance"))


def test_every_option_has_a_help_text():
    commands = get_command(app).commands
    options = [(name, each) for name in commands for each in commands[name].params]
    assert len(options) > 20
    assert [(name, each.name) for name, each in options if not each.help] == []


def test_the_help_shows_flags_without_a_value():
    for arguments in ([], *([name] for name in get_command(app).commands)):
        text = run_command(*arguments, "--help", COLUMNS="120").stdout
        assert "--help" in text
        assert "bool" not in text.lower()


def test_an_unknown_command_is_a_usage_error():
    assert run_command("dcotor").returncode == 2


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "d2ldev", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"d2ldev {d2ldev.__version__}\n"


GONE = 'folder=$(mktemp -d); cd "$folder"; rmdir "$folder"; '


@pytest.mark.parametrize("command", ["doctor", "--version", "tour"])
def test_a_working_folder_that_is_gone_hinders_no_command_that_needs_none(command):
    done = run_command(command, before=GONE)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["doctor", "tour"])
def test_a_misspelt_policy_of_memory_is_an_error_on_a_machine_without_a_gpu(command):
    done = run_command(command, D2LDEV_GPU_MEMORY="zz")
    assert done.returncode == 1
    assert "error: cannot follow D2LDEV_GPU_MEMORY='zz'" in done.stderr
    assert "Traceback" not in done.stderr


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
