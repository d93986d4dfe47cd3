"""Set-up for the conformance suite: one small object of every kind that ``place`` handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from d2ldev import Device
from d2ldev.framework import Tensor
from d2ldev.framework.testing import Contents, Orders, array_api_of, wrap_mlps
from d2ldev_mxnet.framework import NumPySemantics, mx
from d2ldev_mxnet.models import NumPyBlock, NumPySequential, initialise

_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "SGD with momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "Adam": ("adam", {"learning_rate": 0.1}),
    "AdaGrad": ("adagrad", {"learning_rate": 0.1}),
}

CANNOT = {
    "composites": "MXNet's arrays are in Python's own containers, and in no other",
    "triu": "mxnet.numpy 1.9 has no triu",
    "update": "MXNet writes into its arrays, and has no call that returns a changed one",
}


class Everything(mx.gluon.Block):
    """A block that keeps arrays in every place where a block can.

    Args:
        make: ``shape -> array``, on the device where the block is to be.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.weight = self.params.get("weight", shape=(3, 3))
        self.frozen = self.params.get("frozen", shape=(3,), grad_req="null")
        self.params.get("hidden", shape=(3,), grad_req="add")
        with NumPySemantics():
            self.constant = self.params.get_constant("constant", [1.0, 2.0])
        for parameter in self.params.values():
            initialise(parameter, make(parameter.shape))
        self.dense = mx.gluon.nn.Dense(3, in_units=3, use_bias=False)
        self.tied = mx.gluon.nn.Dense(3, in_units=3, use_bias=False, params=self.dense.params)
        initialise(self.dense.weight, make((3, 3)))
        self.plain = make((2,))
        self.scratch = make((2, 2))
        self.scratch.attach_grad()
        trained = make((2,))
        trained.attach_grad()
        self.kept = {"masks": [trained, (make((1,)), None, "a string")]}
        self.same = self.kept["masks"][0]
        unregistered = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
        initialise(unregistered.weight, make((1, 1)))
        self.layers = [unregistered]


