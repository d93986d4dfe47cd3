"""What stands beside the code: the licence, and CI that runs what tox runs."""

import ast
import itertools
import re
import tomllib
from configparser import ConfigParser
from hashlib import sha256
from pathlib import Path

import pytest
from processes import BUILT_IN

import d2ldev
from d2ldev import framework

ROOT = Path(__file__).parent.parent.parent


def test_the_licence_is_the_full_text_of_the_one_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (file,) = project["license-files"]
    assert project["license"] == "Apache-2.0"
    # Of https://www.apache.org/licenses/LICENSE-2.0.txt.
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert sha256((ROOT / file).read_bytes()).hexdigest() == digest


def test_ci_has_a_job_for_each_environment_of_tox():
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    environments = re.search(r"^env_list = (.+)$", tox, re.MULTILINE)[1].split(", ")
    jobs = re.search(r"environment:\n((?:\s+- .+\n)+)", workflow)[1]
    assert re.findall(r"- (\S+)", jobs) == environments


def read_ini(name):
    parser = ConfigParser(interpolation=None)
    parser.read_string((ROOT / name).read_text(encoding="utf-8"))
    return parser


def expand(name):
    """Return the environments that a generative name of tox stands for."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return {"".join(each) for each in itertools.product(*parts)}


def test_ci_runs_environments_of_the_nightly_file_each_night():
    names = read_ini("nightly.ini")["tox"]["env_list"].split()
    environments = set().union(*map(expand, names))
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
    jobs = re.findall(r"^ +- ([a-z0-9.-]+)$", workflow, re.MULTILINE)
    assert set(jobs) <= environments
    assert {each for each in environments if each.startswith("nightly")} <= set(jobs)
    assert "cron:" in workflow


def test_tox_is_read_by_a_stranger():
    assert len((ROOT / "tox.ini").read_text(encoding="utf-8").splitlines()) <= 138


@pytest.mark.parametrize("name", ["tox.ini", "nightly.ini"])
def test_tox_has_no_key_that_tox_does_not_know(name):
    known = {
        "description",
        "package",
        "wheel_build_env",
        "base_python",
        "extras",
        "deps",
        "dependency_groups",
        "set_env",
    }
    known |= {"change_dir", "allowlist_externals", "commands", "commands_pre", "skip_install"}
    parser = read_ini(name)
    used = {key for section in parser.sections()[1:] for key in parser[section]}
    assert used - known - {"pass_env"} == set()


@pytest.mark.parametrize("workflow", ["tests.yml", "nightly.yml"])
def test_ci_has_each_python_of_tox(workflow):
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8")
    versions = re.search(r"python-version: \|\n((?:\s+[0-9.]+\n)+)", workflow)[1].split()
    # The last one is the ``python`` of the job, which is to have ``tox``.
    assert set(versions) == set(re.findall(r"base_python = python(\S+)", tox))
    assert "--skip-missing-interpreters false" in workflow


def test_contributors_are_told_the_layers_that_are_held():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = tool["importlinter"]["contracts"][0]["layers"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = " < ".join(re.findall(r"^\d\. \*\*[^*]+:\*\* `([^`]+)`", text, re.MULTILINE))
    told = [[name.strip() for name in layer.split(",")] for layer in told.split("<")]
    assert told == [layer.split(" : ") for layer in reversed(layers)]


def test_the_extra_for_cuda_has_a_wheel_for_each_library_that_mxnet_loads():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = extras["optional-dependencies"]["mxnet-cuda"]
    source = (ROOT / "backends" / "d2ldev_mxnet" / "importing.py").read_text(encoding="utf-8")
    libraries = re.findall(r'^    "(\w+)": "lib\w+\.so', source, re.MULTILINE)
    wheels = {each.split("==")[0] for each in extra if each.startswith("nvidia-")}
    assert wheels == {f"nvidia-{name.replace('_', '-')}-cu11" for name in libraries}
    assert len(libraries) == 10


PACKAGES = "d2ldev", *(f"d2ldev_{name}" for name in BUILT_IN)
AREAS = (
    "Framework",
    "Devices",
    "Tensors",
    "Models",
    "Files",
    "Strict",
    "Training",
    "Learner",
    "Parallel",
)
PUBLIC = ("errors", "framework", "framework.testing", "loggers", "native", "results", "typing")


def imports_internals(path):
    """Return whether a test imports what neither users nor authors of backends can import.

    ``provision`` of a backend is set-up of tests itself.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
            if node.module in PACKAGES:
                public = {*d2ldev.__all__, *BUILT_IN, *PUBLIC, "__version__", "provision"}
                modules = [alias.name for alias in node.names if alias.name not in public]
                modules = [f"{node.module}.{name}" for name in modules]
        else:
            continue
        for module in modules:
            package, _, rest = module.partition(".")
            if package in PACKAGES and rest not in {"", *PUBLIC, *BUILT_IN, "provision"}:
                return True
    return False


def test_few_tests_import_internals_so_that_the_packages_can_change():
    found = [path for path in sorted((ROOT / "tests").rglob("*.py")) if imports_internals(path)]
    assert len(found) <= 85, found


def names_in(cls):
    return {name for name in {*vars(cls), *vars(cls).get("__annotations__", {})} if name[0] != "_"}


def test_the_contract_stays_on_a_page():
    """Each method that an author may write is one that a reader has to know."""
    areas = [getattr(framework, name) for name in AREAS]
    assert sum(len(names_in(area)) for area in areas) <= 110
    assert len(framework.__all__) <= 95


def test_what_users_import_and_call_stays_small():
    assert len(d2ldev.__all__) <= 40
    assert len(names_in(d2ldev.Backend)) <= 56
