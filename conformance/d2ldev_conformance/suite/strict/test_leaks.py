"""``find_leaks`` names the lines of a library that leave the device of their inputs.

A library that creates a tensor on the CPU, or moves one there, fails only on a GPU. Its authors
often test without one.
"""

from __future__ import annotations

import types
from contextlib import suppress

import pytest

import d2ldev
from d2ldev_conformance.provision import take_own_call
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same

SECTION = "6.7.2.3"
SOURCE = "contract, Leaks"
LIBRARY = """
def leave(backend, x):
    host = backend.to(x, "cpu")
    return x + host

def leave_twice(backend, x):
    y = x + backend.to(x, "cpu")
    return y + backend.to(y, "cpu")

def stay(backend, x):
    return x + backend.to(x, backend.device_of(x))

def hand_over(backend, x):
    return backend.to_numpy(backend.to(x, "cpu"))
"""
LINE = 3
"""The line of the library that leaves the device."""
LINES = [7, 8]
"""The lines of the function that leaves it twice."""

pytestmark = [pytest.mark.needs("find leaks"), pytest.mark.needs_gpus(1)]


@pytest.fixture
def library(tmp_path):
    """A module whose functions take tensors of any backend."""
    path = tmp_path / "library_of_the_suite.py"
    module = types.ModuleType(path.stem)
    exec(compile(LIBRARY, path, "exec"), vars(module))  # noqa: S102  # a file without an import
    return module


@pytest.fixture
def find(backend):
    """Return what finds the leaks of a function of a tensor, the tensor, and the result."""
    make = take_own_call(backend, "ones")
    device = backend.devices()[-1]

    def run(function):
        with d2ldev.find_leaks(device, tests=[__file__], backend=backend) as leaks:
            x = make(None)
            result = function(backend, x)
        return leaks, x, result

    return run


@requirement("leaks.inputs-are-on-the-device", section=SECTION)
def test_a_tensor_that_the_test_makes_is_on_the_device(backend, find, library):
    """Put a tensor that the test makes on the device that ``find_leaks`` was given."""
    leaks, x, _ = find(library.stay)
    assert backend.device_of(x) is backend.devices()[-1]
    assert leaks.has_inputs


@requirement("leaks.a-line-that-leaves-the-device-is-named", section=SECTION)
def test_the_line_that_moves_an_input_is_named(find, library):
    """Name the line and the function of a library that moves an input to another device."""
    leaks, _, _ = find(library.leave)
    lines = [leak.line for leak in leaks.find_failing()]
    assert [(line.number, line.function) for line in lines] == [
        (LINE, "library_of_the_suite.leave")
    ]


@requirement("leaks.one-run-finds-all", section=SECTION)
def test_after_a_leak_the_operation_computes(backend, find, library):
    """Compute after a leak, on the inputs' device, so that one run finds the next leak, too."""
    leaks, x, result = find(library.leave_twice)
    assert [leak.line.number for leak in leaks.find_failing()] == LINES
    assert backend.device_of(result) is backend.device_of(x)
    assert_same(backend.to_numpy(result), 4 * backend.to_numpy(x))


@requirement("leaks.staying-on-the-device-is-right", section=SECTION)
def test_a_function_that_stays_on_the_device_has_no_leaks(find, library):
    """Report no leak of a function that keeps its inputs' device."""
    leaks, _, _ = find(library.stay)
    assert list(leaks) == []


@requirement("leaks.a-hand-over-to-numpy-fails-no-test", section=SECTION)
def test_a_function_that_hands_its_input_to_numpy_fails_no_test(find, library):
    """Report no failing leak of a function that hands its input to NumPy by way of the CPU."""
    leaks, _, _ = find(library.hand_over)
    assert leaks.find_failing() == []


@requirement("leaks.end-with-the-block", section=SECTION)
def test_after_the_block_nothing_is_followed(backend, find, library):
    """Report nothing after the block, and leave the framework's default device as it was."""
    make = take_own_call(backend, "ones")
    before = backend.device_of(make(None))
    leaks, _, _ = find(library.leave)
    number = len(leaks)
    with suppress(Exception):  # array-api-strict refuses it also without a block
        library.leave(backend, backend.to(make(None), backend.devices()[-1]))
    assert len(leaks) == number
    assert backend.device_of(make(None)) is before