def own_tensors(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return calls of MXNet that return arrays."""

    def differentiate(x: Tensor) -> Tensor:
        x.attach_grad()
        with mx.autograd.record():
            y = (x * x).sum()
        y.backward()
        return x.grad

    def double(x: Tensor, states: Any = ()) -> Any:
        return x * 2.0, states

    def map_rows(x: Tensor) -> Tensor:
        return mx.nd.contrib.foreach(double, x.as_nd_ndarray(), [])[0].as_np_ndarray()

    compiled = mx.gluon.nn.HybridLambda(lambda _, x: x * 2.0)
    compiled.hybridize()
    return {
        **array_api_of(mx.np),
        "asarray": lambda _: mx.np.array([[1.0, 2.0]]),
        "concat": lambda *xs: mx.np.concatenate([*xs, xs[0]]),
        "from_dlpack": lambda x: mx.nd.from_dlpack(
            mx.nd.to_dlpack_for_read(x.as_nd_ndarray())
        ).as_np_ndarray(),
        "random": lambda _: mx.np.random.normal(size=(2, 2)),
        "gradient": differentiate,
        "map": map_rows,
        "compile": compiled,
    }


def samples(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of small objects, by name; each makes its object on the device given."""

    def rand(device: Device, seed: int, shape: tuple[int, ...]) -> Tensor:
        return backend.rand(shape, seed=seed, device=device)

    def hybridize(device: Device) -> Any:
        net = backend.mlp([3, 4, 1], device=device)
        net.hybridize(static_alloc=True)
        net(rand(device, 0, (5, 3)))
        return net

    def scratch(device: Device) -> list[Tensor]:
        weight, bias = rand(device, 0, (3, 1)), backend.zeros(1, device=device)
        with NumPySemantics():
            weight.attach_grad()
            bias.attach_grad()
            with mx.autograd.record():
                loss = (mx.np.dot(rand(device, 1, (5, 3)), weight) + bias).sum()
            loss.backward()
        return [weight, bias]

    def train(name: str, options: dict[str, float], device: Device) -> Any:
        """Return a model with gradients, and the trainer that has made two steps with them."""
        net = backend.mlp([3, 4, 1], device=device)
        with NumPySemantics():
            trainer = mx.gluon.Trainer(net.collect_params(), name, options)
            for seed in (1, 2):
                with mx.autograd.record():
                    loss = net(rand(device, seed, (5, 3))).sum()
                loss.backward()
                trainer.step(5)
        return {"model": net, "trainer": trainer}

    return {
        "block": lambda device: Everything(lambda shape: rand(device, len(shape), shape)),
        "hybridized block": hybridize,
        "scratch parameters": scratch,
        **{title: partial(train, *how) for title, how in _OPTIMIZERS.items()},
    }


def buffers(backend: Any) -> Contents:
    """Return a builder of a block with running statistics."""

    def build(seed: int, device: Device) -> Any:
        with NumPySemantics():
            norm = mx.gluon.nn.BatchNorm(in_channels=3)
            norm.initialize(ctx=backend.native(device))
            norm.running_mean.set_data(backend.randn(3, seed=seed, device=device))
            norm.running_var.set_data(backend.rand(3, seed=seed, device=device))
        return norm

    def list_statistics(norm: Any) -> list[Tensor]:
        return [norm.running_mean.data(), norm.running_var.data()]

    return {"batch normalization": (build, list_statistics)}


def gradients(backend: Any) -> Contents:
    """Return builders of a block and of an array that have gradients, by name."""

    def build_block(seed: int, device: Device) -> Any:
        net = backend.mlp([3, 4, 1], activation="tanh", device=device)
        with NumPySemantics():
            _differentiate(backend, net, seed, device)
        return net

    def list_gradients(net: Any) -> list[Tensor]:
        return [each.grad() for each in net.collect_params().values()]

    def build_array(seed: int, device: Device) -> list[Tensor]:
        weight = backend.rand((3, 1), seed=seed, device=device)
        with NumPySemantics():
            weight.attach_grad()
            with mx.autograd.record():
                loss = (weight**2).sum()
            loss.backward()
        return [weight]

    return {
        "block": (build_block, list_gradients),
        "array": (build_array, lambda arrays: [arrays[0].grad]),
    }


def ties(backend: Any) -> Contents:
    """Return a builder of a block with one parameter in two layers."""

    def build(seed: int, device: Device) -> Any:
        net = NumPySequential()
        encoder = mx.gluon.nn.Dense(3, in_units=3, use_bias=False)
        decoder = mx.gluon.nn.Dense(3, in_units=3, use_bias=False, params=encoder.params)
        initialise(encoder.weight, backend.rand((3, 3), seed=seed, device=device))
        net.add(encoder, decoder)
        return net

    return {"layers": (build, lambda net: [layer.weight.data() for layer in net])}


def views(backend: Any) -> Contents:
    """Return a builder of a block whose arrays others hold, too."""

    def build(seed: int, device: Device) -> Any:
        net = backend.mlp([3, 2], seed=seed, device=device)
        with NumPySemantics():
            net[0].bias.set_data(backend.rand(2, seed=seed, device=device))
        return net

    return {"mlp": (build, lambda net: [x.data().detach() for x in net.collect_params().values()])}


def optimizer_states(backend: Any) -> Contents:
    """Return builders of trainers after two steps, by name, with their momenta and means."""

    def build(name: str, options: dict[str, float], seed: int, device: Device) -> Any:
        net = backend.mlp([3, 4, 1], activation="tanh", device=device)
        with NumPySemantics():
            trainer = mx.gluon.Trainer(net.collect_params(), name, options, kvstore=None)
            for number in (seed, seed + 1):
                _differentiate(backend, net, number, device)
                trainer.step(1)
        return {"model": net, "trainer": trainer}

    def list_states(obj: dict[str, Any]) -> list[Tensor]:
        (updater,), index_of = obj["trainer"]._updaters, obj["trainer"]._param2idx
        # In the model's order: the numbers of parameters follow their names, as text.
        states = [updater.states[index_of[name]] for name in obj["model"].collect_params()]
        parts = [state if isinstance(state, tuple) else (state,) for state in states]
        return [x for part in parts for x in part]

    return {name: (partial(build, *how), list_states) for name, how in _OPTIMIZERS.items()}


def parameter_orders(backend: Any) -> Orders:
    """Return builders of dense layers and a trainer after two steps, by name.

    A trainer sorts its parameters by their names. MXNet numbers these in the order of the layers.
    """

    def build(
        name: str, options: dict[str, float], order: str, seed: int, device: Device
    ) -> dict[str, Any]:
        others = [letter for letter in "ac" if letter not in order]
        layers = {letter: NumPySequential() for letter in (*order, *others)}
        for layer in layers.values():
            layer.add(mx.gluon.nn.Dense(1, use_bias=False, in_units=3))
        model = {letter: layers[letter] for letter in "ac"}
        with NumPySemantics():
            for layer in layers.values():
                layer.initialize(ctx=backend.native(device))
            trained = {key: x for each in order for key, x in layers[each].collect_params().items()}
            trainer = mx.gluon.Trainer(trained, name, options, kvstore=None)
            for number in (seed, seed + 1):
                for letter, layer in model.items():
                    _differentiate(backend, layer, 2 * number + ord(letter), device)
                trainer.step(1)
        return {"model": model, "trainer": trainer}

    def read(obj: dict[str, Any]) -> dict[str, list[Tensor]]:
        (updater,) = obj["trainer"]._updaters
        parameters = obj["trainer"]._params
        found = {}
        for letter, layer in obj["model"].items():
            for index in [i for i, x in enumerate(parameters) if x is layer[0].weight]:
                state = updater.states[index]
                found[letter] = list(state) if isinstance(state, tuple) else [state]
        return found

    return {name: (partial(build, *how), read) for name, how in _OPTIMIZERS.items()}


def _differentiate(backend: Any, net: Any, seed: int, device: Device) -> None:
    with mx.autograd.record():
        loss = (net(backend.rand((5, 3), seed=seed, device=device)) ** 2).mean()
    loss.backward()


class Masked(NumPyBlock):
    """A dense layer of whose outputs some are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = mx.gluon.nn.Dense(3, in_units=3)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1) -> Tensor:
        return self.dense(x) * mask * scale


class WithLoss(NumPyBlock):
    """A block that returns its loss if it gets labels.

    Args:
        net: maps three features to two logits.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any = None, z: Any = None, labels: Any = None) -> dict[str, Tensor]:
        """Return the logits of ``x``, or of ``2 * z``."""
        logits = self.net(2 * z if x is None else x)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": mx.gluon.loss.SoftmaxCELoss()(logits, labels).mean()}


