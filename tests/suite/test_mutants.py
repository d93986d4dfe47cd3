"""The conformance suite is itself tested: each mutant is caught by the requirement named for it."""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from d2ldev_conformance.catalogue import list_explanations
from d2ldev_conformance.explanation import describe
from d2ldev_conformance.suite.devices import test_computing_devices
from mutants import MUTANTS, Crashing, Hanging, Stumbling, StumblingAtOnce
from mutants.accidents import find_accidents
from mutants.card import Card
from mutants.devices.devices import TakesNegativeIndices
from mutants.labelled import Labelled
from mutants.lazy import Lazy
from mutants.leaks import Following
from mutants.models import WithObjects
from mutants.sound import SOUND
from processes import extend_path

HERE = Path(__file__).parent
HELPERS = HERE.parent / "helpers"
for module in pkgutil.walk_packages(mutants.__path__, "mutants."):
    importlib.import_module(module.name)
CAUGHT = [(mutant, requirement) for mutant in MUTANTS for requirement in mutant.caught_by]
OF_OBJECTS = sorted(
    {requirement for mutant, requirement in CAUGHT if issubclass(mutant, WithObjects)}
)
"""The requirements of models that take attributes, as those of ``Lazy`` do not."""
OF_LEAKS = sorted({requirement for mutant, requirement in CAUGHT if issubclass(mutant, Following)})
"""The requirements of backends that follow what a framework makes, as ``Lazy`` does not."""
OF_LABELS = sorted({requirement for mutant, requirement in CAUGHT if issubclass(mutant, Labelled)})
"""The requirements whose calls the reference backend lacks: ``Lazy`` declares it."""
OF_CARDS = {requirement for mutant, requirement in CAUGHT if issubclass(mutant, Card)}
"""The requirements that are skipped on virtual GPUs, as those of ``Lazy`` are."""
BY_DAY = sorted(
    {requirement for mutant, requirement in CAUGHT if not mutant.is_nightly}
    - {*OF_OBJECTS, *OF_LEAKS, *OF_LABELS, *OF_CARDS}
)
AT_NIGHT = sorted({requirement for mutant, requirement in CAUGHT if mutant.is_nightly})
OF_MACHINES = "processes.train-on-two-machines"
TIME_LIMIT = 600
"""Seconds after which a mutant hangs: on a busy machine, too, none takes as long."""
PART = -(-len(BY_DAY) // 12)
"""So many requirements of the sound backend are a test: neighbours, which share fixtures."""


@pytest.fixture(scope="session")
def server():
    """The process that gives mutants to the suite."""
    environment = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    with subprocess.Popen(
        [sys.executable, "-m", "mutants.running"],
        env=environment | {"PYTHONPATH": extend_path([HERE, HELPERS])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def ended(server, tmp_path):
    """Give a backend to the suite; how that ended."""

    def run(cls, requirements, time_limit=TIME_LIMIT, is_nightly=False):
        request = {
            "name": cls.name,
            "point": f"{cls.__module__}:{cls.__name__}",
            "virtual_gpus": cls.asked_virtual_gpus,
            "is_nightly": is_nightly,
            "requirements": requirements,
            "folder": str(tmp_path),
            "time_limit": time_limit,
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        assert answer, "the process that runs the mutants has ended"
        return answer.strip()

    return run


@pytest.fixture
def outcomes(ended, tmp_path):
    """Give a backend to the suite; requirement -> outcome."""

    def run(cls, requirements, **options):
        how = ended(cls, requirements, **options)
        printed = (tmp_path / "printed.txt").read_text()
        assert how in ("exit status 0", "exit status 1"), f"{how}\n{printed}"
        report = json.loads((tmp_path / "conformance.json").read_text())
        return {row["requirement"]: row["outcome"] for row in report["requirements"]}

    return run


@pytest.fixture
def skip_without_machines(request):
    """Skips a requirement of two machines where these cannot be made."""

    def skip(requirement):
        if requirement == OF_MACHINES:
            request.getfixturevalue("machines")

    return skip


@pytest.mark.parametrize(
    ("cls", "requirement"),
    [
        pytest.param(
            cls,
            requirement,
            marks=[pytest.mark.nightly] if cls.is_nightly else [],
            id=f"{cls.__name__}-{requirement}",
        )
        for cls, requirement in CAUGHT
    ],
)
def test_a_mutant_is_caught_by_each_requirement_named_for_it(
    cls, requirement, outcomes, skip_without_machines, tmp_path
):
    skip_without_machines(requirement)
    found = outcomes(cls, [requirement], is_nightly=cls.is_nightly)
    printed = (tmp_path / "printed.txt").read_text()
    assert found == {requirement: "failed"}
    assert [*find_accidents(printed)] == [], printed


def test_each_requirement_is_named_by_a_mutant():
    requirements = {explanation.id for explanation in list_explanations()}
    assert requirements == {requirement for _, requirement in CAUGHT}


def test_a_failure_prints_what_its_requirement_asks_and_why(outcomes, tmp_path):
    outcomes(TakesNegativeIndices, ["devices.index-is-not-negative"])
    printed = (tmp_path / "printed.txt").read_text()
    explained = describe(test_computing_devices.test_a_negative_index_is_refused)
    assert explained in printed
    assert "docs/requirements.md#devices.index-is-not-negative" in explained


@pytest.mark.parametrize("first", range(0, len(BY_DAY), PART))
def test_a_sound_backend_passes_what_catches_the_mutants(outcomes, first):
    requirements = BY_DAY[first : first + PART]
    assert outcomes(Lazy, requirements) == dict.fromkeys(requirements, "passed")


def test_a_sound_backend_passes_what_is_required_of_models_with_attributes(outcomes):
    assert outcomes(WithObjects, OF_OBJECTS) == dict.fromkeys(OF_OBJECTS, "passed")


def test_a_sound_backend_passes_what_is_required_of_one_that_follows(outcomes):
    assert outcomes(Following, OF_LEAKS) == dict.fromkeys(OF_LEAKS, "passed")


def test_a_sound_backend_passes_what_is_required_of_labels(outcomes):
    requirements = sorted({*OF_LABELS, *(each for each in BY_DAY if each.startswith("scopes."))})
    assert outcomes(Labelled, requirements) == dict.fromkeys(requirements, "passed")


def test_a_sound_backend_passes_what_is_required_of_hardware(outcomes):
    requirements = sorted(OF_CARDS - {*AT_NIGHT})
    assert outcomes(Card, requirements) == dict.fromkeys(requirements, "passed")


@pytest.mark.parametrize("cls", SOUND, ids=lambda cls: cls.__name__)
def test_a_sound_backend_may_differ_in_what_no_contract_names(outcomes, cls):
    assert outcomes(cls, list(cls.outcomes)) == cls.outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("requirement", AT_NIGHT)
def test_a_sound_backend_passes_what_takes_minutes(outcomes, requirement, skip_without_machines):
    skip_without_machines(requirement)
    sound = Card if requirement in OF_CARDS else Lazy
    found = outcomes(sound, [requirement], is_nightly=True)
    assert found == {requirement: "passed"}


def test_nightly_tests_are_counted_and_skipped_by_default(outcomes, tmp_path):
    found = outcomes(Lazy, ["mlp.seeds", *AT_NIGHT])
    assert found == {"mlp.seeds": "passed", **dict.fromkeys(AT_NIGHT, "skipped")}
    report = json.loads((tmp_path / "conformance.json").read_text())
    reasons = {row["requirement"]: row["reasons"] for row in report["requirements"]}
    assert reasons[AT_NIGHT[0]] == ["takes minutes: --profile nightly tries it"]


def test_a_mutant_that_crashes_or_hangs_is_not_taken_for_one_that_was_caught(ended):
    assert ended(Crashing, ["mlp.seeds"]) == "exit status -9"
    assert ended(Hanging, ["mlp.seeds"], time_limit=1) == "killed after 1 seconds"


@pytest.mark.parametrize(
    ("cls", "told"),
    [
        (Stumbling, "AttributeError: 'Models' object has no attribute 'make_one'"),
        (StumblingAtOnce, "ERROR at setup of test_"),
    ],
)
def test_a_mutant_that_fails_by_an_accident_is_not_taken_for_one_that_was_caught(
    cls, told, outcomes, tmp_path
):
    assert outcomes(cls, ["mlp.seeds"]) == {"mlp.seeds": "failed"}
    first, *_ = find_accidents((tmp_path / "printed.txt").read_text())
    assert told in first


def test_there_are_many_mutants_and_no_two_are_alike():
    assert len(MUTANTS) >= 200
    assert len({cls.name for cls in MUTANTS}) == len(MUTANTS)
