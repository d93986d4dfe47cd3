"""The guides for authors of libraries: their libraries, tests and workflow."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import yaml  # which Flax brings
from pages import ROOT, find_blocks, run_page
from processes import extend_path

GUIDES = ROOT / "docs" / "guides"
LEAKS = GUIDES / "test-without-a-gpu.md"
NAMES = {point.name for point in entry_points(group="pytest11")}
PLUGIN = [] if "d2ldev_leaks" in NAMES else ["-p", "d2ldev.leaks.plugin"]


def run_tests(folder, *options, **variables):
    """Run pytest as a page says; the finished process."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("D2LDEV_")}
    kept |= {"PYTHONPATH": extend_path([folder]), "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, *options]
    return subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, timeout=300
    )


def test_the_function_of_the_guide_passes_its_tests_on_each_framework_and_device(tmp_path):
    run_page(GUIDES / "library-function.md", "all", tmp_path)
    done = run_tests(tmp_path, "test_encode.py", D2LDEV_VIRTUAL_GPUS="2")
    assert "= 24 passed in " in done.stdout, done.stdout + done.stderr  # 2 tests, 4 x 3 devices


@pytest.fixture
def versions(tmp_path):
    """The library of the guide with its leak, and what writes the one without it."""
    first, tests, second = (code for _, _, code in find_blocks(LEAKS, "torch"))
    (tmp_path / "mylib.py").write_text(first)
    (tmp_path / "test_mylib.py").write_text(tests)
    return tmp_path, lambda: (tmp_path / "mylib.py").write_text(second)


@pytest.fixture
def steps():
    """The commands of the guide's workflow."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", LEAKS.read_text("utf-8"), re.M | re.DOTALL)
    workflow = yaml.safe_load(text)
    assert workflow.keys() == {"name", True, "permissions", "jobs"}  # YAML 1.1: "on" is True
    (job,) = workflow["jobs"].values()
    used = [each["uses"] for each in job["steps"] if "uses" in each]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used)
    return [shlex.split(each["run"]) for each in job["steps"] if "run" in each]


def test_the_search_of_the_guide_prints_what_the_page_shows(versions):
    folder, _ = versions
    assert run_tests(folder).returncode == 0  # on the CPU nothing shows it
    done = run_tests(folder, "--d2ldev-leaks", D2LDEV_BACKEND="torch")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", LEAKS.read_text("utf-8"), re.M | re.DOTALL)
    assert done.returncode == 1
    assert shown in done.stdout


def test_the_workflow_of_the_guide_passes_without_the_leak(versions, steps):
    folder, fix = versions
    fix()
    install, *tests = steps
    assert install == ["python", "-m", "pip", "install", "../d2ldev[torch]", "pytest", "."]
    assert len(tests) == 2
    for command in tests:
        assert command[:3] == ["python", "-m", "pytest"]
        done = run_tests(folder, *command[3:], D2LDEV_BACKEND="torch")
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((folder / "leaks.json").read_text())["outcomes"] == {"passed": 1}
