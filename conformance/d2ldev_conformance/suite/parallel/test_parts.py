"""D2L 13.5: a batch is split, and parameters are copied, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import DeviceUnavailableError, InvalidDeviceError, UnsupportedValueError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same, saved_values

SECTION = "13.5"
PAIR = ("gpu:0", "gpu:1")
two_gpus = pytest.mark.needs_gpus(2)


@requirement("split.gives-each-its-part", section=SECTION)
@pytest.mark.parametrize(
    ("length", "lengths"), [(4, [2, 2]), (5, [3, 2]), (1, [1, 0])], ids=["even", "odd", "one"]
)
@two_gpus
def test_each_device_gets_its_part_in_order(backend, length, lengths):
    data = np.arange(3 * length, dtype="float32").reshape(length, 3)
    parts = backend.split(backend.asarray(data, device="gpu:0"), PAIR)
    assert [str(backend.device_of(part)) for part in parts] == list(PAIR)
    assert [part.shape[0] for part in parts] == lengths
    assert_same(np.concatenate([backend.to_numpy(part) for part in parts]), data)


@requirement("split.takes-nestings", section=SECTION)
@two_gpus
def test_tensors_and_numpy_arrays_in_a_nesting_are_split_together(backend):
    batch = {
        "x": np.zeros((4, 2), "float32"),
        "rest": [backend.ones(4), backend.ones(()), "a", None],
    }
    for part, name in zip(backend.split(batch, PAIR), PAIR, strict=True):
        first, second, *others = part["rest"]
        assert [tuple(x.shape) for x in (part["x"], first, second)] == [(2, 2), (2,), ()]
        assert {str(backend.device_of(x)) for x in (part["x"], first, second)} == {name}
        assert others == ["a", None]


@requirement("split.asks-for-one-length", section=SECTION)
def test_tensors_of_two_lengths_are_refused(backend):
    batch = {"x": backend.ones((4, 2)), "y": backend.ones(3)}
    with pytest.raises(UnsupportedValueError, match="x has 4, y has 3"):
        backend.split(batch, ["cpu"])


@requirement("split.asks-for-examples", section=SECTION)
@pytest.mark.parametrize("batch", [None, {}, 3.0], ids=["None", "empty", "number"])
def test_a_batch_without_examples_is_refused(backend, batch):
    with pytest.raises(UnsupportedValueError, match="number of examples"):
        backend.split(batch, ["cpu"])


@requirement("split.refuses-devices", section=SECTION)
@pytest.mark.parametrize(
    "devices",
    [[], "gpu:0", None, ["cpu", "cpu"], [object()]],
    ids=["none", "text", "None", "twice", "other"],
)
@pytest.mark.parametrize("method", ["split", "replicate"])
def test_what_is_no_list_of_devices_is_refused(backend, method, devices):
    with pytest.raises(InvalidDeviceError):
        getattr(backend, method)(backend.ones((2, 2)), devices)


@requirement("split.needs-devices", section=SECTION)
@pytest.mark.parametrize("method", ["split", "replicate"])
def test_a_device_that_does_not_exist_is_refused(backend, missing, method):
    with pytest.raises(DeviceUnavailableError):
        getattr(backend, method)(backend.ones((2, 2)), ["cpu", missing])


@requirement("replicate.copies-parameters", section=SECTION)
@two_gpus
def test_each_device_gets_parameters_of_its_own(backend):
    shared = backend.ones((2, 3), device="gpu:0")
    params = {"w1": shared, "tied": shared, "b1": backend.zeros(3, device="gpu:0")}
    for copy, name in zip(backend.replicate(params, PAIR), PAIR, strict=True):
        assert set(backend.placement(copy).values()) == {backend.device(name)}
        assert copy["w1"] is copy["tied"]
        assert copy["w1"] is not shared
        assert_same(backend.to_numpy(copy["w1"]), np.ones((2, 3), "float32"))
    assert params["w1"] is shared


@requirement("replicate.copies-models", section=SECTION)
@two_gpus
def test_each_device_gets_a_model_of_its_own(backend):
    net = backend.place(backend.mlp([2, 3, 1]), "gpu:0")
    values = saved_values(backend, net)
    copies = backend.replicate(net, PAIR)
    x = backend.ones((4, 2))
    predictions = [
        backend.to_numpy(copy(backend.to(x, name))) for copy, name in zip(copies, PAIR, strict=True)
    ]
    np.testing.assert_allclose(predictions[1], predictions[0], rtol=1e-6)
    learner = backend.learner(copies[0], lr=0.5)
    learner.step((backend.to(x, "gpu:0"),), backend.ones((4, 1), device="gpu:0"))
    learner.sync()
    for other, name in ((net, "gpu:0"), (copies[1], "gpu:1")):
        assert set(backend.placement(other).values()) == {backend.device(name)}
        after = saved_values(backend, other)
        assert list(after) == list(values)
        for key, value in values.items():
            assert_same(after[key], value)
