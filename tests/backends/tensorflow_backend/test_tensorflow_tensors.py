"""TensorFlow's tensors: dtypes, random states, new memory, gradients, tensors of several parts."""

from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from peer_rows import peer_rows
from tensorflow.python import pywrap_tfe

from d2ldev import DeviceLog, OutOfDeviceMemoryError, UnsupportedValueError, cpu, gpu
from d2ldev.framework import nvml
from d2ldev.framework.testing import framework_of

# -- Making ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tf.constant, tf.convert_to_tensor])
def test_int32_constants_are_on_a_virtual_gpu_as_other_numbers_are(backend, make):
    # On a real one TensorFlow keeps them in the host's memory, and d2ldev does not.
    with tf.device("/CPU:1"):
        theirs = make(np.arange(3, dtype="int32"))
    ours = backend.asarray(np.arange(3, dtype="int32"), device="gpu:0")
    assert [backend.device_of(x) for x in (theirs, ours)] == [gpu(0), gpu(0)]


@pytest.mark.parametrize("value", [7, [7], np.int32(7), [np.arange(2, dtype="int32")]], ids=repr)
def test_int32_data_of_any_form_is_on_the_device(backend, value):
    assert backend.device_of(backend.asarray(value, device="gpu")) is gpu(0)


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
def test_data_is_converted_by_numpy_s_rules(backend, value, dtype, expected):
    x = backend.asarray(value, dtype=dtype)
    assert backend.dtype_of(x) == dtype
    assert backend.to_numpy(x).tolist() == expected


