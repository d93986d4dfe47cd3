"""The guide "Take weights from one framework into another": its CNN, trained; integers in files."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import d2ldev

PAGE = Path(__file__).parent.parent.parent / "docs" / "guides" / "weights.md"
IMAGES = np.linspace(-1, 1, 5 * 64, dtype="float32").reshape(5, 1, 8, 8) ** 3


def _blocks():
    section = PAGE.read_text(encoding="utf-8").split("## From a torch CNN to a Flax one")[1]
    return re.findall(r"^```python all\n(.*?)^```$", section.split("\n## ")[0], re.M | re.S)


def test_the_page_takes_a_trained_cnn_from_torch_to_flax_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, third = _blocks()
    made, saved = first.split("d2ldev.torch.save")
    namespace = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(made, namespace)
    net = namespace["net"]
    x = torch.from_numpy(IMAGES)
    net(2 * x + 1)  # so that the statistics are not those of the beginning
    exec(f"d2ldev.torch.save{saved}", namespace)
    with pytest.warns(d2ldev.D2LDevWarning, match="num_batches_tracked.*int64.*int32") as caught:
        exec(second, namespace)
    assert len([each for each in caught if each.category is d2ldev.D2LDevWarning]) == 1
    exec(third, namespace)
    expected = net.eval()(x).detach().numpy()
    prediction = namespace["flax_net"](d2ldev.jax.asarray(IMAGES.transpose(0, 2, 3, 1)))
    np.testing.assert_allclose(d2ldev.jax.to_numpy(prediction), expected, rtol=1e-4, atol=1e-5)
    back = namespace["torch_net"].eval()(x).detach().numpy()
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("target", ["torch", "jax", "tensorflow", "mxnet", "reference"])
def test_integers_are_read_by_every_framework_in_its_own_or_another_dtype(tmp_path, name, target):
    path, backend = tmp_path / "integers.safetensors", d2ldev.get_backend(target)
    save_file({"x": np.array([3, 100], name), "n": np.array(7, name)}, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = backend.load(path)
    assert {key: backend.to_numpy(x).tolist() for key, x in loaded.items()} == {
        "x": [3, 100],
        "n": 7,
    }
    kept = backend.dtype_of(loaded["x"]) == name
    assert kept is (name in backend.dtype_names)
    assert len(caught) == (0 if kept else 1)


@pytest.mark.parametrize(
    ("name", "value"), [("int64", -(2**40)), ("uint64", 2**32), ("float64", 0.5)]
)
def test_what_jax_does_not_hold_is_refused_with_the_line_that_helps(tmp_path, name, value):
    path = tmp_path / "wide.safetensors"
    save_file({"x": np.array([1, value], name)}, path)
    with pytest.raises(d2ldev.CheckpointError, match=rf"{name}.*\n.*jax_enable_x64"):
        d2ldev.jax.load(path)


def test_integers_that_no_dtype_of_mxnet_holds_are_refused(tmp_path):
    path = tmp_path / "wide.safetensors"
    save_file({"x": np.array([2**63], "uint64")}, path)
    with pytest.raises(d2ldev.CheckpointError, match="int64 lacks"):
        d2ldev.get_backend("mxnet").load(path)
