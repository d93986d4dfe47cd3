"""A loader of one framework feeds the training of another."""

import itertools
import warnings

import numpy as np
import pytest
from parameters import draw, mlp_of

import d2ldev
from d2ldev import Trainer

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
# MXNet's loader asks SciPy for a name that has moved.
pytestmark = pytest.mark.filterwarnings("ignore:Please import .csr_matrix.:DeprecationWarning")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)

INPUTS = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")
LABELS = (np.argmax(INPUTS[:, :3], axis=1)).astype("int64")


# Frameworks are imported in functions: MXNet has to be the first, which ``conftest.py`` sees to.
def _of_torch():
    import torch

    data = torch.utils.data.TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(LABELS))
    return torch.utils.data.DataLoader(data, batch_size=4)


def _of_tensorflow():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(4)


def _of_mxnet():
    from mxnet import gluon

    return gluon.data.DataLoader(gluon.data.ArrayDataset(INPUTS, LABELS), batch_size=4)


LOADERS = {"torch": _of_torch, "tf.data": _of_tensorflow, "gluon": _of_mxnet}
BATCHES = [(INPUTS[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]


def losses(framework, data, num_gpus):
    backend = d2ldev.get_backend(framework)
    trainer = Trainer(3, num_gpus, backend=backend)
    with backend.strict():
        history = trainer.fit(
            mlp_of(backend, draw([4, 8, 3], 0)), data, loss="cross_entropy", optimizer="adam"
        )
    assert set(backend.placement(trainer.model).values()) == {trainer.device}
    return history["loss"]


@pytest.fixture(scope="module", autouse=True)
def _all_have_trained():
    """The first training leaves its own traces, which are no test's leaks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for framework, make in itertools.product(FRAMEWORKS, LOADERS.values()):
            losses(framework, make(), 1)


@frameworks
@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader_gives_the_same_losses_as_its_arrays(framework, make, num_gpus):
    assert losses(framework, make(), num_gpus) == losses(framework, BATCHES, num_gpus)
