"""Set-up for the conformance suite: what mutants are trained with besides an MLP.

``array_api_strict`` has no layers, so that dropout, masks and freezing are written out here.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial
from typing import Any, NamedTuple

import array_api_strict as xp
import numpy as np
from reference_backend import (
    MLP,
    ReferenceGroupLearner,
    ReferenceLearner,
    ReferenceParallelLearner,
    provision,
)

from d2ldev import UnsupportedValueError
from d2ldev.framework import Objective, optimizer_refusal, read_signature
from d2ldev.framework.testing import framework_of
from d2ldev.training.functions import output_refusal

samples = provision.samples
LASTING_FILES = ("mutant-kernels*",)
CANNOT = {"hostile_tensors": provision.CANNOT["hostile_tensors"]}


def own_tensors(backend):
    """Return those of a framework with labels, else the reference backend's."""
    own = getattr(framework_of(backend), "list_own_tensors", None)
    return own() if own else provision.own_tensors(backend)


class Kept:
    """An object that keeps tensors in attributes."""

    def __init__(self, **kept):
        vars(self).update(kept)


class Network(MLP):
    """An MLP that is trained with dropout, and whose first layer can be frozen."""


class Freezable(Network):
    """The same, which tells whether the layer is frozen."""


class Masked(MLP):
    """An MLP of whose outputs some are masked."""

    def __call__(self, x, mask):
        """Map both to ``(n, 3)``."""
        return super().__call__(x) * mask


class WithLoss(MLP):
    """An MLP that returns its loss if it gets labels."""

    def __call__(self, x=None, z=None, labels=None):
        """Return the logits of ``x``, or of ``2 * z``."""
        logits = super().__call__(2.0 * z if x is None else x)
        if labels is None:
            return {"logits": logits}
        sums = xp.log(xp.sum(xp.exp(logits), axis=-1))
        classes = xp.arange(logits.shape[-1], device=logits.device)
        is_class = xp.expand_dims(xp.astype(labels, xp.int64), axis=-1) == classes
        chosen = xp.sum(xp.where(is_class, logits, xp.zeros_like(logits)), axis=-1)
        return {"logits": logits, "loss": xp.mean(sums - chosen)}


class Branching(MLP):
    """Two models, of which a batch takes one."""

    def choose(self, x):
        """Return the number of the layer."""
        return 0 if x.shape[0] > 4 else 1

    def outputs(self, x):
        """Return the input and the prediction."""
        return MLP([self.layers[self.choose(x)]]).outputs(x)


class Table(MLP):
    """A model that looks up rows, each by zeros and a one."""

    def outputs(self, x):
        """Return the zeros and ones, and the rows."""
        tokens = xp.arange(6, device=x.device)
        return super().outputs(xp.astype(xp.expand_dims(x, axis=-1) == tokens, xp.float32))


class Attentive(MLP):
    """A model whose call leaves a tensor in an attribute."""

    def __call__(self, x):
        """Map two features to a number."""
        object.__setattr__(self, "attention_weights", x * 1.0)
        return super().__call__(x)


@dataclasses.dataclass(frozen=True)
class Normalized(MLP):
    """An MLP of the distances from the mean of a batch, with a running mean."""

    mean: Any = None

    def outputs(self, x):
        """Return those of the layers; the first is the distance itself."""
        return super().outputs(x - xp.mean(x, axis=0, keepdims=True))


class Permuted(MLP):
    """Dense layers, between which the columns change their order."""

    def outputs(self, x):
        """Return the input, the output of the first layer from the last column on, and the rest."""
        first, last = self.layers
        hidden = xp.flip(MLP([first])(x), axis=-1)
        return [x, hidden, MLP([last])(hidden)]


class Doubled(MLP):
    """A model without parameters."""

    def __call__(self, x):
        """Double each number."""
        return 2.0 * x


@dataclasses.dataclass(frozen=True)
class Layers(MLP):
    """The part of a D2L ``Module`` that is placed."""

    lr: float = 0.0


class Line(Layers):
    """A D2L ``Module``, which attributes can be set of."""

    def training_step(self, batch):
        """Return twice the loss."""
        return 2.0 * self._loss(*batch)

    def validation_step(self, batch):
        """Return thrice the loss."""
        return 3.0 * self._loss(*batch)

    def _loss(self, x, y):
        return xp.mean((self(x) - y) ** 2)

    def configure_optimizers(self):
        """Return gradient descent."""
        return GradientDescent(self.lr)


