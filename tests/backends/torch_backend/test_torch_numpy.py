"""Between torch and NumPy: every dtype, every layout, and never shared memory."""

import sys
import weakref

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from d2ldev_torch.backend import TorchBackend


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", TorchBackend.dtype_names)
def test_every_dtype_goes_from_numpy_and_back_with_its_bytes(torch_backend, name):
    array = np.array([[0, 1], [1, 0]]).astype(numpy_dtype(name))
    back = torch_backend.to_numpy(torch_backend.asarray(array))
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", TorchBackend.dtype_names)
def test_a_tensor_of_numpy_data_has_numpy_s_dtype(torch_backend, name):
    x = torch_backend.asarray(np.ones(2, numpy_dtype(name)))
    assert torch_backend.dtype_of(x) == name


@pytest.mark.parametrize("name", TorchBackend.dtype_names)
def test_a_list_takes_every_dtype(torch_backend, name):
    x = torch_backend.asarray([0, 1, 1], dtype=name)
    assert x.dtype is getattr(torch, name)
    assert x.to(torch.float64 if not x.is_complex() else x.dtype).tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_data_of_a_dtype_that_numpy_lacks_converts(torch_backend, name):
    x = torch_backend.asarray(np.array([1.5, -2], numpy_dtype(name)), dtype="float32")
    assert x.dtype is torch.float32
    assert x.tolist() == [1.5, -2]


@pytest.mark.parametrize(
    ("name", "bits", "number"),
    [
        ("float32", "uint32", 0x7FC0_1234),
        ("float64", "uint64", 0x7FF8_0000_0000_1234),
        ("float16", "uint16", 0x7E12),
        ("bfloat16", "uint16", 0x7FC3),
    ],
)
def test_the_payload_of_nan_survives(torch_backend, name, bits, number):
    array = np.array([number], bits).view(numpy_dtype(name))
    assert torch_backend.to_numpy(torch_backend.asarray(array)).view(bits)[0] == number


def test_infinities_and_the_sign_of_zero_survive(torch_backend):
    array = np.array([np.inf, -np.inf, -0.0, 0.0], np.float32)
    assert torch_backend.to_numpy(torch_backend.asarray(array)).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6.0)[::-1],
        np.arange(6.0)[::2],
        np.broadcast_to(np.float32(2), (2, 2)),
        np.arange(6, dtype=">i4"),
        np.array(3.5),
        np.zeros((0, 3), np.float32),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4).astype(ml_dtypes.bfloat16)[::-1],
        np.array(2, ml_dtypes.bfloat16),
    ],
    ids=[
        *("transposed", "negative stride", "every second", "broadcast", "big-endian"),
        *("0-dim", "no elements", "column-major", "bfloat16 reversed", "bfloat16 0-dim"),
    ],
)
def test_any_layout_of_numpy_is_taken(torch_backend, array):
    x = torch_backend.asarray(array)
    assert tuple(x.shape) == array.shape
    assert torch_backend.to_numpy(x).tolist() == array.tolist()


def test_a_numpy_scalar_keeps_its_dtype(torch_backend):
    x = torch_backend.asarray(np.float16(1.5))
    assert (x.dtype, x.shape, x.item()) == (torch.float16, (), 1.5)


def test_a_read_only_array_is_copied_without_a_warning(torch_backend):
    array = np.arange(3)
    array.flags.writeable = False
    x = torch_backend.asarray(array)
    x[0] = 7
    assert array.tolist() == [0, 1, 2]


def aligned(name):
    """An array whose memory starts at a multiple of 64 bytes, which some frameworks take over."""
    memory = np.zeros(64 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 64].view(numpy_dtype(name))


@pytest.mark.parametrize("name", TorchBackend.dtype_names)
def test_aligned_memory_is_never_shared(torch_backend, name):
    array = aligned(name)
    x = torch_backend.asarray(array)
    array[:] = 1
    assert not torch_backend.to_numpy(x).astype(bool).any()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_what_to_numpy_gives_is_the_caller_s(torch_backend, name):
    x = torch_backend.zeros(2, dtype=name)
    array = torch_backend.to_numpy(x)
    array[0] = 1
    assert array.flags.writeable
    assert torch_backend.to_numpy(x).tolist() == [0, 0]