def test_a_list_of_tensors_is_stacked(backend):
    x = backend.asarray([tf.ones(2), tf.zeros(2)], device="gpu:0")
    assert backend.to_numpy(x).tolist() == [[1, 1], [0, 0]]
    assert backend.device_of(x) is gpu(0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_filled_although_tensorflow_has_no_operation(backend, dtype):
    made = [
        backend.full((2,), 1.5, dtype=dtype, device="gpu:1"),
        backend.zeros(2, dtype=dtype, device="gpu:1"),
    ]
    assert [backend.to_numpy(x).tolist() for x in made] == [[1.5, 1.5], [0, 0]]
    assert {backend.device_of(x) for x in made} == {gpu(1)}


def test_a_range_of_small_numbers_adds_up_no_rounding_errors(backend):
    x = backend.arange(0.0, 1000.0, 0.1, dtype="float32")
    np.testing.assert_array_equal(
        backend.to_numpy(x), np.arange(0.0, 1000.0, 0.1).astype("float32")
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint64", "float16", "float8_e5m2"])
def test_a_range_is_of_dtypes_that_tensorflow_cannot_count_in(backend, dtype):
    x = backend.arange(1, 8, 2, dtype=dtype, device="gpu:0")
    assert backend.to_numpy(x).tolist() == [1, 3, 5, 7]
    assert backend.device_of(x) is gpu(0)


def test_a_wide_range_is_counted_in_the_dtype_that_is_asked_for(backend):
    with pytest.raises(UnsupportedValueError, match="dtype='int64'"):
        backend.arange(2**40, 2**40 + 2)
    x = backend.arange(2**40, 2**40 + 2, dtype="int64")
    assert backend.to_numpy(x).tolist() == [2**40, 2**40 + 1]


def test_without_a_seed_tensorflow_s_seed_decides(backend):
    drawn = []
    for _ in range(2):
        tf.random.set_seed(5)
        drawn.append(backend.to_numpy(backend.rand(3)).tolist())
    assert drawn[0] == drawn[1]


def test_a_model_leaves_the_random_states_alone(backend):
    import random

    import keras

    keras.utils.set_random_seed(5)
    expected = (random.random(), np.random.random(), float(tf.random.uniform(())))
    keras.utils.set_random_seed(5)
    backend.mlp([3, 4, 1], seed=1)
    assert (random.random(), np.random.random(), float(tf.random.uniform(()))) == expected


def test_the_same_seed_gives_the_same_numbers_on_every_device(backend):
    drawn = [backend.rand(4, seed=3, device=d) for d in backend.devices()]
    assert len({backend.to_numpy(x).tobytes() for x in drawn}) == 1


def test_a_global_seed_decides_new_layers_dropout_and_generators(backend):
    import keras

    def draw():
        backend.seed(7)
        layer, dropout = keras.layers.Dense(3), keras.layers.Dropout(0.5)
        x = dropout(layer(tf.ones((4, 3))), training=True)
        return tf.concat([x, tf.random.get_global_generator().normal((4, 3))], 0).numpy()

    assert draw().tobytes() == draw().tobytes()


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_seeds_of_64_bits_are_taken(backend, seed):
    assert backend.rand(2, seed=seed).shape == (2,)


def test_a_seed_that_is_too_long_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match="seed"):
        backend.rand(2, seed=2**63)


@pytest.mark.parametrize("seed", [-1, 2**63 - 1])
def test_a_model_takes_seeds_of_64_bits(backend, seed):
    assert backend.mlp([2, 1], seed=seed)(tf.ones((1, 2))).shape == (1, 1)


def test_more_than_any_memory_is_an_error_and_the_process_goes_on(backend):
    with pytest.raises(OutOfDeviceMemoryError, match="cpu"):
        backend.zeros(2**50)
    with pytest.raises(OutOfDeviceMemoryError, match="elements"):
        backend.zeros((2**40, 2**40))
    assert backend.to_numpy(backend.zeros(1)).tolist() == [0]


@pytest.mark.parametrize(
    ("name", "number"),
    [("zeros", 2**50), ("ones", 2**50), ("rand", 2**50), ("arange", 2.0**50)],
)
@pytest.mark.parametrize("dtype", [None, "float32", "float64"])
def test_more_than_any_memory_is_refused_before_tensorflow_waits_for_it(
    backend, name, number, dtype
):
    with pytest.raises(OutOfDeviceMemoryError, match=r"[0-9]+ bytes are wanted, and [0-9]+ are"):
        getattr(backend, name)(number, dtype=dtype, device="gpu:1")


@pytest.mark.parametrize(("nbytes", "memory"), [(2**30, None), (2**30, 2**30), (2**31, 2**30)])
def test_a_card_has_the_memory_that_the_driver_says(backend, monkeypatch, nbytes, memory):
    room = framework_of(backend).devices
    monkeypatch.setattr(room, "virtual_gpus", None)
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(nvml, "memory_of", lambda index: memory)
    refused = pytest.raises(MemoryError, match=f"{nbytes} bytes are wanted, and {memory} are there")
    with refused if memory is not None and nbytes > memory else nullcontext():
        room.check_room(nbytes, gpu(1))


def test_a_tensor_is_made_where_it_is_wanted_while_a_function_is_traced(backend):
    @tf.function(autograph=False)
    def trace():
        return backend.ones(2, device="gpu:1") * 2

    assert trace().numpy().tolist() == [2, 2]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int32", "bool", "complex64"])
def test_a_tensor_of_every_dtype_is_converted_where_it_is(backend, dtype):
    for source in backend.dtype_names:
        x = backend.ones(2, dtype=source, device="gpu:1")
        y = backend.asarray(x, dtype=dtype)
        assert backend.device_of(y) is gpu(1)
        assert backend.to_numpy(y).tolist() == [1, 1]


# -- Copying ---------------------------------------------------------------------------------------


def test_tensorflow_s_identity_shares_memory_and_a_move_does_not(backend):
    x = backend.ones(64)
    with tf.device("/CPU:1"):
        theirs = tf.identity(x)
    ours = backend.to(x, "gpu:0")
    assert backend.address(theirs) == backend.address(x)
    assert backend.address(ours) != backend.address(x)


@pytest.fixture(params=["copy", "to"])
def transfer(request, backend):
    device = {"copy": "cpu", "to": "gpu:1"}[request.param]
    return lambda x: getattr(backend, request.param)(x, device)


def test_gradients_flow_through_a_copy(backend, transfer):
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(transfer(x) ** 2)
    assert tape.gradient(y, x).numpy().tolist() == [2, 4]


def test_gradients_flow_to_a_variable(backend, transfer):
    variable = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(transfer({"x": [variable]})["x"][0] ** 2)
    assert tape.gradient(y, variable).numpy().tolist() == [2, 4]


@pytest.mark.parametrize("taken", [tf.identity, lambda x: tf.gather(x, [1])], ids=["all", "sparse"])
def test_a_gradient_is_where_the_tensor_is_that_was_moved(backend, taken):
    x = tf.Variable([1.0, 2.0])
    with backend.strict():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(taken(backend.to(x, "gpu:1")))
        gradient = tape.gradient(y, x)
    assert backend.device_of(y) is gpu(1)
    assert backend.device_of(tf.convert_to_tensor(gradient)) is cpu()


@pytest.mark.parametrize("is_strict", [False, True])
def test_second_gradients_flow_through_a_copy(backend, transfer, is_strict):
    x = tf.constant(3.0)
    # Where the gradient is computed elsewhere than on the default device, it is moved back.
    strictness = backend.strict() if is_strict else nullcontext()
    with strictness, tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = transfer(x) ** 3
        first = inner.gradient(y, x)
    assert float(outer.gradient(first, x)) == 18


def test_a_copy_does_not_see_what_is_written_to_the_variable(backend, transfer):
    variable = tf.Variable([1.0, 2.0])
    y = transfer(variable)
    variable.assign([5.0, 5.0])
    assert y.numpy().tolist() == [1, 2]


def test_a_variable_that_is_there_is_itself(backend):
    variable = tf.Variable([1.0])
    assert backend.to(variable, "cpu") is variable


def test_the_array_of_a_variable_is_the_caller_s_own(backend):
    variable = tf.Variable([1.0, 2.0])
    array = backend.to_numpy(variable)
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


def test_a_tensor_of_several_parts_moves_with_all_of_them(backend, composite):
    x = composite
    moved = backend.to([x], "gpu:1")[0]
    assert type(moved) is type(x)
    assert {backend.device_of(part) for part in parts(moved)} == {gpu(1)}
    assert [p.numpy().tolist() for p in parts(moved)] == [p.numpy().tolist() for p in parts(x)]


def test_a_tensor_of_several_parts_that_is_there_is_itself(backend, composite):
    x = composite
    assert backend.to(x, "cpu") is x


def test_a_copied_tensor_of_several_parts_shares_no_memory(backend, composite):
    x = composite
    copied = backend.copy(x)
    addresses = [backend.address(part) for part in [*parts(x), *parts(copied)]]
    assert len(set(addresses)) == 2 * len(parts(x))


def test_strings_are_copied_on_the_cpu(backend):
    words = tf.constant(["a", "b"])
    copied = backend.copy([words])[0]
    assert copied is not words
    assert copied.numpy().tolist() == [b"a", b"b"]


def test_strings_stay_on_the_host(backend):
    x, words = tf.ones(2), tf.constant(["a", "b"])
    batch = {"x": x, "words": words, "deep": [words]}
    moved = backend.to(batch, "gpu:0")
    assert backend.device_of(moved["x"]) is gpu(0)
    assert moved["words"] is moved["deep"][0] is words
    assert backend.device_of(words) is cpu()
    assert backend.to(moved, "gpu:0") is moved
    assert backend.to(words, "gpu:1") is words
    (prefetched,) = backend.prefetch([batch], "gpu:0")
    assert prefetched["words"] is words


def test_strings_of_a_scope_come_to_the_cpu_only_if_asked(backend):
    with tf.device("/CPU:1"):
        words = tf.strings.upper(["a"])
    assert backend.to(words, "gpu:1") is words
    assert backend.device_of(backend.to(words, "cpu")) is cpu()


def test_strings_are_copied_on_the_host(backend):
    words = tf.constant(["a", "b"])
    copied = backend.copy({"words": words, "x": tf.ones(2)}, "gpu:1")
    assert backend.device_of(copied["x"]) is gpu(1)
    assert copied["words"] is not words
    assert backend.device_of(copied["words"]) is cpu()
    assert copied["words"].numpy().tolist() == [b"a", b"b"]


def test_strings_are_split_on_the_host(backend):
    parts = backend.split(
        {"x": tf.ones(3), "words": tf.constant(["a", "b", "c"])}, ["gpu:0", "gpu:1"]
    )
    assert [part["words"].numpy().tolist() for part in parts] == [[b"a", b"b"], [b"c"]]
    assert {backend.device_of(part["words"]) for part in parts} == {cpu()}


@pytest.mark.parametrize("place", ["cpu", "gpu:1"])
def test_a_ragged_tensor_is_split_by_rows(backend, place):
    x = backend.to(tf.ragged.constant([[[1.0], [2.0]], [], [[3.0]]]), place)
    for batch in ({"x": x}, {"x": x, "y": tf.ones(3)}, {"x": (x, (x,))}):
        parts = [part["x"] for part in backend.split(batch, ["gpu:0", "gpu:1"])]
        parts = [part[1][0] if isinstance(part, tuple) else part for part in parts]
        assert [part.to_list() for part in parts] == [[[[1.0], [2.0]], []], [[[3.0]]]]
        assert [backend.device_of(part.flat_values) for part in parts] == [gpu(0), gpu(1)]
    with pytest.raises(UnsupportedValueError, match="x has 3, y has 2"):
        backend.split({"x": x, "y": tf.ones(2)}, ["gpu:0", "gpu:1"])


def test_a_sparse_tensor_is_not_split(backend):
    x = tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]])
    with pytest.raises(UnsupportedValueError, match="SparseTensor at x consists of several") as it:
        backend.split({"x": x}, ["gpu:0", "gpu:1"])
    assert it.value.fix.startswith("a dense tensor")
    parts = backend.split({"x": tf.sparse.to_dense(x)}, ["gpu:0", "gpu:1"])
    assert [part["x"].numpy().tolist() for part in parts] == [[[1.0, 0.0]], [[0.0, 2.0]]]


