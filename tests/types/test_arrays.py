"""What mypy and pyright say of ``Array`` with the annotations of PyTorch, JAX and TensorFlow.

The packages' own mypy run takes JAX and TensorFlow for ``Any``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, write_files

# The options of pyright are those of pyproject.toml: basedpyright's own ones are others.
CONFIGURATION = {
    "mypy.ini": "[mypy]\nstrict = true\nfollow_imports = silent\n",
    "pyrightconfig.json": '{"typeCheckingMode": "standard"}',
}
CHECKERS = {
    "mypy": ("mypy", "--config-file", "mypy.ini"),
    "pyright": ("basedpyright", "--level", "error", "--pythonpath", sys.executable),
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_tensors_of_each_framework_and_the_function_of_the_guide_pass(tmp_path, checker):
    for name, text in CONFIGURATION.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_files(ROOT / "docs" / "guides" / "operators.md", tmp_path, "all")
    files = (Path(__file__).with_name("arrays.py"), tmp_path / "density.py")
    command = [sys.executable, "-m", *CHECKERS[checker], *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
