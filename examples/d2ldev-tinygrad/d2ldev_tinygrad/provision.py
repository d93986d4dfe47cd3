"""Set-up of the conformance suite: builders of objects of tinygrad."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d2ldev.framework.testing import Builders, Contents, Freezables, Loops, array_api_of
from tinygrad import Tensor, TinyJit, nn
from tinygrad.helpers import Context

from d2ldev_tinygrad.models import Model
from d2ldev_tinygrad.training import AdaGrad

CANNOT = {
    **dict.fromkeys(
        ("arange", "asarray", "empty", "eye", "full", "linspace", "random", "zeros"),
        "tinygrad's default device has no number: a call names another device",
    ),
    "from_dlpack": "tinygrad has no DLPack",
    "map": "tinygrad maps no functions over rows",
    "update": "tinygrad writes into the tensor",
    "models_with_losses": "the models of this backend return a tensor",
    "attention_models": "every tensor in an attribute of a model is one of its weights",
    "models_with_branches": "Tensor.gradient needs all parameters of a model in the loss",
    "models_with_tables": "an Embedding of tinygrad multiplies with zeros and ones",
    "models_with_permutations": "the MLP of this backend is its one sequence of layers",
    "composites": "tinygrad has no containers",
    "modules": "tinygrad has no class for D2L's Module",
    "parameter_orders": "the state of tinygrad's optimizers has numbers, and no names",
    "views": "a tensor of tinygrad gets other memory when a value is assigned",
}
# Of the pool of processes that compiles kernels.
LASTING_THREADS = ("Thread-* (_handle_*)",)


class Network(Model):
    """Dense layers with batch normalization, and dropout."""

    def __init__(self, backend: Any, device: Any, dropout: float, seed: int = 0) -> None:
        self.first, self.last = (
            backend.mlp(sizes, seed=seed, device=device).layers[0] for sizes in ([4, 8], [8, 2])
        )
        self.norm = nn.BatchNorm(8)
        backend.place(self.norm, device)
        self.dropout = dropout

    def __call__(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu().dropout(self.dropout))


class Function(Model):
    """A function of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x)


