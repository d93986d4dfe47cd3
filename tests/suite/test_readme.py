"""What the README says is true: its commands, its table of the contract, its program."""

import re
import runpy
from pathlib import Path
from types import FunctionType

import pytest
from d2ldev_reference import ReferenceFramework

import d2ldev

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands():
    return [block.splitlines()[-1] for block in blocks("bash")]


def test_there_are_two_commands():
    tour, test = commands()
    assert tour.endswith("d2ldev tour")
    assert test.endswith("tox")


def test_ci_runs_the_second_command():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands()[1]


def test_the_contract_has_every_method():
    table = README.split("## The contract")[1].split("## Which backend")[0]
    methods = {
        name
        for name in dir(d2ldev.Backend)
        if isinstance(getattr(d2ldev.Backend, name), FunctionType) and not name.startswith("_")
    }
    named = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", table.split("Containers are")[0]))
    assert methods <= named


@pytest.mark.parametrize("program", blocks("python"))
def test_a_program_runs_on_two_virtual_gpus(program, reference):
    with d2ldev.use_backend(reference):
        namespace = {}
        exec(program, namespace)
        assert str(reference.device_of(namespace["X"])) == "gpu:0"


def test_the_training_program_learns_on_a_virtual_gpu(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("py")
    with d2ldev.use_backend(reference):
        namespace = {}
        exec(program, namespace)
    assert str(namespace["trainer"].device) == "gpu:0"
    assert namespace["history"]["loss"][-1] < 0.05 * namespace["history"]["loss"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


def test_the_error_is_worded_as_shown(monkeypatch):
    (shown,) = blocks("text")
    monkeypatch.setattr(ReferenceFramework, "name", "torch")
    with pytest.raises(d2ldev.DeviceUnavailableError) as caught:
        d2ldev.Backend(ReferenceFramework(virtual_gpus=1)).ones(2, device="gpu:1")
    assert shown.strip() == f"{type(caught.value).__name__}: {caught.value}"


def test_the_tables_are_those_of_the_results():
    tool = runpy.run_path(str(ROOT / "tools" / "readme_tables.py"))
    assert tool["with_tables"](README) == README
