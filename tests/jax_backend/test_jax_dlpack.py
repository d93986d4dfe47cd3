"""``from_dlpack``: the memory itself, or an error; JAX alone would copy in silence."""

import jax.numpy as jnp
import numpy as np
import pytest

from d2ldev import UnsupportedValueError, cpu


def aligned(dtype="float32", count=64, offset=0):
    """Zeros that begin ``offset`` bytes after a multiple of 64."""
    nbytes = count * np.dtype(dtype).itemsize
    buffer = np.zeros(nbytes + 128, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    return buffer[start : start + nbytes].view(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint32", "complex64", "bool"])
def test_aligned_memory_is_taken_over(backend, dtype):
    data = aligned(dtype)
    x = backend.from_dlpack(data)
    assert backend.address(x) == data.ctypes.data
    assert x.dtype == data.dtype
    assert x.committed


def test_what_is_written_to_the_source_shows(backend):
    data = aligned()
    x = backend.from_dlpack(data)
    data[3] = 7
    assert backend.to_numpy(x)[3] == 7


def test_the_memory_outlives_its_source(backend):
    data = aligned()
    data[:] = 5
    x = backend.from_dlpack(data)
    del data
    assert backend.to_numpy(x).tolist() == [5] * 64


@pytest.mark.parametrize("offset", [4, 16, 32, 60])
def test_memory_that_jax_would_copy_is_refused(backend, capfd, offset):
    with pytest.raises(UnsupportedValueError, match="multiple of 64 bytes"):
        backend.from_dlpack(aligned(offset=offset))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_a_dtype_that_jax_would_narrow_is_refused(backend, dtype):
    with pytest.raises(UnsupportedValueError, match="copy"):
        backend.from_dlpack(aligned(dtype))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x[::-1],
        lambda x: x[::2],
        lambda x: x.reshape(8, 8)[:, :4],
        lambda x: x.reshape(8, 8).T,
        lambda x: x.reshape(2, 4, 8).swapaxes(0, 1),
        lambda x: np.broadcast_to(x[:1], 8),
    ],
    ids=["backwards", "with gaps", "a part", "transposed", "swapped", "broadcast"],
)
def test_memory_in_another_order_is_refused_and_not_misread(backend, layout):
    with pytest.raises(UnsupportedValueError):
        backend.from_dlpack(layout(aligned()))


@pytest.mark.parametrize("shape", [(64,), (8, 8), (2, 1, 32), (1, 64, 1), (4, 2, 8)])
def test_memory_in_the_order_of_c_is_taken_over_in_any_shape(backend, shape):
    data = aligned().reshape(shape)
    data[:] = np.arange(64).reshape(shape)
    x = backend.from_dlpack(data)
    assert backend.address(x) == data.ctypes.data
    assert backend.to_numpy(x).tolist() == data.tolist()


def test_a_dimension_of_one_has_no_order(backend):
    data = aligned().reshape(1, 64).T
    assert backend.from_dlpack(data).shape == (64, 1)


def test_an_empty_array_is_taken(backend):
    assert backend.from_dlpack(aligned(count=0)).shape == (0,)


@pytest.mark.parametrize("device", ["cpu", "gpu:0", "gpu:1"])
def test_an_array_of_jax_s_is_itself_where_it_is(backend, device):
    x = backend.ones(2, device=device)
    assert backend.from_dlpack(x) is x


def test_an_uncommitted_array_is_itself(backend):
    x = jnp.ones(2)
    assert backend.from_dlpack(x) is x
    assert backend.device_of(x) is cpu()


def test_other_frameworks_see_the_memory(backend):
    x = backend.arange(64, dtype="float32")
    assert np.from_dlpack(x).ctypes.data == backend.address(x)
