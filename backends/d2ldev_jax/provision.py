"""Set-up for the conformance suite: objects of every kind that ``place`` handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx, struct
from flax.training.train_state import TrainState
from jax.experimental.sparse import BCOO
from jax.flatten_util import ravel_pytree

from d2ldev import Device
from d2ldev.framework.testing import Contents, Orders, array_api_of, wrap_mlps

CANNOT = {
    "gradients": "JAX returns gradients, and keeps none",
    "views": "JAX's arrays are immutable",
}


class Everything(nnx.Module):
    """A module with arrays in every place that a module has for them."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.weight = nnx.Param(jnp.ones((3, 3)))
        self.tied = self.weight
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.plain = jnp.zeros(2)
        self.kept = nnx.data({"masks": [jnp.ones(2), (jnp.zeros(1), None, "a string")]})
        self.same = nnx.data([self.kept["masks"][0], self.weight])


class Network(nnx.Module):
    """Dense layers with batch normalization and dropout between them."""

    def __init__(self, rate: float = 0.3) -> None:
        rngs = nnx.Rngs(0, dropout=1)
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.outer = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class Outer(nnx.Module):
    """A network inside of another module."""

    def __init__(self) -> None:
        self.network = Network()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.network(x)


class LeNet(nnx.Module):
    """A convolution and a dense layer, which map an image to three classes."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.convolution = nnx.Conv(1, 6, (5, 5), rngs=rngs)
        self.dense = nnx.Linear(6 * 4 * 4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.sigmoid(self.convolution(x)), (7, 7), (7, 7))
        return self.dense(x.reshape(x.shape[0], -1))


class Tied(nnx.Module):
    """A network with statistics, a random stream and a tie."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed, dropout=seed)
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)
        self.same = self.head.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dropout(nnx.relu(self.norm(self.dense(x)))))


class Masked(nnx.Module):
    """A dense layer with a mask on its outputs."""

    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, mask: Any = None, scale: float = 1) -> jax.Array:
        return self.dense(x) * mask * scale


class WithLoss(nnx.Module):
    """A module that returns its loss if it gets labels.

    Args:
        net: maps three features to two logits.
    """

    def __init__(self, net: nnx.Module) -> None:
        self.net = net

    def __call__(self, x: Any = None, z: Any = None, labels: Any = None) -> dict[str, jax.Array]:
        """Return the logits of ``x``, or of ``2 * z``."""
        net: Any = self.net
        logits = net(2 * z if x is None else x)
        if labels is None:
            return {"logits": logits}
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"logits": logits, "loss": losses.mean()}


class Branching(nnx.Module):
    """A module that computes with one of two, which the number of examples chooses."""

    def __init__(self, large: Any, small: Any) -> None:
        self.large, self.small = large, small

    def __call__(self, x: jax.Array) -> Any:
        return (self.large if len(x) > 4 else self.small)(x)


