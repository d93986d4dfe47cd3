"""``strict()`` in TensorFlow: which operands are looked at, functions, and Keras."""

import inspect
import tempfile
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from d2ldev_tensorflow.strict import inputs_of
from keras import layers
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import constant_op, op_def_registry

from d2ldev import DeviceMismatchError, cpu, gpu

CPU = "/CPU:0"


# AutoGraph writes files when it converts a function.
as_it_is = tf.autograph.experimental.do_not_convert


@pytest.fixture
def here(backend):
    return backend.rand((4, 4), seed=1, device="gpu:1")


@pytest.fixture
def elsewhere(backend):
    return backend.rand((4, 4), seed=2, device="gpu:0")


MIXING = {
    "tf.add": lambda x, y: tf.add(x, y),
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
    "scattering": lambda x, y: tf.tensor_scatter_nd_update(x, [[0]], y[:1]),
    "norm": lambda x, y: tf.nn.batch_normalization(x, y, y, None, None, 1e-3),
    "convolution": lambda x, y: tf.nn.conv1d(x[None], y[None], 1, "SAME"),
    "loss": lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(x, y),
    "segments": lambda x, y: tf.math.segment_sum(x, tf.cast(y[:, 0], tf.int32) * 0),
}


@pytest.mark.parametrize("operation", MIXING.values(), ids=MIXING)
def test_mixing_raises(backend, here, elsewhere, operation):
    with backend.strict():
        with pytest.raises(DeviceMismatchError) as caught:
            operation(here, elsewhere)
        operation(here, here + 0.5)
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_every_operation_of_tensorflow_refuses(backend, here, elsewhere):
    """All that take two tensors, called so that they would fail if they did not refuse before."""
    ran, refused = [], 0
    for name, call in operations_of_two(here, elsewhere):
        try:
            with backend.strict():
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
    """Yield raw operations of two or more operands, called with both tensors in turn."""
    for name in sorted(dir(tf.raw_ops)):
        definition = None if name.startswith("_") else op_def_registry.get(name)
        if definition is None or any(each.is_ref for each in definition.input_arg):
            continue
        used = [definition.input_arg[index] for index in inputs_of(name).operands]
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
    "raw operation": lambda x: tf.raw_ops.AddV2(x=x, y=x),
    "copy": lambda x: tf.identity(x),
}


@pytest.mark.parametrize("operation", STAYING.values(), ids=STAYING)
def test_operations_run_where_their_operands_are(backend, here, operation):
    with backend.strict():
        assert backend.device_of(operation(here)) is gpu(1)


def test_a_tensor_of_the_cpu_is_an_operand(backend, here):
    before = tf.ones(4)
    with backend.strict():
        with backend.on("cpu"):
            scoped = tf.ones(4)
        for x in (before, scoped, backend.ones(4), tf.Variable(tf.ones(4))):
            with pytest.raises(DeviceMismatchError):
                here + x


MADE_ON_THE_WAY = {
    "filled": lambda: tf.ones(4),
    "of numbers": lambda: tf.constant([1.0, 2.0, 3.0, 4.0]),
    "of an array": lambda: tf.convert_to_tensor(np.ones(4, "float32")),
    "random": lambda: tf.random.normal((4,)),
    "computed from such": lambda: tf.reshape(tf.ones((2, 2)) * 2 + tf.range(2.0), [4]),
    "of a function": lambda: tf.function(lambda: tf.ones(4), autograph=False)(),
}


@pytest.mark.parametrize("make", MADE_ON_THE_WAY.values(), ids=MADE_ON_THE_WAY)
def test_unplaced_tensors_mix(backend, here, make):
    with backend.strict():
        made = make()
        found = [here + made, made * here, tf.function(tf.add, autograph=False)(made, here)]
    assert {backend.device_of(x) for x in found} == {gpu(1)}


def test_what_is_computed_from_it_and_a_placed_tensor_is_placed(backend, here, elsewhere):
    with backend.strict():
        placed = here + tf.ones(4)
        with pytest.raises(DeviceMismatchError):
            placed + elsewhere


def test_zeros_of_a_gradient_from_before_the_block_are_not_operands(backend, here):
    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(here)
            y = tf.split(here, 2)[0]
        return tape.gradient(y, here)

    gradient()
    with backend.strict():
        assert backend.device_of(gradient()) is gpu(1)


