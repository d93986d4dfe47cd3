"""D2L's Module and hooks on a Trainer without a framework: what is used, and what is refused."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from d2ldev import Trainer, UnsupportedValueError
from d2ldev.framework import Objective, TrainingSettings
from d2ldev.training.functions import comparison, takes_target
from d2ldev.training.module import find_own_settings

BATCH = (np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))


@pytest.fixture
def net(reference):
    return reference.mlp([2, 1])


def settings_of(methods, loss=None, optimizer=None):
    return find_own_settings(SimpleNamespace(**methods), loss, optimizer, (), trainer=None)


# -- what a model says itself ------------------------------------------------------------------


def test_a_model_that_says_nothing_is_trained_by_the_defaults():
    assert settings_of({}) == {"loss": None, "optimizer": None, "methods": None}


def test_arguments_of_the_call_override_the_models():
    found = settings_of({"configure_optimizers": lambda: "sgd", "loss": max}, "bce", "adam")
    assert found == {"loss": "bce", "optimizer": "adam", "methods": None}


def test_a_model_that_configures_its_optimizer_is_trained_with_its_loss():
    found = settings_of({"configure_optimizers": lambda: "adam", "loss": max})
    assert found == {"loss": max, "optimizer": "adam", "methods": None}


def test_the_loss_of_a_model_that_is_not_a_module_is_ignored():
    """Such as that of a Keras model, which ``compile`` sets."""
    assert settings_of({"loss": max})["loss"] is None


def test_without_a_validation_step_the_training_step_measures():
    found = settings_of({"training_step": lambda batch: 0})
    assert found["methods"] == ("training_step", "training_step")


@pytest.mark.parametrize(
    ("methods", "problem"),
    [
        ({"training_step": lambda batch, index: 0}, "missing a required argument: 'index'"),
        ({"validation_step": lambda batch: 0}, "no attribute 'training_step'"),
        ({"configure_optimizers": lambda: None}, "configure_optimizers returned None"),
    ],
    ids=["of Lightning", "validation alone", "no optimizer"],
)
def test_a_module_that_cannot_be_trained_is_refused(methods, problem):
    with pytest.raises(UnsupportedValueError, match=problem):
        settings_of(methods)


def test_a_training_step_that_returns_nothing_is_an_error_and_a_validation_step_may():
    model = SimpleNamespace(training_step=lambda batch: None, validation_step=lambda batch: None)
    settings = TrainingSettings(methods=("training_step", "validation_step"))
    objective = Objective(None, settings, {})
    assert objective.compute(model, BATCH, is_step=False) == (None, None, ())
    with pytest.raises(UnsupportedValueError, match="returned None, and not the loss"):
        objective.compute(model, BATCH, is_step=True)


def test_a_step_that_returns_no_scalar_is_refused():
    model = SimpleNamespace(training_step=lambda batch: np.ones(3))
    with pytest.raises(UnsupportedValueError, match=r"shape \(3,\), not a scalar"):
        Objective(None, TrainingSettings(methods=("training_step",) * 2), {}).compute(
            model, BATCH, is_step=True
        )


# -- hooks that nobody would call --------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_end", "on_epoch_ended"])
def test_an_unknown_hook_of_a_trainer_is_refused(reference, net, hook):
    mine = type("Mine", (Trainer,), {hook: lambda self, *_: None})
    with pytest.raises(UnsupportedValueError, match=f"does not call its {hook}"):
        mine(1, backend=reference).fit(net, [BATCH])


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_gpu", False), ("on_gpu", lambda self: False), ("on_batch_size", 3), ("on_end", None)],
)
def test_a_method_that_only_sounds_like_a_hook_is_allowed(reference, net, name, value):
    mine = type("Mine", (Trainer,), {name: value})
    assert len(mine(1, backend=reference).fit(net, [BATCH])["loss"]) == 1


def test_an_overridden_clip_gradients_is_refused(reference, net):
    mine = type("Mine", (Trainer,), {"clip_gradients": lambda self, value, model: None})
    with pytest.raises(UnsupportedValueError, match=r"gradient_clip_val=1\) clips by itself"):
        mine(1, backend=reference).fit(net, [BATCH])


@pytest.mark.parametrize(
    "options",
    [{"loss": "mse"}, {"optimizer": "sgd"}, {"metrics": ["accuracy"]}, {"resume": True}],
    ids=str,
)
def test_arguments_that_a_users_fit_epoch_ignores_are_refused(reference, net, options):
    mine = type("Mine", (Trainer,), {"fit_epoch": lambda self: pytest.fail("it has run")})
    with pytest.raises(UnsupportedValueError, match=f"{next(iter(options))}="):
        mine(1, backend=reference).fit(net, [BATCH], **options)


def test_epochs_of_the_users_own_on_several_gpus_are_refused(reference, net):
    mine = type("Mine", (Trainer,), {"fit_epoch": lambda self: pytest.fail("it has run")})
    trainer = mine(1, backend=reference)
    trainer.gpus = ["gpu:0", "gpu:1"]
    with pytest.raises(UnsupportedValueError, match="num_gpus="):
        trainer.fit(net, [BATCH])


def test_an_own_prepare_data_gives_the_data(reference, net):
    class Mine(Trainer):
        def prepare_data(self, data):
            self.train_dataloader, self.val_dataloader = [data], [data, data]

    trainer = Mine(1, backend=reference)
    assert trainer.fit(net, BATCH).keys() == {"loss", "val_loss", "lr"}
    assert (trainer.num_train_batches, trainer.num_val_batches) == (1, 2)


def test_the_trainer_s_own_prepare_data_wants_a_data_module(reference, net):
    class Mine(Trainer):
        def prepare_data(self, data):
            super().prepare_data(data)

    with pytest.raises(UnsupportedValueError, match="it has no train_dataloader"):
        Mine(1, backend=reference).fit(net, [BATCH])


def test_a_data_module_that_returns_no_loader_is_an_error_that_names_it(reference, net):
    data = SimpleNamespace(train_dataloader=lambda: None)
    with pytest.raises(UnsupportedValueError, match="train_dataloader returned None"):
        Trainer(1, backend=reference).fit(net, data)


@pytest.mark.parametrize("lacking", [set(), {"predict_dataloader"}], ids=["own", "to validate"])
def test_predict_uses_the_predict_loader_of_a_data_module(reference, net, lacking):
    loaders = {"train_dataloader": 1, "val_dataloader": 2, "predict_dataloader": 3}
    data = SimpleNamespace(
        **{name: lambda n=n: [BATCH] * n for name, n in loaders.items() if name not in lacking}
    )
    assert len(Trainer(1, backend=reference).predict(net, data)) == 3 - len(lacking)


@pytest.mark.parametrize("verb", ["validate", "predict"])
def test_a_data_module_of_training_data_alone_is_refused(reference, net, verb):
    data = SimpleNamespace(train_dataloader=lambda: [BATCH])
    with pytest.raises(UnsupportedValueError, match="no val_dataloader"):
        getattr(Trainer(1, backend=reference), verb)(net, data)


def test_hyperparameters_are_the_arguments_without_those_that_are_ignored():
    class Mine(Trainer):
        def __init__(self, max_epochs, rate, secret, _hidden=0):
            self.save_hyperparameters(ignore=["secret"])

    kept = vars(Mine(3, 0.5, "x"))
    assert kept == {"max_epochs": 3, "rate": 0.5}


# -- data without a target ---------------------------------------------------------------------


class Regularizer:
    """A loss as ``torch.nn.Module`` and Gluon's blocks are called."""

    def __call__(self, *arguments):
        return self.forward(*arguments)

    def forward(self, prediction):
        return prediction + 1


