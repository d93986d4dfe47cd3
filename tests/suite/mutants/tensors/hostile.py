"""Mutants that let other errors than d2ldev's out."""

from __future__ import annotations

from d2ldev import Backend
from mutants import Mutant


class LetsErrorsOfPythonOut(Mutant, caught_by="errors.hostile-arguments"):
    class Backend(Backend):
        def device(self, spec):
            return super().device(spec if spec == "cpu" else {**vars(spec)})

        def to(self, x, device):
            return super().to(x, self.device(device))

        def copy(self, x, device=None):
            return super().copy(x, self.device(device))

        def place(self, obj, device):
            return super().place(obj, self.device(device))


class AsksErrorsForTheirText(Mutant, caught_by="errors.hostile-values-of-each-kind"):
    class Backend(Backend):
        def copy(self, x, device=None):
            try:
                return super().copy(x, device)
            except Exception as error:
                self.reason = str(error.__cause__)
                raise


class AsksEveryValueForItsShape(Mutant, caught_by="errors.hostile-values-of-each-kind"):
    class Backend(Backend):
        def to_numpy(self, x):
            return super().to_numpy(x[...])
