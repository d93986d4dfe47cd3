"""New environments, each with one extra of the wheel: what it brings, and what works there."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from installs import find_extras

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def install(wheel, tmp_path):
    """Makes an environment with d2ldev and an extra; a function that runs a program of it."""

    def install_extra(extra):
        folder = tmp_path / "environment"
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        what = f"d2ldev[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        pip("--python", python, "install", "--no-compile", what)
        names = ("PYTHONPATH", "VIRTUAL_ENV", "D2LDEV_BACKEND", "D2LDEV_VIRTUAL_GPUS")
        variables = {name: value for name, value in os.environ.items() if name not in names}
        variables["TMPDIR"] = str(tmp_path)

        def run(program, *arguments, **more):
            command = [folder / "bin" / program, *arguments]
            options = {"capture_output": True, "text": True, "check": False, "timeout": 120}
            return subprocess.run(command, cwd=tmp_path, env=variables | more, **options)

        return run

    return install_extra


def pip(*arguments):
    """Run pip of this environment."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    variables = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(
        [*command, *map(str, arguments)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def packages(run):
    """Return the names of the distributions that are installed in an environment."""
    code = (
        "import json; from importlib.metadata import distributions; "
        "print(json.dumps([each.name for each in distributions()]))"
    )
    return {
        re.sub(r"[_.]", "-", name).lower() for name in json.loads(run("python", "-c", code).stdout)
    }


IMPORT = """
import d2ldev
from d2ldev import backend
try:
    backend.num_gpus()
except d2ldev.BackendNotInstalledError as error:
    print(error.fix)
"""


def test_d2ldev_alone_brings_numpy_and_names_its_extras(install, tmp_path):
    run = install("")
    assert packages(run) == {"d2ldev", "numpy"}
    done = run("python", "-c", IMPORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert find_extras(done.stdout) == ["torch", "reference"]
    done = run("d2ldev", "doctor")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = re.findall(r"error: .*; fix: (pip install .*)\n", done.stderr)
    assert find_extras(line) == ["cli"]
    pip("--python", tmp_path / "environment" / "bin" / "python", *shlex.split(line)[1:])
    assert run("d2ldev", "--version").returncode == 0


def test_cli_brings_the_command(install):
    run = install("cli")
    assert {"rich", "typer"} <= packages(run)
    assert run("d2ldev", "--version").returncode == 0
    done = run("d2ldev", "tour")
    assert done.returncode == 1
    assert find_extras(done.stderr) == ["reference"]


def test_reference_brings_a_backend(install):
    run = install("reference")
    assert packages(run) == {"d2ldev", "numpy", "array-api-strict"}
    code = "from d2ldev import backend; print(backend.to(backend.ones(2), 'gpu:1').device)"
    done = run("python", "-c", code, D2LDEV_BACKEND="reference")
    assert done.stdout == "array_api_strict.Device('device2')\n", done.stderr


def test_files_brings_files_and_the_dtypes_that_numpy_lacks(install):
    run = install("files")
    assert packages(run) == {"d2ldev", "numpy", "ml-dtypes", "safetensors", "xxhash"}
    code = """
from d2ldev.files.format.container import check_files, numpy_dtype
check_files("save")
print(numpy_dtype("bfloat16"))
"""
    done = run("python", "-c", code)
    assert done.stdout == "bfloat16\n", done.stderr


def test_memory_brings_the_memory_of_the_process(install):
    run = install("memory")
    assert packages(run) - {"psutil"} == {"d2ldev", "numpy"}
    code = "from d2ldev.operations.devices import host_memory; print(host_memory().total > 0)"
    done = run("python", "-c", code)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.nightly  # it installs for ten seconds
def test_test_brings_the_suite(install):
    run = install("test")
    done = run("d2ldev", "conformance", "reference", "--", "-k", "test_copying")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly  # it installs for ten seconds
def test_all_brings_the_tour_without_a_framework(install):
    run = install("all")
    assert packages(run).isdisjoint({"torch", "jax", "flax", "keras", "tensorflow", "mxnet"})
    done = run("d2ldev", "tour", D2LDEV_BACKEND="reference")
    assert done.returncode == 0, done.stderr
