"""The conformance suite is itself tested: each mutant is caught by the requirement named for it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import (  # noqa: F401
    batches,
    creating,
    devices,
    feeding,
    files,
    killed_runs,
    labels,
    models,
    moving,
    strictness,
    training,
)
from mutants.base import MUTANTS, Queued

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """A folder with a distribution whose entry points are the mutants."""
    folder = tmp_path_factory.mktemp("mutants")
    info = folder / "d2ldev_mutants-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: d2ldev-mutants\nVersion: 1.0\n")
    points = [f"{cls.name} = {cls.__module__}:{cls.__name__}" for cls in [*MUTANTS, Queued]]
    (info / "entry_points.txt").write_text("\n".join(["[d2ldev.backends]", *points]))
    return folder


@pytest.fixture
def outcomes(installed, tmp_path):
    """Give a backend to the suite; requirement -> outcome."""

    def run(cls, *requirements):
        command = [sys.executable, "-m", "pytest", "--pyargs", "d2ldev_conformance", "-q"]
        command += ["-p", "no:cacheprovider", "-W", "error", f"--basetemp={tmp_path / 'inner'}"]
        command += ["--d2ldev-backend", cls.name, "--d2ldev-report", str(tmp_path)]
        command += [f"--d2ldev-requirement={requirement}" for requirement in requirements]
        path = [str(installed), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "D2LDEV_VIRTUAL_GPUS": str(cls.asked_virtual_gpus),
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        report = json.loads((tmp_path / "conformance.json").read_text())
        return {row["requirement"]: row["outcome"] for row in report["requirements"]}

    return run


@pytest.mark.parametrize("cls", MUTANTS, ids=lambda cls: cls.__name__)
def test_a_mutant_is_caught_by_the_requirement_named_for_it(cls, outcomes):
    assert outcomes(cls, cls.caught_by) == {cls.caught_by: "failed"}


@pytest.mark.parametrize("cls", [Queued])
def test_a_sound_backend_passes_what_catches_the_mutants(cls, outcomes):
    found = outcomes(cls)
    assert {found[mutant.caught_by] for mutant in MUTANTS} == {"passed"}
    assert "failed" not in found.values()


def test_there_are_many_mutants_and_no_two_are_alike():
    assert len(MUTANTS) >= 25
    assert len({cls.name for cls in MUTANTS}) == len(MUTANTS)
    assert all(importlib.import_module(cls.__module__) for cls in MUTANTS)
