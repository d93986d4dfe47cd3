"""A resumed run goes on with the order that a ``DataLoader`` would have had."""

import numpy as np
import pytest
import torch
from torch.utils import data

from d2ldev import CheckpointError
from d2ldev.training import order
from d2ldev.training.order import Order
from d2ldev.training.trainer import Trainer

SIZE = 10
DATASET = data.TensorDataset(torch.arange(SIZE).float()[:, None], torch.zeros(SIZE, 1))


class Streamed(data.IterableDataset):
    """Its order depends on how often it was begun."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        chosen = np.random.default_rng(self.epoch).permutation(SIZE)
        self.epoch += 1
        return (DATASET[i] for i in chosen)


class OwnSampler(data.Sampler):
    """It has random numbers that torch does not know of."""

    def __init__(self):
        self.random = np.random.default_rng(4)

    def __iter__(self):
        return iter(self.random.permutation(SIZE).tolist())

    def __len__(self):
        return SIZE


class OwnLoader(data.DataLoader):
    """It has an order that is none of torch's."""

    epoch = 0

    def __iter__(self):
        chosen = np.random.default_rng(self.epoch).permutation(SIZE)
        self.epoch += 1
        return iter([DATASET[int(i)] for i in chosen])


class Augmented(data.Dataset):
    """It draws in the process that loads it."""

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        x, y = DATASET[i]
        return x + torch.rand(()), y


def seeded():
    return torch.Generator().manual_seed(3)


WEIGHTS = torch.ones(SIZE)
READ = {
    "torch's generator": lambda: data.DataLoader(DATASET, shuffle=True),
    "its own generator": lambda: data.DataLoader(DATASET, shuffle=True, generator=seeded()),
    "a sampler's": lambda: data.DataLoader(
        DATASET, sampler=data.RandomSampler(DATASET, generator=seeded())
    ),
    "weights": lambda: data.DataLoader(
        DATASET, sampler=data.WeightedRandomSampler(WEIGHTS, SIZE, generator=seeded())
    ),
    "a batch sampler's": lambda: data.DataLoader(
        DATASET,
        batch_sampler=data.BatchSampler(
            data.SubsetRandomSampler(range(SIZE), generator=seeded()), 3, drop_last=True
        ),
    ),
    "loaded in bulk": lambda: data.DataLoader(
        DATASET,
        batch_size=None,
        sampler=data.BatchSampler(data.RandomSampler(DATASET, generator=seeded()), 3, False),
    ),
    "augmented": lambda: data.DataLoader(Augmented(), 4, shuffle=True, generator=seeded()),
    "workers": lambda: data.DataLoader(
        Augmented(), 4, shuffle=True, generator=seeded(), num_workers=1
    ),
}
GONE_THROUGH = {
    "workers that live on": lambda: data.DataLoader(
        Augmented(), 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "a sampler of the user's in bulk": lambda: data.DataLoader(
        DATASET, batch_size=None, sampler=data.BatchSampler(OwnSampler(), 3, False)
    ),
    "a loader of the user's": lambda: OwnLoader(DATASET),
    "streamed": lambda: data.DataLoader(Streamed()),
    "a sampler of the user's": lambda: data.DataLoader(DATASET, sampler=OwnSampler()),
}
ALL = READ | GONE_THROUGH


@pytest.fixture(autouse=True)
def _torchs_generator():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


class Recording(Trainer):
    """A trainer that notes its batches."""

    def prepare_batch(self, batch):
        self.seen.append(batch[0].flatten().tolist())
        return super().prepare_batch(batch)


def run(backend, loader, path, epochs, **options):
    torch.manual_seed(5)
    trainer = Recording(epochs, backend=backend)
    trainer.seen = []
    trainer.fit(backend.mlp([1, 1]), loader, lr=1e-3, checkpoint=path, **options)
    return trainer.seen


@pytest.mark.parametrize("name", ALL)
def test_the_order_goes_on_in_another_process(torch_backend, tmp_path, name):
    """With a loader that is made anew, and torch's random numbers that begin anew."""
    unbroken = run(torch_backend, ALL[name](), tmp_path / "unbroken", 3)
    before = run(torch_backend, ALL[name](), tmp_path / "run", 2)
    rest = run(torch_backend, ALL[name](), tmp_path / "run", 3, resume=True)
    assert before + rest == unbroken
    assert rest not in (before[: len(rest)], before[len(rest) :])


@pytest.mark.parametrize("name", READ)
def test_a_loader_that_torch_knows_is_not_gone_through(torch_backend, tmp_path, name, monkeypatch):
    run(torch_backend, ALL[name](), tmp_path / "run", 2)
    monkeypatch.setattr(Order, "_go_through", lambda *_: pytest.fail("it was gone through"))
    assert run(torch_backend, ALL[name](), tmp_path / "run", 3, resume=True) != []


@pytest.mark.parametrize("name", GONE_THROUGH)
def test_what_torch_does_not_know_is_gone_through(torch_backend, tmp_path, name):
    run(torch_backend, ALL[name](), tmp_path / "run", 2)
    again = ALL[name]()
    run(torch_backend, again, tmp_path / "run", 3, resume=True)
    assert order._passes[id(again)] == 3


def test_a_loader_with_fewer_generators_is_refused(torch_backend, tmp_path):
    run(torch_backend, READ["its own generator"](), tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match="the order of a DataLoader"):
        run(torch_backend, READ["torch's generator"](), tmp_path / "run", 3, resume=True)


@pytest.mark.parametrize("state", [None, 3, {}, {"default": "00", "own": [], "epochs": []}])
def test_what_is_no_state_of_generators_is_refused(state):
    order = Order(READ["torch's generator"]())
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="the order of a DataLoader"):
        order.checked({**order.state(), "state": state})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_epoch_of_a_distributed_sampler_goes_on(torch_backend, tmp_path):
    """Which the user's own callback tells it, as ever."""

    def numbered_run(epochs, path, **options):
        sampler = data.DistributedSampler(DATASET, num_replicas=1, rank=0, seed=1)
        trainer = Recording(
            epochs, backend=torch_backend, callback=lambda epoch, _: sampler.set_epoch(epoch + 1)
        )
        trainer.seen = []
        loader = data.DataLoader(DATASET, sampler=sampler)
        trainer.fit(torch_backend.mlp([1, 1]), loader, lr=1e-3, checkpoint=path, **options)
        return trainer.seen

    unbroken = numbered_run(4, tmp_path / "unbroken")
    before = numbered_run(2, tmp_path / "run")
    assert before + numbered_run(4, tmp_path / "run", resume=True) == unbroken
    assert unbroken[:SIZE] != unbroken[SIZE : 2 * SIZE]