def test_handles_are_not_copied(backend):
    with pytest.raises(UnsupportedValueError, match="resource"):
        backend.copy(tf.Variable(1.0).handle)


def test_a_tensor_that_is_only_traced_is_not_moved(backend):
    refusals = []

    @tf.function(autograph=False)
    def trace(x):
        with pytest.raises(UnsupportedValueError) as caught:
            backend.to({"x": x}, "gpu:0")
        refusals.append(str(caught.value))
        return x

    trace(tf.ones(2))
    assert "only traced" in refusals[0]


@pytest.mark.parametrize("offset", [4, 16, 32])
def test_memory_that_would_end_the_process_is_not_taken_over(backend, offset):
    buffer = np.zeros(256, np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    data = buffer[start : start + 64].view(np.float32)
    with pytest.raises(UnsupportedValueError, match="multiple of 64"):
        backend.from_dlpack(data)


def test_memory_that_is_walked_in_strides_is_not_taken_over(backend):
    buffer = np.zeros(512, np.uint8)
    start = -buffer.ctypes.data % 64
    data = buffer[start : start + 64].view(np.float32)
    with pytest.raises(UnsupportedValueError):
        backend.from_dlpack(data[::2])


def test_memory_that_is_read_only_is_not_taken_over(backend):
    data = np.zeros(16, np.float32)
    data.flags.writeable = False
    with pytest.raises(UnsupportedValueError):
        backend.from_dlpack(data)


def test_numpy_reads_a_tensor_s_memory(backend):
    x = backend.arange(4, dtype="float32")
    exported = framework_of(backend).tensors.dlpack_of(x)
    array = np.from_dlpack(exported)
    assert exported.__dlpack_device__() == (1, 0)
    assert array.ctypes.data == backend.address(x)
    assert array.tolist() == [0, 1, 2, 3]


def test_a_variable_of_its_own_is_taken_over_with_its_memory(backend):
    variable = tf.Variable([1.0, 2.0])
    x = backend.from_dlpack(variable)
    assert backend.address(x) == backend.address(variable)
    assert backend.device_of(x) is cpu()


# -- Logging ---------------------------------------------------------------------------------------


def test_a_traced_scalar_is_refused_with_the_fix(backend):
    log = DeviceLog(backend)

    @tf.function(autograph=False)
    def step(x):
        log.add(loss=tf.reduce_sum(x))
        return x

    with pytest.raises(UnsupportedValueError, match="log loss") as caught:
        step(tf.ones(2))
    assert caught.value.fix == "return loss from the compiled function, and log the result"
    assert log.flush() == {}


def test_a_log_on_the_cpu_makes_no_operation_for_each_number_of_scalars(backend, monkeypatch):
    # The first operation on 1000 tensors takes 40 times as long as the second one.
    executed, execute = [], pywrap_tfe.TFE_Py_FastPathExecute

    def run(ctx, operation, *operands):
        executed.append(operation)
        return execute(ctx, operation, *operands)

    log, x = DeviceLog(backend, "cpu"), backend.ones(())
    log.add(loss=x)
    log.add(loss=x)
    monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", run)
    assert log.flush() == {"loss": [1, 1]}
    assert executed == []


def test_the_value_of_a_variable_is_the_one_it_had(backend):
    log = DeviceLog(backend, "gpu:0")
    with backend.on("gpu:0"):
        variable = tf.Variable(1.0)
        log.add(loss=variable)
        variable.assign(2.0)
    assert log.last() == {"loss": 1.0}


def test_both_sides_of_every_row_of_the_peers_give_the_same():
    rows = peer_rows("tensorflow")
    assert len(rows) > 10
    assert [row for row in rows if row[2] != row[3]] == []