def test_a_0_dim_tensor_of_a_gpu_is_an_operand(backend, here):
    scalar = backend.asarray(2.0, device="gpu:0")
    with backend.strict(), pytest.raises(DeviceMismatchError):
        here * scalar


def test_the_error_has_the_names_of_the_operation_and_of_its_operands(backend, here, elsewhere):
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        tf.concat([here, elsewhere], 0)
    assert str(caught.value) == (
        "cannot run concat: Expected all tensors to be on the same device, but found "
        "here on gpu:1, elsewhere on gpu:0\n"
        "  devices: gpu:1, gpu:0\n"
        "  fix: elsewhere = backend.to(elsewhere, 'gpu:1')"
    )


def test_a_variable_is_written_from_anywhere(backend, here, elsewhere):
    with backend.strict():
        with backend.on("gpu:1"):
            variable = tf.Variable(here)
        variable.assign(elsewhere)
        assert backend.device_of(variable) is gpu(1)
        assert backend.device_of(variable + 0) is gpu(1)
        assert np.array_equal(variable, elsewhere)


def test_the_user_s_scope_says_where_an_operation_runs(backend, here):
    with backend.strict(), tf.device(CPU):
        assert backend.device_of(here + here) is cpu()


def test_mixing_raises_in_a_scope(backend, here, elsewhere):
    with backend.strict(), tf.device(CPU), pytest.raises(DeviceMismatchError):
        here + elsewhere


def test_the_device_of_creation_says_only_where_tensors_are_made(backend, here):
    with backend.strict(), backend.on("gpu:0"):
        assert backend.device_of(here + here) is gpu(1)
        assert backend.device_of(tf.reshape(here, [16])) is gpu(1)
        assert backend.device_of(tf.ones((2, 2))) is gpu(0)
        assert backend.device_of(tf.identity(here)) is gpu(0)


def test_data_sets_are_the_host_s(backend, here):
    def double(row):
        return row * 2

    with backend.strict():
        rows = tf.data.Dataset.from_tensor_slices(here).map(as_it_is(double))
        batches = list(rows.batch(2))
    assert np.array_equal(np.concatenate(batches), here * 2)


def test_the_very_functions_are_back_after_the_block(backend, here, elsewhere):
    def functions():
        names = [name for name in dir(pywrap_tfe) if name.startswith("TFE_Py")]
        return [*(getattr(pywrap_tfe, name) for name in names), constant_op.convert_to_eager_tensor]

    before = functions()
    with pytest.raises(DeviceMismatchError), backend.strict():
        here + elsewhere
    assert all(new is old for new, old in zip(functions(), before, strict=True))


def test_the_device_of_a_scope_is_back_after_an_operation_that_fails(backend, here):
    with backend.strict():
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.matmul(here, here[:2])
        assert backend.device_of(tf.ones(2)) is cpu()


# -- Functions -------------------------------------------------------------------------------------


def trace(function):
    # AutoGraph writes files when it converts a function.
    return tf.function(function, autograph=False)


def test_a_function_runs_where_its_operands_are(backend, here):
    double = trace(lambda x: tf.matmul(x, x) + tf.ones((4, 4)))
    with backend.strict():
        assert backend.device_of(double(here)) is gpu(1)


def test_arguments_on_two_devices_are_refused(backend, here, elsewhere):
    add = trace(lambda x, y: x + y)
    with backend.strict():
        with pytest.raises(DeviceMismatchError) as caught:
            add(here, elsewhere)
        add(here, here)
    assert set(caught.value.devices) == {"gpu:0", "gpu:1"}


def test_a_function_that_was_traced_before_refuses(backend, here, elsewhere):
    add = trace(lambda x, y: x + y)
    add(here, elsewhere)
    with backend.strict(), pytest.raises(DeviceMismatchError):
        add(here, elsewhere)


def test_a_concrete_function_refuses(backend, here, elsewhere):
    add = trace(lambda x, y: x + y).get_concrete_function(here, here)
    with backend.strict():
        assert backend.device_of(add(here, here)) is gpu(1)
        with pytest.raises(DeviceMismatchError):
            add(here, elsewhere)


def test_a_captured_tensor_is_an_operand(backend, here, elsewhere):
    add = trace(lambda x: x + elsewhere)
    with backend.strict(), pytest.raises(DeviceMismatchError):
        add(here)


