"""Models and optimizers: tinygrad's layers, and the classes that users register as models."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from d2ldev.framework import Models, Role, Slot
from tinygrad import Tensor, nn
from tinygrad.helpers import ContextVar

from d2ldev_tinygrad.devices import compute


class Model(ABC):
    """The base of models: tinygrad has none. Derive from it, or register a class with it.

    >>> @Model.register
    ... class Net:
    ...     def __init__(self):
    ...         self.first = nn.Linear(2, 1)
    ...     def __call__(self, x):
    ...         return self.first(x)
    """

    __call__: Callable[..., Any]


_LAYERS = (
    *(nn.BatchNorm, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, nn.GroupNorm, nn.InstanceNorm),
    *(nn.LayerNorm, nn.LayerNorm2d, nn.Linear, nn.LSTMCell, nn.RMSNorm),
)


class MLP(Model):
    """A multilayer perceptron of ``nn.Linear``.

    Args:
        layers: each with its kernel and its bias.
        activation: the name of the method of tensors that is called between them.
    """

    def __init__(self, layers: Sequence[nn.Linear], activation: str) -> None:
        self.layers, self.activation = list(layers), activation

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = getattr(layer(x), self.activation)()
        return self.layers[-1](x)


class TinygradModels(Models):
    """Models, layers and optimizers of tinygrad."""

    types = (Model, *_LAYERS, nn.optim.Optimizer)

    def mlp(self, layers: Sequence[tuple[Tensor, Tensor]], activation: str) -> MLP:
        compute(*(x for each in layers for x in each))
        return MLP([linear(*each) for each in layers], activation)

    def members(self, obj: Any) -> Iterable[Slot]:
        is_optimizer = isinstance(obj, nn.optim.Optimizer)
        for name, value in vars(obj).items():
            # A switch of the process. The device follows from the parameters.
            if not isinstance(value, ContextVar) and name != "device":
                is_parameter = isinstance(value, Tensor) and value.is_param and not is_optimizer
                role = Role.PARAMETER if is_parameter else Role.BUFFER
                yield Slot(name, value, partial(setattr, obj, name), role, is_trained=is_parameter)

    def list_attached(self, x: Tensor) -> Iterable[Slot]:
        if x.grad is not None:
            yield Slot("grad", x.grad, partial(setattr, x, "grad"), Role.WORKING)

    def find_refill(self, x: Tensor) -> Callable[[Tensor], object]:
        def refill(new: Tensor) -> None:
            x.uop = new.uop

        return refill  # an assignment changes a tensor that is no parameter, too

    def finish(self, obj: Any) -> None:
        if isinstance(obj, nn.optim.Optimizer):
            obj.device = obj.params[0].device


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return a dense layer with these parameters; its own ``__init__`` draws random ones."""
    layer = nn.Linear.__new__(nn.Linear)
    layer.weight, layer.bias = weight, bias
    return layer
