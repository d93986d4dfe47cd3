"""TensorFlow's tensors on hardware, as far as a machine without a GPU can show it.

Virtual GPUs stand for real ones: an operation runs on the CPU where TensorFlow has no kernel for
its dtype on a GPU, and ``_copy_to_device`` makes new memory, as it does between real devices.
"""

import numpy as np
import pytest
import tensorflow as tf
from d2ldev_conformance.suite.data import assert_same, numbers
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager.context import context
from tensorflow.python.framework import constant_op

from d2ldev import OutOfDeviceMemoryError, UnsupportedValueError, cpu, gpu
from d2ldev.framework.testing import framework_of

_EagerTensor = tf.__internal__.EagerTensor
_FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}
# What runs on the CPU in a GPU's scope, as TensorFlow 2.21's registry of kernels says for CUDA.
_WITHOUT_KERNEL = {
    "Identity": {*_FLOAT8, "int32"},
    "Reshape": {*_FLOAT8, "int32"},
    "Fill": {*_FLOAT8, "int32", "uint32", "uint64"},
    "ConcatV2": {"int32"},
    "Snapshot": _FLOAT8,
}
_ROUTES = [(cpu(), gpu(0)), (gpu(0), gpu(1)), (gpu(0), cpu()), (gpu(0), gpu(0)), (cpu(), cpu())]


@pytest.fixture(autouse=True)
def card(backend, monkeypatch):
    """Virtual GPUs that are taken for real ones."""
    for device in backend.devices():
        backend.device_of(backend.ones(1, device=device))  # TensorFlow's name of it is known then
    monkeypatch.setattr(framework_of(backend).devices, "virtual_gpus", None)
    monkeypatch.setattr(framework_of(backend).devices, "count", lambda: 2)
    execute, execute_flat = pywrap_tfe.TFE_Py_FastPathExecute, pywrap_tfe.TFE_Py_Execute
    convert = constant_op.convert_to_eager_tensor

    def has_kernel(operation, operands):
        tensors = [x for x in tf.nest.flatten(operands) if isinstance(x, _EagerTensor)]
        names = {x.dtype.name for x in tensors[-1 if operation == "Fill" else 0 :][:1]}
        return not names & _WITHOUT_KERNEL.get(operation, set())

    def run(ctx, operation, name, *operands):
        if has_kernel(operation, operands):
            return execute(ctx, operation, name, *operands)
        with tf.device("/CPU:0"):
            return execute(ctx, operation, name, *operands)

    def run_flat(handle, device, operation, inputs, *others):
        name = operation.decode() if isinstance(operation, bytes) else operation
        device = device if has_kernel(name, inputs) else "/device:CPU:0"
        return execute_flat(handle, device, operation, inputs, *others)

    def to_tensor(value, ctx, dtype=None):
        x = convert(value, ctx, dtype)
        if x.dtype.name not in _WITHOUT_KERNEL["Identity"]:
            return x
        with tf.device("/CPU:0"):
            return convert(value, ctx, dtype)

    def copy_to_device(x, name):
        if x.backing_device.endswith(name):
            return tf.identity(x)
        with tf.device(name):
            return convert(x._numpy_internal().copy(), context(), x.dtype)

    monkeypatch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", run)
    monkeypatch.setattr(pywrap_tfe, "TFE_Py_Execute", run_flat)
    monkeypatch.setattr(constant_op, "convert_to_eager_tensor", to_tensor)
    monkeypatch.setattr(_EagerTensor, "_copy_to_device", copy_to_device)


def address(x):
    return x._numpy_internal().ctypes.data


@pytest.mark.parametrize(("source", "target"), _ROUTES, ids=str)
def test_each_copy_is_new_memory_in_every_dtype(backend, source, target):
    # ``tf.identity`` copies the first time only.
    for dtype in backend.dtype_names:
        x = backend.ones((3, 5), dtype=dtype, device=source)
        made = [
            *(backend.copy(x, target) for _ in range(2)),
            *(backend.asarray(x, device=target, copy=True) for _ in range(2)),
            *(backend.to(x, target) for _ in range(2) if target is not source),
        ]
        assert {backend.device_of(y) for y in made} == {target}
        assert len({address(y) for y in (x, *made)}) == len(made) + 1, dtype
        for y in made:
            assert_same(backend.to_numpy(y), backend.to_numpy(x))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize(("source", "target"), _ROUTES, ids=str)
def test_every_shape_of_every_dtype_is_copied(backend, source, target, shape):
    for dtype in backend.dtype_names:
        x = backend.asarray(numbers(dtype, shape), device=source)
        y = backend.copy(x, target)
        assert backend.device_of(y) is target
        assert_same(backend.to_numpy(y), numbers(dtype, shape))


