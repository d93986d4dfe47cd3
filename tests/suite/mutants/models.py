"""Mutants that make and place models wrongly."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial

import numpy as np
from reference_backend import MLP, ReferenceModels

import mutants
from d2ldev import Backend, DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework import CPU, Role, Slot
from d2ldev.framework.testing import framework_of
from d2ldev.results import Summary
from mutants import Mutant


class LeavesBiasesBehind(
    Mutant,
    caught_by=(
        "place.moves-everything",
        "place.result-is-where-the-model-is",
        "threads.models-at-once",
    ),
):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            if not isinstance(obj, MLP):
                return placed
            layers = [
                {"weight": new["weight"], "bias": old["bias"]}
                for new, old in zip(placed.layers, obj.layers, strict=True)
            ]
            return dataclasses.replace(placed, layers=layers)


class LeavesWhatIsPlacedInItsMemory(Mutant, caught_by="place.keeps-values"):
    class Tensors(mutants.OneByOne):
        def transfer(self, xs, native, *, copy):
            if copy:
                return super().transfer(xs, native, copy=True)
            return [type(x)._new(x._array, device=native) for x in xs]


class PlacesTiesTwice(Mutant, caught_by="place.keeps-ties"):
    class Backend(Backend):
        def place(self, obj, device):
            if isinstance(obj, dict) and "encoder" in obj:
                place = super().place
                return {key: place(obj[key], device) for key in obj}
            return super().place(obj, device)


class InitializesAgain(Mutant, caught_by="place.keeps-values"):
    class Backend(Backend):
        def place(self, obj, device):
            if isinstance(obj, MLP):
                return self.mlp([3, 4, 1], device=device, seed=9)
            return super().place(obj, device)


class LeavesMomentaBehind(Mutant, caught_by="place.loops-go-on"):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            if isinstance(obj, dict) and "momentum" in obj:
                return {**placed, "momentum": obj["momentum"]}
            return placed


class RenamesParameters(Mutant, caught_by="place.keeps-names"):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            if placed is obj or not isinstance(obj, MLP):
                return placed
            return {"moved": placed}


class PlacesWhatIsThere(Mutant, caught_by="place.noop-returns-same-object"):
    class Backend(Backend):
        def place(self, obj, device):
            return self.copy(obj, device)


class CopiesLayersThatAreThere(Mutant, caught_by="place.noop-returns-same-object"):
    class Backend(Backend):
        def place(self, obj, device):
            if isinstance(obj, MLP):
                for layer in obj.layers:
                    layer.update({name: self.copy(x, device) for name, x in layer.items()})
            return super().place(obj, device)


class PlacesEverythingTwice(Mutant, caught_by="place.copies-nothing-twice"):
    class Backend(Backend):
        def place(self, obj, device):
            super().place(obj, device)
            return super().place(obj, device)


class PlacesOneLayerAfterTheOther(Mutant, caught_by="place.all-or-nothing"):
    class Backend(Backend):
        def place(self, obj, device):
            if isinstance(obj, MLP):
                for i, layer in enumerate(obj.layers):
                    for name in layer:
                        obj.layers[i][name] = self.to(layer[name], device)
                return obj
            return super().place(obj, device)


class PlacesOnTheCpuInstead(Mutant, caught_by="place.missing-device"):
    class Backend(Backend):
        def place(self, obj, device):
            try:
                return super().place(obj, device)
            except DeviceUnavailableError:
                return super().place(obj, CPU)


class PlacesNothingThatWasCalled(Mutant, caught_by="fit.passes-over-what-a-call-leaves"):
    class Backend(Backend):
        def place(self, obj, device):
            if hasattr(obj, "attention_weights"):
                raise UnsupportedValueError("place a model", "a tensor has no bytes", "leave it")
            return super().place(obj, device)


class PlacesAnything(Mutant, caught_by="place.refuses-others"):
    class Backend(Backend):
        def place(self, obj, device):
            try:
                return super().place(obj, device)
            except TypeError:
                return obj


class NamesNoBackend(Mutant, caught_by="errors.name-the-backend"):
    class Backend(Backend):
        def place(self, obj, device):
            try:
                return super().place(obj, device)
            except UnsupportedValueError as error:
                problem = f"it is not an object of the {self.name} backend"
                raise UnsupportedValueError(error.attempted, problem, error.fix) from None


class MakesModelsOnTheCpu(
    Mutant,
    caught_by=("mlp.on-the-device", "mlp.default-is-the-cpu", "mlp.missing-device", "mlp.shape"),
):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            return super().mlp(sizes, activation=activation, device=CPU, seed=seed)


class IgnoresTheModelsSeed(Mutant, caught_by="mlp.seeds"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            return super().mlp(sizes, activation=activation, device=device, seed=0)


class DrawsModelsOnTheDevice(Mutant, caught_by="mlp.same-on-every-device"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            net = super().mlp(sizes, activation=activation, device=device, seed=seed)
            layers = []
            for layer in net.layers:
                weight = layer["weight"]
                drawn = self.rand(weight.shape, seed=seed, like=weight)
                layers.append({**layer, "weight": drawn})
            return dataclasses.replace(net, layers=layers)


class IgnoresTheActivation(Mutant, caught_by="mlp.activations"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            super().mlp(sizes, activation=activation, device=device, seed=seed)
            return super().mlp(sizes, activation="relu", device=device, seed=seed)


def _with_scaled_weights(net, factor):
    """Return the MLP with weights that are multiplied by a number."""
    layers = [{"weight": layer["weight"] * factor, "bias": layer["bias"]} for layer in net.layers]
    return dataclasses.replace(net, layers=layers)


class MakesConstantModels(Mutant, caught_by="mlp.not-constant"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            net = super().mlp(sizes, activation=activation, device=device, seed=seed)
            return _with_scaled_weights(net, 0.0)


class BeginsWithLargeWeights(Mutant, caught_by="mlp.initial-values"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            net = super().mlp(sizes, activation=activation, device=device, seed=seed)
            return _with_scaled_weights(net, 2.0)


class EndsWithAnActivation(Mutant, caught_by="mlp.last-layer-is-affine"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            net = super().mlp(sizes, activation=activation, device=device, seed=seed)
            return Bent(net.layers, net.activation)


class Bent(MLP):
    """An MLP whose outputs are bent a little."""

    def __call__(self, x):
        y = super().__call__(x)
        return y + 0.1 * y * y


class RepeatsItsLayers(Mutant, caught_by="mlp.layers-differ"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            net = super().mlp(sizes, activation=activation, device=device, seed=seed)
            shapes = {layer["weight"].shape: layer for layer in net.layers}
            layers = [shapes[layer["weight"].shape] for layer in net.layers]
            return dataclasses.replace(net, layers=[dict(layer) for layer in layers])


class SeedsTheProcessForModels(Mutant, caught_by="mlp.seed-leaves-the-random-state"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            net = super().mlp(sizes, activation=activation, device=device, seed=seed)
            np.random.seed(seed)
            return net


class DrawsForModelsWithoutASeed(Mutant, caught_by="mlp.draws-nothing-else"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            self.rand((1,))
            return super().mlp(sizes, activation=activation, device=device, seed=seed)


class MakesModelsOfNothing(Mutant, caught_by="mlp.refuses-nonsense"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            sizes = [max(size, 1) for size in sizes] if isinstance(sizes, list) else sizes
            return super().mlp(sizes, activation=activation, device=device, seed=seed)


class MakesModelsInTheScope(Mutant, caught_by="mlp.a-device-beats-the-scope"):
    class Backend(Backend):
        def mlp(self, sizes, *, activation="relu", device=None, seed=0):
            device = self._framework.here or device
            return super().mlp(sizes, activation=activation, device=device, seed=seed)


class HasNothingToPlace(Mutant, caught_by="place.has-samples"):
    class Backend(Backend):
        def named_tensors(self, obj):
            return {}


class ForgetsTheActivation(Mutant, caught_by="place.same-function"):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            return placed if placed is obj or not isinstance(placed, MLP) else MLP(placed.layers)


# -- objects that a model keeps --------------------------------------------------------------------


class Net(MLP):
    """A model that is not a container, and takes attributes."""

    __setattr__ = object.__setattr__


class WithObjects(Mutant):
    """The sound base of those whose models are not containers."""

    class Models(ReferenceModels):
        types = (Net,)

        def mlp(self, layers, activation):
            made = super().mlp(layers, activation)
            return Net(made.layers, made.activation)

        def members(self, obj):
            for name, value in vars(obj).items():
                put = partial(vars(obj).__setitem__, name)
                is_own = name in ("layers", "activation")
                role = Role.PARAMETER if is_own else Role.ATTRIBUTE
                yield Slot(name, value, put, role, is_trained=is_own, is_saved=is_own)

    class Parallel(mutants.ReferenceParallel):
        def twin(self, model):
            layers = [self.framework.backend.copy(layer) for layer in model.layers]
            return Net(layers, model.activation)


class CopiesTheNamesOfTensorsAlone(WithObjects, caught_by="replicate.shares-no-memory"):
    class Parallel(mutants.ReferenceParallel):
        def twin(self, model):
            return Net(list(map(dict, model.layers)), model.activation)


class LeavesPlainAttributesBehind(WithObjects, caught_by="place.moves-attributes"):
    class Models(WithObjects.Models):
        def members(self, obj):
            return [slot for slot in super().members(obj) if slot.name == "layers"]


class MovesOneNameAlone(WithObjects, caught_by="place.moves-all-names"):
    class Backend(Backend):
        def place(self, obj, device):
            kept = getattr(obj, "kept", None)
            placed = super().place(obj, device)
            if kept is not None:
                obj.kept = kept
            return placed


class IsSilentOfWhatStays(WithObjects, caught_by="place.names-what-stays"):
    class Backend(Backend):
        def place(self, obj, device):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return super().place(obj, device)


class SavesInSilence(WithObjects, caught_by="files.names-what-no-file-has"):
    class Backend(Backend):
        def save(self, obj, path):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().save(obj, path)


class MovesTheTrainerToo(WithObjects, caught_by="place.leaves-other-objects"):
    class Backend(Backend):
        def place(self, obj, device):
            kept = getattr(obj, "kept", None)
            if type(kept).__name__ == "Own":
                trainer = vars(vars(kept)["trainer"])
                trainer["x"] = self.to(trainer["x"], device)
            return super().place(obj, device)


# -- what a framework's objects keep ---------------------------------------------------------------


class Forgetful(mutants.ReferenceModels):
    """Models that do not know all that their objects keep."""

    forgotten = ""

    def members(self, obj):
        return [slot for slot in super().members(obj) if slot.name != self.forgotten]


class LeavesBuffersBehind(Mutant, caught_by="place.moves-buffers"):
    class Models(Forgetful):
        forgotten = "mean"


class LeavesStatesBehind(Mutant, caught_by="place.moves-states-of-optimizers"):
    class Models(Forgetful):
        forgotten = "momentum"


class LeavesGradientsBehindParameters(Mutant, caught_by="place.moves-gradients"):
    class Models(mutants.ReferenceModels):
        def list_attached(self, x):
            return ()


class MovesATiedTensorTwice(Mutant, caught_by="place.keeps-ties-of-a-model"):
    class Models(mutants.ReferenceModels):
        def members(self, obj):
            def put(name, value):
                if name == "tied":
                    (value,) = self.framework.tensors.transfer([value], value.device, copy=True)
                vars(obj)[name] = value

            return [each._replace(put=partial(put, each.name)) for each in super().members(obj)]


class Unsaved(Forgetful):
    """Models that move what they do not save."""

    def members(self, obj):
        for slot in super(Forgetful, self).members(obj):
            yield slot._replace(role=Role.WORKING) if slot.name == self.forgotten else slot


class SavesNoBuffers(Mutant, caught_by="io.keeps-buffers"):
    class Models(Unsaved):
        forgotten = "mean"


class SavesNoStates(Mutant, caught_by="io.keeps-states-of-optimizers"):
    class Models(Unsaved):
        forgotten = "momentum"


class StaysWhereItHasPlaced(Mutant, caught_by="place.leaves-the-default-device"):
    class Backend(Backend):
        def place(self, obj, device):
            self.placed_last = self.device(device)
            return super().place(obj, device)

        def default_device(self):
            return getattr(self, "placed_last", None) or super().default_device()


class PlacesNumbers(Mutant, caught_by="place.pytrees"):
    class Backend(Backend):
        def place(self, obj, device):
            placed = super().place(obj, device)
            if isinstance(placed, dict) and "step" in placed:
                return {**placed, "step": self.asarray(placed["step"], device=device)}
            return placed


class PlacesTheFirstAlone(Mutant, caught_by="place.several-at-once"):
    class Backend(Backend):
        def place(self, obj, device):
            if type(obj) is tuple:
                return super().place(obj[0], device), *obj[1:]
            return super().place(obj, device)


class ScalesEachLayer(Mutant, caught_by="mlp.parameters"):
    class Models(ReferenceModels):
        def mlp(self, layers, activation):
            net = super().mlp(layers, activation)
            for layer in net.layers:
                layer["scale"] = layer["weight"][0, :]
            return net


class CountsTensorsTwice(
    Mutant,
    caught_by=("show.every-tensor-once", "show.ties", "show.trained", "show.prints"),
):
    class Backend(Backend):
        def summarize(self, obj):
            return Summary(super().summarize(obj).modules * 2)


class TakesBuffersForParameters(Mutant, caught_by="show.buffers"):
    class Models(mutants.ReferenceModels):
        def members(self, obj):
            for slot in super().members(obj):
                yield slot._replace(role=Role.PARAMETER, is_trained=True)


class TakesFrozenNumbersForTrained(Mutant, caught_by="show.untrained"):
    class Models(mutants.ReferenceModels):
        def members(self, obj):
            for slot in super().members(obj):
                is_layers = slot.name == "layers"
                role = Role.PARAMETER if is_layers else Role.BUFFER
                yield slot._replace(role=role, is_trained=is_layers)


class CountsWhatIsFrozenNow(Mutant, caught_by="show.trained-numbers-change"):
    class Models(mutants.ReferenceModels):
        def members(self, obj):
            for slot in super().members(obj):
                yield slot._replace(is_trained=slot.role is Role.PARAMETER)


class CountsFrozenNumbersTwice(Mutant, caught_by="show.frozen"):
    class Backend(Backend):
        def summarize(self, obj):
            modules = super().summarize(obj).modules
            return Summary(modules * (2 if framework_of(self).is_frozen else 1))


class WaitsForItsSummary(Mutant, caught_by="show.asks-only"):
    class Backend(Backend):
        def summarize(self, obj):
            self.synchronize()
            return super().summarize(obj)
