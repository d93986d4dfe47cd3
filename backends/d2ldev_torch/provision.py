"""Set-up for the conformance suite: objects of every kind that ``place`` handles in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from d2ldev import Device
from d2ldev.framework import Tensor
from d2ldev.framework.testing import Contents, Orders, array_api_of, wrap_mlps

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}

# The compiler starts this thread where tqdm is installed.
LASTING_THREADS = ("tqdm_monitor",)

# The optimizers of loops by hand, and the ones among them that the suite passes to ``fit``.
_BY_HAND: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, two groups": lambda parameters: _of_two_groups(*parameters),
    **_OPTIMIZERS,
    "AMSGrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "Adam with a tensor as its rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
}
_FITTED = ("AdamW, fused", "LBFGS")


def _of_two_groups(*parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
    groups: Any = [{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2]}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9, nesterov=True)


def own_tensors(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return calls of torch that return tensors."""
    return {
        **array_api_of(torch),
        "random": lambda _: torch.rand(2, 2),
        "gradient": torch.func.grad(lambda x: (x * x).sum()),
        "map": torch.func.vmap(lambda row: row * 2.0),
        "compile": torch.compile(lambda x: x * 2.0, backend="eager"),
        "update": lambda x: torch.select_scatter(x, x[1], 0, 0),
    }