class Frozen(MLP):
    """A model that nothing is trained of."""


@dataclasses.dataclass
class Factor:
    """A tensor, and a number."""

    x: object
    factor: float


class GradientDescent(NamedTuple):
    """An optimizer that is an object, as that of a ``Line`` is."""

    lr: float
    name: str = "sgd"


def RMSprop(lr):  # noqa: N802  # the optimizers of frameworks have such names
    """Return an optimizer whose name d2ldev does not have."""
    return GradientDescent(lr, "adam")


class NarrowLearner(ReferenceLearner):
    """Rounds as ``'bf16'`` and ``'fp16'`` do, where it computes and not in the parameters."""

    def __init__(self, framework, model, settings):
        super().__init__(framework, model, settings)
        if settings.precision == "fp16":
            self._optimizer["scale"] = 2.0**16

    def step(self, inputs, y):
        if self.settings.precision == "model":
            return super().step(inputs, y)
        self.wide = self._model
        try:
            self._model = self.narrow_model()
            return super().step(tuple(map(self.narrow, inputs)), y)
        except UnsupportedValueError:
            self._model = self.wide
            raise

    def evaluate(self, inputs, y):
        if self.settings.precision == "model":
            return super().evaluate(inputs, y)
        prediction = self.narrow_model()(*map(self.narrow, inputs))
        return self._loss(prediction, y)[0], prediction

    def narrow_model(self):
        layers = [{name: self.narrow(x) for name, x in each.items()} for each in self._model.layers]
        return dataclasses.replace(self._model, layers=layers)

    def narrow(self, x):
        """Return a tensor with fewer digits, and in ``'fp16'`` with a smaller range."""
        if self.settings.precision == "bf16":
            return _round(x, 8)
        size = xp.abs(x)
        x = xp.where(size > 65504, xp.full_like(x, math.inf), _round(x, 11))
        return xp.where(size < 2.0**-25, xp.zeros_like(x), x)

    def _gradients(self, model, activations, error):
        if self.settings.precision == "model":
            return super()._gradients(model, activations, error)
        scale = self._optimizer.get("scale", 1.0)
        with np.errstate(invalid="ignore"):
            gradients = super()._gradients(model, activations, self.narrow(error * scale))
        self._model = self.wide
        return [{name: x / scale for name, x in layer.items()} for layer in gradients]

    def _update(self, gradients):
        numbers = [x for layer in gradients for x in layer.values()]
        if "scale" in self._optimizer and not all(xp.all(xp.isfinite(x)) for x in numbers):
            scale = self._optimizer["scale"] / 2
            self._optimizer = {**self._optimizer, "scale": scale}
        else:
            super()._update(gradients)


def _round(x, digits):
    """Return float32 with fewer binary digits (Veltkamp)."""
    with np.errstate(invalid="ignore"):  # of infinite ones
        large = x * (2.0 ** (24 - digits) + 1)
        return large - (large - x)


def take_mean(total, weight):
    """Return a mean, and the weight as a number."""
    weight = float(weight)
    return total / (weight or 1.0), weight