def test_a_captured_variable_is_an_operand_and_named(backend, here, elsewhere):
    weight = tf.Variable(elsewhere, name="weight")
    with backend.on("gpu:1"):
        bias = tf.Variable(here, name="bias")
    add = trace(lambda: weight + bias)
    with backend.strict(), pytest.raises(DeviceMismatchError) as caught:
        add()
    assert "weight on cpu" in caught.value.problem
    assert "bias on gpu:1" in caught.value.problem


def test_a_captured_0_dim_variable_of_the_cpu_is_none(backend, here):
    rate = tf.Variable(0.5)
    scaled = trace(lambda x: x * rate)
    with backend.strict():
        assert backend.device_of(scaled(here)) is gpu(1)


def test_gradients_of_a_function_are_where_its_operands_are(backend, here):
    square = trace(lambda x: tf.reduce_sum(x**2))
    with backend.strict():
        with tf.GradientTape() as tape:
            tape.watch(here)
            y = square(here)
        assert backend.device_of(tape.gradient(y, here)) is gpu(1)


def test_a_function_with_an_iterator_runs(backend, here):
    data = iter(tf.data.Dataset.range(3))
    take = trace(lambda: here * tf.cast(next(data), tf.float32))
    with backend.strict():
        take()
        assert bool(tf.reduce_all(take() == here))


@pytest.fixture
def _converted_elsewhere(monkeypatch, tmp_path):
    """AutoGraph converts what is mapped, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Scaling:
    """A callable object, which can be mapped, too."""

    def __init__(self, by):
        self.by = by

    def __call__(self, row):
        return row * self.by

    def scale(self, row):
        """Multiply, as a method."""
        return row * self.by


def make_scale(by):
    """Return a function that closes over a tensor."""

    def scale(row):
        return row * by

    return scale


MAPPED = {
    "function": make_scale,
    "method": lambda by: Scaling(by).scale,
    "callable object": Scaling,
    "partial": lambda by: partial(tf.multiply, by),
    "tf.function": lambda by: trace(make_scale(by)),
}


@pytest.mark.usefixtures("_converted_elsewhere")
@pytest.mark.parametrize("make", MAPPED.values(), ids=MAPPED)
def test_tensors_captured_by_a_vectorized_map_are_operands(backend, here, elsewhere, make):
    with backend.strict():
        mapped = make(here[0])
        assert backend.device_of(tf.vectorized_map(mapped, here)) is gpu(1)
        with pytest.raises(DeviceMismatchError):
            tf.vectorized_map(mapped, elsewhere)


@pytest.mark.usefixtures("_converted_elsewhere")
def test_tensors_made_by_a_vectorized_map_are_not_operands(backend, here):
    signals = backend.ones((4, 30), device="gpu:1")

    def noise(row):
        return row + tf.random.normal((4,))

    def spectrum(row):
        return tf.signal.stft(row, 3, 1)

    with backend.strict():
        found = [tf.vectorized_map(noise, here), tf.vectorized_map(spectrum, signals)]
    assert {backend.device_of(x) for x in found} == {gpu(1)}


@pytest.mark.usefixtures("_converted_elsewhere")
def test_a_jacobian_goes_back_through_moves(backend, here, elsewhere):
    with backend.strict(), tf.GradientTape() as tape:
        tape.watch(here)
        y = backend.to(here * here, "gpu:0") * elsewhere
        found = tape.jacobian(y, here)
    assert found.shape == (4, 4, 4, 4)


def test_a_python_function_refuses(backend, here, elsewhere):
    with backend.strict():
        tf.py_function(lambda x, y: x + y, [here, here], tf.float32)
        with pytest.raises(DeviceMismatchError):
            tf.py_function(lambda x, y: x + y, [here, elsewhere], tf.float32)


@pytest.fixture(scope="module")
def strict_process(run):
    """What a process has seen that is strict as a whole: one for several tests."""
    program = """
backend = d2ldev.get_backend("tensorflow")
x, y = (backend.ones((2, 2), device=f"gpu:{index}") for index in range(2))
show(["computed", str(backend.device_of(y + y))])
try:
    x + y
except d2ldev.DeviceMismatchError as error:
    show(["mixed", error.attempted])
run = tf.function(lambda y: tf.py_function(lambda y: x + y, [y], tf.float32))
try:
    run(y)
except Exception as error:
    show(["traced", "DeviceMismatchError" in str(error)])
