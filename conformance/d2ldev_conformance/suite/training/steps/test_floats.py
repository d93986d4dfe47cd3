"""D2L 6.7.3: data is of the model's dtype when it enters, whatever floats it was made of.

NumPy makes float64 by default, and models are float32. Frameworks raise, cast or compute in other
bits.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from d2ldev import D2LDevWarning, Trainer
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_run, read_saved_values

SECTION = "6.7.3"
SOURCE = "contract, Training"
# Each number is one of float16's.
X = np.arange(12).reshape(6, 2) / 8 - 0.5
Y = np.arange(6).reshape(6, 1) / 4
FORMS = {
    "a pair": lambda x, y: (x, y),
    "a dict": lambda x, y: {"x": x, "y": y, "sample_weight": np.ones(len(y), y.dtype)},
}


def _fit(backend, device, batch, net=None, **options):
    """Return the parameters and the history of a run, and the warnings that it gave."""
    trainer = Trainer(2, backend=backend, **options)
    trainer.device = device
    net = backend.mlp([2, 1], seed=0) if net is None else net
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        history = trainer.fit(net, [batch, batch], [batch])
        predicted = trainer.predict(trainer.model, [batch])
    found = [str(each.message) for each in found if issubclass(each.category, D2LDevWarning)]
    assert [backend.dtype_of(x) for x in predicted] == ["float32"]
    return (read_saved_values(backend, trainer.model), history), found


@requirement("fit.casts-floats", section=SECTION)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["float64", "float16"])
def test_data_of_another_float_dtype_trains_the_model_as_its_own(backend, place, form, name):
    """Cast data of another float dtype to the model's, and say so once."""
    run, said = _fit(backend, place, FORMS[form](X.astype(name), Y.astype(name)))
    expected, _ = _fit(backend, place, FORMS[form](X.astype("float32"), Y.astype("float32")))
    assert_same_run(run, expected)
    # Once by ``fit``, and once by ``predict``.
    assert len(said) == 2
    assert all(f"{name} is cast to float32" in each for each in said)


@requirement("fit.casts-floats", section=SECTION)
def test_tensors_of_another_float_dtype_are_cast_where_they_are(backend, place):
    """Cast tensors of another float dtype on their device.

    A cast on the host would transfer twice.
    """
    names = {"float64", "float16"} & set(backend.dtype_names)
    expected, _ = _fit(backend, place, (X.astype("float32"), Y.astype("float32")))
    for name in names:
        batch = tuple(backend.asarray(x.astype(name), device=place) for x in (X, Y))
        run, said = _fit(backend, place, batch)
        assert_same_run(run, expected)
        assert len(said) == 2


@requirement("fit.casts-only-floats", section=SECTION)
def test_data_of_the_models_dtype_is_not_noted_and_integers_stay(backend, place):
    """Leave integers and data of the model's dtype alone, without a note.

    Labels and tokens are integers.
    """
    x, y = X.astype("float32"), Y.astype("float32")
    expected, said = _fit(backend, place, (x, np.round(y)))
    run, said_of_integers = _fit(backend, place, (x, np.round(y).astype("int32")))
    assert said == said_of_integers == []
    assert_same_run(run, expected)
    seen = []
    trainer = Trainer(1, backend=backend)
    trainer.prepare_batch = lambda batch: (
        seen.append(batch[1].dtype.name) or backend.to(batch, "cpu")
    )
    trainer.fit(backend.mlp([2, 3]), [(x, np.arange(6) % 3)], loss="cross_entropy")
    assert seen == ["int64"]
