"""Text: models that look up words and keys, which the host has; the rest of them is on a device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from d2ldev import ArrayLoader, D2LDevWarning, DeviceMismatchError, Trainer, cpu, gpu

WORDS = np.array(["good film", "bad film", "fine book", "ugly book"] * 2)
KEYS = np.arange(8)
Y = np.array([[1.0], [0.0]] * 4, "float32")


def vectorization():
    words = keras.layers.TextVectorization(output_sequence_length=2)
    words.adapt(WORDS)
    pooling = keras.layers.GlobalAveragePooling1D()
    return _with_embedding(keras.Input((), dtype="string"), words, after=[pooling])


def lookup():
    return _with_embedding(keras.layers.StringLookup(vocabulary=list(WORDS[:4])))


def keys():
    return _with_embedding(keras.layers.IntegerLookup(vocabulary=list(range(8))))


def _with_embedding(*layers, after=()):
    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(12, 3)
    return keras.Sequential([*layers, embedding, *after, keras.layers.Dense(1)])


class Beside(keras.Model):
    """A model that takes words beside numbers."""

    def __init__(self):
        super().__init__()
        self.words = lookup()
        self.numbers = keras.layers.Dense(1)

    def call(self, x, words):
        return self.words(words) + self.numbers(x)


def beside(texts):
    x = np.ones((8, 2), "float32")
    return [
        {"x": x[i : i + 4], "words": texts(WORDS[i : i + 4]), "y": Y[i : i + 4]} for i in (0, 4)
    ]


MODELS = {"vectorization": vectorization, "lookup": lookup, "keys": keys}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def batches(data):
    return [(tf.constant(data[:4]), Y[:4]), (tf.constant(data[4:]), Y[4:])]


def losses(net, data, num_gpus):
    trainer = Trainer(2, num_gpus=num_gpus, backend="tensorflow")
    return trainer.fit(net, data, loss="mse", lr=0.1)["loss"]


@models
def test_a_model_of_text_trains_on_gpus_as_on_the_cpu(backend, make):
    data = batches(KEYS if make is keys else WORDS)
    expected = losses(make(), data, 0)
    for num_gpus in (1, 2):
        np.testing.assert_allclose(losses(make(), data, num_gpus), expected, rtol=1e-5)


TEXTS = {"str": np.array, "objects": lambda x: np.array(list(x), object), "tensor": tf.constant}


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
def test_text_beside_numbers_trains_on_gpus(backend, texts, num_gpus):
    keras.utils.set_random_seed(0)
    found = losses(Beside(), beside(texts), num_gpus)
    keras.utils.set_random_seed(0)
    np.testing.assert_allclose(found, losses(Beside(), beside(tf.constant), 0), rtol=1e-5)


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_numpy_s_text_alone_builds_and_trains_a_model(backend, num_gpus):
    found = losses(lookup(), ArrayLoader(WORDS, Y, batch_size=4), num_gpus)
    np.testing.assert_allclose(found, losses(lookup(), batches(WORDS), 0), rtol=1e-5)


@models
def test_the_inside_of_a_lookup_is_free_in_strict(backend, make):
    net = backend.place(make(), "gpu:1")
    data = tf.constant(KEYS if make is keys else WORDS)
    with backend.strict():
        assert backend.device_of(net(data)) is gpu(1)
        with pytest.raises(DeviceMismatchError):
            net(data) + backend.ones((8, 1), device="gpu:0")


def test_what_keeps_its_words_elsewhere_is_placed(backend):
    net = backend.place(vectorization(), "gpu:1")
    assert set(backend.placement(net).values()) == {gpu(1)}
    net.compile("sgd", "mse")
    net.fit(tf.constant(WORDS), Y, verbose=0)
    backend.place(net, "cpu")
    assert backend.device_of(net(tf.constant(WORDS))) is cpu()


def discretization():
    layer = keras.layers.Discretization(num_bins=3)
    layer.adapt(np.arange(12.0))
    return keras.Sequential([keras.Input((2,)), layer, keras.layers.Embedding(4, 2)])


def normalization():
    layer = keras.layers.Normalization()
    layer.adapt(np.arange(12.0).reshape(6, 2))
    return keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])


@pytest.mark.parametrize("make", [vectorization, lookup, discretization, normalization])
def test_a_copy_has_the_state_of_adapt(backend, make):
    net = make()
    x = tf.constant(WORDS) if make in (vectorization, lookup) else tf.ones((8, 2))
    expected = net(x).numpy()
    (twin,) = backend.replicate(net, ["gpu:1"])
    np.testing.assert_allclose(twin(x).numpy(), expected, rtol=1e-6)


UNSAVED = {vectorization: "text_vectorization[_0-9]*.vocabulary", discretization: "bin_boundaries"}


@pytest.mark.parametrize("make", UNSAVED)
def test_what_adapt_has_learned_and_no_file_has_is_named(backend, make, tmp_path):
    with pytest.warns(D2LDevWarning, match=UNSAVED[make]):
        backend.save({"net": make()}, tmp_path / "net.st")


@pytest.mark.parametrize("make", [lookup, normalization])
def test_nothing_is_named_that_the_program_or_the_file_has(backend, make, tmp_path, recwarn):
    net = make()
    net(tf.constant(WORDS) if make is lookup else tf.ones((1, 2)))  # which builds it
    backend.save(net, tmp_path / "net.st")
    assert not [each for each in recwarn if issubclass(each.category, D2LDevWarning)]
