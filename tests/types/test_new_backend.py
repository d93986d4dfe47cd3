"""What ``d2ldev new-backend`` writes passes mypy and ruff; so does the guide's backend in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_interpreter

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
TOY = (ROOT / "examples" / "toy.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command",
    [("mypy", "--strict", "."), ("ruff", "check", "."), ("ruff", "format", "--check", ".")],
)
def test_a_new_backend_passes_the_checks(tmp_path, command):
    run_interpreter("-m", "d2ldev", "new-backend", "my_toy", cwd=tmp_path)
    check(tmp_path / "d2ldev-my-toy", *command)


@pytest.mark.parametrize("command", [("mypy", "."), ("ruff", "check", ".")])
def test_the_backend_of_the_guide_passes_the_checks_of_the_written_ci(tmp_path, command):
    """Write the guide's files over those of ``d2ldev new-backend toy``, as an author does."""
    run_interpreter("-m", "d2ldev", "new-backend", "toy", cwd=tmp_path)
    root = tmp_path / "d2ldev-toy"
    assert " ".join(command) in (root / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    blocks = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert "d2ldev_toy/training.py" in dict(blocks)
    texts = {"toy.py": TOY}
    for path, code in blocks:
        texts[path] = "\n\n".join(filter(None, [texts.get(path), code]))
    for path, text in texts.items():
        (root / path).write_text(text, encoding="utf-8")
    check(root, *command)


def check(folder, *command):
    """Run a checker in a folder, and expect no complaint."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
