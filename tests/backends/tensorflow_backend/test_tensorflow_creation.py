"""Tensors that TensorFlow makes: dtypes, ranges, random states, and sizes that are too large."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import OutOfDeviceMemoryError, UnsupportedValueError, cpu, gpu


@pytest.mark.parametrize("make", [tf.constant, tf.convert_to_tensor])
def test_int32_constants_stay_on_the_host_in_tensorflow_and_not_here(tensorflow_backend, make):
    with tf.device("/CPU:1"):
        theirs = make(np.arange(3, dtype="int32"))
    ours = tensorflow_backend.asarray(np.arange(3, dtype="int32"), device="gpu:0")
    assert tensorflow_backend.device_of(theirs) is cpu()
    assert tensorflow_backend.device_of(ours) is gpu(0)


@pytest.mark.parametrize("value", [7, [7], np.int32(7), [np.arange(2, dtype="int32")]], ids=repr)
def test_int32_data_of_any_form_is_on_the_device(tensorflow_backend, value):
    assert tensorflow_backend.device_of(tensorflow_backend.asarray(value, device="gpu")) is gpu(0)


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "bfloat16", "complex64"])
def test_memory_of_numpy_is_never_aliased(tensorflow_backend, dtype, alignment):
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    buffer = np.zeros(8192 + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    data = buffer[start : start + 4096].view(wanted)
    x = tensorflow_backend.asarray(data)
    assert tensorflow_backend.address(x) != data.ctypes.data


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        ([1, 2], "float8_e5m2", [1, 2]),
        ([True, False], "float32", [1, 0]),
        ([1.0, 2.0], "int16", [1, 2]),
        ([np.arange(2), np.arange(2)], "float16", [[0, 1], [0, 1]]),
        (2**40, "int64", 2**40),
        (1.5, "bfloat16", 1.5),
    ],
    ids=repr,
)
def test_data_is_converted_by_numpy_s_rules(tensorflow_backend, value, dtype, expected):
    x = tensorflow_backend.asarray(value, dtype=dtype)
    assert tensorflow_backend.dtype_of(x) == dtype
    assert tensorflow_backend.to_numpy(x).tolist() == expected


def test_a_list_of_tensors_is_stacked(tensorflow_backend):
    x = tensorflow_backend.asarray([tf.ones(2), tf.zeros(2)], device="gpu:0")
    assert tensorflow_backend.to_numpy(x).tolist() == [[1, 1], [0, 0]]
    assert tensorflow_backend.device_of(x) is gpu(0)


def test_numpy_s_scalars_in_a_list_keep_their_dtype(tensorflow_backend):
    x = tensorflow_backend.asarray([np.float64(1.5), np.float64(2.5)])
    assert tensorflow_backend.dtype_of(x) == "float64"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_filled_although_tensorflow_has_no_operation(tensorflow_backend, dtype):
    made = [
        tensorflow_backend.full((2,), 1.5, dtype=dtype, device="gpu:1"),
        tensorflow_backend.zeros(2, dtype=dtype, device="gpu:1"),
    ]
    assert [tensorflow_backend.to_numpy(x).tolist() for x in made] == [[1.5, 1.5], [0, 0]]
    assert {tensorflow_backend.device_of(x) for x in made} == {gpu(1)}


def test_a_range_of_small_numbers_adds_up_no_rounding_errors(tensorflow_backend):
    x = tensorflow_backend.arange(0.0, 1000.0, 0.1, dtype="float32")
    np.testing.assert_array_equal(
        tensorflow_backend.to_numpy(x), np.arange(0.0, 1000.0, 0.1).astype("float32")
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64", "float16", "float8_e5m2"])
def test_a_range_is_of_dtypes_that_tensorflow_cannot_count_in(tensorflow_backend, dtype):
    x = tensorflow_backend.arange(1, 8, 2, dtype=dtype, device="gpu:0")
    assert tensorflow_backend.to_numpy(x).tolist() == [1, 3, 5, 7]
    assert tensorflow_backend.device_of(x) is gpu(0)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [((3,), "int32"), ((2**40, 2**40 + 2), "int64"), ((0.5, 2), "float32")],
    ids=repr,
)
def test_the_dtype_of_a_range_is_that_of_its_numbers(tensorflow_backend, arguments, dtype):
    assert tensorflow_backend.dtype_of(tensorflow_backend.arange(*arguments)) == dtype


def test_a_seed_leaves_tensorflow_s_random_state_alone(tensorflow_backend):
    tf.random.set_seed(5)
    expected = tf.random.uniform((3,)).numpy().tolist()
    tf.random.set_seed(5)
    tensorflow_backend.rand((3,), seed=1)
    tensorflow_backend.randn((3,), seed=1, device="gpu:1")
    assert tf.random.uniform((3,)).numpy().tolist() == expected


def test_without_a_seed_tensorflow_s_seed_decides(tensorflow_backend):
    drawn = []
    for _ in range(2):
        tf.random.set_seed(5)
        drawn.append(tensorflow_backend.to_numpy(tensorflow_backend.rand(3)).tolist())
    assert drawn[0] == drawn[1]


def test_a_model_leaves_the_random_states_alone(tensorflow_backend):
    import random

    import keras

    keras.utils.set_random_seed(5)
    expected = (random.random(), np.random.random(), float(tf.random.uniform(())))
    keras.utils.set_random_seed(5)
    tensorflow_backend.mlp([3, 4, 1], seed=1)
    assert (random.random(), np.random.random(), float(tf.random.uniform(()))) == expected


def test_the_same_seed_gives_the_same_numbers_on_every_device(tensorflow_backend):
    drawn = [tensorflow_backend.rand(4, seed=3, device=d) for d in tensorflow_backend.devices()]
    assert len({tensorflow_backend.to_numpy(x).tobytes() for x in drawn}) == 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_seeds_of_64_bits_are_taken(tensorflow_backend, seed):
    assert tensorflow_backend.rand(2, seed=seed).shape == (2,)


def test_a_seed_that_is_too_long_is_refused(tensorflow_backend):
    with pytest.raises(UnsupportedValueError, match="seed"):
        tensorflow_backend.rand(2, seed=2**63)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_model_takes_any_seed(tensorflow_backend, seed):
    assert tensorflow_backend.mlp([2, 1], seed=seed)(tf.ones((1, 2))).shape == (1, 1)


def test_the_kernels_of_a_model_are_uniform_and_its_biases_zero(tensorflow_backend):
    net = tensorflow_backend.mlp([400, 100, 1])
    kernel, bias = (x.numpy() for x in net.layers[0].weights)
    assert np.abs(kernel).max() <= 1 / 20
    assert kernel.std() == pytest.approx(1 / 20 / np.sqrt(3), rel=0.02)
    assert not bias.any()


@pytest.mark.parametrize("shape", [(2**50,), (2**40, 2**40)])
def test_more_than_any_memory_is_an_error_and_the_process_goes_on(tensorflow_backend, shape):
    with pytest.raises(OutOfDeviceMemoryError, match="cpu"):
        tensorflow_backend.zeros(shape)
    assert tensorflow_backend.to_numpy(tensorflow_backend.zeros(1)).tolist() == [0]


def test_a_tensor_is_made_where_it_is_wanted_while_a_function_is_traced(tensorflow_backend):
    @tf.function(autograph=False)
    def traced():
        return tensorflow_backend.ones(2, device="gpu:1") * 2

    assert traced().numpy().tolist() == [2, 2]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int32", "bool", "complex64"])
def test_a_tensor_of_every_dtype_is_converted_where_it_is(tensorflow_backend, dtype):
    for source in tensorflow_backend.dtype_names:
        x = tensorflow_backend.ones(2, dtype=source, device="gpu:1")
        y = tensorflow_backend.asarray(x, dtype=dtype)
        assert tensorflow_backend.device_of(y) is gpu(1)
        assert tensorflow_backend.to_numpy(y).tolist() == [1, 1]
