"""D2L 6.7.3: a mapping calls a model by name, and a model may compute its loss itself."""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import EpochMetric, Trainer, UnsupportedValueError
from d2ldev_conformance.provision import models_with_losses, models_with_masks
from d2ldev_conformance.requirement import requirement

SECTION = "6.7.3"
SOURCE = "contract, Training"

DRAW = np.random.default_rng(0)
X = DRAW.random((6, 3), "float32")
Y = DRAW.random((6, 3), "float32")
LABELS = np.array([0, 1, 0, 1, 1, 0], "int32")


def _fit(trainer, net, batch, **options):
    return trainer.fit(net, [batch], **options)


def _validate(trainer, net, batch, **options):
    return trainer.validate(net, [batch], **options)


def _predict(trainer, net, batch):
    return trainer.predict(net, [batch])


@requirement("fit.refuses-other-names", section=SECTION)
@pytest.mark.parametrize("call", [_fit, _validate, _predict])
@pytest.mark.parametrize("beside", [{"y": Y}, {}], ids=["with y", "without y"])
def test_a_misspelt_key_is_refused(backend, num_gpus, masked_model, call, beside):
    """Refuse a key of a batch that names no input of the model, and name the nearest one.

    Otherwise a misspelt mask would be the target, or another input.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    net = models_with_masks(backend)[masked_model](trainer.device)
    with pytest.raises(UnsupportedValueError, match=r"'mmask'.*did you mean 'mask'"):
        call(trainer, net, {"mmask": X, "x": X, **beside})


@requirement("fit.one-input-by-any-name", section=SECTION)
@pytest.mark.parametrize(
    "batch",
    [{"x": X, "y": Y}, {"y": Y, "pixels": X}, ({"pixels": X}, Y)],
    ids=["x", "pixels", "pair"],
)
def test_a_single_key_goes_to_a_model_that_needs_one_input(backend, num_gpus, batch):
    """Give a single key to a model with one input, and refuse two.

    Frameworks name the input of their layers differently.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    net = backend.mlp([3, 3])
    expected = trainer.validate(net, [(X, Y)])
    assert trainer.validate(net, [batch]) == expected
    with pytest.raises(UnsupportedValueError, match="'other', 'pixels'"):
        trainer.validate(net, [{"other": X, "y": Y, "pixels": X}])
    assert trainer.fit(net, [batch], lr=0.0)["loss"] == [pytest.approx(expected["loss"])]


@requirement("fit.optional-inputs", section=SECTION)
def test_an_input_reaches_its_parameter_past_an_optional_one(backend, num_gpus, loss_model):
    """Give an input to its parameter, also if an optional one before it is missing.

    A framework whose models take positions refuses the gap. By position, ``z`` would be ``x``.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    net = models_with_losses(backend)[loss_model](trainer.device)

    def compute(batch):
        try:
            (output,) = trainer.predict(net, [batch])
        except UnsupportedValueError as error:
            return str(error)
        return backend.to_numpy(output["logits"]).tolist()

    gap = "it takes inputs by position, and a batch lacks 'x' before 'z'"
    right = backend.to_numpy(trainer.predict(net, [{"x": 2 * X}])[0]["logits"])
    found = compute({"z": X})
    assert gap in found or np.allclose(found, right, rtol=1e-5)


def _batch(net_input=X):
    return {"labels": LABELS, "z": None, "x": net_input}


@requirement("fit.loss-of-the-model", section=SECTION)
def test_a_model_computes_its_loss_itself(backend, num_gpus, loss_model):
    """Train with the loss that the model returns, and give metrics its output and the batch.

    Most models of Hugging Face compute their loss when they get labels.
    """
    trainer = Trainer(3, num_gpus, backend=backend)
    net = models_with_losses(backend)[loss_model](trainer.device)
    (output,) = trainer.predict(net, [_batch()])
    expected = float(backend.to_numpy(output["loss"]))

    def rows(output, batch):
        return 1.0 * (output["logits"].shape[0] + batch["labels"].shape[0])

    def share(y_true, y_pred):
        return (y_pred.argmax(-1) == y_true).mean()

    options = {"loss": "model", "metrics": ["accuracy", rows, EpochMetric(share)]}
    found = trainer.validate(net, [_batch()], **options)
    logits = backend.to_numpy(output["logits"])
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(logits.argmax(-1) == LABELS))
    assert found["rows"] == 12.0
    assert found["share"] == pytest.approx(found["accuracy"])
    history = trainer.fit(net, [_batch()], [_batch()], lr=0.5, **options)
    assert history["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert history["val_loss"][-1] < history["loss"][-1] < history["loss"][0]


@requirement("fit.loss-of-the-model", section=SECTION)
def test_batches_with_a_loss_of_the_model_accumulate(backend, num_gpus, loss_model):
    """Make one step from several batches with a loss of the model, as from one batch of all.

    The batches count by their examples.
    """
    whole = _batch()
    halves = [{**_batch(X[i : i + 3]), "labels": LABELS[i : i + 3]} for i in (0, 3)]
    found = []
    for data, number in (([whole], 1), (halves, 2)):
        trainer = Trainer(2, num_gpus, backend=backend, accumulate_grad_batches=number)
        net = models_with_losses(backend)[loss_model](trainer.device)
        trainer.fit(net, data, loss="model", lr=0.5)
        found.append(trainer.validate(trainer.model, [whole], loss="model")["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@requirement("fit.loss-of-the-model", section=SECTION)
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({**_batch(), "sample_weight": np.ones(6, "float32")}, "weigh the examples"),
        ({"x": X}, "returned no loss"),
        ({**_batch(), "y": LABELS}, "'y'"),
    ],
    ids=["weights", "no labels", "a target"],
)
def test_a_loss_of_the_model_takes_no_target(backend, num_gpus, loss_model, batch, words):
    """Refuse weights and a target beside a loss of the model, and a model without a loss.

    Nothing would look at them.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    net = models_with_losses(backend)[loss_model](trainer.device)
    with pytest.raises(UnsupportedValueError, match=words):
        trainer.fit(net, [batch], loss="model")


@requirement("fit.names-the-output-of-a-model", section=SECTION)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_a_named_loss_of_a_mapping_is_refused_with_its_keys(backend, num_gpus, loss_model, loss):
    """Name the keys of a model's output, where a named loss or metric needs a tensor.

    The error of the framework would be about a dict that the user has not written.
    """
    trainer = Trainer(1, num_gpus, backend=backend)
    net = models_with_losses(backend)[loss_model](trainer.device)
    batch = ({"x": X}, LABELS)
    with pytest.raises(UnsupportedValueError, match="with 'logits'") as error:
        trainer.fit(net, [batch], loss=loss)
    assert "loss=lambda out, y: f(out['logits'], y)" in error.value.fix

    def first(out, _y):
        return out["logits"][0, 0]

    with pytest.raises(UnsupportedValueError, match="with 'logits'") as error:
        trainer.validate(net, [batch], loss=first, metrics=["accuracy"])
    assert "metrics=[lambda out, y: f(out['logits'], y)]" in error.value.fix
