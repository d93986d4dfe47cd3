"""Set-up for the conformance suite: objects of every kind that ``place`` handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from d2ldev import Device
from d2ldev.framework import Tensor
from d2ldev.framework.testing import Contents, Orders, array_api_of, wrap_mlps

CANNOT = {
    "gradients": "TensorFlow's tapes return gradients, and no variable keeps one",
}

_OPTIMIZERS = {
    "SGD with momentum": partial(keras.optimizers.SGD, 0.1, momentum=0.9),
    "Adam": partial(keras.optimizers.Adam, 0.1),
    "Adagrad": partial(keras.optimizers.Adagrad, 0.1),
}


class Everything(tf.Module):
    """A module that keeps tensors wherever a module can.

    Args:
        make: ``shape -> tensor``, on the module's device.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.weight = tf.Variable(make((3, 3)))
        self.tied = self.weight
        self.frozen = tf.Variable(make((3,)), trainable=False)
        self.plain = make((2,))
        self.kept = {"masks": [tf.Variable(make((2,))), (make((1,)), None, "a string")]}
        self.same = self.kept["masks"][0]
        self.pair = (tf.Variable(make((1,))), {"scale": make((1,))})
        self.inner = [tf.Module()]
        self.inner[0].bias = tf.Variable(make((3,)))
        self.generator = tf.random.Generator.from_seed(1)


class Network(keras.Model):
    """Dense layers with batch normalization and dropout, built with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = _layers()

    def call(self, x: Tensor, training: bool = False) -> Tensor:
        """Map four features to two classes."""
        hidden, norm, dropout, outer = self.parts
        return outer(dropout(norm(hidden(x), training=training), training=training))


class MaskedLayers(keras.Model):
    """A dense layer and a mask of its outputs, built with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3, kernel_initializer=_draw_kernel(0))

    def call(self, x: Tensor, mask: Tensor, training: bool = False) -> Tensor:
        """Map both to ``(n, 3)``."""
        return self.dense(x) * mask


class Branching(keras.Model):
    """A model that computes with one of two, which the number of examples chooses."""

    def __init__(self, large: Any, small: Any) -> None:
        super().__init__()
        self.large, self.small = large, small

    def call(self, x: Tensor) -> Tensor:
        """Map two features to a number."""
        return (self.large if x.shape[0] > 4 else self.small)(x)


class Attentive(keras.Model):
    """A model that leaves its attention weights in attributes, built with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(2, kernel_initializer=_draw_kernel(0))
        self.last = keras.layers.Dense(1, kernel_initializer=_draw_kernel(1))

    def call(self, x: Tensor) -> Tensor:
        """Map ``(n, 2)`` to ``(n, 1)``."""
        self.attention_weights = tf.nn.softmax(self.first(x))
        self.all_weights = [self.attention_weights]
        return self.last(tf.nn.relu(self.first(x)))


class WithLoss(keras.Model):
    """A model that returns its loss if it gets labels, built with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2, kernel_initializer=_draw_kernel(0))

    def call(
        self, x: Any = None, z: Any = None, labels: Any = None, training: bool = False
    ) -> dict[str, Tensor]:
        """Return the logits of ``x``, or of ``2 * z``."""
        logits = self.dense(2 * z if x is None else x)
        if labels is None:
            return {"logits": logits}
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return {"logits": logits, "loss": tf.reduce_mean(losses)}


class Masked(tf.Module):
    """A module with a mask of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.reshape(tf.range(9.0), (3, 3)))

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map both to ``(n, 3)``."""
        return x @ self.weight * mask


class Doubled(tf.Module):
    """A module without variables."""

    def __call__(self, x: Tensor) -> Tensor:
        """Double each number."""
        return 2 * x


class Line(keras.Model):
    """A D2L ``Module``."""

    def __init__(self, net: Any, lr: float) -> None:
        super().__init__()
        self.net, self.lr = net, lr

    def call(self, x: Tensor) -> Tensor:
        """Map two features to a number."""
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        """Return twice the loss."""
        return 2 * tf.reduce_mean((self(*batch[:-1]) - batch[-1]) ** 2)

    def validation_step(self, batch: Any) -> Tensor:
        """Return thrice the loss."""
        return 3 * tf.reduce_mean((self(*batch[:-1]) - batch[-1]) ** 2)

    def configure_optimizers(self) -> Any:
        """Return gradient descent."""
        return keras.optimizers.SGD(self.lr)