def test_a_conjugated_tensor_gives_its_values(torch_backend):
    x = torch.tensor([1 + 2j]).conj()
    assert x.is_conj()
    assert torch_backend.to_numpy(x).tolist() == [1 - 2j]


def test_a_tensor_with_a_pending_minus_gives_its_values(torch_backend):
    x = torch.tensor([1 + 2j]).conj().imag
    assert x.is_neg()
    assert torch_backend.to_numpy(x).tolist() == [-2]


def test_a_sparse_tensor_gives_a_dense_array(torch_backend):
    x = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    assert torch_backend.to_numpy(x).tolist() == [[0, 2], [0, 0]]


def test_a_tensor_that_needs_gradients_gives_its_values(torch_backend):
    x = torch.ones(2, requires_grad=True)
    assert torch_backend.to_numpy(x * 2).tolist() == [2, 2]
    assert x.requires_grad


def test_a_tensor_without_memory_gives_no_values(torch_backend):
    with pytest.raises(TypeError, match="the tensor is on meta"):
        torch_backend.to_numpy(torch.ones(1, device="meta"))


def test_an_expanded_tensor_gives_memory_of_its_own_for_each_number(torch_backend):
    array = torch_backend.to_numpy(torch.ones(1).expand(3))
    array[0] = 5
    assert array.tolist() == [5, 1, 1]


def test_a_list_of_arrays_is_taken_without_torch_s_warning_that_it_is_slow(torch_backend):
    x = torch_backend.asarray([np.ones(2, np.float32), np.zeros(2, np.float32)])
    assert x.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    "obj", [np.array(["a"]), np.array([object()]), "text", [[1, 2], [3]]], ids=str
)
def test_what_is_no_array_of_numbers_is_refused(torch_backend, obj):
    with pytest.raises(TypeError, match="cannot make a tensor of data"):
        torch_backend.asarray(obj)


def test_from_dlpack_shares_numpy_s_memory(torch_backend):
    array = np.zeros(3, np.float32)
    x = torch_backend.from_dlpack(array)
    array[1] = 5
    assert x.tolist() == [0, 5, 0]


def test_from_dlpack_of_a_tensor_shares_its_memory(torch_backend):
    x = torch.zeros(3)
    assert torch_backend.from_dlpack(x).data_ptr() == x.data_ptr()


def test_from_dlpack_refuses_read_only_memory(torch_backend):
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(TypeError, match=r"(?i)read-?only"):
        torch_backend.from_dlpack(array)


@pytest.mark.parametrize(
    "array",
    [np.arange(3.0)[::-1], array_api_strict.flip(array_api_strict.arange(3))],
    ids=["numpy", "array-api-strict"],
)
def test_from_dlpack_refuses_negative_strides_for_which_torch_would_abort(torch_backend, array):
    with pytest.raises(TypeError, match="negative strides"):
        torch_backend.from_dlpack(array)


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2)), np.array(3), np.array([True, False])],
    ids=["transposed", "no elements", "0-dim", "bool"],
)
def test_from_dlpack_takes_any_other_layout(torch_backend, array):
    x = torch_backend.from_dlpack(array)
    assert (tuple(x.shape), x.tolist()) == (array.shape, array.tolist())


def test_memory_that_was_taken_over_outlives_its_owner(torch_backend):
    array = np.arange(1000)
    x = torch_backend.from_dlpack(array)
    released = weakref.ref(array)
    del array
    assert released() is not None
    assert x[999] == 999


def test_memory_that_was_refused_is_given_back(torch_backend):
    array = np.arange(3.0)
    references = sys.getrefcount(array)
    with pytest.raises(TypeError):
        torch_backend.from_dlpack(array[::-1])
    assert sys.getrefcount(array) == references


def test_from_dlpack_refuses_a_tensor_that_needs_gradients(torch_backend):
    with pytest.raises(TypeError, match="cannot take over the memory of") as caught:
        torch_backend.from_dlpack(torch.ones(2, requires_grad=True))
    assert isinstance(caught.value.__cause__, BufferError)


def test_from_dlpack_refuses_what_has_no_such_memory(torch_backend):
    with pytest.raises(TypeError, match="cannot take over the memory of"):
        torch_backend.from_dlpack([1, 2])
