"""MXNet's arrays: made whatever its modes are, with every number as it was given, and copied."""

import threading

import mxnet as mx
import numpy as np
import pytest
from numpy_semantics import NumPySemantics
from peer_rows import peer_rows

from d2ldev import DeviceLog, OutOfDeviceMemoryError, UnsupportedValueError, gpu
from d2ldev.framework.testing import framework_of

SHAPES = [(), (0,), (2, 0, 3), (2, 3)]
MAKERS = {
    "zeros": lambda backend, shape: backend.zeros(shape, device="gpu:0"),
    "ones": lambda backend, shape: backend.ones(shape, device="gpu:0"),
    "full": lambda backend, shape: backend.full(shape, 2.0, device="gpu:0"),
    "rand": lambda backend, shape: backend.rand(shape, device="gpu:0"),
    "randn with a seed": lambda backend, shape: backend.randn(shape, seed=1, device="gpu:0"),
    "asarray": lambda backend, shape: backend.asarray(np.ones(shape, "float32"), device="gpu:0"),
    "copy": lambda backend, shape: backend.copy(backend.ones(shape), "gpu:0"),
    "to": lambda backend, shape: backend.to(backend.ones(shape, device="gpu:1"), "gpu:0"),
    "conversion": lambda backend, shape: backend.asarray(
        backend.ones(shape, dtype="float64", device="gpu:0"), dtype="float32"
    ),
}


# -- making -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_every_shape_is_made_without_set_np(backend, name, shape):
    x = MAKERS[name](backend, shape)
    assert backend.to_numpy(x).shape == shape
    assert backend.device_of(x) is gpu(0)
    assert (mx.util.is_np_shape(), mx.util.is_np_array()) == (False, False)


@pytest.mark.parametrize("name", MAKERS)
def test_set_np_stays_set(backend, set_np, name):
    assert backend.to_numpy(MAKERS[name](backend, (2, 0))).shape == (2, 0)
    assert (mx.util.is_np_shape(), mx.util.is_np_array()) == (True, True)


@pytest.mark.parametrize("name", MAKERS)
def test_array_semantics_alone_stay_alone(backend, name):
    with mx.util.np_array(True):
        assert backend.to_numpy(MAKERS[name](backend, ())).shape == ()
        assert (mx.util.is_np_shape(), mx.util.is_np_array()) == (False, True)


def test_a_call_that_fails_leaves_the_modes_as_they_were(backend):
    with pytest.raises(OutOfDeviceMemoryError):
        backend.rand(2**50)
    assert (mx.util.is_np_shape(), mx.util.is_np_array()) == (False, False)


def test_every_thread_makes_every_shape(backend):
    shapes = []
    thread = threading.Thread(target=lambda: shapes.append(backend.zeros((0, 2)).shape))
    thread.start()
    thread.join()
    assert shapes == [(0, 2)]


@pytest.mark.parametrize("number", [2**53 + 1, 2**60 + 1, -(2**60) - 1])
def test_integers_that_no_double_holds_are_kept(backend, number):
    assert backend.to_numpy(backend.full(2, number)).tolist() == [number] * 2


@pytest.mark.parametrize(("value", "dtype"), [(True, "bool"), (3, "int64"), (3.0, "float32")])
def test_full_and_asarray_agree(backend, value, dtype):
    assert backend.dtype_of(backend.full(2, value)) == dtype


@pytest.mark.parametrize("seed", [None, 0])
def test_float16_numbers_are_below_one(backend, seed):
    x = backend.to_numpy(backend.rand(2**17, dtype="float16", seed=seed))
    assert x.max() < 1
    assert x.min() >= 0
    assert abs(x.astype("float64").mean() - 0.5) < 0.01


def test_without_a_seed_numbers_come_from_mxnet_s_random_state(backend):
    mx.random.seed(7)
    ours = backend.to_numpy(backend.rand(4)).tolist()
    mx.random.seed(7)
    assert ours == mx.np.random.uniform(0.0, 1.0, (4,)).asnumpy().tolist()


def test_a_negative_seed_is_a_seed(backend):
    drawn = {backend.to_numpy(backend.rand(4, seed=seed)).tobytes() for seed in (-1, 1, -1)}
    assert len(drawn) == 2


def test_more_elements_than_mxnet_counts_are_refused_as_such(backend):
    with pytest.raises(OutOfDeviceMemoryError, match="2147483647 elements"):
        backend.zeros((2**31,), dtype="int8")


def test_small_and_large_tensors_have_the_same_values(backend):
    for size in (2**20 - 1, 2**20):
        assert backend.to_numpy(backend.ones(size, device="gpu:1")).sum() == size
        assert backend.to_numpy(backend.zeros(size, device="gpu:1")).sum() == 0


def test_a_legacy_array_is_returned_itself(backend):
    x = mx.nd.ones((2,))
    assert backend.asarray(x) is x
    assert backend.dtype_of(x) == "float32"


# -- copying ----------------------------------------------------------------------------------


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
    array = np.from_dlpack(framework_of(backend).tensors.dlpack_of(x))
    x[0] = 5.0
    backend.synchronize()
    assert array.tolist() == [5.0, 1.0, 1.0, 1.0]
    assert array.ctypes.data == backend.address(x)


def test_memory_that_was_given_away_lives_as_long_as_it_is_used(backend):
    array = np.from_dlpack(framework_of(backend).tensors.dlpack_of(backend.full(2**20, 3.0)))
    backend.full(2**20, 4.0)
    backend.synchronize()
    assert (array == 3.0).all()


def test_what_is_queued_is_done_before_memory_is_given_away(backend):
    x = backend.rand((512, 512), seed=0)
    y = mx.np.dot(x, x)
    array = np.from_dlpack(framework_of(backend).tensors.dlpack_of(y))
    np.testing.assert_array_equal(array, backend.to_numpy(y))


@pytest.mark.parametrize(("context", "device"), [(mx.cpu(), (1, 0)), (mx.cpu(2), (1, 2))])
def test_the_device_of_what_is_given_away_is_the_context_s(backend, context, device):
    given = framework_of(backend).tensors.dlpack_of(mx.np.ones((1,), ctx=context))
    assert given.__dlpack_device__() == device


# -- for logs ---------------------------------------------------------------------------------


def test_a_loss_is_logged_without_what_it_was_recorded_from(backend):
    log = DeviceLog(backend, "gpu:0")
    weight = backend.ones(2, device="gpu:0")
    with NumPySemantics():
        weight.attach_grad()
        with mx.autograd.record():
            loss = (weight * 3).sum()
        log.add(loss=loss)
        loss.backward()
    assert not any(kept is loss for kept in log._pending)
    assert backend.to_numpy(weight.grad).tolist() == [3.0, 3.0]
    assert log.last() == {"loss": 6.0}


def test_a_global_seed_decides_new_layers_and_dropout(backend):
    def draw():
        backend.seed(7)
        with NumPySemantics(), mx.autograd.train_mode():
            net = mx.gluon.nn.HybridSequential()
            net.add(mx.gluon.nn.Dense(3, in_units=3), mx.gluon.nn.Dropout(0.5))
            net.initialize(mx.init.Xavier())
            return net(mx.np.ones((4, 3))).asnumpy()

    assert draw().tobytes() == draw().tobytes()


def test_both_sides_of_every_row_of_the_peers_give_the_same():
    rows = peer_rows("mxnet")
    assert len(rows) > 10
    assert [row for row in rows if row[2] != row[3]] == []