def own_tensors(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return calls of TensorFlow that return tensors."""

    def differentiate(x: Tensor) -> Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(x * x)
        return tape.gradient(y, x)

    dlpack = tf.experimental.dlpack
    return {
        **array_api_of(tf.experimental.numpy),
        **array_api_of(tf),
        "full_like": lambda x: keras.ops.full_like(x, 7.0),
        "from_dlpack": lambda x: dlpack.from_dlpack(dlpack.to_dlpack(x)),
        "random": lambda _: tf.random.normal((2, 2)),
        "gradient": differentiate,
        "map": lambda x: tf.vectorized_map(_double, x),
        "compile": tf.function(_double),
        "update": lambda x: tf.tensor_scatter_nd_update(x, [[0]], [[7.0, 7.0]]),
    }


def _double(x: Tensor) -> Tensor:
    return x * 2.0


def samples(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of small objects on a given device, by name."""

    def everything(device: Device) -> Everything:
        with backend.on(device):
            return Everything(lambda shape: backend.rand(shape, seed=len(shape)))

    def layers(device: Device) -> Any:
        """Make a Keras model with statistics, a seed generator, a tied layer and own tensors."""
        with backend.on(device):
            tied = keras.layers.Dense(3)
            noise = keras.layers.Dropout(0.5, seed=1)
            net = keras.Sequential(
                [keras.Input((3,)), tied, keras.layers.BatchNormalization(), noise, tied]
            )
            net.mask = backend.ones(3)
            net.kept = [tf.Variable(backend.zeros(1)), {"scale": backend.ones(1)}]
            return net

    def train(make: Callable[[], Any], device: Device) -> Any:
        """Make a model and its optimizer, after two steps."""
        net = backend.mlp([3, 4, 1], device=device)
        with backend.on(device):
            optimizer = make()
            for seed in (1, 2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(net(backend.rand((5, 3), seed=seed)))
                parameters = net.trainable_variables
                optimizer.apply(tape.gradient(loss, parameters), parameters)
        return {"model": net, "optimizer": optimizer}

    def scratch(device: Device) -> list[tf.Variable]:
        with backend.on(device):
            return [tf.Variable(backend.rand((3, 1), seed=0)), tf.Variable(backend.zeros(1))]

    return {
        "module": everything,
        "layers": layers,
        "scratch parameters": scratch,
        **{name: partial(train, make) for name, make in _OPTIMIZERS.items()},
    }


def buffers(backend: Any) -> Contents:
    """Return builders of objects with variables that are not trained, by name."""

    def build_layer(seed: int, device: Device) -> Any:
        with backend.on(device):
            net = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
            net.layers[0].moving_mean.assign(backend.randn(3, seed=seed))
            net.layers[0].moving_variance.assign(backend.rand(3, seed=seed))
        return net

    def list_statistics(net: Any) -> list[Tensor]:
        (layer,) = net.layers
        return [layer.moving_mean.value, layer.moving_variance.value]

    def build_module(seed: int, device: Device) -> tf.Module:
        module = tf.Module()
        with backend.on(device):
            module.mean = tf.Variable(backend.rand(3, seed=seed), trainable=False)
        return module

    return {
        "batch normalization": (build_layer, list_statistics),
        "module": (build_module, lambda module: [module.mean]),
    }


def ties(backend: Any) -> Contents:
    """Return a builder of a module with one variable under two names."""

    def build(seed: int, device: Device) -> tf.Module:
        module = tf.Module()
        with backend.on(device):
            module.encoder = module.decoder = tf.Variable(backend.rand((3, 3), seed=seed))
        return module

    return {"module": (build, lambda module: [module.encoder, module.decoder])}


def views(backend: Any) -> Contents:
    """Return a builder of a model whose variables others hold, too."""

    def build(seed: int, device: Device) -> Any:
        net = backend.mlp([3, 2], seed=seed, device=device)
        with backend.on(device):
            net.layers[-1].bias.assign(backend.rand(2, seed=seed))
        return net

    return {"mlp": (build, lambda net: [each.value for each in net.variables])}


def optimizer_states(backend: Any) -> Contents:
    """Return builders of optimizers after two steps, by name, with their momenta and means."""

    def build(make: Callable[[], Any], seed: int, device: Device) -> dict[str, Any]:
        net = backend.mlp([3, 4, 1], activation="tanh", device=device)
        with backend.on(device):
            optimizer = make()
            for number in (seed, seed + 1):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(net(backend.rand((5, 3), seed=number)) ** 2)
                parameters = net.trainable_variables
                optimizer.apply(tape.gradient(loss, parameters), parameters)
        return {"model": net, "optimizer": optimizer}

    def list_states(obj: dict[str, Any]) -> list[Tensor]:
        return [x.value for x in obj["optimizer"].variables if len(x.shape)]

    return {
        **{name: (partial(build, make), list_states) for name, make in _OPTIMIZERS.items()},
        "momenta in a list": (partial(build, Listed), lambda obj: obj["optimizer"].momenta),
    }


def parameter_orders(backend: Any) -> Orders:
    """Return builders of layers and an optimizer after two steps, by name."""

    def build(make: Callable[[], Any], order: str, seed: int, device: Device) -> Any:
        with backend.on(device):
            layers = {name: keras.layers.Dense(1, use_bias=False) for name in "ac"}
            for layer in layers.values():
                layer.build((None, 3))
            variables = [layers[name].kernel for name in order]
            optimizer = make()
            optimizer.build(variables)
            for number in (seed, seed + 1):
                kernels = {n: backend.rand((3, 1), seed=2 * number + ord(n)) for n in order}
                optimizer.apply([kernels[name] for name in order], variables)
        return {"model": layers, "optimizer": optimizer}

    def read(obj: dict[str, Any]) -> dict[str, list[Tensor]]:
        named = {name: layer.kernel.path.replace("/", "_") for name, layer in obj["model"].items()}
        inner = getattr(obj["optimizer"], "inner_optimizer", obj["optimizer"])
        found = {
            name: [x.value for x in inner.variables if x.name.startswith(f"{path}_")]
            for name, path in named.items()
        }
        return {name: xs for name, xs in found.items() if xs}

    scaling = keras.optimizers.LossScaleOptimizer
    makers: dict[str, Callable[[], Any]]
    makers = {**_OPTIMIZERS, "scaling": lambda: scaling(keras.optimizers.Adam(0.1))}
    return {name: (partial(build, make), read) for name, make in makers.items()}


def hostile_tensors(_backend: Any) -> Mapping[str, Callable[[], Any]]:
    """Return builders of tensors that few functions accept, by name."""
    return {
        "text": lambda: tf.constant(["a", "b"]),
        "resource": lambda: tf.Variable(1.0).handle,
        "variant": lambda: tf.data.Dataset.range(3)._variant_tensor,
        "quantized": lambda: tf.cast([1.0], tf.qint8),
        "sparse": lambda: tf.sparse.from_dense([[1.0, 0.0]]),
        "ragged": lambda: tf.ragged.constant([[1], [2, 3]]),
        "of a graph": _leak,
        "of a Keras model": lambda: keras.Input((2,)),
        "array of tensors": lambda: tf.TensorArray(tf.float32, 2),
        "slices": lambda: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0])),
    }