class Masked(Model):
    """A model of two inputs."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(x) * mask


def samples(backend: Any) -> Builders:
    return {
        "network": lambda device: Network(backend, device, 0.5),
        "gradients": lambda device: _differentiate(backend, backend.mlp([4, 2], device=device)),
        "optimizer": lambda device: nn.optim.Adam(_parameters(Network(backend, device, 0.5))),
        "tie": lambda device: _tie(backend.mlp([3, 3, 3], device=device)),
    }


def buffers(backend: Any) -> Contents:
    def build(seed: int, device: Any) -> Network:
        net = Network(backend, device, 0.5, seed)
        with Context(TRAINING=1):
            net(backend.rand((8, 4), seed=seed, device=device)).realize()
        Tensor.realize(*nn.state.get_state_dict(net).values())
        return net

    return {"mean": (build, lambda net: [net.norm.running_mean, net.norm.running_var])}


def gradients(backend: Any) -> Contents:
    def build(seed: int, device: Any) -> Any:
        return _differentiate(backend, backend.mlp([4, 2], device=device), seed)

    return {"grad": (build, lambda net: [x.grad for x in _parameters(net)])}


def ties(backend: Any) -> Contents:
    def build(seed: int, device: Any) -> Any:
        return _tie(backend.mlp([3, 3, 3], seed=seed, device=device))

    return {"kernel": (build, lambda net: [each.weight for each in net.layers])}


def optimizer_states(backend: Any) -> Contents:
    def builder(make: Callable[[list[Tensor]], Any]) -> Callable[[int, Any], Any]:
        def build(seed: int, device: Any) -> list[Any]:
            net = backend.mlp([4, 8, 2], activation="tanh", device=device)
            optimizer = make(_parameters(net))
            _differentiate(backend, net, seed)
            with Context(TRAINING=1):
                optimizer.step()
            optimizer.zero_grad()
            return [net, optimizer]

        return build

    return {
        "momentum": (builder(lambda xs: nn.optim.SGD(xs, momentum=0.9)), lambda x: x[1].b),
        "adam": (builder(nn.optim.Adam), lambda built: built[1].m + built[1].v),
    }


def loops(backend: Any) -> Loops:
    def begin(seed: int, device: Any) -> dict[str, Any]:
        net = backend.mlp([4, 8, 2], seed=seed, device=device)
        return {"net": net, "optimizer": nn.optim.Adam(_parameters(net), lr=0.01)}

    def go_on(device: Any, net: Any, optimizer: Any) -> None:
        for number in range(3):
            optimizer.zero_grad()
            _differentiate(backend, net, number)
            with Context(TRAINING=1):
                optimizer.step()

    return {"adam": (begin, go_on)}


def hostile_tensors(backend: Any) -> Mapping[str, Callable[[], Any]]:
    return {
        "a constant without a device": lambda: Tensor(1.0),
        "on two devices": lambda: Tensor.ones(4).contiguous().shard(("CPU:1", "CPU:2"), 0),
    }


def own_tensors(backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    return {
        **array_api_of(Tensor),
        "ones": lambda _: backend.zeros((2, 2)) + 1,
        "concat": lambda *xs: Tensor.cat(*xs, xs[0]),
        "gradient": lambda x: (x * x).sum().gradient(x)[0],
        "compile": TinyJit(lambda x: (x * 2.0).realize()),
    }


def networks(backend: Any) -> Builders:
    return {"dropout": lambda device: Network(backend, device, 0.5)}


def networks_with_batch_norm(backend: Any) -> Builders:
    return {"normalized": lambda device: Network(backend, device, 0.0)}


def freezables(backend: Any) -> Freezables:
    def freeze(net: Network, is_frozen: bool) -> None:
        for x in _parameters(net.first, everything=True):
            x.is_param_(not is_frozen)

    return {"layer": (lambda device: Network(backend, device, 0.5), freeze)}


def modes(backend: Any) -> Mapping[str, Any]:
    def build(device: Any) -> Network:
        net = Network(backend, device, 0.5)
        net.first.weight.is_param_(False)
        return net

    def read(net: Network) -> list[bool]:
        tensors = nn.state.get_state_dict(net).values()
        return [Tensor.training, *(x.is_param for x in tensors)]

    return {"one frozen": (build, read)}


def own_optimizers(backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    return {
        "adam": lambda net: nn.optim.Adam(_parameters(net), lr=0.01),
        "momentum": lambda net: nn.optim.SGD(_parameters(net), lr=0.01, momentum=0.9),
        "adagrad": lambda net: AdaGrad(_parameters(net), lr=0.01),
    }


def untrainable_models(backend: Any) -> Builders:
    return {"sum": lambda device: Function(lambda x: x.sum(-1, keepdim=True))}


def models_without_parameters(backend: Any) -> Builders:
    return {"double": lambda device: Function(lambda x: x * 2)}


def models_with_masks(backend: Any) -> Builders:
    return {"product": lambda device: Masked(backend.mlp([3, 3], device=device).layers[0])}


def _parameters(model: Any, *, everything: bool = False) -> list[Tensor]:
    return [x for x in nn.state.get_parameters(model) if everything or x.is_param]


def _differentiate(backend: Any, net: Any, seed: int = 0) -> Any:
    parameters = _parameters(net)
    x = backend.rand((8, 4), seed=seed, device=backend.device_of(parameters[0]))
    for parameter, gradient in zip(
        parameters, net(x).square().mean().gradient(*parameters), strict=True
    ):
        parameter.grad = gradient.realize()
    return net


def _tie(net: Any) -> Any:
    net.layers[1].weight = net.layers[0].weight
    return net
