"""What takes more than one call of a framework: by hand, as one writes it without d2ldev."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batches import walk


def jax_names() -> dict[str, Any]:
    """Return ``by_hand``, which places a model of Flax's."""
    import jax
    from flax import nnx

    def by_hand(model: Any, target: Any) -> None:
        nnx.update(model, jax.device_put(nnx.state(model), target))

    return {"jax": jax, "jnp": jax.numpy, "by_hand": by_hand}


def tensorflow_names() -> dict[str, Any]:
    """Return ``identity`` of a nesting, ``ones``, and ``by_hand``, which places a model."""
    import tensorflow as tf

    def identity(value: Any, target: str) -> Any:
        with tf.device(target):
            return tf.nest.map_structure(tf.identity, value)

    def ones(target: str, shape: Any = (2, 3)) -> Any:
        with tf.device(target):
            return tf.ones(shape)

    def by_hand(model: Any, target: str) -> None:
        with tf.device(target):
            for variable in model.variables:
                variable._value = tf.Variable(variable._value)

    return {"identity": identity, "ones": ones, "by_hand": by_hand}


def torch_creation(native: Any) -> Callable[[], Any]:
    """Return what makes four ones on a device."""
    import torch

    return lambda: torch.ones(4, device=native)


def jax_creation(native: Any) -> Callable[[], Any]:
    """Return what makes four ones on a device."""
    import jax.numpy as jnp

    return lambda: jnp.ones(4, device=native)


def tensorflow_creation(native: Any) -> Callable[[], Any]:
    """Return what makes four ones on a device."""
    ones = tensorflow_names()["ones"]
    return lambda: ones(native, 4)


def mxnet_creation(native: Any) -> Callable[[], Any]:
    """Return what makes four ones on a device."""
    import mxnet as mx

    return lambda: mx.np.ones(4, ctx=native)


CREATIONS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "torch": torch_creation,
    "jax": jax_creation,
    "tensorflow": tensorflow_creation,
    "mxnet": mxnet_creation,
}


def torch_copy(native: Any) -> Callable[[Any], Any]:
    """Return what copies a nesting to a device; Python goes on if its memory is pinned."""
    return lambda value: walk(value, lambda x: x.to(native, non_blocking=True))


def jax_copy(native: Any) -> Callable[[Any], Any]:
    """Return what copies a nesting to a device."""
    import jax

    return lambda value: jax.device_put(value, native)


def tensorflow_copy(native: Any) -> Callable[[Any], Any]:
    """Return what copies a nesting to a device."""
    identity = tensorflow_names()["identity"]
    return lambda value: identity(value, native)


def mxnet_copy(native: Any) -> Callable[[Any], Any]:
    """Return what copies a nesting to a device."""
    return lambda value: walk(value, lambda x: x.as_in_ctx(native))


COPIES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "torch": torch_copy,
    "jax": jax_copy,
    "tensorflow": tensorflow_copy,
    "mxnet": mxnet_copy,
}


def pins(backend: Any) -> bool:
    """Return whether memory is pinned for the backend's GPUs: by PyTorch, for those with queues."""
    has_gpu = backend.name == "torch" and backend.num_gpus() > 0
    return has_gpu and backend.platform("gpu:0") in ("cuda", "rocm", "xpu")


def pin(backend: Any, value: Any) -> Any:
    """Return a nesting of the CPU's tensors in pinned memory, or as it is where none is pinned."""
    return walk(value, lambda x: x.pin_memory()) if pins(backend) else value