def _leak() -> Any:
    """Return a tensor of a finished graph."""
    kept: list[Any] = []

    # AutoGraph would leave a file behind.
    @tf.function(autograph=False)
    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    keep(tf.zeros(2))
    return kept[0]


def networks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of networks with batch normalization and dropout, by name."""
    return {
        "built layers": partial(_network, backend),
        "layers": lambda device: backend.place(keras.Sequential(_layers()), device),
        "subclass": lambda device: backend.place(Network(), device),
    }


def networks_with_batch_norm(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a network with batch normalization and without dropout."""
    return {"built layers": partial(_network, backend, rate=0.0)}


def classifiers(backend: Any) -> Mapping[str, Any]:
    """Return a builder of LeNet, and the shape of an image."""
    return {"lenet": (lambda device: backend.place(lenet(), device), (28, 28, 1))}


def lenet() -> Any:
    """Return a convolution and a dense layer, which map an image to three classes."""
    layers = keras.layers
    convolution = layers.Conv2D(
        6, 5, padding="same", activation="sigmoid", kernel_initializer=_draw_kernel(0)
    )
    dense = layers.Dense(3, kernel_initializer=_draw_kernel(1))
    parts = [convolution, layers.AveragePooling2D(7), layers.Flatten(), dense]
    return keras.Sequential([keras.Input((28, 28, 1)), *parts])