class AnyLoss(ReferenceLearner):
    """Computes losses of the user's, from which nothing is learned, and those of a model."""

    def __init__(self, framework, model, settings, *others):
        known = settings if isinstance(settings.loss, str) else settings._replace(loss="mse")
        if settings.loss == "model":
            known = settings._replace(loss="cross_entropy")
        super().__init__(framework, model, known._replace(methods=None), *others)
        self.settings = settings
        self._objective.weigh = self.own_objective().weigh

    @property
    def signature(self):
        model = self.sync()["model"]
        return read_signature(model, by_position=not isinstance(model, WithLoss))

    def predict(self, inputs):
        inputs = self.signature.arrange(inputs)
        return self._model(**inputs) if isinstance(inputs, dict) else super().predict(inputs)

    def _differentiate(self, model, inputs, y):
        inputs = self.signature.arrange(inputs)
        if not isinstance(inputs, dict) or "labels" not in inputs:
            if isinstance(model, WithLoss):
                self._loss(self.predict(inputs), y)
            return super()._differentiate(model, inputs, y)
        # The gradients of its loss are those of the cross-entropy.
        x = 2.0 * inputs["z"] if inputs["x"] is None else inputs["x"]
        loss, logits, gradients = super()._differentiate(model, (x,), inputs["labels"])
        return loss, {"logits": logits, "loss": loss}, gradients

    def _losses(self, prediction, y):
        is_its_own = self.settings.loss == "model"
        return self._cross_entropy(prediction, y) if is_its_own else super()._losses(prediction, y)

    def _update(self, gradients):
        cls = type(self._model)
        super()._update(gradients)
        if cls in (WithLoss, Table):
            self._model = cls(self._model.layers, self._model.activation)

    def own_objective(self):
        """Return the objective of the user's own loss or methods."""
        return Objective(self._framework, self.settings, {}, take_mean)

    def _loss(self, prediction, y):
        if isinstance(prediction, dict) and self.settings.loss == "model":
            if "loss" not in prediction:
                raise UnsupportedValueError("train", "the model has returned no loss", "labels=")
            return prediction["loss"], None
        if isinstance(self.settings.loss, str):
            if isinstance(prediction, dict):
                raise output_refusal("compute the loss", prediction, "loss")
            return super()._loss(prediction, y)
        loss, self.weight, _ = self.own_objective().compare(prediction, y)
        return loss, None if isinstance(prediction, dict) else prediction * 0.0


def divide_by_uses(model, activations, gradients):
    """Return gradients, those of a table divided by the number of uses of each row."""
    if isinstance(model, Table):
        uses = xp.sum(xp.reshape(activations[0], (-1, 6)), axis=0)
        weight = gradients[0]["weight"] / xp.where(uses > 0, uses, xp.ones_like(uses))
        gradients = [{**gradients[0], "weight": weight}]
    return gradients


class KeepsMeans(ReferenceLearner):
    """Updates the running mean of a ``Normalized`` model."""

    def step(self, inputs, y):
        before = self.sync()["model"]
        found = super().step(inputs, y)
        if isinstance(before, Normalized):
            layers = self.sync()["model"].layers
            mean = 0.9 * before.mean + 0.1 * self.mean_of(*inputs)
            after = dataclasses.replace(before, layers=layers, mean=mean)
            self.replace({**self.sync(), "model": after})
        return found

    def mean_of(self, x):
        """Return the mean of a batch."""
        return xp.mean(x, axis=0)


class NetworkParallelLearner(KeepsMeans, AnyLoss, ReferenceParallelLearner):
    """Trains on several devices, with any loss and dropout."""

    def _split(self, model, inputs, y):
        shards = super()._split(model, inputs, y)
        if not isinstance(model, Network):
            return shards
        return [
            shard._replace(operands=((x * self.draw_mask(x),), y))
            for shard in shards
            for (x,), y in [shard.operands]
        ]

    def draw_mask(self, x):
        """Return a number for each of a shard."""
        return self._framework.backend.rand(x.shape, device=x.device)


class NetworkGroupLearner(KeepsMeans, AnyLoss, ReferenceGroupLearner):
    """Trains in several processes, with any loss, and normalized networks too."""

    def __init__(self, framework, model, settings, group):
        super().__init__(framework, model, settings, group)
        if isinstance(model, (Normalized, Table)):
            self._model = dataclasses.replace(model, layers=self._model.layers)

    def mean_of(self, x):
        first = self._group.gather("the means", self._text(super().mean_of(x)))[0]
        mean = np.frombuffer(bytes.fromhex(first), "<f4")
        return xp.asarray(mean, device=x.device, copy=True)


