"""``d2ldev new-backend``: the package that it writes is installed, and runs at once."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest
from command_line import run_command
from processes import conform, extend_path, make_distribution, run_python

from d2ldev.framework.testing import MODULES, check_conformance

USE = """
    import d2ldev
    backend = d2ldev.get_backend("my_toy")
    show([backend.name, backend.num_gpus(), str(backend.cpu())])
    try:
        backend.ones(2)
    except NotImplementedError as error:
        show(str(error))
"""


@pytest.fixture
def written(tmp_path):
    """The folder of a new backend, with what its installation leaves behind."""
    done = run_command("new-backend", "my_toy", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    root = tmp_path / "d2ldev-my-toy"
    assert f"cd {root}" in done.stdout
    assert "Until devices and tensors are written, pytest and CI are red." in done.stdout
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    make_distribution(
        root, project["name"].replace("-", "_"), project["entry-points"]["d2ldev.backends"]
    )
    return root


def test_a_new_backend_has_a_file_for_each_module(written):
    package = written / "d2ldev_my_toy"
    files = {path.name for path in package.iterdir()}
    modules = {f"{name}.py" for name in (*MODULES, "provision", "__init__")}
    assert files == {*modules, "known_gaps.toml", "py.typed"}
    others = {str(path.relative_to(written)) for path in written.rglob("*.*") if path.is_file()}
    assert others >= {"tests/test_suite.py", ".github/workflows/tests.yml", "README.md"}
    text = "".join(path.read_text("utf-8") for path in written.rglob("*") if path.is_file())
    assert not [
        word for word in ("{name}", "{package}", "{class}", "{distribution}") if word in text
    ]


def test_the_suite_of_a_new_backend_is_five_lines(written):
    lines = (written / "tests" / "test_suite.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line and not line.startswith('"""')]) == 5


def test_a_new_backend_can_be_used_at_once_and_says_what_is_not_begun(written):
    used, message = run_python(USE, path=[written])
    assert used == ["my_toy", 0, "cpu"]
    assert "the backend has no Tensors.full yet" in message


def test_the_suite_runs_on_a_new_backend_and_says_what_to_write(written, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", extend_path([written]))
    monkeypatch.setenv("TMPDIR", str(written))
    monkeypatch.chdir(written)
    with pytest.raises(AssertionError, match="conformance my_toy --only devices") as caught:
        check_conformance("my_toy", "devices")
    text = str(caught.value)
    assert "write Tensors.full" in text
    assert " 0 failed, " in text


EXPECT_AN_ERROR = (
    *("unknown_object_is_refused", "invalid_shape", "exchange_stays_chained"),
    *("without_dlpack", "about_something_else", "lost_process", "different_batches"),
)


def test_a_requirement_that_expects_an_error_is_not_begun_either(written):
    done = conform(written, "my_toy", "-k", " or ".join(EXPECT_AN_ERROR))
    assert done.returncode != 0
    (line,) = (line for line in done.stdout.splitlines() if " requirements: " in line)
    number = line.partition(" ")[0]
    assert line.startswith(f"{number} requirements: 0 passed, 0 failed, {number} not begun, ")


def test_the_tests_of_a_new_backend_run_the_suite(written):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
        cwd=written,
        env=os.environ | {"PYTHONPATH": extend_path([written]), "TMPDIR": str(written)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "FAILED tests/test_suite.py::test_conformance[devices]" in done.stdout
    assert "write Tensors.full" in done.stdout


REFUSED = {
    "capitals": ("Toy", "it is not a name of lowercase letters"),
    "a dash": ("my-toy", "it is not a name of lowercase letters"),
    "a path": ("../toy", "it is not a name of lowercase letters"),
    "a keyword": ("class", "it is not a name of lowercase letters"),
    "an installed backend": ("reference", "a backend of that name is installed"),
    "an alias": ("pytorch", "a backend of that name is installed"),
    "the suite": ("conformance", "a package d2ldev_conformance is installed"),
}


@pytest.mark.parametrize(("name", "problem"), REFUSED.values(), ids=REFUSED.keys())
def test_a_name_that_cannot_be_used_is_refused(tmp_path, name, problem):
    done = run_command("new-backend", name, "--folder", str(tmp_path))
    assert done.returncode == 2
    assert problem in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "d2ldev-toy").mkdir()
    done = run_command("new-backend", "toy", "--folder", str(tmp_path))
    assert done.returncode == 2
    assert "d2ldev-toy exists" in done.stderr
    assert list((tmp_path / "d2ldev-toy").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    done = run_command("new-backend", "toy", "--folder", str(tmp_path / "file" / "below"))
    assert done.returncode == 1
    assert "cannot write a backend 'toy'" in done.stderr


def test_the_entry_point_of_a_new_backend_names_its_class(written):
    (point,) = tomllib.loads((written / "pyproject.toml").read_text("utf-8"))["project"][
        "entry-points"
    ]["d2ldev.backends"].items()
    assert point == ("my_toy", "d2ldev_my_toy:MyToyFramework")
    assert EntryPoint(*point, "d2ldev.backends").attr == "MyToyFramework"
