"""Mutants that lose something on the way into a file or out of it."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import namedtuple

import numpy as np
from reference_backend import ReferenceFiles

from d2ldev import Backend, CheckpointError, UnsupportedValueError
from d2ldev.framework import CPU, Layer, turn
from mutants import Mutant, ReferenceModels, is_tensor
from mutants.provision import Kept, NetworkLearner


class LoadsNarrow(Mutant, caught_by="io.keeps-every-dtype"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            loaded = super().load(path, device=device)
            is_wide = is_tensor(self, loaded) and self.dtype_of(loaded) == "float64"
            return self.asarray(loaded, dtype="float32") if is_wide else loaded


class SwapsTheBytesOfArrays(Mutant, caught_by="io.keeps-arrays"):
    class Backend(Backend):
        def save(self, obj, path):
            if isinstance(obj, dict) and isinstance(array := obj.get("x"), np.ndarray):
                obj = {**obj, "x": array.view(array.dtype.newbyteorder("="))}
            super().save(obj, path)


class ForgetsTheMomentum(Mutant, caught_by="io.training-goes-on"):
    class Backend(Backend):
        def load_into(self, obj, path, **options):
            kept = self.copy(obj["momentum"])
            return {**super().load_into(obj, path, **options), "momentum": kept}


class ReadsStatesByPosition(Mutant, caught_by="io.matches-states-by-name"):
    class Backend(Backend):
        def load_into(self, obj, path, **options):
            loaded = super().load_into(obj, path, **options)
            if isinstance(loaded, dict) and isinstance(kept := loaded.get("optimizer"), Kept):
                kept.a, kept.c = kept.c, kept.a
            return loaded


class LoadsKeysAsText(Mutant, caught_by="io.keeps-nestings"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            loaded = super().load(path, device=device)
            by_number = loaded["layers"][1]
            loaded["layers"][1] = {str(number): x for number, x in by_number.items()}
            return loaded


class LoadsTensorsAlone(Mutant, caught_by="io.keeps-what-is-no-tensor"):
    class Backend(Backend):
        def load_into(self, obj, source, **options):
            (loaded,) = super().load_into(obj, source, **options)
            return [dataclasses.replace(loaded, factor=obj[0].factor)]


class UntiesInFiles(Mutant, caught_by="io.keeps-ties"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            loaded = super().load(path, device=device)
            return {"encoder": loaded["encoder"], "decoder": [self.copy(loaded["encoder"])]}


class LoadsToTheCpu(Mutant, caught_by="io.loads-to-the-device"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            return super().load(path, device=CPU)


class LoadsByWayOfTheCpu(Mutant, caught_by="io.loads-by-no-detour"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            return self.to(super().load(path), device)


class LooksForTheFileFirst(Mutant, caught_by="io.device-must-exist"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            if not os.path.exists(path):
                raise CheckpointError(f"load {path}", "there is no such file", "save one first")
            return super().load(path, device=device)


class LoadsToWhereItWas(Mutant, caught_by="io.from-any-device-to-the-cpu"):
    class Backend(Backend):
        def save(self, obj, path):
            super().save(obj, path)
            self.was = self.device_of(obj["x"])

        def load(self, path, *, device="cpu"):
            return super().load(path, device=self.was)


class ReadsNothingWithoutAGpu(Mutant, caught_by="io.from-a-gpu-without-one"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            return super().load(path, device=device) if self.num_gpus() else {}


class ComparesWhatACallLeaves(Mutant, caught_by="io.passes-over-what-a-call-leaves"):
    class Models(ReferenceModels):
        def members(self, obj):
            return [each._replace(is_saved=True) for each in super().members(obj)]


class ResumesNothingThatWasCalled(Mutant, caught_by="fit.resumes-past-what-a-call-leaves"):
    class Models(ReferenceModels):
        def members(self, obj):
            return [each._replace(is_saved=True) for each in super().members(obj)]


class SavesGradients(Mutant, caught_by="io.gradients-are-not-saved"):
    class Learner(NetworkLearner):
        def sync(self):
            components = super().sync()
            self.framework.trained = components["model"]
            return components

    class Backend(Backend):
        def save(self, obj, path):
            is_trained = obj is getattr(self._framework, "trained", None)
            more = {"gradient": self.ones(3)} if is_trained else {}
            super().save({**self.named_tensors(obj), **more} if more else obj, path)


class EmptiesTheFileFirst(Mutant, caught_by="io.a-failing-save-keeps-the-file"):
    class Backend(Backend):
        def save(self, obj, path):
            with open(path, "wb"):
                super().save(obj, path)


class SavesWhatItCan(Mutant, caught_by="io.refuses-what-no-file-can-hold"):
    class Backend(Backend):
        def save(self, obj, path):
            try:
                super().save(obj, path)
            except UnsupportedValueError:
                super().save({}, path)


class LoadsNothingFromNowhere(Mutant, caught_by="io.refuses-a-missing-file"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            return super().load(path, device=device) if os.path.exists(path) else {}


class ReadsWhateverIsThere(Mutant, caught_by="io.refuses-broken-files"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            try:
                return super().load(path, device=device)
            except CheckpointError:
                return {}


class TakesADamagedKeyForNone(Mutant, caught_by="io.finds-two-flipped-bits"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            try:
                return super().load(path, device=device)
            except CheckpointError as error:
                if "another key" in error.problem:
                    return {}
                raise


class MakesClassesOfFiles(Mutant, caught_by="io.makes-no-class"):
    class Backend(Backend):
        def load(self, path, device="cpu"):
            made = namedtuple("Pair", "first second")
            return [made(*pair) for pair in super().load(path, device)]


class TakesAnyModes(Mutant, caught_by="fit.refuses-odd-states"):
    class Learner(NetworkLearner):
        def check_modes(self, modes):
            return lambda: int(modes)


class LoadsNothing(Mutant, caught_by="io.load-into-brings-every-value"):
    class Backend(Backend):
        def load_into(self, obj, path):
            super().load_into(copy.copy(obj), path)
            return obj


class LoadsIntoTheCpu(Mutant, caught_by="io.load-into-stays-in-place"):
    class Backend(Backend):
        def load_into(self, obj, path):
            return self.place(super().load_into(obj, path), CPU)


class KeepsOneForTwo(Mutant, caught_by="io.load-into-separates-what-is-two"):
    class Backend(Backend):
        def load_into(self, obj, path):
            (net,) = super().load_into(obj, path)["net"]
            return {"net": [net], "average": [net]}


class ReplacesWhatOthersHold(
    Mutant, caught_by=("io.load-into-writes-in-place", "fit.resumes-in-place")
):
    class Models(ReferenceModels):
        def plan_writes(self, values):
            return [None for _ in values]


class LoadsNoNetwork(Mutant, caught_by="io.load-into-gives-shapes"):
    class Backend(Backend):
        def load_into(self, obj, path):
            super().load_into(copy.deepcopy(obj), path)
            return obj


class LoadsWhatFits(Mutant, caught_by="io.load-into-refuses-what-does-not-fit"):
    class Backend(Backend):
        def load_into(self, obj, path):
            try:
                return super().load_into(obj, path)
            except CheckpointError:
                return obj


class ForgivesAnotherName(Mutant, caught_by="io.load-into-refuses-other-names"):
    class Backend(Backend):
        def load_into(self, obj, path):
            return dict(zip(obj, self.load(path).values(), strict=True))


class NamesNoOther(Mutant, caught_by="io.load-into-names-the-nearest"):
    class Backend(Backend):
        def load_into(self, obj, path):
            try:
                return super().load_into(obj, path)
            except CheckpointError as error:
                raise CheckpointError(error.attempted, "it lacks weigth", error.fix) from None


class ReadsNothingInPart(Mutant, caught_by="io.load-into-reads-what-matches"):
    class Backend(Backend):
        def load_into(self, obj, path, *, strict=True):
            return super().load_into(obj, path, strict=strict)._replace(value=obj)


class ReadsAnEmptyPart(Mutant, caught_by="io.load-into-reads-one-part"):
    class Backend(Backend):
        def load_into(self, obj, path, *, only=""):
            super().load_into(copy.deepcopy(obj), path, only=only)
            return obj


class ForgivesAnotherDtype(Mutant, caught_by="io.load-into-refuses-other-dtypes"):
    class Backend(Backend):
        def load_into(self, obj, path):
            return self.load(path)


class SaysThatKernelsAreTurned(Mutant, caught_by="io.layouts-are-known"):
    class Files(ReferenceFiles):
        def layers(self, model):
            layers = super().layers(model)
            return layers and [layer._replace(layout=turn) for layer in layers]


class NamesMoreThanIsSaved(
    Mutant, caught_by=("io.named-tensors-are-what-is-saved", "place.named-tensors")
):
    class Backend(Backend):
        def named_tensors(self, obj, *, gradients=False):
            named = super().named_tensors(obj, gradients=gradients)
            return {**named, **{f"{name}.grad": x for name, x in named.items()}}


class LoadsFilesAlone(Mutant, caught_by="io.load-into-takes-tensors-by-name"):
    class Backend(Backend):
        def load_into(self, obj, path):
            return super().load_into(obj, str(path))


class WantsTheDeviceNamed(Mutant, caught_by="io.device-by-position"):
    class Backend(Backend):
        def load(self, path, *, device="cpu"):
            return super().load(path, device)


class ReadsEachTensorOnce(Mutant, caught_by="io.load-into-takes-every-name"):
    class Backend(Backend):
        def load_into(self, obj, source):
            tensors = {id(x): x for x in self.named_tensors(obj).values()}
            if not isinstance(source, (str, os.PathLike)) and len(source) > len(tensors):
                raise CheckpointError("load a mapping", "it has one tensor twice", "give one name")
            return super().load_into(obj, source)


class LoadsWhatItHasLoaded(Mutant, caught_by="io.loads-into-new-memory"):
    class Backend(Backend):
        def load(self, path, device="cpu"):
            loaded = super().load(path, device=device)
            return self.__dict__.setdefault("loaded", {}).setdefault((path, device), loaded)


class TakesTheTensorsOfItsSource(Mutant, caught_by="io.load-into-takes-every-name"):
    class Backend(Backend):
        def load_into(self, obj, source):
            loaded = super().load_into(obj, source)
            for number, layer in enumerate(getattr(loaded, "layers", ())):
                layer.update({name: source[f"layers.{number}.{name}"] for name in layer})
            return loaded


class TakesAnySequenceForAnMlp(Mutant, caught_by="io.unknown-layers-have-no-layout"):
    class Files(ReferenceFiles):
        def layers(self, model):
            layers = getattr(model, "layers", ())
            return [Layer(each["weight"], each["bias"]) for each in layers]
