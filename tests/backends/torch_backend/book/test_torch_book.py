"""The book's code for PyTorch, word for word, on d2ldev's ``Trainer``: D2L 3.2 to 3.4 and 6.7.3."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from book import HyperParameters, ProgressBoard, add_with
from torch import nn

from d2ldev import Trainer

EPOCHS = 2


@pytest.fixture(params=[0, 1], ids=["cpu", "gpu0"])
def num_gpus(request):
    return request.param


@pytest.fixture
def d2l(virtual, monkeypatch):
    """What the book imports, and its decorator, which is undone after the test."""
    kept = dict(vars(Trainer))

    yield SimpleNamespace(
        Trainer=Trainer,
        HyperParameters=HyperParameters,
        ProgressBoard=ProgressBoard,
        add_to_class=add_with(monkeypatch),
        num_gpus=virtual.num_gpus,
        gpu=lambda i: virtual.native(virtual.gpu(i)),
        cpu=lambda: torch.device("cpu"),
        to=lambda x, device: x.to(device),
        numpy=lambda x: x.detach().numpy(),
    )
    monkeypatch.undo()
    assert dict(vars(Trainer)) == kept


@pytest.fixture
def module(d2l):
    class Module(nn.Module, d2l.HyperParameters):
        def __init__(self, plot_train_per_epoch=2, plot_valid_per_epoch=1):
            super().__init__()
            self.save_hyperparameters()
            self.board = d2l.ProgressBoard()

        def loss(self, y_hat, y):
            raise NotImplementedError

        def forward(self, X):  # noqa: N803
            assert hasattr(self, "net"), "Neural network is defined"
            return self.net(X)

        def plot(self, key, value, train):
            """Plot a point in animation."""
            assert hasattr(self, "trainer"), "Trainer is not inited"
            self.board.xlabel = "epoch"
            if train:
                x = self.trainer.train_batch_idx / self.trainer.num_train_batches
                n = self.trainer.num_train_batches / self.plot_train_per_epoch
            else:
                x = self.trainer.epoch + 1
                n = self.trainer.num_val_batches / self.plot_valid_per_epoch
            self.board.draw(
                x,
                d2l.numpy(d2l.to(value, d2l.cpu())),
                ("train_" if train else "val_") + key,
                every_n=int(n),
            )

        def training_step(self, batch):
            l = self.loss(self(*batch[:-1]), batch[-1])  # noqa: E741
            self.plot("loss", l, train=True)
            return l

        def validation_step(self, batch):
            l = self.loss(self(*batch[:-1]), batch[-1])  # noqa: E741
            self.plot("loss", l, train=False)

        def configure_optimizers(self):
            raise NotImplementedError

    class LinearRegression(Module):
        def __init__(self, lr):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.LazyLinear(1)
            self.net.weight.data.normal_(0, 0.01)
            self.net.bias.data.fill_(0)

        def loss(self, y_hat, y):
            fn = nn.MSELoss()
            return fn(y_hat, y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

    LinearRegression.Module = Module
    return LinearRegression


@pytest.fixture
def data(d2l):
    torch.manual_seed(0)  # the loss is compared after a few steps

    class DataModule(d2l.HyperParameters):
        def __init__(self, root="../data", num_workers=4):
            self.save_hyperparameters()

        def get_dataloader(self, train):
            raise NotImplementedError

        def train_dataloader(self):
            return self.get_dataloader(train=True)

        def val_dataloader(self):
            return self.get_dataloader(train=False)

    class SyntheticRegressionData(DataModule):
        def __init__(self, w, b, noise=0.01, num_train=16, num_val=8, batch_size=4):
            super().__init__()
            self.save_hyperparameters()
            n = num_train + num_val
            self.X = torch.randn(n, len(w))
            noise = torch.randn(n, 1) * noise
            self.y = torch.matmul(self.X, w.reshape((-1, 1))) + b + noise

        def get_tensorloader(self, tensors, train, indices=slice(0, None)):
            tensors = tuple(a[indices] for a in tensors)
            dataset = torch.utils.data.TensorDataset(*tensors)
            return torch.utils.data.DataLoader(dataset, self.batch_size, shuffle=train)

        def get_dataloader(self, train):
            i = slice(0, self.num_train) if train else slice(self.num_train, None)
            return self.get_tensorloader((self.X, self.y), train, i)

    return SyntheticRegressionData(w=torch.tensor([2, -3.4]), b=4.2)


@pytest.fixture
def the_books_gpus(d2l):
    """Section 6.7.3."""

    @d2l.add_to_class(d2l.Trainer)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):  # noqa: N807
        self.save_hyperparameters()
        self.gpus = [d2l.gpu(i) for i in range(min(num_gpus, d2l.num_gpus()))]

    @d2l.add_to_class(d2l.Trainer)
    def prepare_batch(self, batch):
        if self.gpus:
            batch = [d2l.to(a, self.gpus[0]) for a in batch]
        return batch

    @d2l.add_to_class(d2l.Trainer)
    def prepare_model(self, model):
        model.trainer = self
        model.board.xlim = [0, self.max_epochs]
        if self.gpus:
            model.to(self.gpus[0])
        self.model = model


def _check(trainer, model, data, num_gpus):
    model.board.losses(EPOCHS)
    drawn = model.board.drawn
    assert drawn[-1][1] < 0.5 * drawn[0][1]
    assert trainer.model is model
    assert model.net.weight.device == (trainer.gpus or [torch.device("cpu")])[0]
    assert model.board.xlim == [0, EPOCHS]


def test_the_books_trainer_module_and_data_run(
    virtual, d2l, module, data, the_books_gpus, num_gpus, monkeypatch, tmp_path
):
    monkeypatch.setattr(Trainer, "backend", virtual)
    model = module(lr=0.1)
    trainer = d2l.Trainer(max_epochs=EPOCHS, num_gpus=num_gpus)
    history = trainer.fit(model, data, checkpoint=tmp_path / "run")
    _check(trainer, model, data, num_gpus)
    assert len(history["loss"]) == EPOCHS
    assert np.isnan(history["val_loss"]).all()
    expected = np.mean(model.board.losses(EPOCHS), 1)
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-6)


def test_the_books_fit_epoch_runs(
    virtual, d2l, module, data, the_books_gpus, num_gpus, monkeypatch
):
    monkeypatch.setattr(Trainer, "backend", virtual)

    @d2l.add_to_class(d2l.Trainer)
    def fit_epoch(self):
        self.model.train()
        for batch in self.train_dataloader:
            loss = self.model.training_step(self.prepare_batch(batch))
            self.optim.zero_grad()
            with torch.no_grad():
                loss.backward()
                if self.gradient_clip_val > 0:
                    self.clip_gradients(self.gradient_clip_val, self.model)
                self.optim.step()
            self.train_batch_idx += 1
        if self.val_dataloader is None:
            return
        self.model.eval()
        for batch in self.val_dataloader:
            with torch.no_grad():
                self.model.validation_step(self.prepare_batch(batch))
            self.val_batch_idx += 1

    model = module(lr=0.1)
    trainer = d2l.Trainer(max_epochs=EPOCHS, num_gpus=num_gpus)
    assert trainer.fit(model, data) == {}
    _check(trainer, model, data, num_gpus)


def test_the_books_own_fit_runs_too(virtual, d2l, module, data, monkeypatch):
    """Section 3.2.4: the class as a whole has a fit of its own."""

    class Mine(d2l.Trainer):
        def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):
            self.save_hyperparameters()
            assert num_gpus == 0, "No GPU support yet"

        def prepare_data(self, data):
            self.train_dataloader = data.train_dataloader()
            self.val_dataloader = data.val_dataloader()
            self.num_train_batches = len(self.train_dataloader)
            self.num_val_batches = (
                len(self.val_dataloader) if self.val_dataloader is not None else 0
            )

        def prepare_model(self, model):
            model.trainer = self
            model.board.xlim = [0, self.max_epochs]
            self.model = model

        def fit(self, model, data):
            self.prepare_data(data)
            self.prepare_model(model)
            self.optim = model.configure_optimizers()
            self.epoch = 0
            self.train_batch_idx = 0
            self.val_batch_idx = 0
            for self.epoch in range(self.max_epochs):  # noqa: B020
                self.fit_epoch()

        def fit_epoch(self):
            for batch in self.train_dataloader:
                loss = self.model.training_step(self.prepare_batch(batch))
                self.optim.zero_grad()
                loss.backward()
                self.optim.step()

    model = module(lr=0.1)
    trainer = Mine(EPOCHS)
    trainer.backend = virtual
    trainer.fit(model, data)
    assert len(model.board.drawn) == 4 * EPOCHS