def loops(backend: Any) -> Mapping[str, Any]:
    """Return loops by hand, by name. Another seed may give another rate."""

    def begin(make: Callable[[float], Any], seed: int, device: Device) -> Any:
        hidden, outer = (
            keras.layers.Dense(n, kernel_initializer=_draw_kernel(seed)) for n in (4, 1)
        )
        parts = [keras.Input((3,)), hidden, keras.layers.BatchNormalization(), outer]
        with backend.on(device):
            net = keras.Sequential(parts)
            optimizer = make(seed / 10)
            optimizer.build(net.trainable_variables)
        return {"net": net, "optimizer": optimizer}

    def go_on(device: Device, net: Any, optimizer: Any) -> None:
        with backend.on(device):
            x = backend.rand((8, 3), seed=9)
            for _ in range(3):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(net(x, training=True) ** 2)
                parameters = net.trainable_variables
                optimizer.apply(tape.gradient(loss, parameters), parameters)

    # The bias before the norm has no gradient but rounding errors, which must not become steps.
    adam = partial(keras.optimizers.Adam, epsilon=1e-3)
    makers: dict[str, Callable[[float], Any]] = {
        "layers": adam,
        "momenta in a list": lambda _rate: Listed(),
        "around another": lambda rate: Around(adam(rate)),
    }
    return {name: (partial(begin, make), go_on) for name, make in makers.items()}


class Listed(keras.optimizers.Optimizer):
    """An optimizer with momenta in a list, as variables that Keras does not know."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.05)
        self.momenta: list[tf.Variable] = []

    def build(self, variables: Any) -> None:
        """Make the momenta."""
        if not self.built:
            super().build(variables)
            self.momenta = [tf.Variable(tf.zeros(x.shape)) for x in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Change a variable."""
        momentum = self.momenta[self._get_variable_index(variable)]
        momentum.assign(0.9 * momentum + gradient)
        variable.assign_sub(learning_rate * momentum)


class Around(keras.optimizers.Optimizer):
    """Lookahead: takes half of another optimizer's step."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.05)
        self.inner = inner
        self.slow: list[Any] = []

    def build(self, variables: Any) -> None:
        """Remember the first values of the variables."""
        if not self.built:
            super().build(variables)
            self.inner.build(variables)
            self.slow = [keras.Variable(x, name=f"slow_{i}") for i, x in enumerate(variables)]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Take a step of the other optimizer."""
        variables = list(trainable_variables or self._trainable_variables)
        self.build(variables)
        found = self.inner.apply(grads, variables)
        for slow, variable in zip(self.slow, variables, strict=True):
            slow.assign((slow + variable) / 2)
            variable.assign(slow)
        return found


def own_optimizers(_backend: Any) -> Mapping[str, Callable[[Any], Any]]:
    """Return builders of optimizers that count steps, for their scale or their rate."""
    optimizers = keras.optimizers
    return {
        # So large that float32 overflows. The scale decides which steps are left out.
        "scaling": lambda _net: optimizers.LossScaleOptimizer(
            optimizers.Adam(0.01), initial_scale=2.0**127, dynamic_growth_steps=3
        ),
        "schedule": lambda _net: optimizers.SGD(optimizers.schedules.CosineDecay(0.1, 16)),
        "momenta in a list": lambda _net: Listed(),
        "around another": lambda _net: Around(optimizers.Adam(0.05)),
    }