class Attentive(nnx.Module):
    """A module that leaves its attention weights in an attribute.

    Args:
        net: maps two features to a number.
    """

    def __init__(self, net: nnx.Module) -> None:
        self.net = net
        self.attention_weights: Any = nnx.data(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        self.attention_weights = jax.nn.softmax(self.net.layers[0](x))
        return self.net(x)


class Sowing(nnx.Module):
    """A module that leaves its attention weights in a variable for such values.

    Args:
        net: maps two features to a number.
    """

    def __init__(self, net: nnx.Module) -> None:
        self.net = net

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        self.attention_weights = nnx.Intermediate(jax.nn.softmax(self.net.layers[0](x)))
        return self.net(x)


class Assigning(nnx.Module):
    """A module that assigns its attention weights to a variable that it has from its start.

    Args:
        net: maps two features to a number.
    """

    def __init__(self, net: nnx.Module) -> None:
        self.net = net
        self.attention_weights = nnx.Variable(jnp.zeros((1, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        self.attention_weights.value = jax.nn.softmax(self.net.layers[0](x))
        return self.net(x)


class MaskedLinen(linen.Module):
    """The same in linen."""

    @linen.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return linen.Dense(3)(x) * mask


@struct.dataclass
class Scaled:
    """Weights with a static value, which JAX treats as a part of the type."""

    weight: jax.Array
    factor: float = struct.field(pytree_node=False)


def own_tensors(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return calls of JAX that return arrays."""
    return {
        **array_api_of(jnp),
        "random": lambda _: jax.random.normal(jax.random.key(0), (2, 2)),
        "gradient": jax.grad(lambda x: (x * x).sum()),
        "map": jax.vmap(lambda row: row * 2.0),
        "compile": jax.jit(lambda x: x * 2.0),
        "update": lambda x: x.at[0].set(7.0),
    }


def samples(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of small objects, by name; each makes its object on the device given."""
    return {
        "module": partial(_make_there, backend, Everything),
        "module and optimizer": partial(_make_there, backend, _train_module),
        "linen train state": partial(_make_there, backend, _train_state),
        "random keys": partial(_make_there, backend, _random_keys),
    }


def buffers(backend: Any) -> Contents:
    """Return a builder of a module with running statistics."""

    def build(seed: int, device: Device) -> nnx.BatchNorm:
        norm = _make_there(backend, lambda: nnx.BatchNorm(3, rngs=nnx.Rngs(0)), device)
        norm.mean[...] = backend.randn(3, seed=seed, device=device)
        norm.var[...] = backend.rand(3, seed=seed, device=device)
        return norm

    return {"batch normalization": (build, lambda norm: [norm.mean[...], norm.var[...]])}


def ties(backend: Any) -> Contents:
    """Return a builder of a module with one parameter under two names."""

    def build(seed: int, device: Device) -> Tied:
        return _make_there(backend, partial(Tied, seed), device)

    return {"module": (build, lambda net: [net.head.kernel[...], net.same[...]])}


def optimizer_states(backend: Any) -> Contents:
    """Return builders of optimizers after two steps, by name, with their momenta and means."""

    def make(optimizer: Callable[[Any], Any], seed: int) -> dict[str, Any]:
        net = nnx.Linear(3, 1, rngs=nnx.Rngs(seed))
        made = optimizer(net)
        for number in (seed, seed + 1):
            x = backend.rand((5, 3), seed=number)
            made.update(net, nnx.grad(lambda net, x: (net(x) ** 2).mean())(net, x))
        return {"model": net, "optimizer": made}

    def build(optimizer: Callable[[Any], Any], seed: int, device: Device) -> Any:
        return _make_there(backend, partial(make, optimizer, seed), device)

    def list_states(obj: dict[str, Any]) -> list[jax.Array]:
        return [x for x in jax.tree.leaves(nnx.state(obj["optimizer"])) if x.ndim]

    makers = {
        "momentum": lambda net: nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param),
        "adam": lambda net: nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param),
        "adagrad": lambda net: nnx.Optimizer(net, optax.adagrad(0.1), wrt=nnx.Param),
        "variables of its own": Slowed,
    }
    return {name: (partial(build, optimizer), list_states) for name, optimizer in makers.items()}


def parameter_orders(backend: Any) -> Orders:
    """Return builders of parameters, and of the state of an optimizer after two steps, by name."""

    def build_state(order: str, seed: int, device: Device) -> Any:
        params = {name: backend.ones(3, device=device) for name in "ac"}
        transformation = optax.adam(0.1)
        trained = {name: params[name] for name in order}
        state = transformation.init(trained)
        for number in (seed, seed + 1):
            numbers = {name: 2 * number + ord(name) for name in order}
            gradients = {n: backend.rand(3, seed=i, device=device) for n, i in numbers.items()}
            _, state = transformation.update(gradients, state)
        return {"model": params, "optimizer": state}

    def read_state(obj: dict[str, Any]) -> dict[str, list[jax.Array]]:
        means = obj["optimizer"][0]
        return {name: [means.mu[name], means.nu[name]] for name in means.mu}

    def make(order: str, seed: int) -> Any:
        net = _Pair(order)
        optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=_Trained)
        for number in (seed, seed + 1):
            x = {name: backend.rand(3, seed=2 * number + ord(name)) for name in order}
            optimizer.update(net, nnx.grad(_Pair.weigh, argnums=nnx.DiffState(0, _Trained))(net, x))
        return {"model": net, "optimizer": optimizer}

    def build_module(order: str, seed: int, device: Device) -> Any:
        return _make_there(backend, partial(make, order, seed), device)

    def read_module(obj: dict[str, Any]) -> dict[str, list[jax.Array]]:
        found: dict[str, list[jax.Array]] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(obj["optimizer"])):
            (name,) = {str(getattr(key, "key", "")) for key in path} & {"a", "c"} or {""}
            if name:
                found.setdefault(name, []).append(x)
        return found

    return {"state": (build_state, read_state), "module": (build_module, read_module)}


class _Trained(nnx.Param):
    """A parameter that an optimizer trains."""


class _Pair(nnx.Module):
    """Two parameters, made in the order of their names in a text; the others are not trained."""

    def __init__(self, order: str) -> None:
        for name in (*order, *(name for name in "ac" if name not in order)):
            kind = _Trained if name in order else nnx.Param
            setattr(self, name, kind(jnp.ones(3)))

    def weigh(self, x: Mapping[str, jax.Array]) -> jax.Array:
        """Return the sum of the parameters times numbers."""
        return sum(
            ((getattr(self, name) * value).sum() for name, value in x.items()), jnp.zeros(())
        )


def hostile_tensors(_backend: Any) -> Mapping[str, Callable[[], Any]]:
    """Return builders of tensors that few calls can take, by name."""

    def delete() -> jax.Array:
        x = jnp.zeros(2)
        x.delete()
        return x

    return {
        "key": lambda: jax.random.key(0),
        "shape": lambda: jax.ShapeDtypeStruct((2,), "float32"),
        "deleted": delete,
        "stale tracer": partial(_leak, jax.jit),
        "stale tracer of vmap": partial(_leak, jax.vmap),
        "stale tracer of grad": partial(_leak, lambda f: jax.grad(lambda x: f(x).sum())),
        "int4": lambda: jnp.zeros(2, "int4"),
    }


def _leak(transform: Callable[..., Any]) -> Any:
    """Return the tracer that a function gets during its trace."""
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x

    transform(keep)(jnp.zeros(2))
    return kept[0]


def networks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a network with batch normalization and dropout."""
    return {"module": lambda device: backend.place(Network(), device)}


def networks_with_batch_norm(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a network with batch normalization and without dropout."""
    return {"module": lambda device: backend.place(Network(rate=0.0), device)}


def classifiers(backend: Any) -> Mapping[str, Any]:
    """Return a builder of LeNet, and the shape of an image."""
    return {"lenet": (partial(_make_there, backend, LeNet), (28, 28, 1))}


def loops(backend: Any) -> Mapping[str, Any]:
    """Return loops by hand, by name."""

    def make(optimizer: Callable[[Any], Any], seed: int) -> Any:
        net = Tied(seed)
        return {"net": net, "optimizer": optimizer(net)}

    def begin(optimizer: Callable[[Any], Any], seed: int, device: Device) -> Any:
        return _make_there(backend, partial(make, optimizer, seed), device)

    def go_on(device: Device, net: Tied, optimizer: Any) -> None:
        x = backend.rand((8, 3), seed=9, device=device)
        for _ in range(3):
            _step(net, optimizer, x)

    makers = {
        # The bias before the norm has no gradient but rounding errors, which must not become steps.
        "module": lambda net: nnx.Optimizer(net, optax.adam(0.1, eps=1e-3), wrt=nnx.Param),
        "variables of its own": Slowed,
    }
    return {name: (partial(begin, make), go_on) for name, make in makers.items()}


@nnx.jit
def _step(net: Tied, optimizer: Any, x: jax.Array) -> None:
    gradients = nnx.grad(lambda net: (net(x) ** 2).mean())(net)
    optimizer.update(net, gradients)


class Slowed(nnx.Optimizer):
    """An optimizer with a mean of gradients in a variable of its own.

    Args:
        model: that it trains.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, optax.sgd(0.1), wrt=nnx.Param)
        self.mean = nnx.Variable(0 * ravel_pytree(nnx.state(model, nnx.Param))[0])

    def update(self, model: Any, grads: Any, **others: Any) -> None:
        """Take a step along the mean."""
        gradient, unravel = ravel_pytree(grads)
        self.mean[...] = mean = 0.9 * self.mean[...] + 0.1 * gradient
        super().update(model, unravel(mean), **others)


def own_optimizers(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return builders of optimizers with a schedule that changes the rate after step 8 of 16."""
    return {
        "exponential": lambda _net: optax.sgd(optax.exponential_decay(0.1, 4, 0.5)),
        "cosine": lambda _net: optax.adam(optax.cosine_decay_schedule(0.1, 16)),
        "piecewise constant": lambda _net: optax.adagrad(
            optax.piecewise_constant_schedule(0.1, {6: 0.5, 10: 0.1})
        ),
        "warm-up, injected": lambda _net: optax.inject_hyperparams(optax.rmsprop)(
            learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 16)
        ),
        "variables of its own": Slowed,
        "around another": lambda _net: optax.apply_if_finite(optax.adam(0.05), 3),
    }


