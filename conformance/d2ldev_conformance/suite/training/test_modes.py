"""D2L 5.6: some layers compute otherwise in training, and a user chooses the mode of each.

Whoever looks at a model, or trains it, leaves the modes of its layers as they were. Otherwise the
next call of the model drops values, or a layer trains that was frozen.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import Trainer
from d2ldev_conformance.provision import check_provided, modes
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import ROUNDING, read_saved_values

SOURCE = "contract, Training"


class DataError(Exception):
    """The end of the data."""


def _fail_after(batches):
    yield from batches
    raise DataError


@requirement("runs.leave-the-modes", section="6.7.3")
@pytest.mark.parametrize("call", ["validate", "predict", "fit"])
def test_each_layer_has_the_mode_that_it_had_before(backend, moded, call):
    """Leave the mode of each layer as it was in ``fit``, ``validate`` and ``predict``.

    The same holds if the data or the model raises an error.
    """
    build, read = modes(backend)[moded]
    net = build(backend.cpu())
    before = read(net)
    trainer = Trainer(1, 0, backend=backend)

    def use(data):
        if call == "fit":
            trainer.fit(net, data, data, loss="cross_entropy", lr=0.1)
        else:
            options = {"loss": "cross_entropy"} if call == "validate" else {}
            getattr(trainer, call)(net, data, **options)
        # The caller has the same object: nothing has moved.
        return read(net)

    batch = np.ones((8, 4), "float32"), np.zeros(8, "int32")
    wrong = np.ones((8, 5), "float32"), np.zeros(8, "int32")
    with pytest.raises(DataError):
        use(_fail_after([batch]))
    assert read(net) == before
    with pytest.raises(Exception):  # noqa: B017, PT011  # the framework's own
        use([batch, wrong])
    assert read(net) == before
    assert use([batch]) == before


@requirement("runs.leave-the-modes", section="6.7.3")
@pytest.mark.needs_gpus(2)
def test_each_layer_has_the_mode_that_it_had_before_on_two_gpus(backend):
    """Leave the mode of each layer as it was in ``fit`` on two GPUs, also after an error.

    One network shows it: ``fit`` may start two processes.
    """
    check_provided(backend, "modes")
    build, read = next(iter(modes(backend).values()))
    net = build(backend.cpu())
    before = read(net)
    batch = np.ones((8, 4), "float32"), np.zeros(8, "int32")
    wrong = np.ones((8, 5), "float32"), np.zeros(8, "int32")

    def fit(*data):
        Trainer(1, 2, backend=backend).fit(net, data, [batch], loss="cross_entropy", lr=0.1)

    with pytest.raises(Exception):  # noqa: B017, PT011  # the framework's own
        fit(batch, wrong)
    assert read(net) == before
    fit(batch)
    assert read(net) == before


@requirement("runs.predict-in-use", section="6.7.3", source="D2L 5.6")
def test_no_layer_drops_values_in_use_whatever_its_mode(backend, moded):
    """Predict with all layers in evaluation mode, also if a user left one in training mode.

    Then a row has the same prediction in every batch, and the model stays as it is.
    """
    net = modes(backend)[moded][0](backend.cpu())
    batch = np.random.default_rng(0).normal(3, 2, (8, 4)).astype("float32")
    before = read_saved_values(backend, net)
    whole, part = (
        backend.to_numpy(Trainer(1, 0, backend=backend).predict(net, [rows])[0])
        for rows in (batch, batch[:2])
    )
    np.testing.assert_allclose(whole[:2], part, **ROUNDING)
    for name, value in read_saved_values(backend, net).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
