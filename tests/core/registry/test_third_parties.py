"""Third parties: nothing of theirs runs before it is chosen, and none takes a built-in name."""

import re
from pathlib import Path

import pytest
from processes import FRAMEWORKS, MINE, make_backend, make_distribution, make_package, run_python

from d2ldev.contract.framework import ABILITIES
from d2ldev.registry import discovery

# What a package does that nobody has chosen.
UNASKED = {
    "sleeps": "import time\ntime.sleep(1000)",
    "ends the process": "import os\nos._exit(3)",
    "raises SystemExit": "raise SystemExit('no GPU')",
    "raises no Exception": "raise BaseException('odd')",
    "is interrupted": "raise KeyboardInterrupt",
}
CALLS = {
    "the handle": "from d2ldev import backend; backend.name",
    "available_backends": "import d2ldev; d2ldev.available_backends()",
    "backend_of": "import d2ldev, array_api_strict; d2ldev.backend_of(array_api_strict.zeros(1))",
    "an unknown name": "import d2ldev, contextlib\n"
    "with contextlib.suppress(d2ldev.UnknownBackendError): d2ldev.get_backend('zzz')",
}


def refusal_of_mine(folder):
    """Return why the backend "mine", of a distribution in a folder, is refused."""
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("mine")
        except d2ldev.BackendNotInstalledError as error:
            show(str(error))
    """
    (message,) = run_python(code, path=[folder])
    return message


@pytest.fixture(params=UNASKED.values(), ids=UNASKED.keys())
def unasked(tmp_path, request):
    """The folder of two distributions whose packages do harm when they are imported."""
    for name in ("harmful", "harmful_too"):
        make_package(tmp_path, f"{name}_package", request.param)
        make_distribution(tmp_path, name, {name: f"{name}_package.backend:MyFramework"})
    return tmp_path


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_nothing_of_a_third_party_runs_before_it_is_chosen(unasked, call):
    assert run_python(f"{call}\nshow('done')", path=[unasked]) == ["done"]


def test_the_packages_below_a_needed_module_are_not_imported(tmp_path):
    make_package(tmp_path, "needed", "raise OSError")
    make_package(tmp_path / "needed", "below", "raise OSError")
    make_backend(tmp_path, requires=["needed.below", "needed.not_there"])
    code = """
        from d2ldev.registry.discovery import find_missing_modules
        show(find_missing_modules("mine"))
    """
    assert run_python(code, path=[tmp_path]) == [["needed.not_there"]]


@pytest.mark.parametrize("place", ["package", "module", "class"])
@pytest.mark.parametrize("error", ["BaseException('odd')", "SystemExit('odd')", "GeneratorExit"])
def test_an_exception_of_a_chosen_third_party_is_an_error_of_ours(tmp_path, place, error):
    make_backend(tmp_path)
    package, module = (tmp_path / "mine_backend" / name for name in ("__init__.py", "wiring.py"))
    if place == "class":
        module.write_text(
            MINE.replace("{name!r}", "'mine'")
            + f"\n    def __init__(self, virtual_gpus=None): raise {error}"
        )
    else:
        (package if place == "package" else module).write_text(f"raise {error}")
    message = refusal_of_mine(tmp_path)
    assert "cannot use the mine backend: mine_backend.wiring:MyFramework" in message


def test_ctrl_c_while_a_third_party_is_imported_is_the_user_s(tmp_path):
    source = "import signal\nsignal.raise_signal(signal.SIGINT)"
    make_backend(tmp_path, source=source)
    code = """
        import d2ldev
        try:
            d2ldev.get_backend("mine")
        except KeyboardInterrupt:
            show("interrupted")
    """
    assert run_python(code, path=[tmp_path]) == ["interrupted"]


def test_a_module_that_is_needed_may_be_annotated(tmp_path):
    make_package(tmp_path, "one_package", "requires: tuple[str, ...] = ('no_such_module',)")
    make_distribution(tmp_path, "one", {"one": "one_package.backend:MyFramework"})
    code = "import d2ldev; show('one' in d2ldev.available_backends())"
    assert run_python(code, path=[tmp_path]) == [False]


# -- names that are taken ---------------------------------------------------------------------

REFUSED = """
    import d2ldev
    try:
        d2ldev.get_backend({name!r})
    except d2ldev.BackendNotInstalledError as error:
        show(str(error))