def untrainable_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module whose only variable is no parameter."""
    return {"module": partial(_make_there, backend, Fixed)}


class Fixed(nnx.Module):
    """A module that maps two features to their sum."""

    def __init__(self) -> None:
        self.weight = nnx.Variable(jnp.ones((2, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        return x @ self.weight[...]


def freezables(backend: Any) -> Mapping[str, Any]:
    """Return a builder of a network, and a function that freezes and unfreezes its statistics."""

    def freeze(net: Network, is_frozen: bool) -> None:
        net.norm.set_attributes(use_running_average=is_frozen)

    return {"statistics": (lambda device: backend.place(Network(), device), freeze)}


def modes(backend: Any) -> Mapping[str, Any]:
    """Return builders of a network with modules in both modes, and a function that reads them.

    The module in the other mode is inside of an inner one.
    """

    def build(name: str, is_training: bool, device: Device) -> Outer:
        net = backend.place(Outer(), device)
        net.set_attributes(deterministic=is_training, use_running_average=is_training)
        flag = "deterministic" if name == "dropout" else "use_running_average"
        getattr(net.network, name).set_attributes(**{flag: not is_training})
        return net

    def read(net: Outer) -> list[Any]:
        return [net.network.dropout.deterministic, net.network.norm.use_running_average]

    return {
        "one in evaluation mode": (partial(build, "norm", False), read),
        "normalization in training mode": (partial(build, "norm", True), read),
        "dropout in training mode": (partial(build, "dropout", True), read),
    }


def models_with_permutations(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of linear layers with a function that reverses columns between them."""

    def build(device: Device) -> Any:
        rngs = nnx.Rngs(0)
        layers = nnx.Linear(4, 4, rngs=rngs), jnp.fliplr, nnx.Linear(4, 4, rngs=rngs)
        return backend.place(nnx.Sequential(*layers), device)

    return {"function": build}


