"""What a release needs stands ready, and an error names what is missing."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PUBLISH = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The tool, on a project whose version is 1.2.3 and whose changelog has its notes."""
    tool = runpy.run_path(str(ROOT / "tools" / "release.py"))
    (tmp_path / "d2ldev").mkdir()
    (tmp_path / "d2ldev" / "__init__.py").write_text('import os\n__version__ = "1.2.3"\n')
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").touch()
    notes = "## 1.2.3 - 2026-11-27\n\n### Fixed\n\n- A crash.\n\n## 1.2.2 - 2026-01-01\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{notes}")
    monkeypatch.setitem(tool["make_message"].__globals__, "ROOT", tmp_path)
    return tool["make_message"]


def test_the_message_of_a_tag_has_the_notes_of_its_version_alone(release):
    # Git leaves out lines that begin with "#".
    assert release("v1.2.3") == "d2ldev 1.2.3\n\nFixed:\n\n- A crash.\n"


def test_a_tag_of_another_version_is_refused(release):
    with pytest.raises(SystemExit, match=r"v1.2.4 is not the tag of 1.2.3: set __version__"):
        release("v1.2.4")


def test_a_version_without_notes_is_refused(release, tmp_path):
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 - unreleased\n\n- A crash.\n")
    with pytest.raises(SystemExit, match=r"has no section '## 1.2.3 - YYYY-MM-DD'"):
        release("v1.2.3")


def test_changes_that_are_not_in_the_notes_are_named(release, tmp_path):
    (tmp_path / "changelog.d" / "+crash.fixed.md").write_text("A crash.\n")
    with pytest.raises(SystemExit, match=r"changelog.d has \+crash.fixed.md: run 'towncrier"):
        release("v1.2.3")


def test_this_version_has_notes_that_are_short():
    tool = runpy.run_path(str(ROOT / "tools" / "release.py"))
    assert 10 < len(tool["find_notes"](tool["read_version"]()).splitlines()) < 80


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "d2ldev/__init__.py"
    assert "version:" not in re.sub("cff-version:", "", (ROOT / "CITATION.cff").read_text())


def test_the_changelog_is_where_towncrier_writes():
    towncrier = PROJECT["tool"]["towncrier"]
    assert towncrier["start_string"] in (ROOT / towncrier["filename"]).read_text(encoding="utf-8")


def test_contributors_are_told_each_type_of_change():
    told = (ROOT / "changelog.d" / "README.md").read_text(encoding="utf-8")
    types = [each["directory"] for each in PROJECT["tool"]["towncrier"]["type"]]
    assert re.findall(r"^\| `(\w+)` \| ", told, re.MULTILINE)[1:] == types


def test_the_name_of_a_change_is_no_number_of_an_issue():
    # towncrier writes what stands before the type behind the sentence, but for the names with "+".
    names = [path.name for path in (ROOT / "changelog.d").glob("*.md") if path.stem != "README"]
    assert [name for name in names if not name.startswith("+")] == []


def test_only_the_job_that_publishes_has_a_right_beyond_reading():
    assert re.findall(r"^permissions: (.+)$", PUBLISH, re.MULTILINE) == ["{}"]
    assert re.findall(r"^      ([\w-]+): write", PUBLISH, re.MULTILINE) == ["id-token"]
    *others, last = re.split(r"^  (?=\w+:$)", PUBLISH, flags=re.MULTILINE)
    assert last.startswith("publish:")
    assert "id-token: write" in last
    assert "run:" not in last
    assert "checkout" not in last
    assert [job for job in others if "id-token" in job] == []


def test_a_tag_is_published_after_the_tests_and_the_check_of_the_tag():
    assert re.findall(r"needs: (.+)", PUBLISH) == ["[tests, build]"]
    assert "uses: $/.github/workflows/tests.yml" in PUBLISH
    assert 'python tools/release.py "$GITHUB_REF_NAME"' in PUBLISH
    tests = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert "\n  workflow_call:\n" in tests


def test_each_action_is_pinned_by_its_commit():
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        used = re.findall(r"uses: (?!\$/)(\S+)(.*)", workflow.read_text(encoding="utf-8"))
        assert [each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", each[0])] == []
        assert [each for each in used if not re.fullmatch(r" # v[\d.]+", each[1])] == []


CLASSIFIERS = PROJECT["project"]["classifiers"]


def test_the_classifiers_of_python_are_the_versions_that_were_tried():
    text = (ROOT / "conformance" / "versions.toml").read_text(encoding="utf-8")
    tried = {row["python"] for row in tomllib.loads(text)["rows"]}
    prefix = "Programming Language :: Python :: "
    claimed = [each.removeprefix(prefix) for each in CLASSIFIERS if each.startswith(prefix)]
    claimed = [each for each in claimed if re.fullmatch(r"3\.\d+", each)]
    assert claimed == sorted(tried, key=lambda version: int(version.removeprefix("3.")))
    assert PROJECT["project"]["requires-python"] == f">={claimed[0]}"


def test_the_bounds_of_the_frameworks_are_the_oldest_versions_that_were_tried():
    text = (ROOT / "conformance" / "versions.toml").read_text(encoding="utf-8")
    tried = {}
    for row in tomllib.loads(text)["rows"]:
        for name, _, version in (pin.partition("==") for pin in row["install"]):
            tried.setdefault(name, set()).add(tuple(map(int, version.split("."))))
    bounds = {}
    for extra in ("torch", "jax", "tensorflow", "mxnet"):
        for each in PROJECT["project"]["optional-dependencies"][extra]:
            if bound := re.match(r"([\w-]+)[>=]=([\d.]+)", each):
                bounds[bound[1]] = tuple(map(int, bound[2].split(".")))
    names = ["flax", "jax", "keras", "mxnet", "optax", "tensorflow-cpu", "torch"]
    oldest = {name: min(tried[name])[: len(bounds[name])] for name in names}
    assert oldest == {name: bounds[name] for name in names}


def test_the_classifier_of_cuda_has_a_report():
    assert "Environment :: GPU :: NVIDIA CUDA" in CLASSIFIERS
    assert [*(ROOT / "conformance" / "results").glob("torch-cuda-*.json")]


def test_the_citation_agrees_with_the_project():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    project = PROJECT["project"]
    assert f"abstract: {project['description']}.\n" in citation
    assert f"license: {project['license']}\n" in citation
    assert f"title: {project['name']}\n" in citation
    assert f"name: {project['authors'][0]['name']}\n" in citation
    assert re.findall(r"^  - (.+)$", citation, re.MULTILINE)[1:7] == project["keywords"]
