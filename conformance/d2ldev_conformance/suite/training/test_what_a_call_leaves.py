"""D2L 6.7.3: a model's call may leave a tensor in an attribute, such as its attention weights.

A model's call may leave a tensor in an attribute, such as attention weights. It is a by-product,
and not a part of the model.

No list of the framework's has it. So it may be missing, surplus or of another shape, and ends no
run, and nothing else.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import Trainer
from d2ldev_conformance.provision import attention_models
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same

SECTION = "6.7.3"
SOURCE = "contract, Files"


@pytest.fixture
def make(backend, attention_model):
    """Make the model on the CPU; called with a number of rows, it has computed with so many."""

    def make(rows=0):
        backend.seed(0)
        net = attention_models(backend)[attention_model](backend.cpu())
        if rows:
            net(backend.ones((rows, 2)))
        return net

    return make


def _predict(backend, net, batches):
    found = Trainer(1, backend=backend).predict(net, batches)
    return [backend.to_numpy(x) for x in found]


@requirement("fit.passes-over-what-a-call-leaves", section=SECTION, source="contract, Training")
def test_a_model_is_placed_and_trained_again_after_a_run(backend, make, batches, num_gpus):
    """Train and place a model again whose calls leave a tensor."""
    trainer = Trainer(2, num_gpus, backend=backend)
    first = trainer.fit(make(), batches, lr=0.1)["loss"]
    second = trainer.fit(trainer.model, batches, lr=0.1)["loss"]
    assert second[0] < first[0]
    placed = backend.place(trainer.model, backend.cpu())
    assert set(backend.placement(placed).values()) == {backend.cpu()}


@requirement("io.passes-over-what-a-call-leaves", section=SECTION)
@pytest.mark.parametrize("rows", [0, 3, 4], ids=["fresh", "of another shape", "of its shape"])
@pytest.mark.parametrize("rows_saved", [0, 4], ids=["saved fresh", "saved after a call"])
def test_a_file_fits_a_model_whatever_its_calls_have_left(
    backend, make, batches, tmp_path, rows, rows_saved
):
    """Load a file into a model, whatever its calls have left."""
    trained = Trainer(1, backend=backend)
    trained.fit(make(rows_saved), batches, lr=0.1)
    expected = _predict(backend, trained.model, batches)
    backend.save(trained.model, tmp_path / "net.safetensors")
    for source in (tmp_path / "net.safetensors", backend.named_tensors(trained.model)):
        loaded = backend.load_into(make(rows), source)
        for mine, theirs in zip(_predict(backend, loaded, batches), expected, strict=True):
            assert_same(mine, theirs)


@requirement(
    "fit.resumes-past-what-a-call-leaves", section=SECTION, source="contract, Resuming a run"
)
@pytest.mark.parametrize("rows", [0, 3], ids=["fresh", "of another shape"])
def test_a_run_goes_on_whatever_a_call_has_left(backend, make, batches, tmp_path, rows):
    """Resume a run of such a model with the same losses."""
    path = tmp_path / "run.safetensors"
    unbroken = Trainer(3, backend=backend).fit(make(), batches, lr=0.1)
    Trainer(1, backend=backend).fit(make(), batches, lr=0.1, checkpoint=path)
    resumed = Trainer(3, backend=backend).fit(
        make(rows), batches, lr=0.1, checkpoint=path, resume=True
    )
    np.testing.assert_array_equal(resumed["loss"], unbroken["loss"])
