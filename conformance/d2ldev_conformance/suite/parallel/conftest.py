"""How the processes are started that train together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from d2ldev import Backend
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.machines import machines  # noqa: F401  # a fixture
from d2ldev_conformance.suite.parallel.copies import copy_processes


@pytest.fixture(scope="module")
def copied_processes(backend: Backend) -> Iterator[None]:
    """Lets ``fit`` start copies of one process; see ``copy_processes``."""
    virtual_gpus = framework_of(backend).virtual_gpus
    is_possible = "forkserver" in multiprocessing.get_all_start_methods()
    has_processes = "train on several GPUs in one process" in framework_of(backend).cannot
    if not (virtual_gpus and is_possible and has_processes):
        yield
        return
    with copy_processes(backend.name, virtual_gpus):
        yield
