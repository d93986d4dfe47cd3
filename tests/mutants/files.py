"""Mutants that lose something on the way into a file or out of it."""

from __future__ import annotations

import copy
import os

from d2ldev import CheckpointError
from d2ldev.device import CPU
from d2ldev.files.layouts import turned
from mutants.base import Mutant


class LoadsNarrow(Mutant, caught_by="io.keeps-every-dtype"):
    def load(self, path, *, device="cpu"):
        loaded = super().load(path, device=device)
        is_wide = isinstance(loaded, self.tensor_types) and self.dtype_of(loaded) == "float64"
        return self.astype(loaded, "float32") if is_wide else loaded


class LoadsKeysAsText(Mutant, caught_by="io.keeps-nestings"):
    def load(self, path, *, device="cpu"):
        loaded = super().load(path, device=device)
        by_number = loaded["layers"][1]
        loaded["layers"][1] = {str(number): x for number, x in by_number.items()}
        return loaded


class UntiesInFiles(Mutant, caught_by="io.keeps-ties"):
    def load(self, path, *, device="cpu"):
        loaded = super().load(path, device=device)
        return {"encoder": loaded["encoder"], "decoder": [self.copy(loaded["encoder"])]}


class LoadsToTheCpu(Mutant, caught_by="io.loads-to-the-device"):
    def load(self, path, *, device="cpu"):
        return super().load(path, device=CPU)


class LoadsByWayOfTheCpu(Mutant, caught_by="io.loads-by-no-detour"):
    def load(self, path, *, device="cpu"):
        return self.to(super().load(path), device)


class LooksForTheFileFirst(Mutant, caught_by="io.device-must-exist"):
    def load(self, path, *, device="cpu"):
        if not os.path.exists(path):
            raise CheckpointError(f"load {path}", "there is no such file", "save one first")
        return super().load(path, device=device)


class LoadsToWhereItWas(Mutant, caught_by="io.from-any-device-to-the-cpu"):
    def save(self, obj, path):
        super().save(obj, path)
        self.was = self.device_of(obj["x"])

    def load(self, path, *, device="cpu"):
        return super().load(path, device=self.was)


class EmptiesTheFileFirst(Mutant, caught_by="io.a-failing-save-keeps-the-file"):
    def save(self, obj, path):
        with open(path, "wb"):
            super().save(obj, path)


class SavesWhatItCan(Mutant, caught_by="io.refuses-what-no-file-can-hold"):
    def save(self, obj, path):
        super().save({"layers": obj["layers"][:1]}, path)


class LoadsNothingFromNowhere(Mutant, caught_by="io.refuses-a-missing-file"):
    def load(self, path, *, device="cpu"):
        return super().load(path, device=device) if os.path.exists(path) else {}


class ReadsWhateverIsThere(Mutant, caught_by="io.refuses-broken-files"):
    def load(self, path, *, device="cpu"):
        try:
            return super().load(path, device=device)
        except CheckpointError:
            return {}


class LoadsNothing(Mutant, caught_by="io.load-into-brings-every-value"):
    def load_into(self, obj, path):
        super().load_into(copy.copy(obj), path)
        return obj


class LoadsIntoTheCpu(Mutant, caught_by="io.load-into-stays-in-place"):
    def load_into(self, obj, path):
        return self.place(super().load_into(obj, path), CPU)


class LoadsWhatFits(Mutant, caught_by="io.load-into-refuses-what-does-not-fit"):
    def load_into(self, obj, path):
        try:
            return super().load_into(obj, path)
        except CheckpointError:
            return obj


class ForgivesAnotherName(Mutant, caught_by="io.load-into-refuses-other-names"):
    def load_into(self, obj, path):
        return dict(zip(obj, self.load(path).values(), strict=True))


class ForgivesAnotherDtype(Mutant, caught_by="io.load-into-refuses-other-dtypes"):
    def load_into(self, obj, path):
        return self.load(path)


class SaysThatKernelsAreTurned(Mutant, caught_by="io.layouts-are-known"):
    def _layouts(self, obj):
        layouts = super()._layouts(obj)
        if layouts is None:
            return None
        return {
            name: turned(layout.role, layout.shape) if len(layout.shape) == 2 else layout
            for name, layout in layouts.items()
        }
