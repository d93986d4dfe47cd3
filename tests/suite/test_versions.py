"""The versions that ``pyproject.toml`` promises are those that have been run."""

import json
import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest
from d2ldev_conformance.matrix import merge_reports

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROWS = tomllib.loads((ROOT / "conformance" / "versions.toml").read_text(encoding="utf-8"))["rows"]
RESULTS = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "conformance" / "results" / "versions").glob("*.json"))
]


def ask(row):
    return {name: row[name] for name in ("backend", "python", "install")}


def pins(name):
    """The versions of a distribution in the rows that hold."""
    held = [result["row"]["install"] for result in RESULTS if result["outcome"] == "holds"]
    found = [pin.split("==") for install in held for pin in install if "==" in pin]
    return {version for each, version in found if each == name}


def bounds():
    """Each framework in an extra with its lower bound, and NumPy's."""
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    text = "\n".join([*extras, *PROJECT["dependencies"]])
    names = ("flax", "jax", "keras", "mxnet", "numpy", "optax", "tensorflow-cpu", "torch")
    found = set(re.findall(r"^([a-z-]+)(?:>=|==)([\d.]+)", text, re.MULTILINE))
    return sorted(bound for bound in found if bound[0] in names)


def key(version):
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize(("name", "bound"), bounds())
def test_a_lower_bound_is_a_version_that_holds(name, bound):
    held = sorted(pins(name), key=key)
    assert held
    assert held[0] == bound or held[0].startswith(f"{bound}.")


def test_each_python_that_is_promised_has_a_row_that_holds():
    held = {result["row"]["python"] for result in RESULTS if result["outcome"] == "holds"}
    text = "\n".join(PROJECT["classifiers"])
    assert set(re.findall(r":: Python :: (3\.\d+)$", text, re.MULTILINE)) == held
    assert PROJECT["requires-python"] == f">={min(held, key=key)}"


def test_each_result_is_of_a_row():
    rows = [ask(row) for row in ROWS]
    assert [result["row"] for result in RESULTS if result["row"] not in rows] == []


def test_what_fails_is_not_kept_as_it_is():
    # It is mended, or the bound leaves it out. What has no wheel is no promise.
    failing = [result["row"] for result in RESULTS if result["outcome"] == "fails"]
    assert failing == []


@pytest.fixture
def tool():
    return runpy.run_path(str(ROOT / "tools" / "versions.py"))


def test_an_environment_has_the_versions_of_its_row(tool, tmp_path):
    row = {"backend": "jax", "python": "3.12", "install": ["jax==1.2", "flax==3.4"], "oldest": True}
    venv, install = tool["install_commands"](row, tmp_path)
    assert venv[venv.index("--python") + 1] == "3.12"
    assert install[-2:] == ["jax==1.2", "flax==3.4"]
    assert install[-3] == f"d2ldev[test,jax] @ {ROOT.as_uri()}"
    assert "lowest-direct" in install
    constraints = (tmp_path / "pins").read_text(encoding="utf-8")
    assert "pytest==" in constraints
    assert "jax==" not in constraints


def test_a_row_runs_where_its_version_can_make_gpus(tool, tmp_path):
    row = {"backend": "torch", "python": "3.11", "install": ["torch==2.6.0"]}
    command = tool["suite_command"](row, "files", tmp_path)
    assert command[command.index("--virtual-gpus") + 1] == "2"
    assert command[-2:] == ["-k", "files"]
    command = tool["suite_command"]({**row, "gpus": 0}, "", tmp_path)
    assert command[command.index("--require-gpus") + 1] == "0"
    assert command[-1] == "--"


def test_a_failed_command_is_reported_with_its_last_line(tool, tmp_path):
    commands = [["echo", "fine"], ["ls", "/nowhere"], ["touch", str(tmp_path / "not reached")]]
    with (tmp_path / "log").open("w", encoding="utf-8") as output:
        problem = tool["_run"](commands, tmp_path, output)
    assert "/nowhere" in problem
    assert not (tmp_path / "not reached").exists()
    assert "fine" in (tmp_path / "log").read_text(encoding="utf-8")


def test_the_reports_of_rows_make_one_matrix(tool, tmp_path, monkeypatch):
    kept = ROOT / "conformance" / "results" / "torch-cpu.json"

    def run(commands, place, _):
        (place / "report").mkdir(exist_ok=True)
        shutil.copy(kept, place / "report" / "conformance.json")
        return ""

    monkeypatch.setitem(tool["result_of"].__globals__, "_run", run)
    monkeypatch.setitem(tool["result_of"].__globals__, "versions", lambda _: {})
    row = {"backend": "torch", "python": "3.11", "install": []}
    for name in ("torch-a", "torch-b"):
        result = tool["result_of"]({**row, "name": name}, "files", tmp_path, own=False)
        assert result["outcome"] == "holds"
    merge_reports([tmp_path], tmp_path / "out")
    matrix = json.loads((tmp_path / "out" / "matrix.json").read_text(encoding="utf-8"))
    assert [run["source"] for run in matrix["runs"]] == ["torch-a", "torch-b"]


def test_every_row_of_the_versions_is_in_the_table():
    table = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    lines = table.split("<!-- versions -->")[1].split("<!-- end of versions -->")[0].splitlines()
    told = [line.split(" | ")[0].removeprefix("| ") for line in lines[3:] if line]
    assert told == [row["backend"] for row in ROWS]
