"""The guide "Write a backend": its blocks make a package that passes what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import extend_path, make_distribution, run_interpreter

from d2ldev.framework.testing import MODULES

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
TOY = (ROOT / "examples" / "toy.py").read_text(encoding="utf-8")


def read_files():
    """Return the text of each file of the guide: of its blocks in turn, by its path."""
    files = {"toy.py": TOY}
    for path, code in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", GUIDE, re.M | re.DOTALL):
        files[path] = "\n\n".join(filter(None, [files.get(path), code]))
    return files


@pytest.fixture
def toy(tmp_path):
    """The folder of the guide's package, as if it was installed."""
    for path, text in read_files().items():
        target = tmp_path / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
    make_distribution(tmp_path, "d2ldev_toy", {"toy": "d2ldev_toy:ToyFramework"})
    return tmp_path


def conform(folder, *options):
    """Run the suite on the guide's backend; the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "d2ldev", "conformance", "toy", *options],
        env=os.environ | {"PYTHONPATH": extend_path([folder]), "TMPDIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_the_guide_has_a_chapter_for_each_module_in_their_order():
    chapters = [title.lower() for title in re.findall(r"^## (.+)$", GUIDE, re.MULTILINE)]
    assert [each for each in chapters if each in MODULES] == list(MODULES)
    assert read_files().keys() == {
        "toy.py",
        *(f"d2ldev_toy/{name}.py" for name in (*MODULES, "provision", "__init__")),
    }


def test_the_backend_of_the_guide_moves_a_model(toy):
    done = conform(toy, "--virtual-gpus", "1", "--only", "models", "--", "-k", "cpu-gpu0")
    assert done.returncode == 0, done.stdout
    assert " 0 failed, 0 not begun" in done.stdout


def test_the_first_chapters_work_in_the_package_that_the_command_writes(tmp_path):
    run_interpreter("-m", "d2ldev", "new-backend", "toy", cwd=tmp_path)
    root = tmp_path / "d2ldev-toy"
    files = read_files()
    for path in ("toy.py", "d2ldev_toy/__init__.py", "d2ldev_toy/devices.py"):
        (root / path).write_text(files[path], encoding="utf-8")
    make_distribution(root, "d2ldev_toy", {"toy": "d2ldev_toy:ToyFramework"})
    done = conform(root, "--only", "devices", "--", "-k", "distinct or spellings")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly  # each takes up to a minute
@pytest.mark.parametrize("module", MODULES)
def test_the_backend_of_the_guide_passes_each_module(toy, module):
    done = conform(toy, "--virtual-gpus", "1", "--only", module)
    assert done.returncode == 0, done.stdout
