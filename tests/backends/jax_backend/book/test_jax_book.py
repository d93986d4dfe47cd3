"""The book's linen modules on d2ldev's ``Trainer``, which has their state: D2L 3.4, 4.3 and 8.5."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import numpy as jnp
from processes import run_python

from d2ldev import Trainer
from d2ldev.errors import UnsupportedValueError
from d2ldev.native import jax as d2l

EPOCHS = 2


@pytest.fixture(params=[0, 1], ids=["cpu", "gpu0"])
def num_gpus(request):
    return request.param


@pytest.fixture
def trained_with(backend, monkeypatch):
    """The backend of the book's trainers; its random numbers, too."""
    backend.seed(0)  # the loss is compared after a few steps
    monkeypatch.setattr(Trainer, "backend", backend)
    return backend


class LinearRegression(d2l.Module):
    lr: float

    def setup(self):
        self.net = nn.Dense(1, kernel_init=nn.initializers.normal(0.01))

    def loss(self, params, X, y, state):  # noqa: N803
        y_hat = state.apply_fn({"params": params}, *X)
        return jnp.mean(optax.l2_loss(y_hat, y))

    def configure_optimizers(self):
        return optax.sgd(self.lr)


class SGD:
    def __init__(self, lr):
        self.lr = lr

    def init(self, params):
        del params
        return optax.EmptyState

    def update(self, updates, state, params=None):
        del params
        updates = jax.tree_util.tree_map(lambda g: -self.lr * g, updates)
        return updates, state

    def __call__(self):
        return optax.GradientTransformation(self.init, self.update)


class LinearRegressionScratch(d2l.Module):
    num_inputs: int
    lr: float
    sigma: float = 0.01

    def setup(self):
        self.w = self.param("w", nn.initializers.normal(self.sigma), (self.num_inputs, 1))
        self.b = self.param("b", nn.initializers.zeros, (1))

    def forward(self, X):  # noqa: N803
        return jnp.matmul(X, self.w) + self.b

    def loss(self, params, X, y, state):  # noqa: N803
        y_hat = state.apply_fn({"params": params}, *X)
        l = (y_hat - y.reshape(y_hat.shape)) ** 2 / 2  # noqa: E741
        return l.mean()

    def configure_optimizers(self):
        return SGD(self.lr)


class Classifier(d2l.Module):
    def training_step(self, params, batch, state):
        value, grads = jax.value_and_grad(self.loss, has_aux=True)(
            params, batch[:-1], batch[-1], state
        )
        l, _ = value  # noqa: E741
        self.plot("loss", l, train=True)
        return value, grads

    def validation_step(self, params, batch, state):
        l, _ = self.loss(params, batch[:-1], batch[-1], state)  # noqa: E741
        self.plot("loss", l, train=False)

    @partial(jax.jit, static_argnums=(0, 5))
    def loss(self, params, X, Y, state, averaged=True):  # noqa: N803
        Y_hat, updates = state.apply_fn(  # noqa: N806
            {"params": params, "batch_stats": state.batch_stats},
            *X,
            mutable=["batch_stats"],
            rngs={"dropout": state.dropout_rng},
        )
        Y_hat = jnp.reshape(Y_hat, (-1, Y_hat.shape[-1]))  # noqa: N806
        Y = jnp.reshape(Y, (-1,))  # noqa: N806
        fn = optax.softmax_cross_entropy_with_integer_labels
        return (fn(Y_hat, Y).mean(), updates) if averaged else (fn(Y_hat, Y), updates)

    def configure_optimizers(self):
        return optax.sgd(self.lr)


class BNNet(Classifier):
    lr: float = 0.1
    num_classes: int = 2
    training: bool = True

    def setup(self):
        self.net = nn.Sequential(
            [
                nn.Dense(4),
                nn.BatchNorm(not self.training),
                nn.relu,
                nn.Dropout(0.5, deterministic=not self.training),
                nn.Dense(self.num_classes),
            ]
        )


class SyntheticRegressionData:
    def __init__(self, w, b):
        key1, key2 = jax.random.split(jax.random.PRNGKey(0))
        self.X = jax.random.normal(key1, (24, w.shape[0]))
        self.y = jnp.matmul(self.X, jnp.reshape(w, (-1, 1))) + b
        self.y += 0.01 * jax.random.normal(key2, (24, 1))

    def get_dataloader(self, rows):
        """NumPy's arrays, as the book's loaders yield them."""
        x, y = (np.asarray(a[rows]) for a in (self.X, self.y))
        return [(x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4)]

    def train_dataloader(self):
        return self.get_dataloader(slice(0, 16))

    def val_dataloader(self):
        return self.get_dataloader(slice(16, None))


