"""``strict()`` in TensorFlow: which operands are looked at, and where operations run."""

import inspect
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

# Private: what each operation's inputs are called, and what all operations go through.
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import constant_op, op_def_registry

from d2ldev import DeviceMismatchError, cpu, gpu

CPU = "/CPU:0"
# AutoGraph writes files when it converts a function.
as_it_is = tf.autograph.experimental.do_not_convert


@pytest.fixture
def here(tensorflow_backend):
    return tensorflow_backend.rand((4, 4), seed=1, device="gpu:1")


@pytest.fixture
def elsewhere(tensorflow_backend):
    return tensorflow_backend.rand((4, 4), seed=2, device="gpu:0")


MIXING = {
    "tf.add": lambda x, y: tf.add(x, y),
    "a variable": lambda x, y: x + tf.Variable(y),
    "numpy": lambda x, y: tf.experimental.numpy.add(x, y),
    "list": lambda x, y: tf.concat([x, y], 0),
    "several lists": lambda x, y: tf.stack([x, y]),
    "einsum": lambda x, y: tf.einsum("ij,jk->ik", x, y),
    "condition": lambda x, y: tf.where(x > 0, x, y),
    "clipping": lambda x, y: tf.clip_by_value(x, y, 1.0),
    "linear algebra": lambda x, y: tf.linalg.solve(x, y),
    "operator": lambda x, y: tf.linalg.LinearOperatorFullMatrix(x).matmul(y),
    "sparse": lambda x, y: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(x), y),
    "indices": lambda x, y: tf.gather(x, tf.cast(y[0], tf.int64)),
    "mask": lambda x, y: tf.boolean_mask(x, y > 0),
    "in a user's function": lambda x, y: tf.map_fn(as_it_is(lambda row: row + y[0]), x),
    "assigning and adding": lambda x, y: tf.Variable(x).assign_add(y),
    "scattering": lambda x, y: tf.tensor_scatter_nd_update(x, [[0]], y[:1]),
    "norm": lambda x, y: tf.nn.batch_normalization(x, y, y, None, None, 1e-3),
    "convolution": lambda x, y: tf.nn.conv1d(x[None], y[None], 1, "SAME"),
    "loss": lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(x, y),
    "segments": lambda x, y: tf.math.segment_sum(x, tf.cast(y[:, 0], tf.int32) * 0),
}


@pytest.mark.parametrize("operation", MIXING.values(), ids=MIXING)
def test_mixing_raises(tensorflow_backend, here, elsewhere, operation):
    with tensorflow_backend.strict():
        with pytest.raises(DeviceMismatchError) as caught:
            operation(here, elsewhere)
        operation(here, here + 0.5)
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_every_operation_of_tensorflow_refuses(tensorflow_backend, here, elsewhere):
    """All that take two tensors, called so that they would fail if they did not refuse before."""
    ran, refused = [], 0
    for name, call in operations_of_two(here, elsewhere):
        try:
            with tensorflow_backend.strict():
                call()
        except DeviceMismatchError:
            refused += 1
        except Exception as error:
            ran.append(f"{name}: {error}")
        else:
            ran.append(name)
    assert refused > 600
    # The one converts its inputs before, and None to nothing; the other does not run eagerly.
    assert {each.partition(":")[0] for each in ran} == {"Select", "TensorArrayGrad"}


def operations_of_two(x, y):
    """Raw operations that take at least two operands, called with both tensors in turn."""
    from d2ldev_tensorflow.operands import Definitions, Positions

    positions = Positions(Definitions())
    for name in sorted(dir(tf.raw_ops)):
        definition = None if name.startswith("_") else op_def_registry.get(name)
        if definition is None or any(each.is_ref for each in definition.input_arg):
            continue
        used = [definition.input_arg[index] for index in positions[name] or ()]
        lists = [each.name for each in used if each.number_attr or each.type_list_attr]
        if len(used) + len(lists) < 2:
            continue
        arguments = dict.fromkeys(inspect.signature(getattr(tf.raw_ops, name)).parameters)
        arguments |= {each.name: x for each in definition.input_arg}
        arguments |= {each.name: (x, y)[index % 2] for index, each in enumerate(used)}
        arguments |= {each: [x, y] for each in lists}
        yield name, partial(getattr(tf.raw_ops, name), **arguments)