def samples(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of small objects on a given device, by name."""

    def everything(device: Device) -> Everything:
        return Everything(lambda shape: backend.rand(shape, seed=len(shape), device=device))

    def recurrent(device: Device) -> torch.nn.LSTM:
        with torch.random.fork_rng(devices=[]):
            return torch.nn.LSTM(3, 4).to(backend.native(device))

    def train(optimizer: Callable[..., torch.optim.Optimizer], device: Device) -> Any:
        """Return a model with gradients and its optimizer, after a step."""
        net = backend.mlp([3, 4, 1], device=device)
        steps = optimizer(net.parameters())
        for seed in (1, 2):
            steps.zero_grad()
            net(backend.rand((5, 3), seed=seed, device=device)).sum().backward()
            steps.step()
        return {"model": net, "optimizer": steps}

    return {
        "module": everything,
        "recurrent module": recurrent,
        "scratch parameters": lambda device: [
            backend.rand((3, 1), seed=0, device=device).requires_grad_(),
            backend.zeros(1, device=device).requires_grad_(),
        ],
        **{name: partial(train, make) for name, make in _OPTIMIZERS.items()},
    }


def buffers(backend: Any) -> Contents:
    """Return a builder of a module with running statistics."""

    def build(seed: int, device: Device) -> Any:
        norm = backend.place(torch.nn.BatchNorm1d(3), device)
        norm.running_mean = backend.randn(3, seed=seed, device=device)
        norm.running_var = backend.rand(3, seed=seed, device=device)
        return norm

    return {"batch normalization": (build, lambda norm: [norm.running_mean, norm.running_var])}


def gradients(backend: Any) -> Contents:
    """Return a builder of a module whose parameters have gradients."""

    def build(seed: int, device: Device) -> Any:
        net = backend.mlp([3, 4, 1], activation="tanh", device=device)
        _differentiate(backend, net, seed, device)
        return net

    return {"module": (build, lambda net: [x.grad for x in net.parameters()])}


def ties(backend: Any) -> Contents:
    """Return a builder of a module with one parameter in two layers."""

    def build(seed: int, device: Device) -> torch.nn.ModuleList:
        encoder, decoder = (backend.mlp([3, 3], seed=seed, device=device)[0] for _ in range(2))
        decoder.weight = encoder.weight
        return torch.nn.ModuleList([encoder, decoder])

    return {"layers": (build, lambda layers: [layer.weight for layer in layers])}


def views(backend: Any) -> Contents:
    """Return builders of modules, by name, whose memory others hold, too."""

    def build(seed: int, device: Device) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net: Any = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
            net[1].running_mean += seed
            net[1].running_var += seed
            torch.nn.init.normal_(net[1].weight)
            torch.nn.init.normal_(net[1].bias)
        net.register_buffer("count", torch.tensor([seed]))
        del net[1].num_batches_tracked
        return net.to(backend.native(device))

    def turn(seed: int, device: Device) -> Any:
        return build(seed, device).to(memory_format=torch.channels_last)

    def join(seed: int, device: Device) -> Any:
        net = build(seed, device)
        joined = torch.cat([x.detach().reshape(-1) for x in net.parameters()])
        begin = 0
        for x in net.parameters():
            x.data = joined[begin : begin + x.numel()].view_as(x)
            begin += x.numel()
        net.joined = joined
        return net

    def list_tensors(net: torch.nn.Module) -> list[Tensor]:
        return [x.detach() for x in (*net.parameters(), *net.buffers())]

    return {
        "module": (build, list_tensors),
        "channels last": (turn, list_tensors),
        "one buffer": (join, lambda net: [net.joined, *list_tensors(net)]),
    }


def optimizer_states(backend: Any) -> Contents:
    """Return builders of optimizers after two steps, by name, with their momenta and means."""

    def build(make: Callable[..., Any], seed: int, device: Device) -> dict[str, Any]:
        net = backend.mlp([3, 4, 1], activation="tanh", device=device)
        optimizer = make(net.parameters())
        for number in (seed, seed + 1):
            optimizer.zero_grad()
            _differentiate(backend, net, number, device)
            optimizer.step()
        return {"model": net, "optimizer": optimizer}

    def list_states(obj: dict[str, Any]) -> list[Tensor]:
        values = [x for state in obj["optimizer"].state.values() for x in state.values()]
        return [x for x in values if isinstance(x, torch.Tensor) and x.ndim]

    names = (*_OPTIMIZERS, "RMSprop", "NAdam", "AMSGrad")
    return {
        **{name: (partial(build, _BY_HAND[name]), list_states) for name in names},
        "momenta in an attribute": (partial(build, Flat), lambda obj: [obj["optimizer"].momenta]),
    }


def parameter_orders(backend: Any) -> Orders:
    """Return builders of parameters and an optimizer after two steps, by name."""

    def build(make: Callable[..., Any], order: str, seed: int, device: Device) -> Any:
        kernels = {name: backend.ones(3, device=device) for name in "ac"}
        model = torch.nn.ParameterDict({name: x.requires_grad_() for name, x in kernels.items()})
        optimizer = make([model[name] for name in order])
        for number in (seed, seed + 1):
            for index, x in enumerate(model.values()):
                x.grad = backend.rand(3, seed=2 * number + index, device=device)
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def read(obj: dict[str, Any]) -> dict[str, list[Tensor]]:
        state = obj["optimizer"].state
        return {
            name: [value for value in state[x].values() if value.ndim]
            for name, x in obj["model"].items()
            if x in state
        }

    names = (*_OPTIMIZERS, "RMSprop", "NAdam", "AdamW, fused")
    return {name: (partial(build, _BY_HAND[name]), read) for name in names}


def _differentiate(backend: Any, net: torch.nn.Module, seed: int, device: Device) -> None:
    (net(backend.rand((5, 3), seed=seed, device=device)) ** 2).mean().backward()


def hostile_tensors(_backend: Any) -> Mapping[str, Callable[[], Any]]:
    """Return builders of tensors that few functions accept, by name."""
    lengths = [torch.zeros(2), torch.zeros(3)]
    return {
        "meta": partial(torch.zeros, 2, device="meta"),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "compressed": lambda: torch.eye(2).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2), 1, 0, torch.qint8),
        "nested": partial(torch.nested.nested_tensor, lengths),
        "jagged": partial(torch.nested.nested_tensor, lengths, layout=torch.jagged),
        "fake": lambda: FakeTensorMode().from_tensor(torch.zeros(2)),
        "mkldnn": lambda: torch.zeros(2).to_mkldnn(),
        "of a transformation": partial(_leak, torch.func.vmap, torch.zeros(2, 2)),
        "of a gradient": partial(_leak, torch.func.grad, torch.zeros(2)),
        "uninitialized": torch.nn.UninitializedParameter,
        "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        "complex of 32 bits": partial(torch.zeros, 2, dtype=torch.complex32),
    }


def _leak(transform: Callable[..., Any], x: Tensor) -> Tensor:
    """Return the tensor that a transformation passes to its function."""
    kept: list[Tensor] = []

    def keep(inner: Tensor) -> Tensor:
        kept.append(inner)
        return inner.sum()

    transform(keep)(x)
    return kept[0]


def networks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of networks with batch normalization and dropout, by name."""
    return {"module": partial(_network, backend), "lazy module": partial(_lazy_network, backend)}


def networks_with_batch_norm(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a network with batch normalization and without dropout."""
    return {"module": partial(_network, backend, rate=0.0)}


def classifiers(backend: Any) -> Mapping[str, Any]:
    """Return a builder of LeNet, and the shape of an image."""
    return {"lenet": (lambda device: backend.place(lenet(), device), (1, 28, 28))}


def lenet() -> torch.nn.Module:
    """Return two convolutions and a dense layer, which map an image to three classes."""
    nn = torch.nn
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolutions = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        dense = nn.Linear(64, 3)
    first = convolutions[0], nn.Sigmoid(), nn.AvgPool2d(2)
    second = convolutions[1], nn.Sigmoid(), nn.AvgPool2d(5)
    return nn.Sequential(*first, *second, nn.Flatten(), dense)


def loops(backend: Any) -> Mapping[str, Any]:
    """Return loops by hand with each optimizer, by name."""

    def begin(make: Callable[..., Any], seed: int, device: Device) -> Any:
        net = backend.mlp([3, 4, 1], activation="tanh", seed=seed, device=device)
        return {"net": net, "optimizer": make(net.parameters())}

    def go_on(device: Device, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # Generators of the CPU and of a GPU draw other numbers.
        x = backend.to(backend.rand((8, 3), seed=9, device="cpu"), device)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) ** 2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    makers = {**_BY_HAND, **_OF_OWN_TENSORS}
    return {name: (partial(begin, make), go_on) for name, make in makers.items()}


class Flat(torch.optim.Optimizer):
    """An optimizer with its momenta in one tensor, and its number of steps in an attribute."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.momenta = torch.cat([torch.zeros_like(x).ravel() for x in self._parameters()])
        self.steps = 0

    def _parameters(self) -> Any:
        return self.param_groups[0]["params"]

    def state_dict(self) -> Any:
        """Return the momenta, too."""
        return {**super().state_dict(), "momenta": self.momenta, "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the momenta, too."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.momenta, self.steps = state_dict["momenta"], state_dict["steps"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step, which gets smaller with the number of steps."""
        _compute(closure)
        self.steps += 1
        self.momenta.mul_(0.9).add_(torch.cat([x.grad.ravel() for x in self._parameters()]))
        momenta = torch.split(self.momenta, [x.numel() for x in self._parameters()])
        for x, momentum in zip(self._parameters(), momenta, strict=True):
            lr = self.param_groups[0]["lr"]
            x.sub_(momentum.view_as(x), alpha=lr / self.steps**0.5)


class Around(torch.optim.Optimizer):
    """Lookahead: takes half of another optimizer's two steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.is_even = True

    def state_dict(self) -> Any:
        """Return the state of the other optimizer, too."""
        return {**super().state_dict(), "inner": self.inner.state_dict(), "even": self.is_even}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of the other optimizer, too."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.is_even = self.inner.param_groups, state_dict["even"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of the other optimizer."""
        _compute(closure)
        parameters = [x for group in self.param_groups for x in group["params"]]
        for x in parameters:
            self.state[x].setdefault("slow", x.clone())
        self.inner.step()
        self.is_even = not self.is_even
        for x in parameters if self.is_even else ():
            self.state[x]["slow"].lerp_(x, 0.5)
            x.copy_(self.state[x]["slow"])


def _compute(closure: Any) -> None:
    if closure is not None:
        with torch.enable_grad():
            closure()


_OF_OWN_TENSORS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momenta in an attribute": Flat,
    "around another": lambda parameters: Around(torch.optim.Adam(parameters, 0.05)),
}
# torch replaces a class's ``step`` when its first object is made.
Around(Flat([torch.zeros(1, device="cpu")]))


class Reversing(torch.nn.Module):
    """A layer that reverses the order of the columns."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns from the last to the first."""
        return x.flip(-1)


def models_with_permutations(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of linear layers with a ``Reversing`` between them."""

    def build(device: Device) -> torch.nn.Module:
        first, last = (backend.mlp([4, 4], seed=seed, device=device)[0] for seed in (0, 1))
        return torch.nn.Sequential(first, Reversing(), last)

    return {"own layer": build}


def own_optimizers(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return builders of torch's and other optimizers for a module, by name."""

    def make(name: str, net: torch.nn.Module) -> torch.optim.Optimizer:
        return {**_BY_HAND, **_OF_OWN_TENSORS}[name](net.parameters())

    return {name: partial(make, name) for name in (*_FITTED, *_OF_OWN_TENSORS)}


def untrainable_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module without anything to train."""
    return {
        "module": lambda device: backend.mlp([2, 1], device=device).requires_grad_(False),
    }


def freezables(backend: Any) -> Mapping[str, Any]:
    """Return builders of a network, and functions that freeze or thaw a part, by name."""
    build = partial(_network, backend)
    return {
        "parameters": (build, lambda net, is_frozen: net[0].requires_grad_(not is_frozen)),
        "statistics": (build, lambda net, is_frozen: net[1].train(not is_frozen)),
    }


def modes(backend: Any) -> Mapping[str, Any]:
    """Return builders of a network with modules in both modes, and a function that reads them.

    The module in the other mode is inside of an inner one.
    """

    def build(number: int, is_training: bool, device: Device) -> Any:
        *inner, last = _network(backend, device).train(not is_training)
        inner[number].train(is_training)
        net = torch.nn.Sequential(torch.nn.Sequential(*inner), last)
        net.training = net[0].training = not is_training
        return net

    def read(net: torch.nn.Module) -> list[bool]:
        return [module.training for module in net.modules()]

    return {
        "one in evaluation mode": (partial(build, 1, False), read),
        "normalization in training mode": (partial(build, 1, True), read),
        "dropout in training mode": (partial(build, 3, True), read),
    }


def models_with_tables(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of an embedding."""

    def build(device: Device) -> torch.nn.Embedding:
        return torch.nn.Embedding(6, 4, _weight=backend.rand((6, 4), seed=0, device=device))

    return {"embedding": build}


def models_with_masks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that is called with ``x`` and ``mask``."""
    return {"module": lambda device: backend.place(Masked(), device)}


def models_with_losses(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that computes its loss itself."""
    return {"module": wrap_mlps(backend, WithLoss, [3, 2])}


def models_with_branches(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that computes with one of two layers."""
    return {"module": wrap_mlps(backend, Branching, [2, 1], [2, 1])}


def attention_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of modules whose call leaves a tensor in an attribute, by name."""
    return {"module": wrap_mlps(backend, Attentive, [2, 2, 1])}


def composites(_backend: Any) -> Mapping[str, Any]:
    """Return a builder of packed sequences of different lengths, and a function that reads one."""

    def pack(number: int) -> PackedSequence:
        lengths = ((4, 2), (4, 1, 1))[number]
        return pack_sequence([torch.full((n,), float(n)) for n in lengths])

    def tell(x: PackedSequence) -> Any:
        return x.data.tolist(), x.batch_sizes.tolist()

    return {"packed sequence": (pack, tell)}


def models_without_parameters(_backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that doubles its input."""
    return {"module": lambda _device: Doubled()}


class Doubled(torch.nn.Module):
    """A module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Double each number."""
        return 2 * x


def modules(backend: Any) -> Mapping[str, Callable[[Device, float], Any]]:
    """Return a builder of a D2L ``Module``."""
    return {"module": lambda device, lr: Line(backend.mlp([2, 1], device=device), lr)}


class Line(torch.nn.Module):
    """A D2L ``Module``."""

    def __init__(self, net: torch.nn.Module, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x: Tensor) -> Tensor:
        """Map two features to a number."""
        return self.net(x)

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the squared errors."""
        return ((y_hat - y) ** 2).mean()

    def training_step(self, batch: Any) -> Tensor:
        """Return twice the loss."""
        return 2 * self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Any) -> Tensor:
        """Return thrice the loss."""
        return 3 * self.loss(self(*batch[:-1]), batch[-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return gradient descent."""
        return torch.optim.SGD(self.parameters(), self.lr)


def _network(backend: Any, device: Device, rate: float = 0.3) -> Any:
    with torch.random.fork_rng(devices=[]):
        layers = _layers(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), rate)
        return backend.place(layers, device)


def _lazy_network(backend: Any, device: Device) -> Any:
    with warnings.catch_warnings():
        # Older versions of torch say so at every lazy layer.
        warnings.filterwarnings("ignore", "Lazy modules are a new feature")
        return backend.place(_layers(torch.nn.LazyLinear(8), torch.nn.LazyLinear(2)), device)


def _layers(first: torch.nn.Module, last: torch.nn.Module, rate: float = 0.3) -> torch.nn.Module:
    norm, dropout = torch.nn.BatchNorm1d(8), torch.nn.Dropout(rate)
    return torch.nn.Sequential(first, norm, torch.nn.ReLU(), dropout, last)


class Masked(torch.nn.Module):
    """A linear layer and a mask of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1) -> Tensor:
        """Map both to ``(n, 3)``."""
        return self.linear(x) * mask * scale


class WithLoss(torch.nn.Module):
    """A module that returns its loss if it gets labels.

    Args:
        net: maps three features to two logits.
    """

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, x: Any = None, z: Any = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the logits of ``x``, or of ``2 * z``."""
        logits = self.net(2 * z if x is None else x)
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits, labels.long())
        return {"logits": logits, "loss": loss}


class Branching(torch.nn.Module):
    """A module that computes with one of two, which the number of examples chooses."""

    def __init__(self, large: torch.nn.Module, small: torch.nn.Module) -> None:
        super().__init__()
        self.large, self.small = large, small

    def forward(self, x: Tensor) -> Tensor:
        """Map two features to a number."""
        prediction: Tensor = (self.large if len(x) > 4 else self.small)(x)
        return prediction


class Attentive(torch.nn.Module):
    """A module that leaves its attention weights in attributes.

    Args:
        net: maps two features to a number.
    """

    attention_weights: Tensor

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        self.attention_weights = torch.softmax(self.net.get_submodule("0")(x), -1)
        self.all_weights = [self.attention_weights]
        return self.net(x)


class Everything(torch.nn.Module):
    """A module that keeps tensors wherever a module can.

    Args:
        make: ``shape -> tensor``, on the module's device.
    """

    mean: Tensor

    def __init__(self, make: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(make((3, 3)))
        self.tied = self.weight
        self.frozen = torch.nn.Parameter(make((3,)), requires_grad=False)
        self.register_buffer("mean", make((3,)))
        self.register_buffer("hidden", make((3,)), persistent=False)
        self.plain = make((2,))
        self.scratch = make((2, 2)).requires_grad_()
        trained = make((2,)).requires_grad_()
        self.kept = {"masks": [trained, (make((1,)), None, "a string")]}
        self.same = self.kept["masks"][0]
        self.layers = [torch.nn.BatchNorm1d(3, device=self.weight.device)]