def test_a_tensor_of_every_dtype_is_made_on_a_gpu(backend):
    for dtype in backend.dtype_names:
        data = numbers(dtype)
        made = [
            backend.asarray(data, device="gpu:0"),
            backend.asarray([1, 0, 1], dtype=dtype, device="gpu:0"),
            backend.asarray(1, dtype=dtype, device="gpu:0"),
            backend.zeros(2, dtype=dtype, device="gpu:0"),
            backend.full((2, 3), 1, dtype=dtype, device="gpu:0"),
            backend.ones((), dtype=dtype, device="gpu:0"),
        ]
        assert {backend.device_of(x) for x in made} == {gpu(0)}
        assert {backend.dtype_of(x) for x in made} == {dtype}
        assert_same(backend.to_numpy(made[0]), data)


@pytest.mark.parametrize("dtype", sorted(_FLOAT8))
def test_float8_is_counted_and_converted_on_a_gpu(backend, dtype):
    counted = backend.arange(4, dtype=dtype, device="gpu:0")
    there_and_back = backend.asarray(backend.asarray(counted, dtype="float32"), dtype=dtype)
    for x in (counted, there_and_back):
        assert backend.device_of(x) is gpu(0)
        assert backend.to_numpy(x).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["int32", "float8_e5m2"])
def test_what_a_tape_does_not_record_is_moved_and_made_beside_it(backend, dtype):
    # What records a copy runs ``Identity`` on it, which has no kernel for these on a GPU.
    with tf.GradientTape() as tape:
        x = tf.Variable([1.0, 2.0])
        labels = backend.to(backend.ones(2, dtype=dtype), "gpu:0")
        made = backend.full(2, 1, dtype=dtype, device="gpu:0")
        y = tf.reduce_sum(backend.to(x, "gpu:0") ** 2)
    assert [backend.device_of(each) for each in (labels, made)] == [gpu(0), gpu(0)]
    assert tape.gradient(y, x).numpy().tolist() == [2, 4]


def test_gradients_flow_back_across(backend):
    x = tf.constant(3.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = backend.to(x, "gpu:0") ** 3
        first = inner.gradient(y, x)
    assert backend.device_of(first) is cpu()
    assert float(outer.gradient(first, x)) == 18


def test_a_tensor_is_made_where_it_is_wanted_while_a_function_is_traced(backend):
    @tf.function(autograph=False)
    def trace():
        return backend.asarray(np.ones(2, "float32"), device="gpu:1") * 2

    assert trace().numpy().tolist() == [2, 2]


@pytest.mark.parametrize("make", ["to", "copy", "asarray"])
def test_a_copy_for_which_the_memory_is_too_small_says_so(backend, monkeypatch, make):
    # ``_copy_to_device`` has one error for all reasons, and the reason in prose:
    # https://github.com/tensorflow/tensorflow/issues/7025. An operation has an error for this one.
    def fail(*_):
        raise RuntimeError("Dst tensor is not initialized.")

    def exhaust(shape, value):
        assert (shape, value.dtype) == ((12,), tf.uint8)
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    x = np.ones(3, "float32") if make == "asarray" else backend.ones(3)
    monkeypatch.setattr(_EagerTensor, "_copy_to_device", fail)
    monkeypatch.setattr(tf, "fill", exhaust)
    with pytest.raises(OutOfDeviceMemoryError, match="OOM when allocating"):
        getattr(backend, make)(x, device="gpu:0")


def test_a_copy_that_fails_for_another_reason_keeps_its_error(backend, monkeypatch):
    def fail(*_):
        raise RuntimeError("the driver is gone")

    x = backend.ones(3)
    monkeypatch.setattr(_EagerTensor, "_copy_to_device", fail)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        backend.to(x, "gpu:0")


def test_strings_stay_on_the_host_in_all_that_moves_a_batch(backend):
    batch = {"x": backend.ones(2), "words": tf.constant(["a", "b"])}
    (prefetched,) = backend.prefetch([batch], "gpu:0")
    for moved in (backend.to(batch, "gpu:0"), backend.copy(batch, "gpu:0"), prefetched):
        assert backend.device_of(moved["x"]) is gpu(0)
        assert backend.device_of(moved["words"]) is cpu()
        assert moved["words"].numpy().tolist() == [b"a", b"b"]


def test_float8_on_a_gpu_has_no_address(backend):
    x = backend.ones(2, dtype="float8_e5m2", device="gpu:0")
    with pytest.raises(UnsupportedValueError, match="TensorFlow gives none for a tensor of float8"):
        backend.address(x)


def test_the_names_that_tensorflow_copies_to_are_those_that_d2ldev_gives_it(monkeypatch):
    monkeypatch.undo()
    x = tf.constant([1.0])
    for index in range(3):
        copied = x._copy_to_device(f"/device:CPU:{index}")
        assert copied.backing_device.endswith(f"/device:CPU:{index}")
    with pytest.raises(RuntimeError):
        x._copy_to_device("/CPU:0")
