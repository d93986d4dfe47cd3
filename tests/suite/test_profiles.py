"""The profiles of the suite select tests by the GPUs of a process, and leave none to nobody."""

import pytest
from d2ldev_conformance.profiles import PROFILES, Traits

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


def test_quick_is_what_meets_numpy():
    assert {test.module for test in select("quick", 2)} == {"tensors", "files"}
