"""Mutants whose training goes on in the same process, and not in the next one."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress

from mutants.base import Mutant
from mutants.training import Learned


class WritesWhenPythonExits(Mutant, caught_by="fit.resumes-when-killed"):
    def save(self, obj, path):
        later = f"{path}.later"
        super().save(obj, later)
        atexit.register(_rename, later, path)


class KeepsTheOptimizerInMemory(Learned, caught_by="fit.resumes-when-killed"):
    kept = None

    def spoil(self, learner):
        state, restore, fresh = learner.state, learner.restore, learner.state()["optimizer"]

        def state_without_it():
            found = state()
            self.kept = found["optimizer"]
            return {**found, "optimizer": fresh}

        def restore_with_it(found):
            restore({**found, "optimizer": self.kept or fresh})

        learner.state, learner.restore = state_without_it, restore_with_it


def _rename(later, path):
    with suppress(FileNotFoundError):  # it was written more than once
        os.replace(later, path)
