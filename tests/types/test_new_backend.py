"""What ``d2ldev new-backend`` writes, under mypy --strict and ruff."""

import subprocess
import sys

import pytest

from d2ldev.cli import new_backend


@pytest.mark.parametrize(
    "command",
    [("mypy", "--strict", "."), ("ruff", "check", "."), ("ruff", "format", "--check", ".")],
)
def test_a_new_backend_passes_the_checks(tmp_path, command):
    assert new_backend.run("my_toy", tmp_path) == 0
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path / "d2ldev-my-toy",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
