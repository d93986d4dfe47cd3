"""Tensors pass between all frameworks: the same memory where DLPack allows it."""

import collections
import itertools

import numpy as np
import pytest

import d2ldev
from d2ldev import UnsupportedValueError
from d2ldev.framework.testing import framework_of

NAMES = ("mxnet", "torch", "jax", "tensorflow", "reference")
PAIRS = list(itertools.permutations(NAMES, 2))


@pytest.fixture(params=PAIRS, ids=lambda pair: "-to-".join(pair))
def pair(request):
    return tuple(d2ldev.get_backend(name) for name in request.param)


# TensorFlow's device objects are strings, which everyone reads.
@pytest.fixture(
    params=[pair for pair in PAIRS if pair[0] != "tensorflow"], ids=lambda pair: "-to-".join(pair)
)
def device_pair(request):
    return tuple(d2ldev.get_backend(name) for name in request.param)


def align(data):
    """Return the same numbers at a multiple of 64 bytes, where XLA and TensorFlow alias memory."""
    buffer = np.zeros(data.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    copied = buffer[start : start + data.nbytes].view(data.dtype)
    copied[:] = data
    return copied


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_a_tensor_passes_with_its_values_in_the_same_memory(pair, dtype):
    source, target = pair
    data = align(np.arange(64).astype(dtype))
    x = source.from_dlpack(data)
    y = target.from_dlpack(x)
    assert isinstance(y, framework_of(target).tensors.types)
    assert target.device_of(y) is target.cpu()
    np.testing.assert_array_equal(target.to_numpy(y), data)
    assert target.address(y) == source.address(x)


def test_a_tensor_passes_as_a_copy_through_numpy(pair):
    source, target = pair
    data = np.arange(6, dtype="float32").reshape(2, 3)
    x = source.asarray(data)
    y = target.asarray(d2ldev.backend_of(x).to_numpy(x))
    np.testing.assert_array_equal(target.to_numpy(y), data)
    assert target.address(y) != source.address(x)


def test_another_frameworks_tensor_in_a_batch_is_data(pair):
    source, target = pair
    x = source.asarray(np.arange(6, dtype="float32"))
    batch = collections.OrderedDict(x=[x], again=(x,))
    moved = target.to(batch, "cpu")
    assert type(moved) is collections.OrderedDict
    assert target.dtype_of(moved["x"][0]) == "float32"
    np.testing.assert_array_equal(target.to_numpy(moved["x"][0]), np.arange(6, dtype="float32"))
    assert moved["again"][0] is moved["x"][0]


def test_a_copy_of_another_frameworks_tensor_is_refused_with_the_way_to_take_it(pair):
    source, target = pair
    with pytest.raises(UnsupportedValueError) as caught:
        target.copy({"x": [source.ones(2)]}, "cpu")
    assert "x.0" in str(caught.value)
    assert "from_dlpack" in caught.value.fix


def test_another_frameworks_device_object_is_refused(device_pair):
    source, target = device_pair
    with pytest.raises(d2ldev.InvalidDeviceError):
        target.ones(1, device=source.native("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_backend_of_finds_the_backend_of_a_tensor(name):
    backend = d2ldev.get_backend(name)
    assert d2ldev.backend_of(backend.ones(2)) is backend


@pytest.mark.parametrize("name", NAMES)
def test_the_active_backend_is_one_of_several(name):
    with d2ldev.use_backend(name):
        assert d2ldev.backend.name == name
        assert d2ldev.backend_of(d2ldev.backend.ones(1)).name == name
