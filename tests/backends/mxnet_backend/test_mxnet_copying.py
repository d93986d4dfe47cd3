"""Copies of MXNet's arrays, and their memory in other hands."""

import numpy as np
import pytest
from d2ldev_mxnet.dlpack import Exported
from d2ldev_mxnet.framework import NumPySemantics, mx

from d2ldev import UnsupportedValueError, cpu, gpu


def test_a_copy_is_new_memory_also_in_its_own_context(backend):
    x = backend.ones(4, device="gpu:0")
    assert backend.address(backend.copy(x)) != backend.address(x)


def test_contexts_do_not_share_memory(backend):
    x = backend.ones(4)
    y = backend.to(x, "gpu:0")
    y[:] = 5.0
    assert backend.to_numpy(x).tolist() == [1.0] * 4


def test_a_copy_has_the_values_of_its_time(backend):
    x = backend.ones((256, 256))
    copied = backend.copy(x, "gpu:1")
    x[:] = 7.0
    assert backend.to_numpy(copied).max() == 1.0


@pytest.mark.parametrize("method", ["to", "copy"])
def test_copies_are_part_of_what_is_recorded(backend, method):
    weight = backend.ones(3)
    weight.attach_grad()
    with NumPySemantics():
        with mx.autograd.record():
            there = getattr(backend, method)(weight * 2, "gpu:1")
            loss = backend.to(there * 3, "cpu").sum()
        loss.backward()
    assert weight.grad.tolist() == [6.0] * 3


def test_a_part_of_an_array_is_copied_as_what_it_is(backend):
    x = backend.asarray(np.arange(12, dtype="float32").reshape(3, 4))
    assert backend.to_numpy(backend.to(x[1], "gpu:0")).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "make",
    [
        lambda: mx.nd.diag(mx.nd.arange(1, 3)),
        lambda: mx.nd.diag(mx.nd.arange(1, 3)).tostype("csr"),
        lambda: mx.nd.diag(mx.nd.arange(1, 3)).tostype("row_sparse"),
    ],
    ids=["legacy", "csr", "row_sparse"],
)
def test_an_array_of_another_class_stays_of_its_class(backend, make):
    x = make()
    moved = backend.to(x, "gpu:1")
    assert type(moved) is type(x)
    assert backend.device_of(moved) is gpu(1)
    assert backend.to_numpy(moved).tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert backend.to(moved, "gpu:1") is moved


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_a_legacy_array_of_any_shape_is_read(backend, shape):
    x = backend.zeros(shape).as_nd_ndarray()
    assert backend.to_numpy(x).shape == shape


def test_an_array_that_was_taken_over_is_the_same_memory(backend):
    x = backend.ones(4, device="gpu:0")
    y = backend.from_dlpack(x)
    y[0] = 9.0
    assert y is not x
    assert backend.device_of(y) is gpu(0)
    assert backend.to_numpy(x).tolist() == [9.0, 1.0, 1.0, 1.0]


def test_a_legacy_array_is_taken_over_as_one_of_numpy_s_kind(backend):
    x = mx.nd.ones((2,))
    y = backend.from_dlpack(x)
    assert type(y) is mx.np.ndarray
    assert backend.address(y) == backend.address(x)


@pytest.mark.parametrize("shape", [(3,), (), (0, 2)])
def test_numpy_s_memory_is_taken_over_in_every_shape(backend, shape):
    data = np.ones(shape, "float32")
    y = backend.from_dlpack(data)
    assert backend.to_numpy(y).shape == shape
    assert backend.device_of(y) is cpu()


@pytest.mark.parametrize(
    "data",
    [
        np.arange(4, dtype="float32")[::-1],
        np.arange(4, dtype="float32")[::2],
        np.ones((2, 3), "float32").T,
        np.ones(2, "uint16"),
        np.broadcast_to(np.float32(1), (2,)),
    ],
    ids=["backwards", "every second", "transposed", "uint16", "read-only"],
)
def test_memory_that_mxnet_cannot_walk_is_refused(backend, data):
    with pytest.raises(UnsupportedValueError, match="copy instead"):
        backend.from_dlpack(data)


class Elsewhere:
    """A tensor of a device that is not there."""

    def __init__(self, kind, index):
        self._device = kind, index

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self):
        raise AssertionError("nobody asks for the memory of a device that is not there")


@pytest.mark.parametrize("device", [(2, 0), (2, 5), (8, 0), (10, 0)])
def test_memory_of_a_device_that_mxnet_has_not_is_refused(backend, hardware, device):
    for one in (backend, hardware):
        with pytest.raises(UnsupportedValueError, match="BufferError"):
            one.from_dlpack(Elsewhere(*device))


def test_others_take_over_the_memory_of_mxnet_s_arrays(backend):
    x = backend.ones(4)
    array = np.from_dlpack(backend._dlpack_of(x))
    x[0] = 5.0
    backend.synchronize()
    assert array.tolist() == [5.0, 1.0, 1.0, 1.0]
    assert array.ctypes.data == backend.address(x)


def test_memory_that_was_given_away_lives_as_long_as_it_is_used(backend):
    array = np.from_dlpack(backend._dlpack_of(backend.full(2**20, 3.0)))
    backend.full(2**20, 4.0)
    backend.synchronize()
    assert (array == 3.0).all()


def test_what_is_queued_is_done_before_memory_is_given_away(backend):
    x = backend.rand((512, 512), seed=0)
    y = mx.np.dot(x, x)
    array = np.from_dlpack(backend._dlpack_of(y))
    np.testing.assert_array_equal(array, backend.to_numpy(y))


@pytest.mark.parametrize(("context", "device"), [(mx.cpu(), (1, 0)), (mx.cpu(2), (1, 2))])
def test_the_device_of_what_is_given_away_is_the_context_s(context, device):
    assert Exported(mx.np.ones((1,), ctx=context)).__dlpack_device__() == device
