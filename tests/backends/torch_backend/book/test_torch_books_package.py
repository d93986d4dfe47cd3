"""The book's package with d2ldev's ``Trainer``, as docs/d2l.md has it.

``tox -c nightly.ini -e d2l`` runs the package itself. By day a package of the same shape stands in
for it.
"""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from launched import environment
from processes import extend_path, run_interpreter

# In a file that is imported: the board of the book has IPython take the place of ``__main__``.
MODELS = """
import torch
from torch import nn
from d2l import torch as d2l

def data():
    torch.manual_seed(0)
    return d2l.SyntheticRegressionData(torch.tensor([2, -3.4]), 4.2, num_train=64, num_val=32)

class Labelled(d2l.DataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.save_hyperparameters()
        self.values = data()
        self.labels = (self.values.y[:, 0] > 4).long()

    def get_dataloader(self, train):
        return self.get_tensorloader((self.values.X, self.labels), train)

class MLP(getattr(d2l, 'Classifier', object)):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

WORK = {'LinearRegression': (lambda: d2l.LinearRegression(lr=0.1), data), 'MLP': (MLP, Labelled)}
"""

PROGRAM = """
import json, sys
import torch
import d2ldev
from d2l import torch as d2l
from d2ldev.native import torch as native
from models import WORK

def trained(name, num_gpus):
    make, make_data = WORK[name]
    torch.manual_seed(0)
    model, batches = make(), make_data()
    torch.manual_seed(1)
    trainer = d2l.Trainer(max_epochs=3, num_gpus=num_gpus)
    trainer.fit(model, batches)
    parameters = [each.detach() for each in model.parameters()]
    values = torch.cat([each.cpu().reshape(-1) for each in parameters])
    return [str(parameters[0].device), values.tolist()]

def main(names):
    results = {'own': [trained(name, 0) for name in names]}
    d2l.Trainer = d2ldev.Trainer
    for number in range(3):
        results[number] = [trained(name, number) for name in names]
    d2l.num_gpus, d2l.gpu = native.num_gpus, native.gpu
    results['devices'] = [str(d2l.try_gpu(1)), [str(gpu) for gpu in d2l.try_all_gpus()]]
    print(json.dumps(results))

if __name__ == '__main__':
    main(sys.argv[1:])
"""