class NetworkLearner(KeepsMeans, AnyLoss, NarrowLearner):
    """Trains networks and modules too, and has masked models predict."""

    def __init__(self, framework, model, settings):
        optimizer = settings.optimizer
        if isinstance(optimizer, GradientDescent):
            settings = settings._replace(optimizer=optimizer.name, lr=optimizer.lr)
        if isinstance(optimizer, str) and optimizer == "rmsprop":
            raise optimizer_refusal(
                optimizer,
                "a GradientDescent",
                module=sys.modules[__name__],
                path=__name__,
                arguments="0.01",
                owns=lambda x: x is RMSprop,
            )
        super().__init__(framework, model, settings)
        if not model.layers and optimizer is not None:
            raise UnsupportedValueError("train a model", "there is nothing to train", "mlp([2, 1])")
        self.settings = settings
        if settings.methods is not None:
            # The gradients of its loss are written out, and those of its steps are twice as large.
            self.settings = settings._replace(lr=2 * settings.lr)

    def step(self, inputs, y):
        before = self.sync()["model"]
        if self.settings.methods is not None:
            ((x, y),) = inputs
            loss, *_ = self.own_objective().compute(before, *inputs, is_step=True)
            super().step((x,), y)
            layers = self.sync()["model"].layers
            self.replace({**self.sync(), "model": dataclasses.replace(before, layers=layers)})
            return loss, None
        if isinstance(before, Masked):
            return self.evaluate(inputs, y)
        if isinstance(before, Branching):
            return self.step_of_a_branch(before.choose(*inputs), inputs, y)
        if isinstance(before, Attentive):
            found = super().step(inputs, y)
            after = Attentive(self.sync()["model"].layers)
            after(*inputs)
            self.replace({**self.sync(), "model": after})
            return found
        if not isinstance(before, Network):
            return super().step(inputs, y)
        loss, prediction = super().step(self.drop_some(inputs), y)
        layers = self.sync()["model"].layers
        if self.framework.is_frozen:
            layers = [before.layers[0], *layers[1:]]
        self.replace({**self.sync(), "model": dataclasses.replace(before, layers=layers)})
        return loss, prediction

    def evaluate(self, inputs, y):
        if self.settings.methods is not None:
            model = self.sync()["model"]
            loss, *_ = self.own_objective().compute(model, *inputs, is_step=False)
            return loss, None
        return super().evaluate(inputs, y)

    def step_of_a_branch(self, number, inputs, y):
        """Take a step with one of two layers, and leave the other one as it is."""
        before, whole = self._model, self._optimizer
        self._model = MLP([before.layers[number]])
        self._optimizer = {
            name: [value[number]] if isinstance(value, list) else value
            for name, value in whole.items()
        }
        try:
            return ReferenceLearner.step(self, inputs, y)
        finally:

            def put(all_layers, own):
                return [own[0] if i == number else x for i, x in enumerate(all_layers)]

            layers = put(before.layers, self._model.layers)
            self._model = Branching(self.leave_out(layers, 1 - number))
            self._optimizer = {
                name: put(whole[name], value) if isinstance(value, list) else value
                for name, value in self._optimizer.items()
            }

    def leave_out(self, layers, unused):
        """Return the layers after a step that has not used one of them."""
        return layers

    def drop_some(self, inputs):
        """Return the inputs without some of their numbers."""
        (x,) = inputs
        return (x * self.framework.backend.rand(x.shape, device=x.device),)

    def modes(self):
        return self.framework.is_frozen

    def check_modes(self, modes):
        def set_modes():
            self.framework.is_frozen = modes

        return set_modes


def _draw(backend, seed, device):
    return backend.rand((3,), seed=seed, device=device)


def buffers(backend):
    """Return a model with a mean."""

    def build(seed, device):
        return Kept(weight=backend.ones((3,), device=device), mean=_draw(backend, seed, device))

    return {"mean": (build, lambda obj: [obj.mean])}


GRADIENTS = {}
"""The gradient of each parameter by its ``id``, beside the parameter, whose ``id`` stays its own.

The arrays of array-api-strict have slots, and take no attributes.
"""


def gradients(backend):
    """Return a parameter with a gradient."""

    def build(seed, device):
        parameter = _draw(backend, 0, device)
        GRADIENTS[id(parameter)] = [parameter, _draw(backend, seed, device)]
        return {"weight": parameter}

    return {"parameter": (build, lambda obj: [GRADIENTS[id(obj["weight"])][1]])}


def ties(backend):
    """Return a model with one tensor in two places."""

    def build(seed, device):
        weight = _draw(backend, seed, device)
        return Kept(weight=weight, tied=weight)

    return {"tied": (build, lambda obj: [obj.weight, obj.tied])}


def views(backend):
    """Return a model whose memory others hold, too."""

    def build(seed, device):
        return Attentive(backend.mlp([2, 1], device=device, seed=seed).layers)

    return {"attentive": (build, lambda net: [layer["weight"][...] for layer in net.layers])}