def attention_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of modules whose call leaves an array in an attribute, by name."""
    classes = {"attribute": Attentive, "intermediate": Sowing, "variable": Assigning}
    return {name: wrap_mlps(backend, cls, [2, 2, 1]) for name, cls in classes.items()}


def models_with_losses(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that computes its loss itself."""
    return {"module": wrap_mlps(backend, WithLoss, [3, 2])}


def models_with_branches(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that computes with one of two layers."""
    return {"module": wrap_mlps(backend, Branching, [2, 1], [2, 1])}


def models_with_tables(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of an embedding."""
    make = partial(nnx.Embed, 6, 4, rngs=nnx.Rngs(0))
    return {"embedding": partial(_make_there, backend, make)}


def models_with_masks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of modules that are called with ``x`` and ``mask``, by name."""

    def wrap() -> Any:
        x = jnp.ones((1, 3))
        return nnx.bridge.ToNNX(MaskedLinen(), rngs=nnx.Rngs(0)).lazy_init(x, x)

    return {
        "module": lambda device: backend.place(Masked(), device),
        "wrapped linen": lambda device: backend.place(wrap(), device),
    }


def composites(_backend: Any) -> Mapping[str, Any]:
    """Return builders of nodes with static values, each with a function that describes a node."""

    def sparse_array(number: int) -> BCOO:
        dense = jnp.zeros((2 + number, 3)).at[0, 1].set(1.0 + number)
        return BCOO.fromdense(dense)

    def tell(x: BCOO) -> Any:
        return x.shape, x.todense().tolist()

    def scale(number: int) -> Scaled:
        return Scaled(weight=jnp.ones(2), factor=0.5 + number)  # type: ignore[call-arg]

    return {
        "sparse": (sparse_array, tell),
        "struct": (scale, lambda x: (x.weight.tolist(), x.factor)),
    }


def models_without_parameters(_backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a module that doubles its input."""
    return {"module": lambda _device: Doubled()}


class Doubled(nnx.Module):
    """A module without parameters."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


def modules(backend: Any) -> Mapping[str, Callable[[Device, float], Any]]:
    """Return a builder of a D2L ``Module``."""
    return {"module": lambda device, lr: Line(backend.mlp([2, 1], device=device), lr)}


class Line(nnx.Module):
    """A D2L ``Module``."""

    def __init__(self, net: nnx.Module, lr: float) -> None:
        self.net, self.lr = net, lr

    def __call__(self, x: jax.Array) -> jax.Array:
        net: Any = self.net
        return net(x)

    def loss(self, y_hat: jax.Array, y: jax.Array) -> jax.Array:
        return ((y_hat - y) ** 2).mean()

    def training_step(self, batch: Any) -> jax.Array:
        return 2 * self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Any) -> jax.Array:
        return 3 * self.loss(self(*batch[:-1]), batch[-1])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


def _make_there(backend: Any, make: Callable[[], Any], device: Device) -> Any:
    with backend.on(device):
        made = make()
    return backend.place(made, device)  # JAX's arrays are on the device, and uncommitted


def _random_keys() -> Any:
    return jax.random.key(0), jax.random.split(jax.random.key(1))


def _train_module() -> dict[str, Any]:
    """Return a module, and its optimizer after one step."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    return {"model": model, "optimizer": optimizer}


def _train_state() -> Any:
    """Return linen's parameters, with the state of an optimizer after one step."""
    model = linen.Dense(2)
    variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
    momentum = optax.sgd(0.1, momentum=0.9)
    create: Callable[..., Any] = TrainState.create
    state = create(apply_fn=model.apply, params=variables["params"], tx=momentum)
    state = state.replace(step=jnp.zeros((), jnp.int32))
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
