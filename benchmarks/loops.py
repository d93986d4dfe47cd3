"""Training loops as each framework's own tutorial writes them, and LeNet in its own layers.

Each waits for the device once per epoch, when it reads the last loss, as the fastest of them do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

LEARNING_RATE = 0.1

Batches = list[tuple[Any, Any]]
Epoch = Callable[[Batches], object]


class Framework(NamedTuple):
    """What is measured of one framework.

    Args:
        lenet: makes LeNet, as D2L has it (section 7.6).
        is_channels_last: whether its convolutions take images of shape ``(n, 28, 28, 1)``.
        loops: the name of a hand-written loop -> makes an epoch of it for a model.
        fits: the name of the framework's own method that trains -> the same.
    """

    lenet: Callable[[], Any]
    is_channels_last: bool
    loops: dict[str, Callable[[Any], Epoch]]
    fits: Mapping[str, Callable[[Any], Epoch]] = MappingProxyType({})


def torch_framework() -> Framework:
    """Follow https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html."""
    import torch
    from torch import nn

    def lenet() -> Any:
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Sigmoid(), nn.AvgPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.Sigmoid(), nn.Linear(120, 84), nn.Sigmoid()),
            nn.Linear(84, 10),
        )

    def loop(model: Any) -> Epoch:
        loss_fn = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

        def epoch(batches: Batches) -> object:
            model.train()
            for x, y in batches:
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return loss.item()

        return epoch

    return Framework(lenet, False, {"zero_grad, backward, step": loop})


def jax_framework() -> Framework:
    """Follow https://flax.readthedocs.io/en/latest/nnx_basics.html, and its performance guide."""
    import jax
    import optax
    from flax import nnx

    def pool(x: Any) -> Any:
        return nnx.avg_pool(x, (2, 2), (2, 2))

    def lenet() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            *(nnx.Conv(1, 6, (5, 5), padding=2, rngs=rngs), jax.nn.sigmoid, pool),
            *(nnx.Conv(6, 16, (5, 5), padding=0, rngs=rngs), jax.nn.sigmoid, pool),
            lambda x: x.reshape(x.shape[0], -1),
            *(nnx.Linear(400, 120, rngs=rngs), jax.nn.sigmoid),
            *(nnx.Linear(120, 84, rngs=rngs), jax.nn.sigmoid, nnx.Linear(84, 10, rngs=rngs)),
        )

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    def transform(model: Any) -> Epoch:
        optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
            optimizer.update(model, gradients)
            return loss

        def epoch(batches: Batches) -> object:
            for x, y in batches:
                loss = step(model, optimizer, x, y)
            return float(loss)

        return epoch

    def functional(model: Any) -> Epoch:
        optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)
        graph, state = nnx.split((model, optimizer))

        @jax.jit
        def step(state: Any, x: Any, y: Any) -> Any:
            model, optimizer = nnx.merge(graph, state)
            loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer)), loss

        def epoch(batches: Batches) -> object:
            nonlocal state
            for x, y in batches:
                state, loss = step(state, x, y)
            return float(loss)

        return epoch

    return Framework(lenet, True, {"@nnx.jit": transform, "jax.jit of the split": functional})


def tensorflow_framework() -> Framework:
    """Follow https://www.tensorflow.org/tutorials/quickstart/advanced."""
    import keras
    import tensorflow as tf

    def loop(model: Any) -> Epoch:
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)

        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_object(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def epoch(batches: Batches) -> object:
            for x, y in batches:
                loss = step(x, y)
            return float(loss)

        return epoch

    def fit(model: Any) -> Epoch:
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(LEARNING_RATE), loss_object)

        def epoch(batches: Batches) -> object:
            return model.fit(_Sequence(batches), epochs=1, verbose=0, shuffle=False)

        class _Sequence(keras.utils.PyDataset):
            """Batches that are tensors already, as Keras takes them."""

            def __init__(self, batches: Batches) -> None:
                super().__init__()
                self._batches = batches

            def __len__(self) -> int:
                return len(self._batches)

            def __getitem__(self, i: int) -> Any:
                return self._batches[i]

        return epoch

    return Framework(keras_lenet, True, {"@tf.function": loop}, {"model.fit": fit})


def keras_lenet(shape: tuple[int, ...] = (28, 28, 1)) -> Any:
    """Return LeNet in the layers of Keras, on whichever framework Keras runs."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(6, 5, activation="sigmoid", padding="same"),
            layers.AvgPool2D(2, 2),
            layers.Conv2D(16, 5, activation="sigmoid"),
            layers.AvgPool2D(2, 2),
            layers.Flatten(),
            layers.Dense(120, activation="sigmoid"),
            layers.Dense(84, activation="sigmoid"),
            layers.Dense(10),
        ]
    )


def mxnet_framework() -> Framework:
    """Follow https://mxnet.apache.org/versions/1.9.1/api/python/docs/tutorials/packages/gluon/."""
    from d2ldev_mxnet.framework import mx

    mx.npx.set_np()
    nn = mx.gluon.nn

    def lenet() -> Any:
        net = nn.HybridSequential()
        net.add(
            nn.Conv2D(6, 5, padding=2, activation="sigmoid"),
            nn.AvgPool2D(2, 2),
            nn.Conv2D(16, 5, activation="sigmoid"),
            nn.AvgPool2D(2, 2),
            nn.Dense(120, activation="sigmoid"),
            nn.Dense(84, activation="sigmoid"),
            nn.Dense(10),
        )
        net.initialize(mx.init.Xavier())
        return net

    def loop(model: Any) -> Epoch:
        loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        loss_function.hybridize()
        options = {"learning_rate": LEARNING_RATE}
        trainer = mx.gluon.Trainer(model.collect_params(), "sgd", options)

        def epoch(batches: Batches) -> object:
            for x, y in batches:
                with mx.autograd.record():
                    loss = loss_function(model(x), y)
                loss.backward()
                trainer.step(len(y))
            return float(loss.mean())

        return epoch

    return Framework(lenet, False, {"record, backward, step": loop})


FRAMEWORKS: dict[str, Callable[[], Framework]] = {
    "torch": torch_framework,
    "jax": jax_framework,
    "tensorflow": tensorflow_framework,
    "mxnet": mxnet_framework,
}
