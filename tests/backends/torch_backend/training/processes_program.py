"""Runs of training whose results do not depend on how many processes they are made in.

As a program it makes all of them, and keeps what this process has found in the file that its
argument names, with its rank at the end.
"""

import os
import pickle
import shutil
import sys
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import d2ldev
from d2ldev import Trainer

RANK = int(os.environ.get("RANK", "0"))


def batches(sizes=(5, 5, 4, 1), features=3, seed=0):
    """Return batches of three classes; several processes cannot share them evenly."""
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=(n, features)).astype("float32"), random.integers(0, 3, n))
        for n in sizes
    ]


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


class Branches(torch.nn.Module):
    """A model that uses a part only for some examples, and another part never."""

    def __init__(self):
        super().__init__()
        self.common, self.rare, self.never = (torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        of_rare = x[:, 0] > 1
        if not of_rare.any():
            return self.common(x)
        return torch.where(of_rare[:, None], self.rare(x), self.common(x))


class Own(torch.nn.Module):
    """A model that gives its loss itself."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[-1])

    validation_step = training_step


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class ScaledLoss(torch.nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, prediction, y):
        return torch.nn.functional.cross_entropy(prediction * self.scale, y)


class OfRows(torch.nn.Module):
    """A model of the sums of rows that have several lengths."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(torch.stack([rows.sum(0) for rows in x.unbind()]))


def batches_of_rows():
    """Return batches of nested tensors, with the labels of ``batches``."""
    return [
        (
            torch.nested.nested_tensor(
                [torch.from_numpy(row).repeat(1 + i % 3, 1) for i, row in enumerate(x)],
                layout=torch.jagged,
            ),
            y,
        )
        for x, y in batches()
    ]


def _seed(make):
    torch.manual_seed(0)
    return make()


def _fit(net, data=None, epochs=3, *, val_data=None, backend="torch", num_gpus=0, **options):
    of_trainer = ("gradient_clip_val", "accumulate_grad_batches", "precision", "callbacks")
    given = {name: options.pop(name) for name in of_trainer if name in options}
    reads_shard = options.pop("reads_shard", False)
    trainer = Trainer(epochs, num_gpus, backend=backend, **given)
    if not any(torch.nn.parameter.is_lazy(x) for x in net.parameters()):
        with torch.no_grad():
            for x in net.parameters():  # all begin with the parameters of rank 0
                x += RANK
    defaults = {"lr": 0.1}
    if "optimizer" in options and not isinstance(options["optimizer"], str):
        defaults = {}
    if not hasattr(net, "training_step"):
        defaults |= {"loss": "cross_entropy", "metrics": ["accuracy"]}
    data = batches() if data is None else data
    if reads_shard:
        data, val_data = trainer.shard_data(data), trainer.shard_data(val_data)
    history = trainer.fit(net, data, val_data, **(defaults | options))
    return _values(trainer.model), history


def _values(net):
    return {name: x.detach().cpu().numpy().copy() for name, x in net.state_dict().items()}


def _with_thawing():
    net = mlp()
    net[0].requires_grad_(False)

    def on_epoch_end(epoch, history):
        net[0].requires_grad_(epoch == 0)

    return _fit(net, callbacks=on_epoch_end)


def _with_overflow():
    # Large in the last example of the second batch, which is not the part of rank 0.
    data = batches((6, 6, 6))
    data[1][0][-1] = 1e5
    return _fit(mlp(), data, precision="fp16", lr=0.01)


def _lbfgs():
    net = mlp()
    # Few iterations: LBFGS is unstable on batches, and rounding grows in it.
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    return _fit(net, batches((14,)), 2, optimizer=optimizer)


def _with_trained_loss():
    net, loss = mlp(), ScaledLoss()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    values, history = _fit(net, loss=loss, optimizer=optimizer)
    return values | {"scale": loss.scale.detach().numpy().copy()}, history


def _with_used_optimizer():
    """Train with momentum that only rank 0 has."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 + RANK, momentum=0.9)
    if RANK == 0:
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return _fit(net, optimizer=optimizer)


def _lazy():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return _fit(net, optimizer="adam")


def _load(*, has_generator, **options):
    """Train on shuffled loaders, which would have another order in each process."""
    net = mlp()

    def loader(seed):
        ((x, y),) = batches((13,), seed=seed)
        generator = torch.Generator().manual_seed(RANK) if has_generator else None
        examples = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return DataLoader(examples, 5, shuffle=True, generator=generator)

    torch.manual_seed(RANK)
    return _fit(net, loader(0), val_data=loader(1), **options)


RUNS = {
    "adamw, accumulated": lambda: _fit(
        mlp(), optimizer="adamw", lr=0.02, accumulate_grad_batches=3, gradient_clip_val=0.05
    ),
    "a part that few batches use": lambda: _fit(_seed(Branches), optimizer="adamw", lr=0.02),
    "such a part, accumulated": lambda: _fit(
        _seed(Branches), optimizer="adamw", lr=0.02, accumulate_grad_batches=2
    ),
    "bf16": lambda: _fit(mlp(), precision="bf16"),
    "fp16 with a step left out": _with_overflow,
    "fp16, accumulated": lambda: _fit(mlp(), precision="fp16", accumulate_grad_batches=3),
    "its own training_step": lambda: _fit(_seed(Own), optimizer="adam", lr=0.02),
    "ties": lambda: _fit(_seed(Tied)),
    "rows of several lengths": lambda: _fit(_seed(OfRows), batches_of_rows()),
    "lazy modules": _lazy,
    "compiled": lambda: _fit(torch.compile(mlp(), backend="eager")),
    "thawed in a callback": _with_thawing,
    "lbfgs": _lbfgs,
    "a loss that is trained": _with_trained_loss,
    "a used optimizer": _with_used_optimizer,
    "a loader": lambda: _load(has_generator=False),
    "a loader with a generator": lambda: _load(has_generator=True),
    "a part of a loader": lambda: _load(has_generator=False, reads_shard=True),
    "a part of a loader with a generator": lambda: _load(has_generator=True, reads_shard=True),
}


NORMALIZED = batches((8, 8))


def normalize():
    """Return a model with a batch normalisation."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )


def masks():
    """Return which inputs a layer of dropout has left for each of 12 examples."""
    net = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(32, 12, bias=False))
    torch.nn.init.zeros_(net[1].weight)

    def own_output(prediction, y):
        return prediction.gather(1, y.long()[:, None]).mean()

    data = [(np.ones((12, 32), "float32"), np.arange(12))]
    Trainer(1, 0, backend="torch").fit(net, data, loss=own_output)
    return (net[1].weight != 0).int().tolist()


def resume(path):
    """Return what a run with dropout has learned, and one that goes on within its second epoch."""

    def fit(file, **options):
        torch.manual_seed(RANK)
        parts = torch.nn.Linear(3, 8), torch.nn.Dropout(), torch.nn.Linear(8, 3)
        options = {"checkpoint": file, "checkpoint_every": 2} | options
        return _fit(torch.nn.Sequential(*parts), **options)[0]

    def on_step_end(step, loss):
        if step == 6 and RANK == 0:
            shutil.copy(f"{path}.run", f"{path}.broken")

    unbroken = fit(f"{path}.run", callbacks=on_step_end)
    return unbroken, fit(f"{path}.broken", resume=True)


def main(path):
    warnings.simplefilter("ignore")
    d2ldev.set_backend("torch")
    found = {name: make() for name, make in RUNS.items()}
    found["batch_norm"] = _fit(normalize(), NORMALIZED, 2)
    found["masks"], found["resumed"] = masks(), resume(path)
    with open(f"{path}{RANK}", "wb") as file:
        pickle.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