class Branching(NumPyBlock):
    """A block that computes with one of two, which the number of examples chooses."""

    def __init__(self, large: Any, small: Any) -> None:
        super().__init__()
        self.large, self.small = large, small

    def forward(self, x: Tensor) -> Tensor:
        return (self.large if len(x) > 4 else self.small)(x)


class Attentive(NumPyBlock):
    """A block that leaves its attention weights in attributes.

    Args:
        net: maps two features to a number.
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        self.attention_weights = mx.npx.softmax(self.net[0](x))
        self.all_weights = [self.attention_weights]
        return self.net(x)


class MaskedHybrid(NumPyBlock, mx.gluon.HybridBlock):
    """The same with a parameter of its own, which Gluon gives to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.params.get("weight", shape=(3, 3))

    def hybrid_forward(self, F: Any, x: Tensor, mask: Tensor, *, weight: Tensor) -> Tensor:  # noqa: N803
        return F.np.dot(x, weight) * mask


def hostile_tensors(_backend: Any) -> Mapping[str, Callable[[], Any]]:
    """Return builders of tensors that few calls can take, by name."""
    return {
        "compressed": lambda: mx.nd.sparse.zeros("csr", (2, 2)),
        "rows": lambda: mx.nd.sparse.zeros("row_sparse", (2, 2)),
        "symbol": lambda: mx.sym.Variable("x"),
    }


def networks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of networks with batch normalization and dropout, by name."""
    return {
        "block": partial(_network, backend, 4, 8),
        "deferred block": partial(_network, backend, 0, 0),
    }


def networks_with_batch_norm(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a network with batch normalization and without dropout."""
    return {"block": partial(_network, backend, 4, 8, rate=0.0)}


def classifiers(backend: Any) -> Mapping[str, Any]:
    """Return a builder of LeNet, whose weights oneDNN lays out, and the shape of an image."""
    return {"lenet": (lambda device: lenet(backend.native(device)), (1, 28, 28))}


def lenet(context: Any = None) -> Any:
    """Return two convolutions and a dense layer, which map an image to three classes.

    Args:
        context: where they are; default is MXNet's own.
    """
    nn = mx.gluon.nn
    with NumPySemantics():
        net = NumPySequential()
        net.add(nn.Conv2D(6, 5, padding=2, activation="sigmoid"), nn.AvgPool2D(2, 2))
        net.add(nn.Conv2D(16, 5, activation="sigmoid"), nn.AvgPool2D(5, 5))
        net.add(nn.Flatten(), nn.Dense(3))
        net.hybridize()
        net.initialize(mx.init.Xavier(), ctx=context)
        net(mx.np.zeros((1, 1, 28, 28), ctx=context))
    return net