def optimizer_states(backend):
    """Return a parameter and an optimizer with a momentum."""

    def build(seed, device):
        momentum = _draw(backend, seed, device)
        return [Kept(weight=backend.ones((3,), device=device)), Kept(momentum=momentum)]

    return {"momentum": (build, lambda obj: [obj[1].momentum])}


def parameter_orders(backend):
    """Return two parameters, and an optimizer with a momentum of each."""

    def build(order, seed, device):
        parameters = {name: backend.ones((3,), device=device) for name in "ac"}
        momenta = {name: _draw(backend, 2 * seed + ord(name), device) for name in order}
        return {"model": Kept(**parameters), "optimizer": Kept(**momenta)}

    return {"momenta": (build, lambda obj: {n: [x] for n, x in vars(obj["optimizer"]).items()})}


def networks(backend):
    """Return a network."""

    return {"network": partial(_network, backend, Network)}


def _network(backend, cls, device):
    framework_of(backend).is_frozen = False
    net = backend.mlp([4, 8, 2], device=device)
    return cls(net.layers, net.activation)


def networks_with_batch_norm(backend):
    """Return a normalized network."""

    def build(device):
        layers = backend.mlp([4, 8, 2], device=device).layers
        return Normalized(layers, mean=backend.zeros(4, device=device))

    return {"normalized": build}


def freezables(backend):
    """Return a network, and what freezes its first layer."""

    def freeze(_net, is_frozen):
        framework_of(backend).is_frozen = is_frozen

    return {"first layer": (partial(_network, backend, Freezable), freeze)}


def modes(backend):
    """Return a network with a frozen layer, and what tells of it."""

    def build(device):
        net = networks(backend)["network"](device)
        framework_of(backend).is_frozen = True
        return net

    return {"one frozen": (build, lambda _net: framework_of(backend).is_frozen)}


def models_with_permutations(backend):
    """Return a model of two layers, whose columns change their order between them."""
    return {"permuted": lambda device: Permuted(backend.mlp([4, 4, 4], device=device).layers)}


def loops(backend):
    """Return a loop by hand, with momentum; the gradients are the parameters themselves."""

    def begin(seed, device):
        net = backend.mlp([3, 4, 1], seed=seed, device=device)
        return {"net": net, "momentum": [0.0 * x for x in backend.named_tensors(net).values()]}

    def go_on(_device, net, momentum):
        for x, mean in zip(backend.named_tensors(net).values(), momentum, strict=True):
            mean[...] = 0.9 * mean + x
            x[...] = x - 0.1 * mean

    return {"momentum": (begin, go_on)}


def own_optimizers(_backend):
    """Return what makes an optimizer with a state."""
    return {"adam": lambda _net: GradientDescent(0.1, "adam")}


def untrainable_models(backend):
    """Return a model that nothing is trained of."""
    return {"frozen": lambda device: Frozen(backend.mlp([2, 1], device=device).layers)}


def models_with_masks(backend):
    """Return a masked model."""
    return {"masked": lambda device: Masked(backend.mlp([3, 3], device=device).layers)}


def models_with_losses(backend):
    """Return a model that computes its loss itself."""
    return {"with a loss": lambda device: WithLoss(backend.mlp([3, 2], device=device).layers)}


def models_with_branches(backend):
    """Return a model of two layers."""

    def build(device):
        layers = [backend.mlp([2, 1], seed=i, device=device).layers[0] for i in range(2)]
        return Branching(layers)

    return {"branching": build}


def models_with_tables(backend):
    """Return a model that looks up rows."""
    return {"table": lambda device: Table(backend.mlp([6, 4], device=device).layers)}


def attention_models(backend):
    """Return a model whose call leaves a tensor in an attribute."""
    return {
        "attentive": lambda device: Attentive(backend.mlp([2, 4, 1], device=device).layers),
    }


def composites(backend):
    """Return what makes a dataclass with a number, and what tells of it."""

    def build(number):
        return Factor(backend.ones(2), 0.5 + number)

    return {"dataclass": (build, lambda found: (backend.to_numpy(found.x).tolist(), found.factor))}


def models_without_parameters(backend):
    """Return a model that doubles its input."""
    return {"doubled": lambda _device: Doubled([])}


def modules(backend):
    """Return a D2L ``Module``."""

    return {"line": lambda device, lr: Line(backend.mlp([2, 1], device=device).layers, lr=lr)}