class HybridRegularizer(Regularizer):
    def forward(self, x, *arguments):
        return self.hybrid_forward("F", x, *arguments)

    def hybrid_forward(self, F, prediction):  # noqa: N803  # as Gluon has it
        return prediction + 1


class Distance(Regularizer):
    def forward(self, prediction, label):
        return 0


class HybridDistance(HybridRegularizer):
    def hybrid_forward(self, F, prediction, label, sample_weight=None):  # noqa: N803
        return 0


def scale_by(prediction, scale=1, *, shift=1):
    return prediction * scale + shift


def scale_by_keyword(prediction, *, scale):
    return prediction + scale


def perhaps_weighted(prediction, sample_weight=None):
    return prediction + 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda prediction: prediction + 1,
        scale_by,
        partial(scale_by, scale=1),
        partial(scale_by_keyword, scale=1),
        perhaps_weighted,
        Regularizer(),
        HybridRegularizer(),
        Regularizer().forward,
    ],
)
def test_a_loss_of_a_prediction_is_called_with_it_alone(loss):
    assert not takes_target(loss)
    assert comparison(loss)(1, None) == 2


@pytest.mark.parametrize(
    "loss",
    [
        "mse",
        lambda *both: 0,
        lambda prediction, y, scale=1: 0,
        lambda prediction, y, sample_weight: 0,
        lambda predictions, targets=None: 0,
        lambda x, y, z: 0,
        partial(lambda scale, prediction, y: 0, 1),
        Distance(),
        HybridDistance(),
        "{} against {}".format,  # does not say what it takes
    ],
)
def test_a_loss_of_a_prediction_and_a_target_is_called_with_both(loss):
    assert takes_target(loss)


def test_a_loss_of_a_prediction_and_weights_is_refused():
    with pytest.raises(UnsupportedValueError, match="no y beside which they are given"):
        comparison(lambda prediction, sample_weight: 0)