def loops(backend: Any) -> Mapping[str, Any]:
    """Return loops by hand with each optimizer, by name."""
    nn = mx.gluon.nn

    def begin(name: Any, options: dict[str, float], seed: int, device: Device) -> Any:
        with NumPySemantics():
            net = NumPySequential()
            net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4), nn.Dense(1, in_units=4))
            net.initialize(mx.init.Xavier(), ctx=backend.native(device))
            for parameter in net.collect_params(".*weight").values():
                parameter.set_data(backend.rand(parameter.shape, seed=seed, device=device))
            optimizer = name if isinstance(name, str) else name()
            trainer = mx.gluon.Trainer(net.collect_params(), optimizer, options, kvstore=None)
        return {"net": net, "trainer": trainer}

    def go_on(device: Device, net: Any, trainer: Any) -> None:
        # Generators of the CPU and of a GPU draw other numbers.
        x = backend.to(backend.rand((8, 3), seed=9, device="cpu"), device)
        with NumPySemantics():
            for _ in range(3):
                with mx.autograd.record():
                    loss = (net(x) ** 2).mean()
                loss.backward()
                trainer.step(1)

    makers: dict[str, tuple[Any, dict[str, float]]] = {
        **_OPTIMIZERS,
        "momenta in a dict": (Listed, {}),
        "around another": (lambda: Around(mx.optimizer.Adam(learning_rate=0.05)), {}),
    }
    return {title: (partial(begin, *how), go_on) for title, how in makers.items()}


class Listed(mx.optimizer.Optimizer):
    """An optimizer with its momenta, and the number of its steps, in attributes."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.05)
        self.momenta: dict[int, Any] = {}
        self.steps = 0

    def create_state(self, index: int, weight: Any) -> None:
        """Keep the momentum in an attribute."""
        self.momenta[index] = mx.nd.zeros_like(weight)

    def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """Take a step, which is the smaller the more there were."""
        self._update_count(index)
        self.steps += 1
        self.momenta[index] *= 0.9
        self.momenta[index] += grad
        weight -= self._get_lr(index) * self.momenta[index] / self.steps**0.5


class Around(mx.optimizer.Optimizer):
    """Lookahead: goes half of the way that another optimizer has gone in a step."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=inner.lr)
        self.inner = inner
        self.slow: dict[int, Any] = {}

    def create_state(self, index: int, weight: Any) -> Any:
        """Return the state of the other optimizer."""
        self.slow[index] = weight.copy()
        return self.inner.create_state(index, weight)

    def update(self, index: int, weight: Any, grad: Any, state: Any) -> None:
        """Take a step of the other optimizer."""
        self._update_count(index)
        self.inner.update(index, weight, grad, state)
        self.slow[index] = self.slow[index] / 2 + weight / 2
        weight[:] = self.slow[index]