# What of the package the program uses, in its shape.
STAND_IN = """
import inspect, sys
import torch
from torch import nn

d2l = sys.modules[__name__]

def cpu():
    return torch.device('cpu')

def gpu(i=0):
    return torch.device(f'cuda:{i}')

def num_gpus():
    return torch.cuda.device_count()

def try_gpu(i=0):
    return gpu(i) if num_gpus() > i else cpu()

def try_all_gpus():
    return [gpu(i) for i in range(num_gpus())]

class HyperParameters:
    def save_hyperparameters(self, ignore=[]):
        values = inspect.currentframe().f_back.f_locals
        names = [name for name in values if name not in ['self', *ignore] and name[0] != '_']
        self.hparams = {name: values[name] for name in names}
        for name in names:
            setattr(self, name, values[name])

class ProgressBoard(HyperParameters):
    def __init__(self, xlabel=None, xlim=None):
        self.save_hyperparameters()
        self.drawn = []

    def draw(self, x, y, label, every_n=1):
        self.drawn.append((label, x, float(y)))

class Module(nn.Module, HyperParameters):
    def __init__(self, plot_train_per_epoch=2, plot_valid_per_epoch=1):
        super().__init__()
        self.save_hyperparameters()
        self.board = ProgressBoard()

    def forward(self, X):
        return self.net(X)

    def plot(self, key, value, train):
        trainer = self.trainer
        x = trainer.train_batch_idx / trainer.num_train_batches if train else trainer.epoch + 1
        self.board.draw(x, value.to(d2l.cpu()).detach().numpy(), key)

    def training_step(self, batch):
        value = self.loss(self(*batch[:-1]), batch[-1])
        self.plot('train_loss', value, True)
        return value

    def validation_step(self, batch):
        self.plot('val_loss', self.loss(self(*batch[:-1]), batch[-1]), False)

class DataModule(HyperParameters):
    def __init__(self, root='../data', num_workers=4):
        self.save_hyperparameters()

    def train_dataloader(self):
        return self.get_dataloader(train=True)

    def val_dataloader(self):
        return self.get_dataloader(train=False)

    def get_tensorloader(self, tensors, train, indices=slice(0, None)):
        dataset = torch.utils.data.TensorDataset(*(each[indices] for each in tensors))
        return torch.utils.data.DataLoader(dataset, self.batch_size, shuffle=train)

class SyntheticRegressionData(d2l.DataModule):
    def __init__(self, w, b, noise=0.01, num_train=1000, num_val=1000, batch_size=32):
        super().__init__()
        self.save_hyperparameters()
        n = num_train + num_val
        self.X = torch.randn(n, len(w))
        self.y = self.X @ w.reshape(-1, 1) + b + noise * torch.randn(n, 1)

    def get_dataloader(self, train):
        chosen = slice(0, self.num_train) if train else slice(self.num_train, None)
        return self.get_tensorloader((self.X, self.y), train, chosen)

class LinearRegression(d2l.Module):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.LazyLinear(1)

    def loss(self, y_hat, y):
        return nn.MSELoss()(y_hat, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

class Trainer(HyperParameters):
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):
        self.save_hyperparameters()

    def fit(self, model, data):
        self.train_dataloader = data.train_dataloader()
        self.val_dataloader = data.val_dataloader()
        self.num_train_batches = len(self.train_dataloader)
        self.num_val_batches = len(self.val_dataloader)
        model.trainer = self
        optimizer = model.configure_optimizers()
        self.train_batch_idx = 0
        for self.epoch in range(self.max_epochs):
            model.train()
            for batch in self.train_dataloader:
                loss = model.training_step(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                self.train_batch_idx += 1
            model.eval()
            for batch in self.val_dataloader:
                with torch.no_grad():
                    model.validation_step(batch)
"""


def _train(folder, *names):
    """Return what the program shows, with the packages of a folder on the path."""
    _write(folder, {"train.py": PROGRAM, "models.py": MODELS})
    given = environment(
        PYTHONPATH=extend_path([folder]),
        D2LDEV_BACKEND="torch",
        D2LDEV_VIRTUAL_GPUS="2",
        MPLBACKEND="agg",
    )
    done = run_interpreter(str(folder / "train.py"), *names, cwd=folder, env=given)
    return json.loads(done.stdout.splitlines()[-1])


def _write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _check(results):
    own, cpu, one, two = (results[name] for name in ("own", "0", "1", "2"))
    assert cpu == own
    assert [place for place, _ in one + two] == ["vgpu:0"] * len(one + two)
    assert [values for _, values in one] == [values for _, values in own]
    for (_, found), (_, expected) in zip(two, own, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert results["devices"] == ["vgpu:1", ["vgpu:0", "vgpu:1"]]


def test_a_package_of_the_books_shape_trains_with_d2ldevs_trainer(tmp_path):
    _write(tmp_path, {"d2l/__init__.py": "", "d2l/torch.py": STAND_IN})
    results = _train(tmp_path, "LinearRegression")
    _check(results)
    ((_, values),) = results["own"]
    np.testing.assert_allclose(values, [2, -3.4, 4.2], atol=2)


@pytest.mark.skipif(
    find_spec("d2l") is None, reason="tox -c nightly.ini -e d2l installs the book's package"
)
def test_the_books_package_trains_with_d2ldevs_trainer(tmp_path):
    # The package imports torchvision, of which the program uses nothing.
    files = {"torchvision/__init__.py": "from . import transforms", "torchvision/transforms.py": ""}
    _write(tmp_path, files)
    _check(_train(tmp_path, "LinearRegression", "MLP"))
