"""The book's code for MXNet, word for word, on d2ldev's ``Trainer``: D2L 3.2 to 3.5 and 6.7.3."""

import mxnet as mx
import numpy
import pytest
from book import ProgressBoard, add_with
from numpy_semantics import NumPySemantics

from d2ldev import Trainer

EPOCHS = 2
autograd, gluon, init, np = mx.autograd, mx.gluon, mx.init, mx.np


@pytest.fixture(autouse=True)
def set_np():
    """``npx.set_np()``, for the test."""
    with NumPySemantics():
        yield


class LinearRegression(gluon.nn.Block):
    def __init__(self, lr, plot_train_per_epoch=2, plot_valid_per_epoch=1):
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch
        self.board = ProgressBoard()
        self.lr = lr
        self.net = gluon.nn.Dense(1)
        self.net.initialize(init.Normal(sigma=0.01))

    def forward(self, X):  # noqa: N803
        assert hasattr(self, "net"), "Neural network is defined"
        return self.net(X)

    def loss(self, y_hat, y):
        fn = gluon.loss.L2Loss()
        return fn(y_hat, y).mean()

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
        self.board.draw(x, value.asnumpy(), ("train_" if train else "val_") + key, every_n=int(n))

    def training_step(self, batch):
        l = self.loss(self(*batch[:-1]), batch[-1])  # noqa: E741
        self.plot("loss", l, train=True)
        return l

    def validation_step(self, batch):
        l = self.loss(self(*batch[:-1]), batch[-1])  # noqa: E741
        self.plot("loss", l, train=False)

    def configure_optimizers(self):
        return gluon.Trainer(self.collect_params(), "sgd", {"learning_rate": self.lr})


class SyntheticRegressionData:
    def __init__(self, w, b, noise=0.01, num_train=16, num_val=8, batch_size=4):
        self.num_train, self.batch_size = num_train, batch_size
        n = num_train + num_val
        self.X = np.random.randn(n, len(w))
        noise = np.random.randn(n, 1) * noise
        self.y = np.dot(self.X, w.reshape((-1, 1))) + b + noise

    def get_dataloader(self, train):
        i = slice(0, self.num_train) if train else slice(self.num_train, None)
        dataset = gluon.data.ArrayDataset(self.X[i], self.y[i])
        return gluon.data.DataLoader(dataset, self.batch_size, shuffle=train)

    def train_dataloader(self):
        return self.get_dataloader(train=True)

    def val_dataloader(self):
        return self.get_dataloader(train=False)


@pytest.fixture
def the_books_gpus(backend, monkeypatch):
    """Section 6.7.3."""

    add_to_class = add_with(monkeypatch)

    @add_to_class(Trainer)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):  # noqa: N807
        self.save_hyperparameters()
        gpus = range(min(num_gpus, backend.num_gpus()))
        self.gpus = [backend.native(backend.gpu(i)) for i in gpus]

    @add_to_class(Trainer)
    def prepare_batch(self, batch):
        if self.gpus:
            batch = [a.as_in_context(self.gpus[0]) for a in batch]
        return batch

    @add_to_class(Trainer)
    def prepare_model(self, model):
        model.trainer = self
        model.board.xlim = [0, self.max_epochs]
        if self.gpus:
            model.collect_params().reset_ctx(self.gpus[0])
        self.model = model

    monkeypatch.setattr(Trainer, "backend", backend)


@pytest.mark.filterwarnings("ignore:ndarray.as_in_context:DeprecationWarning")
@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.usefixtures("the_books_gpus")
def test_the_books_trainer_module_and_data_run(backend, num_gpus):
    backend.seed(0)  # the loss is compared after a few steps
    model, data = LinearRegression(lr=0.2), SyntheticRegressionData(np.array([2, -3.4]), 4.2)
    trainer = Trainer(EPOCHS, num_gpus)
    history = trainer.fit(model, data)
    expected = numpy.mean(model.board.losses(EPOCHS), 1)
    numpy.testing.assert_allclose(history["loss"], expected, rtol=1e-6)
    assert history["loss"][1] < 0.7 * history["loss"][0]
    assert trainer.model is model
    assert set(backend.placement(model).values()) == {trainer.device}


@pytest.mark.filterwarnings("ignore:ndarray.as_in_context:DeprecationWarning")
@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.usefixtures("the_books_gpus")
def test_the_books_fit_epoch_runs(backend, num_gpus, monkeypatch):
    """Section 3.4."""

    @add_with(monkeypatch)(Trainer)
    def fit_epoch(self):
        for batch in self.train_dataloader:
            with autograd.record():
                loss = self.model.training_step(self.prepare_batch(batch))
            loss.backward()
            if self.gradient_clip_val > 0:
                self.clip_gradients(self.gradient_clip_val, self.model)
            self.optim.step(1)
            self.train_batch_idx += 1
        if self.val_dataloader is None:
            return
        for batch in self.val_dataloader:
            self.model.validation_step(self.prepare_batch(batch))
            self.val_batch_idx += 1

    backend.seed(0)  # the loss is compared after a few steps
    model, data = LinearRegression(lr=0.2), SyntheticRegressionData(np.array([2, -3.4]), 4.2)
    trainer = Trainer(EPOCHS, num_gpus)
    assert trainer.fit(model, data) == {}
    first, second = numpy.mean(model.board.losses(EPOCHS), 1)
    assert second < 0.7 * first
    assert set(backend.placement(model).values()) == {trainer.device}