"""


@pytest.fixture
def impostor(tmp_path):
    """Installs a distribution that announces a name; the folder where it is."""

    def install(name):
        for framework in FRAMEWORKS:
            make_package(tmp_path, framework)
        make_package(tmp_path, "impostor", "raise SystemExit('it was imported')")
        make_distribution(tmp_path, "impostor-of-it", {name: "impostor.backend:MyFramework"})
        return tmp_path

    return install


@pytest.mark.parametrize("name", ["torch", "PyTorch", "jax", "tf", "mxnet", "reference"])
def test_a_package_that_announces_a_built_in_name_is_refused(impostor, name):
    (message,) = run_python(REFUSED.format(name=name), path=[impostor(name)])
    assert "more than one distribution announces it: " in message
    assert "pip uninstall impostor-of-it" in message
    assert "pip uninstall d2ldev" in message


def test_a_taken_built_in_name_is_not_a_default(impostor):
    code = """
        import d2ldev
        try:
            d2ldev.backend.name
        except d2ldev.BackendNotInstalledError as error:
            show("impostor-of-it" in str(error))
    """
    assert run_python(code, path=[impostor("torch")]) == [True]


@pytest.mark.parametrize("name", ["mine", "bench", "training", "my_dev"])
def test_a_third_party_is_there_by_its_name_also_before_anything_else(tmp_path, name):
    make_backend(tmp_path, name)
    code = f"from d2ldev import {name}; show({name}.name)"
    assert run_python(code, path=[tmp_path]) == [name]


def test_a_third_party_s_name_with_a_hyphen_is_an_attribute(tmp_path):
    make_backend(tmp_path)
    make_distribution(tmp_path, "another", {"my-dev": "mine_backend.wiring:MyFramework"})
    code = "import d2ldev; show(getattr(d2ldev, 'my-dev').name)"
    assert run_python(code, path=[tmp_path]) == ["mine"]


def test_two_third_parties_of_one_name_are_refused(tmp_path):
    make_backend(tmp_path)
    make_distribution(tmp_path, "another", {"Mine": "mine_backend.wiring:MyFramework"})
    (message,) = run_python(REFUSED.format(name="mine"), path=[tmp_path])
    assert "another" in message
    assert "mine-backend" in message


def test_a_distribution_found_twice_counts_once(tmp_path):
    for folder in ("first", "second"):
        make_backend(tmp_path / folder)
    code = "import d2ldev; show(d2ldev.get_backend('mine').name)"
    assert run_python(code, path=[tmp_path / "first", tmp_path / "second"]) == ["mine"]


@pytest.mark.parametrize(
    "content", [b"\xff", b"[d2ldev.backends]\nodd\n"], ids=["no UTF-8", "no value"]
)
def test_a_distribution_whose_entry_points_cannot_be_read_is_passed_over(tmp_path, content):
    make_backend(tmp_path)
    make_distribution(tmp_path, "damaged", {})
    (found,) = tmp_path.glob("damaged*/entry_points.txt")
    found.write_bytes(content)
    code = """
        import d2ldev
        show(d2ldev.get_backend("reference").name)
        show(d2ldev.get_backend("mine").name)
    """
    assert run_python(code, path=[tmp_path]) == ["reference", "mine"]


def test_two_distributions_without_a_name_are_a_conflict_as_any_two(tmp_path):
    for name in ("first", "second"):
        make_distribution(tmp_path, name, {"mine": f"{name}_package:MyFramework"})
        (metadata,) = tmp_path.glob(f"{name}*/METADATA")
        metadata.unlink()
    message = refusal_of_mine(tmp_path)
    assert "more than one distribution announces it" in message
    assert "first_package:MyFramework" in message
    assert "second_package:MyFramework" in message


@pytest.mark.parametrize("name", ["torch", "jax", "tensorflow", "mxnet"])
def test_requirements_of_a_package_are_read_also_under_pytest(name):
    """pytest rewrites all packages of a distribution that has a plugin, as d2ldev has."""
    discovery.find_backends(refresh=True)
    assert name in discovery.read_required_modules(name)


# -- what an author mends ---------------------------------------------------------------------

MADE = (
    MINE
    + """
    def __init__(self, virtual_gpus=None):
        super().__init__(virtual_gpus)
        {line}
"""
)
CANNOT = {
    "a misspelt name": (
        "{'trains': 'it has no gradients'}",
        "cannot has 'trains', which is no ability: did you mean 'train'?",
    ),
    "another name": (
        "{'fly': 'it has no wings'}",
        "cannot has 'fly', which is no ability: there are mlp, dlpack, ",
    ),
    "no reason": ("{'train': ''}", "cannot has 'train' without the reason, a text"),
    "no mapping": ("['train']", "cannot is ['train'], and no mapping from a name to the reason"),
}


@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize(("cannot", "problem"), CANNOT.values(), ids=CANNOT.keys())
def test_what_no_framework_may_lack_is_refused(tmp_path, where, cannot, problem):
    """It would be no error for users, and the suite would count a failure."""
    source = MADE.replace("{line}", f"self.cannot = {cannot}")
    if where == "class":
        source = f"{MINE}\n    cannot = {cannot}\n"
    make_backend(tmp_path, source=source)
    message = refusal_of_mine(tmp_path)
    assert problem in message
    assert "fix: mend it in MyFramework: docs/api/interface.md#names-for-cannot" in message


def test_every_ability_that_is_asked_for_has_a_name():
    """In the core and in the suite: another name would be allowed to nobody."""
    asked = set()
    for folder in ("d2ldev", "conformance"):
        for path in (Path(__file__).parents[3] / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            asked |= {*re.findall(r"require\(\s*\w*\.?_?framework, \"([^\"]+)\"", text)}
            for marks in re.findall(r"mark\.needs\(([^)]*)\)", text):
                asked |= {*re.findall(r"\"([^\"]+)\"", marks)}
    assert {"train", "mlp", "dlpack", "find leaks"} <= asked
    assert asked <= {*ABILITIES}


WRONG = {
    "when it is made": (MADE.replace("{line}", "len(0)"), "cannot be made: TypeError: ", 9),
    "in a module of its own": (MADE.replace("{line}", "from mine_backend.part import x"), "", 0),
    "when it is imported": (f"{MINE}\nundefined\n", "fails to import: NameError: ", 7),
}


@pytest.mark.parametrize(("source", "problem", "line"), WRONG.values(), ids=WRONG.keys())
def test_an_error_in_the_code_of_an_author_has_its_line(tmp_path, source, problem, line):
    make_backend(tmp_path, source=source)
    part = tmp_path / "mine_backend" / "part.py"
    part.write_text("import json\n\njson.loads('{')\n", "utf-8")
    file, line = (tmp_path / "mine_backend" / "wiring.py", line) if line else (part, 3)
    message = refusal_of_mine(tmp_path)
    assert problem in message
    assert f" ({file}:{line}); known: " in message


def test_an_error_of_syntax_has_its_own_line(tmp_path):
    make_backend(tmp_path, source="x = 1\ny = (\n")
    message = refusal_of_mine(tmp_path)
    assert "fails to import: SyntaxError: '(' was never closed (wiring.py, line 2); " in message
