"""``to`` and ``copy`` of TensorFlow's tensors: new memory, gradients, tensors of several parts."""

from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf

from d2ldev import UnsupportedValueError, cpu, gpu


def test_tensorflow_s_identity_shares_memory_and_a_move_does_not(tensorflow_backend):
    x = tensorflow_backend.ones(64)
    with tf.device("/CPU:1"):
        theirs = tf.identity(x)
    ours = tensorflow_backend.to(x, "gpu:0")
    assert tensorflow_backend.address(theirs) == tensorflow_backend.address(x)
    assert tensorflow_backend.address(ours) != tensorflow_backend.address(x)


@pytest.fixture(params=["copy", "to"])
def transfer(request, tensorflow_backend):
    device = {"copy": "cpu", "to": "gpu:1"}[request.param]
    return lambda x: getattr(tensorflow_backend, request.param)(x, device)


def test_every_dtype_gets_new_memory(tensorflow_backend, transfer):
    addresses = []
    for dtype in tensorflow_backend.dtype_names:
        x = tensorflow_backend.ones((3, 5), dtype=dtype)
        y = transfer(x)
        assert y.shape == x.shape
        addresses += [tensorflow_backend.address(x), tensorflow_backend.address(y)]
        assert tensorflow_backend.to_numpy(y).tobytes() == tensorflow_backend.to_numpy(x).tobytes()
        assert addresses[-1] != addresses[-2]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "float8_e5m2"])
def test_every_shape_is_kept(tensorflow_backend, transfer, shape, dtype):
    assert transfer(tensorflow_backend.zeros(shape, dtype=dtype)).shape == shape


def test_gradients_flow_through_a_copy(tensorflow_backend, transfer):
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(transfer(x) ** 2)
    assert tape.gradient(y, x).numpy().tolist() == [2, 4]


def test_gradients_flow_to_a_variable(tensorflow_backend, transfer):
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(transfer({"x": [variable]})["x"][0] ** 2)
    assert tape.gradient(y, variable).numpy().tolist() == [2, 4]


@pytest.mark.parametrize("taken", [tf.identity, lambda x: tf.gather(x, [1])], ids=["all", "sparse"])
def test_a_gradient_is_where_the_tensor_is_that_was_moved(tensorflow_backend, taken):
    x = tf.Variable([1.0, 2.0])
    with tensorflow_backend.strict():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(taken(tensorflow_backend.to(x, "gpu:1")))
        gradient = tape.gradient(y, x)
    assert tensorflow_backend.device_of(y) is gpu(1)
    assert tensorflow_backend.device_of(tf.convert_to_tensor(gradient)) is cpu()


@pytest.mark.parametrize("is_strict", [False, True])
def test_second_gradients_flow_through_a_copy(tensorflow_backend, transfer, is_strict):
    x = tf.constant(3.0)
    # Where the gradient is computed elsewhere than on the default device, it is moved back.
    strictness = tensorflow_backend.strict() if is_strict else nullcontext()
    with strictness, tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = transfer(x) ** 3
        first = inner.gradient(y, x)
    assert float(outer.gradient(first, x)) == 18


def test_a_copy_does_not_see_what_is_written_to_the_variable(tensorflow_backend, transfer):
    variable = tf.Variable([1.0, 2.0])
    y = transfer(variable)
    variable.assign([5.0, 5.0])
    assert y.numpy().tolist() == [1, 2]


def test_a_variable_that_is_there_is_itself(tensorflow_backend):
    variable = tf.Variable([1.0])
    assert tensorflow_backend.to(variable, "cpu") is variable


def test_the_array_of_a_variable_is_the_caller_s_own(tensorflow_backend):
    variable = tf.Variable([1.0, 2.0])
    array = tensorflow_backend.to_numpy(variable)
    array[:] = 9
    assert variable.numpy().tolist() == [1, 2]


def parts(x):
    return tf.nest.flatten(x, expand_composites=True)


# Not made while tests are collected: TensorFlow's devices are not configured by then.
COMPOSITES = {
    "ragged": lambda: tf.ragged.constant([[1.0, 2.0], [3.0]]),
    "ragged twice": lambda: tf.ragged.constant([[[1.0], []], [[2.0, 3.0]]]),
    "sparse": lambda: tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]),
    "slices": lambda: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2])),
}


@pytest.fixture(params=COMPOSITES)
def composite(request):
    return COMPOSITES[request.param]()


