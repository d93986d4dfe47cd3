"""How the processes are started that train together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from d2ldev import Backend, settings
from d2ldev.distributed import spawning
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.machines import machines  # noqa: F401  # a fixture

# Imported by the process that is copied, not here.
_PRELOADED = "d2ldev_conformance.suite.parallel.preloaded"


@pytest.fixture(scope="module")
def copied_processes(backend: Backend) -> Iterator[None]:
    """Lets ``fit`` start copies of one process, in which the framework is imported once.

    Only with virtual GPUs: a driver does not go on in a copy. The processes of a user are new ones.
    """
    virtual_gpus = framework_of(backend).virtual_gpus
    is_possible = "forkserver" in multiprocessing.get_all_start_methods()
    has_processes = "train on several GPUs in one process" in framework_of(backend).cannot
    if not (virtual_gpus and is_possible and has_processes):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.BACKEND, backend.name)
        patch.setenv(settings.VIRTUAL_GPUS, str(virtual_gpus))
        multiprocessing.set_forkserver_preload([_PRELOADED])
        forkserver.ensure_running()
        patch.setattr(spawning, "START_METHOD", "forkserver")
        yield