class Labelled(SyntheticRegressionData):
    """The same with two classes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.y = (self.y[:, 0] > 0).astype("int32")


@pytest.fixture
def data():
    return SyntheticRegressionData(jnp.array([2, -3.4]), 4.2)


@pytest.fixture
def the_books_epochs(monkeypatch):
    """Section 3.4."""

    def fit_epoch(self):
        self.model.training = True
        if self.state.batch_stats:
            for batch in self.train_dataloader:
                (_, mutated_vars), grads = self.model.training_step(
                    self.state.params, self.prepare_batch(batch), self.state
                )
                self.state = self.state.apply_gradients(grads=grads)
                self.state = self.state.replace(
                    dropout_rng=jax.random.split(self.state.dropout_rng)[0]
                )
                self.state = self.state.replace(batch_stats=mutated_vars["batch_stats"])
                self.train_batch_idx += 1
        else:
            for batch in self.train_dataloader:
                _, grads = self.model.training_step(
                    self.state.params, self.prepare_batch(batch), self.state
                )
                self.state = self.state.apply_gradients(grads=grads)
                self.state = self.state.replace(
                    dropout_rng=jax.random.split(self.state.dropout_rng)[0]
                )
                self.train_batch_idx += 1
        if self.val_dataloader is None:
            return
        self.model.training = False
        for batch in self.val_dataloader:
            self.model.validation_step(self.state.params, self.prepare_batch(batch), self.state)
            self.val_batch_idx += 1

    monkeypatch.setattr(Trainer, "fit_epoch", fit_epoch, raising=False)


@pytest.mark.parametrize("epochs", ["ours", "the book's"])
def test_a_model_from_scratch_is_trained_by_an_optimizer_from_scratch(
    trained_with, data, num_gpus, epochs, request
):
    if epochs != "ours":
        request.getfixturevalue("the_books_epochs")
    model, trainer = LinearRegressionScratch(2, lr=0.1), Trainer(EPOCHS, num_gpus)
    trainer.fit(model, data)
    losses = [y for _, y in model.board.points["train_loss"]]
    assert losses[-1] < 0.7 * losses[0]
    assert set(trained_with.placement(trainer.state.params).values()) == {trainer.device}


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_batch_normalization_and_dropout_are_those_of_the_books_epochs(
    trained_with, num_gpus, request
):
    def state_after(trainer):
        trained_with.seed(0)
        trainer.fit(BNNet(), Labelled(jnp.array([2, -3.4]), 0.0))
        return trainer.state.params, trainer.state.batch_stats

    found = state_after(Trainer(EPOCHS, num_gpus, backend=trained_with))
    request.getfixturevalue("the_books_epochs")
    expected = state_after(Trainer(EPOCHS, backend=trained_with))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    assert float(jnp.abs(jax.tree.leaves(found[1])[0]).max()) > 0


def test_a_run_goes_on_from_its_checkpoint(trained_with, data, tmp_path):
    straight = Trainer(3, backend=trained_with)
    straight.fit(BNNet(), Labelled(jnp.array([2, -3.4]), 0.0))
    trained_with.seed(0)
    path = tmp_path / "run"
    labelled = Labelled(jnp.array([2, -3.4]), 0.0)
    Trainer(1, backend=trained_with).fit(BNNet(), labelled, checkpoint=path)
    resumed = Trainer(3, backend=trained_with)
    resumed.fit(BNNet(), labelled, checkpoint=path, resume=True)
    assert int(resumed.state.step) == 3 * 4
    for name in ("params", "batch_stats"):
        pair = getattr(resumed.state, name), getattr(straight.state, name)
        jax.tree.map(np.testing.assert_array_equal, *pair)
        # As docs/resuming.md has it.
        zeros = jax.tree.map(jnp.zeros_like, pair[0])
        alone = trained_with.load_into(zeros, path, only=f"components.optimizer.{name}")
        jax.tree.map(np.testing.assert_array_equal, alone, pair[0])


def test_the_trainer_validates_and_predicts_with_its_state(trained_with, data, num_gpus):
    class Returning(LinearRegression):
        def validation_step(self, params, batch, state):
            return self.loss(params, batch[:-1], batch[-1], state)

    model, trainer = Returning(lr=0.1), Trainer(EPOCHS, num_gpus, backend=trained_with)
    history = trainer.fit(model, data)
    loss = trainer.validate(model, data)["loss"]
    assert loss == pytest.approx(history["val_loss"][-1], rel=1e-6)
    predictions = np.concatenate([trained_with.to_numpy(x) for x in trainer.predict(model, data)])
    assert np.mean((predictions - data.y[16:]) ** 2) / 2 == pytest.approx(loss, rel=1e-5)


def test_each_trainer_predicts_with_its_own_state(trained_with, data):
    model = LinearRegression(lr=0.1)
    short, longer, untrained = (Trainer(n, backend=trained_with) for n in (1, 20, 1))
    for trainer in (short, longer):
        trainer.fit(model, data)
    with pytest.raises(UnsupportedValueError, match=r"trainer.fit\(module, data\)"):
        untrained.predict(model, data)
    losses = []
    for trainer in (short, longer):
        predictions = [trained_with.to_numpy(x) for x in trainer.predict(model, data)]
        losses.append(float(np.mean((np.concatenate(predictions) - data.y[16:]) ** 2)))
    assert losses[1] < 0.1 * losses[0]


def test_a_model_that_another_trainer_evaluates_keeps_its_own(trained_with, data):
    model = LinearRegression(lr=0.1)
    earlier, own = (Trainer(1, backend=trained_with) for _ in range(2))
    for trainer in (earlier, own):
        trainer.fit(model, data)
    earlier.predict(model, data)
    assert model.trainer is own
    with pytest.raises(UnsupportedValueError, match="evaluate"):
        Trainer(1, backend=trained_with).predict(model, data)
    assert model.trainer is own


@pytest.mark.usefixtures("the_books_epochs")
def test_the_books_epochs_find_the_state_of_each_trainer(trained_with, data):
    model = LinearRegression(lr=0.1)
    trainers = [Trainer(1, backend=trained_with) for _ in range(2)]
    for trainer in trainers:
        trainer.fit(model, data)
    assert [int(trainer.state.step) for trainer in trainers] == [4, 4]


class Once:
    """Batches that can be read once."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        return self.batches

    def __len__(self):
        return 4  # which the book's plots divide by


