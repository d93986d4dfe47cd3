"""The book's code for TensorFlow, word for word, on d2ldev's ``Trainer``: D2L 3.2 to 3.5, 6.7.3."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from book import ProgressBoard, add_with

from d2ldev import Trainer
from d2ldev.native import NativeDevices

EPOCHS = 2


class Module(tf.keras.Model):
    def __init__(self, plot_train_per_epoch=2, plot_valid_per_epoch=1):
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch
        self.board = ProgressBoard()
        self.training = None

    def loss(self, y_hat, y):
        raise NotImplementedError

    def forward(self, X):  # noqa: N803
        assert hasattr(self, "net"), "Neural network is defined"
        return self.net(X)

    def call(self, X, *args, **kwargs):  # noqa: N803
        if kwargs and "training" in kwargs:
            self.training = kwargs["training"]
        return self.forward(X, *args)

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
        self.board.draw(x, value.numpy(), ("train_" if train else "val_") + key, every_n=int(n))

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
        self.lr = lr
        initializer = tf.initializers.RandomNormal(stddev=0.01)
        self.net = tf.keras.layers.Dense(1, kernel_initializer=initializer)

    def loss(self, y_hat, y):
        fn = tf.keras.losses.MeanSquaredError()
        return fn(y, y_hat)

    def configure_optimizers(self):
        return tf.keras.optimizers.SGD(self.lr)


class SyntheticRegressionData:
    def __init__(self, w, b, noise=0.01, num_train=16, num_val=8, batch_size=4):
        self.num_train, self.batch_size = num_train, batch_size
        n = num_train + num_val
        self.X = tf.random.normal((n, w.shape[0]))
        noise = tf.random.normal((n, 1)) * noise
        self.y = tf.matmul(self.X, tf.reshape(w, (-1, 1))) + b + noise

    def get_tensorloader(self, tensors, train, indices=slice(0, None)):
        tensors = tuple(a[indices] for a in tensors)
        shuffle_buffer = tensors[0].shape[0] if train else 1
        return (
            tf.data.Dataset.from_tensor_slices(tensors)
            .shuffle(buffer_size=shuffle_buffer)
            .batch(self.batch_size)
        )

    def get_dataloader(self, train):
        i = slice(0, self.num_train) if train else slice(self.num_train, None)
        return self.get_tensorloader((self.X, self.y), train, i)

    def train_dataloader(self):
        return self.get_dataloader(train=True)

    def val_dataloader(self):
        return self.get_dataloader(train=False)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_the_books_module_and_data_run(backend, num_gpus):
    backend.seed(0)  # the loss is compared after a few steps
    model, data = LinearRegression(lr=0.1), SyntheticRegressionData(tf.constant([2, -3.4]), 4.2)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend)
    history = trainer.fit(model, data)
    expected = np.mean(model.board.losses(EPOCHS), 1)
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-6)
    assert history["loss"][1] < 0.7 * history["loss"][0]
    assert set(backend.placement(model).values()) == {trainer.device}


@pytest.fixture
def the_books_trainer(backend, monkeypatch):
    """Sections 6.7.3, 3.4 and, of ``prepare_model``, 3.2.4."""
    d2l, add_to_class = NativeDevices(backend), add_with(monkeypatch)

    @add_to_class(Trainer)
    def __init__(self, max_epochs, num_gpus=0, gradient_clip_val=0):  # noqa: N807
        self.save_hyperparameters()
        self.gpus = [d2l.gpu(i) for i in range(min(num_gpus, d2l.num_gpus()))]

    @add_to_class(Trainer)
    def prepare_batch(self, batch):
        if self.gpus:
            with self.gpus[0]:
                batch = [tf.identity(a) for a in batch]
        return batch

    @add_to_class(Trainer)
    def prepare_model(self, model):
        model.trainer = self
        model.board.xlim = [0, self.max_epochs]
        self.model = model

    @add_to_class(Trainer)
    def fit_epoch(self):
        self.model.training = True
        for batch in self.train_dataloader:
            with tf.GradientTape() as tape:
                loss = self.model.training_step(self.prepare_batch(batch))
            grads = tape.gradient(loss, self.model.trainable_variables)
            if self.gradient_clip_val > 0:
                grads = self.clip_gradients(self.gradient_clip_val, grads)
            self.optim.apply_gradients(zip(grads, self.model.trainable_variables))  # noqa: B905
            self.train_batch_idx += 1
        if self.val_dataloader is None:
            return
        self.model.training = False
        for batch in self.val_dataloader:
            self.model.validation_step(self.prepare_batch(batch))
            self.val_batch_idx += 1

    monkeypatch.setattr(Trainer, "backend", backend)


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.usefixtures("the_books_trainer")
def test_the_books_trainer_runs(backend, num_gpus):
    backend.seed(0)  # the loss is compared after a few steps
    model, data = LinearRegression(lr=0.1), SyntheticRegressionData(tf.constant([2, -3.4]), 4.2)
    trainer = Trainer(EPOCHS, num_gpus)
    assert trainer.fit(model, data) == {}
    first, second = np.mean(model.board.losses(EPOCHS), 1)
    assert second < 0.7 * first
    assert trainer.model is model
    assert model.board.xlim == [0, EPOCHS]


def test_the_loss_of_a_model_that_configures_its_optimizer_is_used(backend):
    class Absolute(keras.Sequential):
        def loss(self, y_hat, y):
            return tf.reduce_mean(tf.abs(y_hat - y))

        def configure_optimizers(self):
            return keras.optimizers.SGD(0.0)

    model = Absolute([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    history = Trainer(1, backend=backend).fit(model, [(tf.ones((2, 1)), tf.fill((2, 1), 3.0))])
    assert history["loss"] == [3.0]
