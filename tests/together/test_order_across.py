"""A run whose batches another framework's loader makes goes on with the order that it had."""

import random

import mxnet as mx
import numpy as np
import pytest

import d2ldev
from d2ldev import Trainer

pytestmark = [
    # Gluon's loaders themselves call arrays by a name that MXNet has given up, and ask SciPy for
    # one that has moved.
    pytest.mark.filterwarnings("ignore:ndarray.as_in_context has been renamed"),
    pytest.mark.filterwarnings("ignore:Please import .csr_matrix.:DeprecationWarning"),
]
NAMES = ("mxnet", "torch", "jax", "tensorflow", "reference")
X = np.arange(12, dtype="float32")[:, None]
Y = np.sin(X)


# Frameworks are imported in functions: MXNet has to be the first, which ``conftest.py`` sees to.
def torchs(**options):
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    dataset = TensorDataset(torch.tensor(X), torch.tensor(Y))
    return DataLoader(dataset, 4, shuffle=True, **options)


def torchs_with_a_generator():
    import torch

    return torchs(generator=torch.Generator().manual_seed(1))


def gluons():

    return mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(X, Y), 4, shuffle=True)


@pytest.fixture(scope="module", autouse=True)
def _all_have_trained():
    """The first training leaves its own traces, which are no test's leaks."""
    for name in NAMES:
        backend = d2ldev.get_backend(name)
        Trainer(1, backend=backend).fit(backend.mlp([1, 1]), [(X, Y)])


@pytest.fixture(autouse=True)
def _random_numbers_are_left_alone():
    import torch

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


class Recording(Trainer):
    def prepare_batch(self, batch):
        batch = super().prepare_batch(batch)
        self.seen.append(self.backend.to_numpy(batch[0]).flatten().tolist())
        return batch


def run(backend, loader, path, epochs, **options):
    import torch

    torch.manual_seed(5)
    np.random.seed(5)
    trainer = Recording(epochs, backend=backend)
    trainer.seen = []
    trainer.fit(backend.mlp([1, 1]), loader, lr=1e-4, checkpoint=path, **options)
    return trainer.seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [torchs, torchs_with_a_generator, gluons])
def test_the_order_goes_on_in_another_process(make, name, tmp_path):
    backend = d2ldev.get_backend(name)
    unbroken = run(backend, make(), tmp_path / "unbroken", 4)
    before = run(backend, make(), tmp_path / "run", 2)
    rest = run(backend, make(), tmp_path / "run", 4, resume=True)
    assert before + rest == unbroken
    assert rest[:3] not in (before[:3], before[3:])