STAYING = {
    "number": lambda x: x + 1,
    "number before": lambda x: 2.0 - x,
    "array": lambda x: x + np.ones((4, 4), "float32"),
    "array before": lambda x: np.ones((4, 4), "float32") * x,
    "list": lambda x: x * [1.0, 2.0, 3.0, 4.0],
    "0-dim tensor": lambda x: x * tf.constant(2.0),
    "0-dim variable": lambda x: x * tf.Variable(2.0),
    "slice": lambda x: x[1:3, ::2],
    "slice by tensors": lambda x: x[tf.constant(1) : tf.constant(3)],
    "indices": lambda x: tf.gather(x, [1, 0]),
    "array of indices": lambda x: tf.gather(x, np.array([1, 0])),
    "shape": lambda x: tf.reshape(x, [2, 8]),
    "shape that is a tensor": lambda x: tf.reshape(x, tf.constant([2, 8])),
    "axis": lambda x: tf.reduce_sum(x, axis=[0]),
    "all axes": tf.reduce_mean,
    "permutation": lambda x: tf.transpose(x, [1, 0]),
    "padding": lambda x: tf.pad(x, [[1, 1], [0, 0]]),
    "split": lambda x: tf.split(x, [1, 3])[1],
    "repeats": lambda x: tf.tile(x, [2, 1]),
    "top": lambda x: tf.math.top_k(x, 2).values,
    "one hot": lambda x: tf.one_hot(tf.cast(x, tf.int32), 3),
    "dropout": lambda x: tf.nn.dropout(x, 0.5, seed=1),
    "stateless dropout": lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2]),
    "shuffle": lambda x: tf.random.experimental.stateless_shuffle(x, seed=[1, 2]),
    "window made on the way": lambda x: tf.signal.stft(x, 2, 1),
    "matrix made on the way": lambda x: tf.signal.mfccs_from_log_mel_spectrograms(x),
    "norm": tf.linalg.norm,
    "image": lambda x: tf.image.resize(x[None, :, :, None], [2, 2]),
    "loop": lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a + x), (0, x))[1],
    "scan": lambda x: tf.scan(as_it_is(lambda total, row: total + row), x),
    "array of tensors": lambda x: tf.TensorArray(tf.float32, 2).unstack(x[:2]).stack(),
    "strings": lambda x: tf.strings.to_number(tf.strings.as_string(x)),
    "like it": tf.zeros_like,
    "of its shape": lambda x: tf.random.normal(tf.shape(x)) + x,
    "variable made of it": lambda x: tf.Variable(x).read_value(),
    "raw operation": lambda x: tf.raw_ops.AddV2(x=x, y=x),
    "copy": lambda x: tf.identity(x),
}


@pytest.mark.parametrize("operation", STAYING.values(), ids=STAYING)
def test_operations_run_where_their_operands_are(tensorflow_backend, here, operation):
    with tensorflow_backend.strict():
        assert tensorflow_backend.device_of(operation(here)) is gpu(1)


def test_a_tensor_of_the_cpu_is_an_operand(tensorflow_backend, here):
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError):
        here + tf.ones(4)


def test_a_0_dim_tensor_of_a_gpu_is_an_operand(tensorflow_backend, here):
    scalar = tensorflow_backend.asarray(2.0, device="gpu:0")
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError):
        here * scalar


def test_the_error_has_the_names_of_the_operation_and_of_its_operands(
    tensorflow_backend, here, elsewhere
):
    with tensorflow_backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        tf.concat([here, elsewhere], 0)
    assert str(caught.value) == (
        "cannot run concat: its operands are on different devices: "
        "values[0] on gpu:1, values[1] on gpu:0\n"
        "  devices: gpu:1, gpu:0\n"
        "  fix: values[1] = backend.to(values[1], 'gpu:1')"
    )


def test_a_variable_is_written_from_anywhere(tensorflow_backend, here, elsewhere):
    with tensorflow_backend.strict():
        variable = tf.Variable(here)
        variable.assign(elsewhere)
        assert tensorflow_backend.device_of(variable) is gpu(1)
        assert tensorflow_backend.device_of(variable + 0) is gpu(1)
        assert np.array_equal(variable, elsewhere)


def test_the_user_s_scope_says_where_an_operation_runs(tensorflow_backend, here):
    with tensorflow_backend.strict(), tf.device(CPU):
        assert tensorflow_backend.device_of(here + here) is cpu()


def test_mixing_raises_in_a_scope(tensorflow_backend, here, elsewhere):
    with tensorflow_backend.strict(), tf.device(CPU), pytest.raises(DeviceMismatchError):
        here + elsewhere


def test_the_device_of_creation_says_only_where_tensors_are_made(tensorflow_backend, here):
    with tensorflow_backend.strict(), tensorflow_backend.on("gpu:0"):
        assert tensorflow_backend.device_of(here + here) is gpu(1)
        assert tensorflow_backend.device_of(tf.reshape(here, [16])) is gpu(1)
        assert tensorflow_backend.device_of(tf.ones((2, 2))) is gpu(0)
        assert tensorflow_backend.device_of(tf.identity(here)) is gpu(0)


def test_data_sets_are_the_host_s(tensorflow_backend, here):
    def double(row):
        return row * 2

    with tensorflow_backend.strict():
        rows = tf.data.Dataset.from_tensor_slices(here).map(as_it_is(double))
        batches = list(rows.batch(2))
    assert np.array_equal(np.concatenate(batches), here * 2)


def test_the_very_functions_are_back_after_the_block(tensorflow_backend, here, elsewhere):
    def functions():
        names = [name for name in dir(pywrap_tfe) if name.startswith("TFE_Py")]
        return [*(getattr(pywrap_tfe, name) for name in names), constant_op.convert_to_eager_tensor]

    before = functions()
    with pytest.raises(DeviceMismatchError), tensorflow_backend.strict():
        here + elsewhere
    assert all(new is old for new, old in zip(functions(), before, strict=True))


def test_the_device_of_a_scope_is_back_after_an_operation_that_fails(tensorflow_backend, here):
    with tensorflow_backend.strict():
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.matmul(here, here[:2])
        assert tensorflow_backend.device_of(tf.ones(2)) is cpu()
