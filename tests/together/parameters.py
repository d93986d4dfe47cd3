"""The parameters of ``backend.mlp``, handed over as NumPy arrays."""

import itertools
from collections.abc import Sequence

import numpy as np

Layers = Sequence[tuple[np.ndarray, np.ndarray]]
"""The weight, of shape (outputs, inputs), and the bias of each layer."""


def draw(sizes: Sequence[int], seed: int) -> Layers:
    """Draw weights uniform in +-1/sqrt(inputs), and biases that are not zero."""
    random = np.random.default_rng(seed)
    layers = []
    for n_in, n_out in itertools.pairwise(sizes):
        weight, bias = random.uniform(-1, 1, (n_out, n_in)), random.uniform(-0.1, 0.1, n_out)
        layers.append(((weight / np.sqrt(n_in)).astype("float32"), bias.astype("float32")))
    return layers


def mlp_of(backend, layers: Layers, activation: str = "tanh"):
    """Return an MLP of a framework with these parameters, on the CPU."""
    sizes = [layers[0][0].shape[1], *(len(bias) for _, bias in layers)]
    net = backend.mlp(sizes, activation=activation)
    return _HAND_OVER[backend.name](backend, net, layers)


def _torch(backend, net, layers):
    flat = [array for layer in layers for array in layer]
    names = net.state_dict()
    net.load_state_dict({n: backend.asarray(x) for n, x in zip(names, flat, strict=True)})
    return net


def _jax(backend, net, layers):
    linear = [layer for layer in net.layers if hasattr(layer, "kernel")]
    for layer, (weight, bias) in zip(linear, layers, strict=True):
        layer.kernel[...] = backend.asarray(weight.T)
        layer.bias[...] = backend.asarray(bias)
    return net


def _tensorflow(backend, net, layers):
    net.set_weights([array for weight, bias in layers for array in (weight.T, bias)])
    return net


def _mxnet(backend, net, layers):
    flat = [array for layer in layers for array in layer]
    for parameter, array in zip(net.collect_params().values(), flat, strict=True):
        parameter.set_data(backend.asarray(array))
    return net


def _reference(backend, net, layers):
    for own, (weight, bias) in zip(net.layers, layers, strict=True):
        own["weight"], own["bias"] = backend.asarray(weight), backend.asarray(bias)
    return net


_HAND_OVER = {
    "torch": _torch,
    "jax": _jax,
    "tensorflow": _tensorflow,
    "mxnet": _mxnet,
    "reference": _reference,
}
