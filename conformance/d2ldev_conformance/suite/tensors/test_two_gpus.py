"""D2L 6.7.2 and 6.7.3 as they stand, from line to line, on two GPUs: real ones, or virtual ones.

A reader who types the book's lines has to see the book's results, on each framework.
"""

from __future__ import annotations

import pytest

import d2ldev
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same

SOURCE = "D2L"

pytestmark = pytest.mark.needs_gpus(2)
FIRST, SECOND = d2ldev.gpu(0), d2ldev.gpu(1)


@requirement("chapter.two-gpus", section="6.7.1")
def test_there_are_two_gpus(backend):
    """Find both GPUs by ``try_gpu`` and ``try_all_gpus``."""
    assert backend.try_all_gpus()[:2] == [FIRST, SECOND]
    assert [backend.try_gpu(), backend.try_gpu(1)] == [FIRST, SECOND]


@requirement("chapter.x-on-the-first-gpu", section="6.7.2.1")
def test_x_is_on_the_first_gpu(backend, X):  # noqa: N803
    """Make the book's ``X`` on the first GPU."""
    assert backend.device_of(X) is FIRST


@requirement("chapter.y-on-the-second-gpu", section="6.7.2.1")
def test_y_is_on_the_second_gpu(backend, Y):  # noqa: N803
    """Make the book's ``Y`` on the second GPU."""
    assert backend.device_of(Y) is SECOND


@requirement("chapter.z-is-x-on-the-second-gpu", section="6.7.2.2")
def test_z_is_a_copy_of_x_on_the_second_gpu(backend, X, Z):  # noqa: N803
    """Copy ``X`` to the second GPU as ``Z``, and leave ``X`` on the first."""
    assert [backend.device_of(X), backend.device_of(Z)] == [FIRST, SECOND]
    assert_same(backend.to_numpy(Z), backend.to_numpy(X))


@requirement("chapter.z-to-where-it-is", section="6.7.2.2")
def test_z_moved_to_where_it_is_is_z(backend, Z):  # noqa: N803
    """Return ``Z`` itself if it is asked to move to its own GPU."""
    assert backend.to(Z, backend.gpu(1)) is Z


@requirement("chapter.copy-of-z", section="6.7.2.2", source="contract")
def test_a_copy_of_z_is_not_z(backend, Z):  # noqa: N803
    """Return new memory from ``copy(Z)``, on the same GPU."""
    copied = backend.copy(Z)
    assert copied is not Z
    assert backend.device_of(copied) is SECOND
    assert backend.address(copied) != backend.address(Z)
