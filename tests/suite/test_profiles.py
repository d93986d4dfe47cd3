"""The profiles of the suite select tests by the GPUs of a process, and leave none to nobody."""

import os
import re
import subprocess
import sys

import pytest
from d2ldev_conformance.profiles import PROFILES, Traits
from d2ldev_conformance.requirement import SUITE

from d2ldev.framework.testing import MODULES

TESTS = [
    Traits(module, requirement, gpus, names_gpu)
    for module in MODULES
    for requirement in ("copy.makes-new-memory", "processes.end-with-a-lost-one")
    for gpus, names_gpu in ((0, False), (0, True), (1, True), (2, True), (3, True), (4, True))
]


def select(name, virtual_gpus):
    return {test for test in TESTS if PROFILES[name].selects(test, virtual_gpus)}


@pytest.mark.parametrize("name", ["default", "nightly"])
def test_the_processes_of_a_profile_leave_out_no_test(name):
    runs = [select(name, number or 0) for number in PROFILES[name].virtual_gpus]
    assert set().union(*runs) == {*TESTS}


def test_two_virtual_gpus_have_what_needs_them_and_all_but_training():
    chosen = select("default", 2)
    assert {test.module for test in chosen if not test.names_gpu} == {*MODULES} - {"training"}
    assert {test.module for test in chosen if test.gpus == 2} == {*MODULES}
    assert {test.requirement for test in chosen} == {"copy.makes-new-memory"}


def test_everywhere_each_process_has_every_test():
    for number in PROFILES["everywhere"].virtual_gpus:
        assert select("everywhere", number or 0) == {*TESTS}


@pytest.mark.parametrize("name", ["default", "nightly"])
def test_four_virtual_gpus_have_what_two_are_too_few_for(name):
    assert {test.gpus for test in select(name, 4)} == {3, 4}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_quick_has_each_test_once_and_none_that_starts_processes(number):
    test = Traits("tensors", "copy.makes-new-memory", 1, names_gpu=True)
    assert PROFILES["quick"].selects(test, number)
    # Without virtual GPUs, real ones may be there.
    assert PROFILES["quick"].selects(test._replace(is_repeated=True), number) == (number == 0)
    assert not PROFILES["quick"].selects(test._replace(starts_processes=True), number)


FILES = [
    path
    for path in sorted(SUITE.rglob("test_*.py"))
    if re.search(r"^import subprocess|run_launch|copied_processes", path.read_text("utf-8"), re.M)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_whose_tests_start_processes_says_so(path):
    assert "pytest.mark.starts_processes" in path.read_text("utf-8")


@pytest.mark.parametrize("number", [1, 2])
def test_quick_has_a_test_for_the_last_gpu_and_not_for_the_others(number, tmp_path):
    chosen = ["--d2ldev-backend", "reference", "--d2ldev-profile", "quick", "--collect-only", "-q"]
    files = [str(SUITE / name) for name in ("files", "parallel", "training/test_trainer.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *chosen, "-c", str(SUITE.parent / "pytest.ini")],
        env=os.environ | {"D2LDEV_VIRTUAL_GPUS": f"{number}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line for line in done.stdout.splitlines() if "::" in line]
    for test, last in (
        ("load_to_the_cpu[", f"gpu{number - 1}"),
        ("a_resumed_run_ends_like", "gpu0"),
    ):
        of_test = [name.partition("[")[2] for name in names if test in name]
        assert {place for name in of_test for place in re.findall(r"cpu|gpu\d", name)} == {last}
    assert any("test_shards" in name for name in names)
    for left_out in ("test_processes", "test_several_gpus", "in_a_process_without_one"):
        assert [name for name in names if left_out in name] == []
