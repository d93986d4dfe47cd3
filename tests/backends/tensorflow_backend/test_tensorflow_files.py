"""TensorFlow's tensors, models and optimizers in files."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import CheckpointError

layers = keras.layers


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


def bits(backend, x):
    array = backend.to_numpy(x)
    return array.dtype.name, array.shape, array.tobytes()


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tensorflow_backend, path, shape):
    size = int(np.prod(shape))
    saved = {}
    for name in tensorflow_backend.dtype_names:
        dtype = np.dtype(tf.as_dtype(name).as_numpy_dtype)
        data = np.arange(size * dtype.itemsize) % (2 if name == "bool" else 256)
        saved[name] = tf.constant(data.astype("uint8").view(dtype).reshape(shape))
    tensorflow_backend.save(saved, path)
    loaded = tensorflow_backend.load(path)
    assert [(x.dtype, bits(tensorflow_backend, x)) for x in loaded.values()] == [
        (x.dtype, bits(tensorflow_backend, x)) for x in saved.values()
    ]


def made(seed):
    """With statistics; and an optimizer that has made no step yet."""
    drawn = keras.initializers.GlorotUniform(seed=seed)
    net = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, kernel_initializer=drawn),
            layers.BatchNormalization(),
            layers.Dense(1, kernel_initializer=drawn),
        ]
    )
    optimizer = keras.optimizers.Adam(0.1 if seed == 1 else 0.5)
    optimizer.build(net.trainable_variables)
    return {"net": net, "optimizer": optimizer}


def train(net, optimizer, steps=3):
    x = tf.reshape(tf.range(24, dtype=tf.float32), (8, 3)) / 10
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(net(x, training=True) ** 2)
        parameters = net.trainable_variables
        optimizer.apply(tape.gradient(loss, parameters), parameters)


def test_training_goes_on_as_if_it_had_not_been_interrupted(tensorflow_backend, path):
    whole = made(1)
    train(**whole)
    tensorflow_backend.save(whole, path)
    train(**whole)
    resumed = tensorflow_backend.load_into(made(2), path)
    train(**resumed)
    for part in ("net", "optimizer"):
        values = [
            [bits(tensorflow_backend, v._value) for v in each[part].variables]
            for each in (whole, resumed)
        ]
        assert values[0] == values[1]


def test_an_optimizer_without_variables_is_refused_with_the_way_to_make_them(
    tensorflow_backend, path
):
    tensorflow_backend.save(made(1)["optimizer"], path)
    with pytest.raises(CheckpointError, match=r"optimizer\.build"):
        tensorflow_backend.load_into(keras.optimizers.Adam(0.1), path)


def test_the_state_of_another_optimizer_is_refused(tensorflow_backend, path):
    whole = made(1)
    tensorflow_backend.save(whole["optimizer"], path)
    other = keras.optimizers.SGD(0.25)
    other.build(whole["net"].trainable_variables)
    with pytest.raises(CheckpointError, match="SGD"):
        tensorflow_backend.load_into(other, path)
    assert float(other.learning_rate) == 0.25


def test_variables_stay_who_they_are_and_what_was_traced_computes_with_the_new_values(
    tensorflow_backend, path
):
    weight = tf.Variable([1.0, 2.0])
    traced = tf.function(lambda: weight * 1, autograph=False)
    traced()
    tensorflow_backend.save({"w": tf.constant([3.0, 4.0])}, path)
    assert tensorflow_backend.load_into({"w": weight}, path)["w"] is weight
    assert traced().numpy().tolist() == [3, 4]


def test_a_file_from_a_virtual_gpu_is_read_in_a_process_without_one(tensorflow_backend, path, run):
    x = tensorflow_backend.arange(4, dtype="bfloat16", device="gpu:1")
    tensorflow_backend.save(x, path)
    program = f"""
backend = d2ldev.get_backend("tensorflow")
x = backend.load({str(path)!r})
show([backend.num_gpus(), str(backend.device_of(x)), x.dtype.name, x.numpy().tolist()])
"""
    assert run(program, D2LDEV_VIRTUAL_GPUS="0") == [[0, "cpu", "bfloat16", [0, 1, 2, 3]]]


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool", "bfloat16"])
def test_tensors_are_loaded_to_a_device(tensorflow_backend, path, dtype):
    tensorflow_backend.save(tensorflow_backend.ones(2, dtype=dtype), path)
    loaded = tensorflow_backend.load(path, device="gpu:1")
    assert str(tensorflow_backend.device_of(loaded)) == "gpu:1"


def sequential(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts])


def test_a_dense_layer_behind_a_flattened_convolution_has_its_columns_as_the_channels_are(
    tensorflow_backend,
):
    net = sequential((4, 4, 1), layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(2))
    layouts = tensorflow_backend._layouts(net)
    weight = {layout.role: layout for layout in layouts.values()}["1.weight"]
    assert (weight.split, weight.shape) == ((4, 3, 2), (2, 12))


@pytest.mark.parametrize("first", ["convolution", "flatten"])
def test_channels_that_come_first_are_not_guessed(tensorflow_backend, first):
    formats = {"convolution": "channels_last", "flatten": "channels_last", first: "channels_first"}
    net = sequential(
        (4, 4, 4),
        layers.Conv2D(3, 3, data_format=formats["convolution"]),
        layers.Flatten(data_format=formats["flatten"]),
        layers.Dense(2),
    )
    assert tensorflow_backend._layouts(net) is None


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)], ids=str)
def test_an_input_that_is_flattened_has_its_order_from_whoever_calls_the_model(
    tensorflow_backend, shape
):
    layouts = tensorflow_backend._layouts(sequential(shape, layers.Flatten(), layers.Dense(2)))
    weight = {layout.role: layout for layout in layouts.values()}["0.weight"]
    assert (weight.split, weight.axes) == ((12, 2), (1, 0))


NOT_STANDARD = {
    "batch normalization": lambda: sequential((3,), layers.BatchNormalization()),
    "a function": lambda: sequential((3,), layers.Dense(3), layers.Lambda(lambda x: x[:, ::-1])),
    "a reshaping": lambda: sequential((4,), layers.Reshape((2, 2)), layers.Dense(3)),
    "a recurrent layer": lambda: sequential((3, 2), layers.LSTM(3)),
    "not built": lambda: keras.Sequential([layers.Dense(3)]),
    "no layers": lambda: keras.Sequential(),
    "no sequence": lambda: layers.Dense(3),
}


@pytest.mark.parametrize("make", NOT_STANDARD.values(), ids=NOT_STANDARD.keys())
def test_no_layouts_are_claimed_for_other_models(tensorflow_backend, make):
    assert tensorflow_backend._layouts(make()) is None
