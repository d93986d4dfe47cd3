"""A file that one backend has written is read by every other."""

import itertools
import re

import numpy as np
import pytest

import d2ldev

NAMES = ("mxnet", "torch", "jax", "tensorflow", "reference")
PAIRS = list(itertools.permutations(NAMES, 2))


@pytest.fixture(params=PAIRS, ids=lambda pair: "-to-".join(pair))
def pair(request):
    return tuple(d2ldev.get_backend(name) for name in request.param)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


def test_names_and_values_are_the_same_everywhere(pair, path):
    source, target = pair
    shared = sorted(set(source.dtype_names) & set(target.dtype_names))
    # float8_e8m0fnu has powers of two, and no zero.
    data = {name: np.arange(6).reshape(2, 3) % 2 + ("e8m0" in name) for name in shared}
    nesting = {"x": {name: source.asarray(data[name], dtype=name) for name in shared}, "lr": 0.1}
    source.save(nesting, path)
    loaded = target.load(path)
    assert {name: target.dtype_of(x) for name, x in loaded["x"].items()} == {n: n for n in shared}
    assert loaded["lr"] == 0.1
    for name in shared:
        values = target.to_numpy(loaded["x"][name])
        np.testing.assert_array_equal(values, data[name].astype(values.dtype))


def test_a_model_is_read_as_its_parameters_by_the_names_that_it_had(pair, path):
    source, target = pair
    net = source.mlp([3, 4, 2], seed=1)
    source.save(net, path)
    there, here = source.load(path), target.load(path)
    assert list(here) == list(there)
    for name, x in here.items():
        np.testing.assert_array_equal(target.to_numpy(x), source.to_numpy(there[name]))


def test_layers_have_the_same_roles_and_canonical_shapes_everywhere(pair, path):
    def forms(backend):
        backend.save(backend.mlp([3, 4, 2]), path)
        found = re.findall(
            rb'\[\\"(\d\.\w+)\\",\[[\d,]+\],\[[\d,]+\],\[([\d,]+)\]', path.read_bytes()
        )
        return {role.decode(): tuple(map(int, shape.split(b","))) for role, shape in found}

    source, target = pair
    assert forms(source) == forms(target)
    assert forms(source) == {
        "0.weight": (4, 3),
        "0.bias": (4,),
        "1.weight": (2, 4),
        "1.bias": (2,),
    }