def test_a_tensor_of_several_parts_moves_with_all_of_them(tensorflow_backend, composite):
    x = composite
    moved = tensorflow_backend.to([x], "gpu:1")[0]
    assert type(moved) is type(x)
    assert {tensorflow_backend.device_of(part) for part in parts(moved)} == {gpu(1)}
    assert [p.numpy().tolist() for p in parts(moved)] == [p.numpy().tolist() for p in parts(x)]


def test_a_tensor_of_several_parts_that_is_there_is_itself(tensorflow_backend, composite):
    x = composite
    assert tensorflow_backend.to(x, "cpu") is x


def test_a_copied_tensor_of_several_parts_shares_no_memory(tensorflow_backend, composite):
    x = composite
    copied = tensorflow_backend.copy(x)
    addresses = [tensorflow_backend.address(part) for part in [*parts(x), *parts(copied)]]
    assert len(set(addresses)) == 2 * len(parts(x))


def test_strings_are_copied_on_the_cpu(tensorflow_backend):
    words = tf.constant(["a", "b"])
    copied = tensorflow_backend.copy([words])[0]
    assert copied is not words
    assert copied.numpy().tolist() == [b"a", b"b"]


def test_strings_are_on_the_cpu(tensorflow_backend):
    words = tf.constant(["a"])
    assert tensorflow_backend.to(words, "cpu") is words


def test_strings_have_no_place_on_a_gpu(tensorflow_backend):
    with pytest.raises(UnsupportedValueError, match="string") as caught:
        tensorflow_backend.to({"name": tf.constant(["a"])}, "gpu:0")
    assert caught.value.devices == ("cpu", "gpu:0")


def test_handles_are_not_copied(tensorflow_backend):
    with pytest.raises(UnsupportedValueError, match="resource"):
        tensorflow_backend.copy(tf.Variable(1.0).handle)


def test_a_tensor_that_is_only_traced_is_not_moved(tensorflow_backend):
    refusals = []

    @tf.function(autograph=False)
    def traced(x):
        with pytest.raises(UnsupportedValueError) as caught:
            tensorflow_backend.to({"x": x}, "gpu:0")
        refusals.append(str(caught.value))
        return x

    traced(tf.ones(2))
    assert "only traced" in refusals[0]


def test_what_tensorflow_put_elsewhere_is_an_error_and_not_passed_on(
    tensorflow_backend, monkeypatch
):
    from d2ldev_tensorflow import backend as module

    def on_the_cpu(x):
        with tf.device("/CPU:0"):
            return tf.identity(x)

    for name in ("copied", "snapshot"):
        monkeypatch.setattr(module, name, on_the_cpu)
    with pytest.raises(UnsupportedValueError, match="used the CPU"):
        tensorflow_backend.to(tf.ones(2), "gpu:0")


@pytest.mark.parametrize("offset", [4, 16, 32])
def test_memory_that_would_end_the_process_is_not_taken_over(tensorflow_backend, offset):
    buffer = np.zeros(256, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    data = buffer[start : start + 64].view(np.float32)
    with pytest.raises(UnsupportedValueError, match="multiple of 64"):
        tensorflow_backend.from_dlpack(data)


def test_memory_that_is_walked_in_strides_is_not_taken_over(tensorflow_backend):
    buffer = np.zeros(512, np.uint8)
    start = -buffer.ctypes.data % 64
    data = buffer[start : start + 64].view(np.float32)
    with pytest.raises(UnsupportedValueError):
        tensorflow_backend.from_dlpack(data[::2])


def test_memory_that_is_read_only_is_not_taken_over(tensorflow_backend):
    data = np.zeros(16, np.float32)
    data.flags.writeable = False
    with pytest.raises(UnsupportedValueError):
        tensorflow_backend.from_dlpack(data)


def test_numpy_reads_a_tensor_s_memory(tensorflow_backend):
    x = tensorflow_backend.arange(4, dtype="float32")
    exported = tensorflow_backend._dlpack_of(x)
    array = np.from_dlpack(exported)
    assert exported.__dlpack_device__() == (1, 0)
    assert array.ctypes.data == tensorflow_backend.address(x)
    assert array.tolist() == [0, 1, 2, 3]


def test_a_variable_of_its_own_is_taken_over_with_its_memory(tensorflow_backend):
    variable = tf.Variable([1.0, 2.0])
    x = tensorflow_backend.from_dlpack(variable)
    assert tensorflow_backend.address(x) == tensorflow_backend.address(variable)
    assert tensorflow_backend.device_of(x) is cpu()
