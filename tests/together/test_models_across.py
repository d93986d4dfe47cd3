"""A model takes over the parameters of the same layers in another framework, and computes alike."""

import itertools
from functools import partial

import numpy as np
import pytest

import d2ldev
from d2ldev import CheckpointError

NAMES = ("mxnet", "torch", "jax", "tensorflow", "reference")
PAIRS = list(itertools.permutations(NAMES, 2))
# The frameworks that have convolutions.
FRAMEWORKS = NAMES[:-1]


@pytest.fixture(params=PAIRS, ids=lambda pair: "-to-".join(pair))
def pair(request):
    return tuple(d2ldev.get_backend(name) for name in request.param)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.safetensors"


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_a_loaded_mlp_computes_like_the_saved_one(pair, path, activation):
    source, target = pair
    data = np.random.default_rng(0).normal(size=(7, 5)).astype("float32")
    net = source.mlp([5, 4, 3, 2], activation=activation, seed=1)
    source.save(net, path)
    loaded = target.load_into(target.mlp([5, 4, 3, 2], activation=activation, seed=2), path)
    np.testing.assert_allclose(
        target.to_numpy(loaded(target.asarray(data))),
        source.to_numpy(net(source.asarray(data))),
        rtol=1e-6,
        atol=1e-6,
    )


def test_the_way_there_and_back_changes_no_bit(pair, path):
    source, target = pair
    net = source.mlp([5, 4, 2], seed=1)
    source.save(net, path)
    target.save(target.load_into(target.mlp([5, 4, 2], seed=2), path), path)
    back = source.load_into(source.mlp([5, 4, 2], seed=3), path)
    data = source.asarray(np.ones((2, 5), "float32"))
    np.testing.assert_array_equal(source.to_numpy(back(data)), source.to_numpy(net(data)))


def test_an_mlp_of_other_sizes_is_refused(pair, path):
    source, target = pair
    # As many numbers: they would fit if they were turned.
    source.save(source.mlp([4, 6, 4]), path)
    with pytest.raises(CheckpointError):
        target.load_into(target.mlp([6, 4, 6]), path)


def torch_network(backend, seed):
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(2, 3, (3, 2)), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(18, 4), nn.Tanh(), nn.Linear(4, 2)),
        )


def jax_network(backend, seed):
    import jax
    from flax import nnx

    rngs = nnx.Rngs(seed)
    return nnx.Sequential(
        nnx.Conv(2, 3, (3, 2), padding="VALID", rngs=rngs),
        nnx.relu,
        partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2)),
        partial(jax.lax.collapse, start_dimension=1),
        nnx.Linear(18, 4, rngs=rngs),
        nnx.tanh,
        nnx.Linear(4, 2, rngs=rngs),
    )


def tensorflow_network(backend, seed):
    import keras
    from keras import layers

    def draw(i):
        return keras.initializers.GlorotUniform(seed=seed + i)

    return keras.Sequential(
        [
            keras.Input((6, 7, 2)),
            layers.Conv2D(3, (3, 2), kernel_initializer=draw(0)),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(4, activation="tanh", kernel_initializer=draw(1)),
            layers.Dense(2, kernel_initializer=draw(2)),
        ]
    )


def mxnet_network(backend, seed):
    import mxnet as mx

    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(3, (3, 2), in_channels=2, activation="relu"),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Dense(4, in_units=18, activation="tanh"),
        nn.Dense(2, in_units=4),
    )
    net.initialize()
    for i, parameter in enumerate(net.collect_params().values()):
        parameter.set_data(backend.rand(parameter.shape, seed=seed + i).as_nd_ndarray() - 0.5)
    return net


NETWORKS = {
    "torch": torch_network,
    "jax": jax_network,
    "tensorflow": tensorflow_network,
    "mxnet": mxnet_network,
}


def output(backend, net, images):
    """Return what a network makes of images, with the channels where its framework wants them."""
    if backend.name in ("jax", "tensorflow"):
        images = images.transpose(0, 2, 3, 1)
    x = backend.asarray(np.ascontiguousarray(images))
    return backend.to_numpy(net(x.as_nd_ndarray() if backend.name == "mxnet" else x))


@pytest.mark.parametrize(
    "pair", list(itertools.permutations(FRAMEWORKS, 2)), ids=lambda pair: "-to-".join(pair)
)
def test_a_convolutional_network_computes_alike_though_its_channels_are_elsewhere(pair, path):
    source, target = (d2ldev.get_backend(name) for name in pair)
    images = np.random.default_rng(0).normal(size=(3, 2, 6, 7)).astype("float32")
    net = NETWORKS[source.name](source, 1)
    source.save(net, path)
    loaded = target.load_into(NETWORKS[target.name](target, 50), path)
    np.testing.assert_allclose(
        output(target, loaded, images), output(source, net, images), rtol=1e-5, atol=1e-6
    )