def untrainable_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of layers without anything to train."""

    def freeze(device: Device) -> Any:
        net = backend.mlp([2, 1], device=device)
        net.trainable = False
        return net

    return {"layers": freeze}


def freezables(backend: Any) -> Mapping[str, Any]:
    """Return builders of a network, and functions that freeze or thaw a part, by name."""

    def freeze(number: int, net: Any, is_frozen: bool) -> None:
        net.layers[number].trainable = not is_frozen

    build = partial(_network, backend)
    return {"parameters": (build, partial(freeze, 0)), "statistics": (build, partial(freeze, 1))}


def modes(backend: Any) -> Mapping[str, Any]:
    """Return a builder of a network with a frozen layer in an inner model, and its reader.

    Keras gives the mode itself to each call.
    """

    def build(device: Device) -> Any:
        *inner, last = _layers()
        net = keras.Sequential([keras.Input((4,)), keras.Sequential(inner), last])
        inner[1].trainable = False
        return backend.place(net, device)

    def read(net: Any) -> list[bool]:
        return [layer.trainable for layer in (*net.layers, *net.layers[0].layers)]

    return {"one frozen": (build, read)}


@keras.saving.register_keras_serializable("d2ldev_tensorflow")
class Reversing(keras.layers.Layer):  # type: ignore[misc, unused-ignore]
    """A layer that reverses the order of the columns."""

    def call(self, x: Any) -> Any:
        """Return the columns from the last to the first."""
        return keras.ops.flip(x, -1)


def models_with_permutations(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of dense layers with a ``Reversing`` between them."""

    def build(device: Device) -> Any:
        first, last = (keras.layers.Dense(4, kernel_initializer=_draw_kernel(i)) for i in (0, 1))
        return backend.place(
            keras.Sequential([keras.Input((4,)), first, Reversing(), last]), device
        )

    return {"own layer": build}


def attention_models(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of models whose call leaves a tensor in an attribute, by name."""
    return {"model": lambda device: backend.place(Attentive(), device)}


def models_with_losses(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a model that computes its loss itself."""
    return {"model": lambda device: backend.place(WithLoss(), device)}


def models_with_branches(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a model that computes with one of two layers."""
    return {"model": wrap_mlps(backend, Branching, [2, 1], [2, 1])}


def models_with_tables(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of an embedding."""

    def build(device: Device) -> Any:
        layer = keras.layers.Embedding(6, 4, embeddings_initializer=_draw_kernel(0))
        return backend.place(keras.Sequential([keras.Input((None,)), layer]), device)

    return {"embedding": build}


def models_with_masks(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of models that are called with ``x`` and ``mask``, by name."""
    return {
        "layers": lambda device: backend.place(MaskedLayers(), device),
        "module": lambda device: backend.place(Masked(), device),
    }


def composites(_backend: Any) -> Mapping[str, Any]:
    """Return builders of composite tensors, and functions that read one, by name."""

    def make_ragged(number: int) -> tf.RaggedTensor:
        return tf.ragged.constant([[[1.0, 2.0], [3.0]], [[1.0], [2.0, 4.0]]][number])

    def slices(number: int) -> tf.IndexedSlices:
        shape = tf.constant([9 - number, 3])
        return tf.IndexedSlices(tf.ones((1, 3)), tf.constant([number]), shape)

    def tell(x: tf.IndexedSlices) -> Any:
        return [part.numpy().tolist() for part in (x.values, x.indices, x.dense_shape)]

    return {"ragged": (make_ragged, tf.RaggedTensor.to_list), "slices": (slices, tell)}


def models_without_parameters(_backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return builders of models that double their input, by name."""

    def functional(_device: Device) -> Any:
        x = keras.Input((2,))
        return keras.Model(x, 2 * x)

    return {"functional": functional, "module": lambda _device: Doubled()}


def modules(backend: Any) -> Mapping[str, Callable[[Device, float], Any]]:
    """Return a builder of a D2L ``Module``, by name."""
    return {"module": lambda device, lr: Line(backend.mlp([2, 1], device=device), lr)}


def models_of_sequences(backend: Any) -> Mapping[str, Callable[[Device], Any]]:
    """Return a builder of a sequence model; Keras refuses a third dimension for an MLP."""

    def dense(device: Device) -> Any:
        layer = keras.layers.Dense(3, kernel_initializer=_draw_kernel(0))
        return backend.place(keras.Sequential([keras.Input((None, 2)), layer]), device)

    return {"layers": dense}


def _network(backend: Any, device: Device, rate: float = 0.3) -> Any:
    return backend.place(keras.Sequential([keras.Input((4,)), *_layers(rate)]), device)


def _layers(rate: float = 0.3) -> list[Any]:
    layers = keras.layers
    hidden = layers.Dense(8, kernel_initializer=_draw_kernel(0))
    outer = layers.Dense(2, kernel_initializer=_draw_kernel(1))
    return [hidden, layers.BatchNormalization(), layers.Dropout(rate, seed=1), outer]


def _draw_kernel(seed: int) -> Any:
    """Return an initializer that does not use Keras's random state."""
    return keras.initializers.GlorotUniform(seed=seed)
