"""Making arrays: whatever MXNet's modes are, with every number as it was given."""

import threading

import numpy as np
import pytest
from d2ldev_mxnet.framework import NumPySemantics, NumPyShapes, mx

from d2ldev import OutOfDeviceMemoryError, UnsupportedValueError, gpu

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


@pytest.mark.parametrize("scope", [NumPyShapes, NumPySemantics])
def test_a_scope_ends_also_with_an_exception(scope):
    with pytest.raises(ZeroDivisionError), scope():
        1 / 0  # noqa: B018
    assert (mx.util.is_np_shape(), mx.util.is_np_array()) == (False, False)


def test_a_scope_holds_in_its_own_thread_only():
    seen = []
    with NumPySemantics():
        thread = threading.Thread(
            target=lambda: seen.extend([mx.util.is_np_shape(), mx.util.is_np_array()])
        )
        thread.start()
        thread.join()
    assert seen == [False, False]


def test_every_thread_makes_every_shape(backend):
    shapes = []
    thread = threading.Thread(target=lambda: shapes.append(backend.zeros((0, 2)).shape))
    thread.start()
    thread.join()
    assert shapes == [(0, 2)]


@pytest.mark.parametrize("name", ["int16", "uint16", "uint32", "uint64", "bfloat16", "complex64"])
def test_dtypes_that_mxnet_has_not_are_refused(backend, name):
    with pytest.raises(UnsupportedValueError, match=name):
        backend.zeros(1, dtype=name)


@pytest.mark.parametrize("number", [2**53 + 1, 2**60 + 1, -(2**60) - 1])
def test_integers_that_no_double_holds_are_kept(backend, number):
    assert backend.to_numpy(backend.full(2, number)).tolist() == [number] * 2


def test_a_range_of_integers_that_no_double_holds_is_kept(backend):
    x = backend.arange(2**60, 2**60 + 3, device="gpu:0")
    assert backend.to_numpy(x).tolist() == [2**60, 2**60 + 1, 2**60 + 2]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, "bool"), (3, "int64"), (3.0, "float32"), ([1, 2], "int64"), ([True], "bool")],
    ids=str,
)
def test_numbers_without_a_dtype_are_not_all_float32(backend, value, dtype):
    assert backend.dtype_of(backend.asarray(value)) == dtype


@pytest.mark.parametrize(("value", "dtype"), [(True, "bool"), (3, "int64"), (3.0, "float32")])
def test_full_and_asarray_agree(backend, value, dtype):
    assert backend.dtype_of(backend.full(2, value)) == dtype


def test_numpy_s_float64_stays_wide(backend):
    assert backend.dtype_of(backend.asarray(np.ones(2))) == "float64"


@pytest.mark.parametrize("seed", [None, 0])
def test_float16_numbers_are_below_one(backend, seed):
    x = backend.to_numpy(backend.rand(2**17, dtype="float16", seed=seed))
    assert x.max() < 1
    assert x.min() >= 0
    assert abs(x.astype("float64").mean() - 0.5) < 0.01


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("draw", ["rand", "randn"])
def test_random_numbers_have_the_dtype_that_was_asked_for(backend, draw, dtype):
    for seed in (None, 1):
        assert backend.dtype_of(getattr(backend, draw)(3, seed=seed, dtype=dtype)) == dtype


def test_a_seed_leaves_mxnet_s_random_state_alone(backend):
    def drawn(*seeds):
        mx.random.seed(7)
        for seed in seeds:
            backend.rand(5, seed=seed)
            backend.randn(5, seed=seed)
            backend.mlp([3, 2], seed=seed)
        return backend.to_numpy(backend.rand(4)).tolist()

    assert drawn(1, 2) == drawn()


def test_without_a_seed_numbers_come_from_mxnet_s_random_state(backend):
    mx.random.seed(7)
    ours = backend.to_numpy(backend.rand(4)).tolist()
    mx.random.seed(7)
    assert ours == mx.np.random.uniform(0.0, 1.0, (4,)).asnumpy().tolist()


def test_a_negative_seed_is_a_seed(backend):
    drawn = {backend.to_numpy(backend.rand(4, seed=seed)).tobytes() for seed in (-1, 1, -1)}
    assert len(drawn) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda backend: backend.zeros((2**50,)),
        lambda backend: backend.ones((2**25, 2**25)),
        lambda backend: backend.arange(2**50),
        lambda backend: backend.rand((2**50,)),
    ],
    ids=["zeros", "ones", "arange", "rand"],
)
def test_more_than_the_machine_holds_is_too_little_memory(backend, make):
    with pytest.raises(OutOfDeviceMemoryError):
        make(backend)
    backend.synchronize()


def test_more_elements_than_mxnet_counts_are_refused_as_such(backend):
    with pytest.raises(UnsupportedValueError, match="2147483647 elements"):
        backend.zeros((2**31,), dtype="int8")


def test_small_and_large_tensors_have_the_same_values(backend):
    for size in (2**20 - 1, 2**20):
        assert backend.to_numpy(backend.ones(size, device="gpu:1")).sum() == size
        assert backend.to_numpy(backend.zeros(size, device="gpu:1")).sum() == 0


def test_a_legacy_array_comes_back_itself(backend):
    x = mx.nd.ones((2,))
    assert backend.asarray(x) is x
    assert backend.dtype_of(x) == "float32"
