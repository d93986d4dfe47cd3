"""Copies of one process, for those that ``fit`` starts: the framework is imported once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver

import pytest

from d2ldev import settings
from d2ldev.distributed import spawning

# Imported by the process that is copied, not here.
_PRELOADED = "d2ldev_conformance.suite.parallel.preloaded"


@contextmanager
def copy_processes(name: str, virtual_gpus: int) -> Iterator[None]:
    """Let ``fit`` start copies of one process, in which the framework is imported once.

    Only with virtual GPUs: a driver does not go on in a copy. The processes of a user are new ones.

    Args:
        name: the backend.
        virtual_gpus: how many it has in the copies.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.BACKEND, name)
        patch.setenv(settings.VIRTUAL_GPUS, str(virtual_gpus))
        multiprocessing.set_forkserver_preload([_PRELOADED])
        forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawning, "START_METHOD", "forkserver")
        yield