"""
    return dict(run(program, D2LDEV_VIRTUAL_GPUS="2", D2LDEV_STRICT="1"))


def test_a_python_function_in_a_traced_one_is_strict_with_the_whole_process(strict_process):
    assert strict_process["traced"] is True


def test_the_whole_process_is_strict_with_the_environment_variable(strict_process):
    assert (strict_process["computed"], strict_process["mixed"]) == ("gpu:1", "run add")


# -- Keras -----------------------------------------------------------------------------------------


IMAGES, SEQUENCES, FEATURES, WORDS = (8, 8, 3), (5, 6), (6,), (5,)


def attention():
    inputs = keras.Input(SEQUENCES)
    seen = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    seen = layers.LayerNormalization()(layers.Dropout(0.1, seed=1)(seen) + inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(seen)))


def stack_all(*of):
    return keras.Sequential([*of, layers.Dense(1)])


MODELS = {
    "dense": (FEATURES, lambda: stack_all(layers.Dense(4, activation="relu"))),
    "convolution": (
        IMAGES,
        lambda: stack_all(
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
        ),
    ),
    "causal convolution": (
        SEQUENCES,
        lambda: stack_all(layers.Conv1D(4, 2, padding="causal"), layers.GlobalMaxPooling1D()),
    ),
    "embedding": (
        WORDS,
        lambda: stack_all(layers.Embedding(9, 4), layers.GlobalAveragePooling1D()),
    ),
    "LSTM": (SEQUENCES, lambda: stack_all(layers.LSTM(4))),
    "masked GRU": (
        WORDS,
        lambda: stack_all(
            layers.Embedding(9, 4, mask_zero=True), layers.Bidirectional(layers.GRU(3))
        ),
    ),
    "dropout": (
        FEATURES,
        lambda: stack_all(layers.Dropout(0.1, seed=1), layers.GaussianNoise(0.01)),
    ),
    "attention": (SEQUENCES, attention),
}


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(1)
    yield
    keras.utils.set_random_seed(1)


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def kind(request):
    return request.param


def data_for(shape):
    generator = np.random.default_rng(0)
    if shape == WORDS:
        return generator.integers(0, 9, (4, *shape))
    return generator.random((4, *shape), "float32")


@pytest.fixture(params=["placed", "placed before it is built", "made there"])
def model(request, backend, kind):
    """A model on the second GPU, and its input in NumPy."""
    shape, make = kind
    x = data_for(shape)
    if request.param == "made there":
        with backend.on("gpu:1"):
            net = make()
            net(backend.asarray(x, device="gpu:1"))
    else:
        net = make()
        if request.param == "placed":
            net(x)
        backend.place(net, "gpu:1")
    return net, x


def test_a_model_is_trained_where_it_is(backend, model):
    net, x = model
    x, target = (backend.asarray(each, device="gpu:1") for each in (x, np.ones((4, 1))))
    optimizer, losses = keras.optimizers.Adam(0.01), []
    with backend.strict():
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(x, training=True) - tf.cast(target, "float32")) ** 2)
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply(gradients, net.trainable_variables)
            losses.append(float(loss))
        computed = [loss, *map(tf.convert_to_tensor, gradients)]
    assert {backend.device_of(each) for each in computed} == {gpu(1)}
    assert set(backend.placement(net).values()) == {gpu(1)}
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
def test_a_model_refuses_data_on_another_device(backend, model, device):
    net, x = model
    net(backend.asarray(x, device="gpu:1"))
    elsewhere = backend.asarray(x, device=device)
    with backend.strict(), pytest.raises(DeviceMismatchError):
        net(elsewhere)


def compile_model(backend, kind, **options):
    """Return a model and its optimizer on the second GPU, and its input in NumPy."""
    shape, make = kind
    x, net = data_for(shape), make()
    net(x)
    backend.place(net, "gpu:1")
    optimizer = backend.place(keras.optimizers.Adam(0.01), "gpu:1")
    net.compile(optimizer, "mse", metrics=["mae"], jit_compile=False, **options)
    return net, optimizer, x


def test_a_model_is_fitted_to_arrays(backend, kind):
    net, optimizer, x = compile_model(backend, kind)
    with backend.strict():
        fitted = net.fit(x, np.ones((4, 1)), epochs=4, verbose=0, shuffle=False)
    losses = fitted.history["loss"]
    assert losses[-1] < losses[0]
    assert set(backend.placement([net, optimizer]).values()) == {gpu(1)}


@pytest.mark.parametrize("eagerly", [True, False])
def test_a_model_is_fitted_and_measured_batch_by_batch(backend, eagerly):
    net, optimizer, x = compile_model(backend, MODELS["dense"], run_eagerly=eagerly)
    with backend.strict():
        net.fit(x, np.ones((4, 1)), verbose=0)
        net.train_on_batch(x, np.ones((4, 1)))
        assert np.isfinite(net.evaluate(x, np.ones((4, 1)), verbose=0)).all()
        assert net.predict(x, verbose=0).shape == (4, 1)
    assert set(backend.placement([net, optimizer]).values()) == {gpu(1)}


def schedule():
    return keras.optimizers.schedules.CosineDecay(0.1, 8)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, clipnorm=1.0),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaling the loss": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "schedule": lambda: keras.optimizers.Adam(schedule()),
}


@pytest.mark.parametrize("is_placed", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_the_cpu(backend, make, is_placed):
    def train(device):
        with backend.on(device):
            weight, optimizer = tf.Variable(backend.rand((3, 2), seed=1)), make()
            if not is_placed:
                optimizer.build([weight])
        if is_placed:
            backend.place([weight, optimizer], device)
        for _ in range(4):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((weight - 1.0) ** 2)
            optimizer.apply(tape.gradient(loss, [weight]), [weight])
        assert str(backend.device_of(weight)) == device
        return weight.numpy().tobytes()

    with backend.strict():
        assert train("gpu:1") == train("cpu")


def test_an_optimizer_refuses_gradients_on_another_device(backend):
    with backend.strict():
        weight = backend.place(tf.Variable(backend.ones((3, 2))), "gpu:0")
        gradient = backend.ones((3, 2), device="gpu:1")
        with pytest.raises(DeviceMismatchError):
            keras.optimizers.SGD(0.1).apply([gradient], [weight])


def test_a_model_on_two_devices_is_trained_with_moves_between_them(backend):
    first = backend.mlp([3, 4, 4], device="gpu:0")
    second = backend.mlp([4, 4, 1], device="gpu:1")
    x = backend.rand((5, 3), seed=1, device="gpu:0")
    parameters = first.trainable_variables + second.trainable_variables
    with backend.strict():
        with tf.GradientTape() as tape:
            hidden = backend.to(tf.nn.relu(first(x)), "gpu:1")
            loss = tf.reduce_mean(second(hidden) ** 2)
        gradients = tape.gradient(loss, parameters)
        keras.optimizers.SGD(0.1).apply(gradients, parameters)
    places = [backend.device_of(each) for each in gradients]
    assert places == [gpu(0)] * 4 + [gpu(1)] * 4


def test_a_loss_takes_labels_from_numpy(backend):
    logits = backend.rand((4, 4), seed=1, device="gpu:1")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with backend.strict():
        assert backend.device_of(loss(np.array([1, 2, 3, 0]), logits)) is gpu(1)


@pytest.mark.parametrize("of", [tf.nn.relu, tf.transpose, lambda x: tf.split(x, 2)[0]])
def test_gradients_are_where_the_tensor_is(backend, of):
    x = backend.rand((4, 4), seed=1, device="gpu:1")
    with backend.strict():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = of(x)
        assert backend.device_of(tape.gradient(y, x)) is gpu(1)


def test_what_64_threads_compute_in_blocks_that_end_in_any_order_is_their_own(run):
    # In a process of its own: it has ended in a segmentation fault. The blocks of ``garbage`` are
    # ended by the collector.
    program = """
import random, threading
backend, wrong = d2ldev.get_backend("tensorflow"), []

def entered(place):
    with backend.on(place), backend.strict():
        yield

def work(number):
    chosen = random.Random(number)
    for _ in range(20):
        blocks = [entered(chosen.choice(["cpu", "gpu:0", "gpu:1"])) for _ in range(4)]
        for block in blocks:
            next(block)
        chosen.shuffle(blocks)
        for block in blocks:
            block.close()
            garbage = [entered("gpu:1")]
            next(garbage[0])
            garbage.append(garbage)
            x = tf.fill((number + 1, 2), float(number))
            x = tf.transpose(backend.to(x, chosen.choice(["gpu:0", "gpu:1"])), (1, 0))
            x = x + x[0, 0]
            if (tuple(x.shape), float(x[1, number])) != ((2, number + 1), 2.0 * number):
                wrong.append(number)

threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
show(wrong)
"""
    # Freed memory is overwritten.
    assert run(program, D2LDEV_VIRTUAL_GPUS="2", PYTHONMALLOC="debug") == [[]]