def own_optimizers(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return builders of optimizers and trainers of a block, by name."""
    optimizer = mx.optimizer

    def in_another_order(net: Any) -> Any:
        """Return a trainer that has the weights and biases in reverse order."""
        parameters = list(net.collect_params(".*weight|.*bias").values())
        return mx.gluon.Trainer(parameters[::-1], "adam", {"learning_rate": 0.05})

    def schedule(_net: Any) -> Any:
        schedule = mx.lr_scheduler.MultiFactorScheduler([6, 10], 0.1)
        return optimizer.SGD(momentum=0.9, lr_scheduler=schedule)

    makers: dict[str, Callable[[Any], Any]] = {
        "nadam": lambda _net: optimizer.Nadam(),
        "rmsprop": lambda _net: optimizer.RMSProp(centered=True),
        "lamb": lambda _net: optimizer.LAMB(),
        "adadelta": lambda _net: optimizer.AdaDelta(),
        "ftrl": lambda _net: optimizer.Ftrl(),
        "a schedule": schedule,
        "a trainer": in_another_order,
        "momenta in a dict": lambda _net: Listed(),
        "around another": lambda _net: Around(optimizer.Adam(learning_rate=0.05)),
    }

    def build(make: Callable[[Any], Any], net: Any) -> Any:
        with NumPySemantics():
            return make(net)

    return {name: partial(build, make) for name, make in makers.items()}


def untrainable_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a block without anything to train."""

    def freeze(device: Device) -> Any:
        net = backend.mlp([2, 1], device=device)
        net.collect_params().setattr("grad_req", "null")
        return net

    return {"block": freeze}


def freezables(backend: Any) -> Mapping[str, Any]:
    """Return a builder of a network, and what freezes and thaws its first layer."""

    def freeze(net: NumPySequential, is_frozen: bool) -> None:
        net[0].collect_params().setattr("grad_req", "null" if is_frozen else "write")

    return {"parameters": (partial(_network, backend, 4, 8), freeze)}


def modes(backend: Any) -> Mapping[str, Any]:
    """Return a builder of a network with a frozen layer in an inner block, and its reader.

    MXNet has one training mode, for all blocks that a thread calls.
    """

    def build(device: Device) -> NumPySequential:
        inner = _network(backend, 4, 8, device)
        inner[0].collect_params().setattr("grad_req", "null")
        net = NumPySequential()
        net.add(inner)
        return net

    def read(net: NumPySequential) -> list[Any]:
        requests = [x.grad_req for x in net.collect_params().values()]
        return [mx.autograd.is_training(), mx.autograd.is_recording(), *requests]

    return {"one frozen": (build, read)}


class Reversing(mx.gluon.HybridBlock):  # type: ignore[misc, unused-ignore]
    """A block that reverses the order of the columns."""

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        """Return the columns from the last to the first."""
        return F.np.flip(x, -1)


def models_with_permutations(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of dense layers with a ``Reversing`` between them."""

    def build(device: Device) -> NumPySequential:
        dense = mx.gluon.nn.Dense
        with NumPySemantics():
            net = NumPySequential()
            net.add(dense(4, in_units=4), Reversing(), dense(4, in_units=4))
            net.initialize(mx.init.Xavier(), ctx=backend.native(device))
        return net

    return {"own block": build}


def attention_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of blocks whose call leaves an array in an attribute, by name."""
    return {"block": wrap_mlps(backend, Attentive, [2, 2, 1])}


def models_with_losses(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a block that computes its loss itself."""
    return {"block": wrap_mlps(backend, WithLoss, [3, 2])}


def models_with_branches(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a block that computes with one of two layers."""
    return {"block": wrap_mlps(backend, Branching, [2, 1], [2, 1])}


def models_with_tables(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of an embedding."""

    def build(device: Device) -> Any:
        with NumPySemantics():
            block = NumPySequential()
            block.add(mx.gluon.nn.Embedding(6, 4))
            block.initialize(mx.init.One(), ctx=backend.native(device))
        return block

    return {"embedding": build}


def models_with_masks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of blocks that are called with ``x`` and ``mask``, by name."""

    def make(cls: type, device: Device) -> Any:
        with NumPySemantics():
            block = cls()
            block.initialize(ctx=backend.native(device))
        return block

    return {"block": partial(make, Masked), "hybrid block": partial(make, MaskedHybrid)}


def models_without_parameters(_backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a block that doubles its input."""
    return {"block": lambda _device: Doubled()}


class Doubled(mx.gluon.Block):
    """A block without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def modules(backend: Any) -> Mapping[str, Callable[[Device, float], Any]]:
    """Return a builder of a D2L ``Module``."""
    return {"module": lambda device, lr: Line(backend.mlp([2, 1], device=device), lr)}


class Line(NumPyBlock):
    """A D2L ``Module``."""

    def __init__(self, net: Any, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return ((y_hat - y) ** 2).mean()

    def training_step(self, batch: Any) -> Tensor:
        return 2 * self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Any) -> Tensor:
        return 3 * self.loss(self(*batch[:-1]), batch[-1])

    def configure_optimizers(self) -> Any:
        with NumPySemantics():
            return mx.gluon.Trainer(self.collect_params(), "sgd", {"learning_rate": self.lr})


def _network(
    backend: Any, n_in: int, n_hidden: int, device: Device, rate: float = 0.3
) -> NumPySequential:
    """Return a network; sizes of 0 come with its first batch."""
    nn = mx.gluon.nn
    with NumPySemantics():
        net = NumPySequential()
        net.add(nn.Dense(8, in_units=n_in), nn.BatchNorm(in_channels=n_hidden))
        net.add(nn.Activation("tanh"), nn.Dropout(rate), nn.Dense(2, in_units=n_hidden))
        net.initialize(mx.init.Xavier(), ctx=backend.native(device))
    return net