@pytest.mark.usefixtures("the_books_epochs")
def test_the_books_epoch_has_all_batches_that_can_be_read_once(trained_with, data):
    trainer = Trainer(1, backend=trained_with)
    trainer.fit(LinearRegression(lr=0.1), Once(data.train_dataloader()))
    assert trainer.train_batch_idx == 4


def test_a_linen_module_needs_nothing_that_it_does_not_import():
    code = """
        import jax, sys, d2ldev
        from flax import linen
        backend = d2ldev.get_backend("jax")
        placed = backend.place(linen.Dense(3), "cpu")
        show([type(placed).__name__, "flax.nnx" in sys.modules])
    """
    assert run_python(code, hide=()) == [["Dense", False]]


def test_gradients_are_clipped(trained_with, data):
    trainer = Trainer(1, gradient_clip_val=1e-3, backend=trained_with)
    trainer.fit(LinearRegression(lr=1.0), data)
    assert abs(float(trainer.state.params["net"]["bias"][0])) <= 4 * 1e-3


def _return_nothing(trainer, data):
    class Forgetful(LinearRegression):
        def training_step(self, params, batch, state):
            super().training_step(params, batch, state)

    trainer.fit(Forgetful(lr=0.1), data)


def _measure_each_example(trainer, data):
    class Separate(LinearRegression):
        def validation_step(self, params, batch, state):
            return jnp.ones(3)

    trainer.fit(Separate(lr=0.1), data)


def _of_another_tab(trainer, data):
    class OfTorch(LinearRegression):
        def training_step(self, batch):
            raise AssertionError

    trainer.fit(OfTorch(lr=0.1), data)


def _wholly_of_another_tab(trainer, data):
    class OfTorch(LinearRegression):
        def training_step(self, batch):
            raise AssertionError

        validation_step = training_step

    trainer.fit(OfTorch(lr=0.1), data)


def _without_an_optimizer(trainer, data):
    trainer.fit(LinearRegression(lr=0.1), data, optimizer=object())


def _not_trained(trainer, data):
    trainer.validate(LinearRegression(lr=0.1), data)


def _on_two_gpus(trainer, data):
    both = Trainer(1, 2, backend=trainer.backend)
    both.fit(LinearRegression(lr=0.1), data)


def _accumulate(trainer, data):
    trainer.accumulate_grad_batches = 2
    trainer.fit(LinearRegression(lr=0.1), data)


def _without_its_methods(trainer, data):
    model = LinearRegression(lr=0.1)
    trainer.fit(model, data)
    *inputs, y = next(iter(data.val_dataloader()))
    trainer.backend.learner(model, is_trained=False).evaluate(tuple(inputs), y)


REFUSED = {
    r"training_step returned None.*return \(loss, gradients\)": _return_nothing,
    r"validation_step: the loss is of shape \(3,\)": _measure_each_example,
    r"def training_step\(self, params, batch, state\)": _of_another_tab,
    r"with parameters.*def training_step\(self, params, batch, state\)": _wholly_of_another_tab,
    "not an optax.GradientTransformation": _without_an_optimizer,
    r"trainer.fit\(module, data\)": _not_trained,
    "leave accumulate_grad_batches out": _accumulate,
    r"methods=\('training_step', 'validation_step'\)": _without_its_methods,
    "training_step on one device": _on_two_gpus,
}


@pytest.mark.parametrize("match", REFUSED)
def test_unsupported_trainings_are_refused(trained_with, data, match):
    with pytest.raises(UnsupportedValueError, match=f"(?s){match}"):
        REFUSED[match](Trainer(1, backend=trained_with), data)
