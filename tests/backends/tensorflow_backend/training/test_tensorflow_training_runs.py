"""``Trainer`` on TensorFlow: ``tf.data``, batches by name, Keras' losses, traces, resuming."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_models import Plain, Subclassed, build, convolutional

from d2ldev import (
    ArrayLoader,
    CheckpointError,
    DeviceLog,
    Trainer,
    UnsupportedValueError,
    cpu,
    gpu,
)
from d2ldev.framework.testing import framework_of

RANDOM = np.random.default_rng(0)


IMAGES, LABELS = RANDOM.random((10, 8, 8, 3), dtype=np.float32), RANDOM.integers(0, 2, 10)


BATCHES = [(IMAGES[i : i + 4], LABELS[i : i + 4]) for i in (0, 4, 8)]


OPTIONS = {"loss": "cross_entropy", "optimizer": "adam"}


@pytest.fixture
def net(backend):
    return build(backend, convolutional, "cpu")


def test_a_dataset_gives_the_same_as_its_arrays(backend):
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    losses = [
        Trainer(2, 1, backend=backend).fit(
            build(backend, convolutional, "cpu"), data, dataset, **OPTIONS
        )
        for data in (BATCHES, dataset, dataset.prefetch(1))
    ]
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def test_a_model_that_is_not_built_is_trained_on_the_gpu(backend):
    net = build(backend, Subclassed, "cpu")
    pairs = [(X[:, 0, 0], X[:, 1, 1], y) for X, y in BATCHES]
    trainer = Trainer(10, num_gpus=1, backend=backend)
    history = trainer.fit(net, pairs, pairs, loss="cross_entropy", lr=0.1)
    assert history["val_loss"][-1] < history["val_loss"][0]
    assert set(backend.placement(net).values()) == {gpu(0)}


def test_the_users_optimizer_is_placed(backend, net):
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(net.trainable_variables)
    Trainer(1, num_gpus=1, backend=backend).fit(
        net, BATCHES, loss="cross_entropy", optimizer=optimizer
    )
    assert int(optimizer.iterations) == 3
    assert set(backend.placement(optimizer).values()) == {gpu(0)}


# -- Traces ----------------------------------------------------------------------------------------


EPOCHS = 5


CLASSES = RANDOM.integers(0, 2, 10).astype("int32")


TRACED = {
    convolutional: (IMAGES,),
    Subclassed: (IMAGES[:, 0, 0], IMAGES[:, 1, 1]),  # has no variables before the first batch
    Plain: (IMAGES[:, 0, 0],),
}


@pytest.fixture
def traced():
    """The lengths of the batches for which the loss was called, which happens in a trace only."""
    return []


@pytest.fixture
def loss(traced):
    def note(prediction, y):
        traced.append(prediction.shape[0])
        logits = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=prediction)
        return tf.reduce_mean(logits)

    return note


def trace_batches(model, size=4):
    """Return batches of 4, 4 and 2."""
    return [
        (*(x[i : i + size] for x in TRACED[model]), CLASSES[i : i + size])
        for i in range(0, 10, size)
    ]


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("model", TRACED, ids=lambda model: model.__name__)
def test_a_step_and_an_evaluation_are_traced_once_for_each_shape(
    backend, model, num_gpus, loss, traced
):
    counts = []
    trainer = Trainer(
        EPOCHS, num_gpus, backend=backend, callbacks=lambda *_: counts.append(len(traced))
    )
    data = trace_batches(model)
    trainer.fit(build(backend, model, "cpu"), data, data, loss=loss, optimizer="adam")
    assert traced == [4, 2, 4, 2]
    assert counts == [4] * EPOCHS


def test_a_checkpoint_and_a_metric_have_nothing_traced_again(backend, loss, traced, path):
    data = trace_batches(convolutional)
    trainer = Trainer(EPOCHS, 1, gradient_clip_val=1.0, backend=backend)
    trainer.fit(
        build(backend, convolutional, "cpu"),
        data,
        data,
        loss=loss,
        metrics=["accuracy"],
        checkpoint=path,
    )
    assert traced == [4, 2, 4, 2]


def test_a_resumed_run_traces_as_often_as_a_new_one(backend, loss, traced, path):
    data = trace_batches(convolutional)
    for epochs in (2, EPOCHS):
        traced.clear()
        net = build(backend, convolutional, "cpu")
        trainer = Trainer(epochs, backend=backend)
        trainer.fit(net, data, data, loss=loss, checkpoint=path, resume=True)
        assert traced == [4, 2, 4, 2]


# -- Batches by name -------------------------------------------------------------------------------


ROWS = RANDOM.normal(size=(8, 3)).astype("float32")


MASK = RANDOM.random((8, 3)).astype("float32")


Y = RANDOM.normal(size=(8, 3)).astype("float32")


ORDERS = [{"mask": MASK, "x": ROWS, "y": Y}, {"y": Y, "x": ROWS, "mask": MASK}]


def functional(nested):
    """Return a model of ``dense(x) * mask``, with inputs that are nested so."""
    keras.utils.set_random_seed(0)
    x, mask = keras.Input((3,), name="x"), keras.Input((3,), name="mask")
    return keras.Model(nested(x, mask), layers.Dense(3)(x) * mask)


MODELS = {
    "list": lambda: functional(lambda x, mask: [x, mask]),
    "mapping": lambda: functional(lambda x, mask: {"x": x, "mask": mask}),
    "mapping that is not sorted": lambda: functional(lambda x, mask: {"mask": mask, "x": x}),
}


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize("batch", ORDERS, ids=lambda batch: "".join(batch))
@pytest.mark.parametrize("model", MODELS)
def test_a_dict_gives_inputs_by_name(backend, model, batch, num_gpus):
    net = MODELS[model]()
    trainer = Trainer(1, num_gpus, backend=backend)
    history = trainer.fit(net, [batch], [batch], lr=0.0)
    kernel = net.trainable_variables[0].numpy()
    expected = np.mean((ROWS @ kernel * MASK - Y) ** 2)
    assert history["loss"] == pytest.approx([expected], rel=1e-5)
    assert history["val_loss"] == pytest.approx([expected], rel=1e-5)


def test_inputs_without_the_names_of_a_mapping_are_refused(backend):
    with pytest.raises(UnsupportedValueError, match="its inputs have names") as error:
        Trainer(1, backend=backend).fit(MODELS["mapping"](), [(ROWS, MASK, Y)])
    assert "{'x': ..., 'mask': ..., 'y': y}" in error.value.fix


@pytest.mark.parametrize("built", [True, False])
def test_a_sequential_model_takes_its_one_input_by_any_name(backend, built):
    net = keras.Sequential(([keras.Input((3,))] if built else []) + [layers.Dense(3)])
    history = Trainer(1, backend=backend).fit(net, [{"pixels": ROWS, "y": Y}])
    assert history["loss"][0] > 0


# -- Keras' losses and metrics ---------------------------------------------------------------------


POINTS = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")


BINARY = [(POINTS, (POINTS[:, :1] > 0).astype("float32"))]


def fit_model(backend, loss, metrics=(), num_gpus=1):
    """Return the history of a run, and the parameters after it."""
    net = backend.mlp([2, 1], seed=0)
    trainer = Trainer(3, num_gpus, backend=backend)
    history = trainer.fit(net, BINARY, loss=loss, lr=0.5, metrics=metrics)
    return history, net.get_weights()


def by_hand(prediction, y):
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=prediction))


def from_a_function(y_true, y_pred):
    losses = keras.losses.binary_crossentropy(y_true, y_pred, from_logits=True)
    return tf.reduce_mean(losses)


def rate(y_true, y_pred):
    return keras.ops.mean(keras.metrics.binary_accuracy(y_true, y_pred, threshold=0.0))


@pytest.mark.parametrize("num_gpus", [0, 1])
@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.BinaryCrossentropy(from_logits=True),
        from_a_function,
        partial(from_a_function),
        tf.function(from_a_function, autograph=False),
    ],
    ids=["object", "function", "partial", "tf.function"],
)
def test_keras_losses_are_called_with_y_first(backend, loss, num_gpus):
    history, parameters = fit_model(backend, loss, num_gpus=num_gpus)
    expected, expected_parameters = fit_model(backend, by_hand, num_gpus=num_gpus)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    for x, y in zip(parameters, expected_parameters, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_a_loss_for_each_example_is_refused_with_the_fix(backend):
    with pytest.raises(UnsupportedValueError, match="not a scalar") as error:
        fit_model(backend, keras.losses.binary_crossentropy)
    call = "lambda y_true, y_pred: keras.ops.mean(loss(y_true, y_pred))"
    assert error.value.fix == f"loss={call}"


def test_the_fix_calls_no_method_that_a_tensor_lacks(backend):
    def errors(prediction, y):
        return tf.abs(prediction - y)

    with pytest.raises(UnsupportedValueError, match="not a scalar") as error:
        fit_model(backend, errors)
    assert error.value.fix == "loss=lambda prediction, y: keras.ops.mean(loss(prediction, y))"
    with pytest.raises(UnsupportedValueError, match="not a scalar") as error:
        DeviceLog(backend).add(loss=tf.zeros(3))
    assert error.value.fix == "log.add(loss=keras.ops.mean(loss))"


def test_a_metric_for_each_example_is_refused_with_the_fix(backend):
    with pytest.raises(UnsupportedValueError, match="not a scalar") as error:
        fit_model(backend, "bce", metrics=[keras.metrics.binary_accuracy])
    call = "lambda y_true, y_pred: keras.ops.mean(keras.metrics.binary_accuracy(y_true, y_pred))"
    assert error.value.fix == f"metrics=[{call}]"


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_keras_metrics_are_called_with_y_first(backend, num_gpus):
    def share(prediction, y):
        return tf.reduce_mean(tf.cast((prediction > 0) == (y > 0.5), tf.float32))

    history, _ = fit_model(backend, by_hand, [rate, share], num_gpus)
    assert history["rate"] == history["share"]
    assert history["rate"][-1] > 0.5


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_keras_metrics_with_a_state_measure_an_epoch(backend, num_gpus):
    right = keras.metrics.BinaryAccuracy(threshold=0.0)
    area = keras.metrics.AUC(from_logits=True)
    history, _ = fit_model(backend, by_hand, [right, area, rate], num_gpus)
    np.testing.assert_allclose(history["binary_accuracy"], history["rate"], rtol=1e-6)
    assert 0.5 < history[area.name][-1] <= 1
    device = backend.gpu(0) if num_gpus else backend.cpu()
    assert {*backend.placement((right, area)).values()} == {device}


def test_a_keras_metric_with_a_state_is_not_a_loss(backend):
    with pytest.raises(UnsupportedValueError, match="running value"):
        fit_model(backend, keras.metrics.BinaryCrossentropy(from_logits=True))


# -- compiled models -------------------------------------------------------------------------------


def compile_model(backend, **options):
    net = backend.mlp([2, 1], seed=0)
    net.compile(**options)
    return net


def test_a_run_says_what_the_model_was_compiled_with(backend, caplog):
    net = compile_model(backend, optimizer="adam", loss="mae")
    with caplog.at_level("INFO", logger="d2ldev"):
        Trainer(1, num_gpus=0, backend=backend).fit(net, BINARY)
    (said,) = caplog.messages
    assert "compiled with loss='mae' and optimizer=<" in said
    assert "Adam" in said


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"optimizer": "adam", "loss": "mse"},
        lambda: {
            "optimizer": keras.optimizers.SGD(0.5),
            "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        },
        lambda: {"optimizer": keras.optimizers.SGD(0.5), "loss": keras.losses.mean_absolute_error},
        lambda: {"optimizer": keras.optimizers.SGD(0.5), "loss": from_a_function},
        lambda: {"optimizer": keras.optimizers.SGD(0.5), "loss": "poisson"},
    ],
    ids=["names", "object", "function", "own function", "a number for each example"],
)
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_compiled_model_is_trained_as_keras_trains_it(backend, make, num_gpus):
    net, twin = (compile_model(backend, **make(), jit_compile=False) for _ in range(2))
    history = Trainer(3, num_gpus, backend=backend).fit(net, BINARY)
    expected = [float(twin.train_on_batch(*BINARY[0])) for _ in range(3)]
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    for x, y in zip(net.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_compiled_function_gets_targets_of_the_rank_and_dtype_of_predictions(backend, dtype):
    batch = (BINARY[0][0], BINARY[0][1][:, 0].astype(dtype))
    net, twin = (
        compile_model(backend, optimizer=keras.optimizers.SGD(0.5), loss=squares, jit_compile=False)
        for _ in range(2)
    )
    history = Trainer(1, backend=backend).fit(net, [batch])
    assert history["loss"] == [pytest.approx(float(twin.train_on_batch(*batch)), rel=1e-5)]


def squares(y_true, y_pred):
    return tf.square(y_true - y_pred)


def test_arguments_of_fit_override_compile(backend):
    options = {"loss": "mse", "optimizer": "momentum", "lr": 0.1}
    net = compile_model(backend, optimizer="adam", loss={"output": "mae"})
    history = Trainer(3, backend=backend).fit(net, BINARY, **options)
    expected = Trainer(3, backend=backend).fit(backend.mlp([2, 1], seed=0), BINARY, **options)
    assert history == expected


def test_a_model_that_was_compiled_without_a_loss_needs_one(backend):
    net = compile_model(backend, optimizer=keras.optimizers.SGD(0.5))
    before = net.get_weights()
    for verb, word in (("fit", "train"), ("validate", "validate")):
        with pytest.raises(UnsupportedValueError, match=rf"cannot {word} .*without a loss"):
            getattr(Trainer(3, backend=backend), verb)(net, BINARY)
    for x, y in zip(net.get_weights(), before, strict=True):
        np.testing.assert_array_equal(x, y)
    history = Trainer(3, backend=backend).fit(net, BINARY, loss="mse")
    fresh = backend.mlp([2, 1], seed=0)
    assert history == Trainer(3, backend=backend).fit(fresh, BINARY, loss="mse", lr=0.5)


class OwnStep(keras.Model):
    """A model as Keras' guide of ``train_step`` has it."""

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(1)

    def call(self, x):
        return self.layer(x)


class OwnTrainStep(OwnStep):
    def train_step(self, data):
        raise AssertionError("nobody calls it")


class OwnTestStep(OwnStep):
    def test_step(self, data):
        raise AssertionError("nobody calls it")


class OwnPredictStep(OwnStep):
    def predict_step(self, data):
        raise AssertionError("nobody calls it")


class OwnLoss(OwnStep):
    def compute_loss(self, *operands, **options):
        raise AssertionError("nobody calls it")


class OwnTrainingStep(OwnTrainStep):
    def training_step(self, batch):
        return tf.reduce_mean((self(batch[0]) - batch[1]) ** 2)


REFUSED = [
    ("fit", OwnTrainStep, "train", "train_step"),
    ("fit", OwnTestStep, "train", "test_step"),
    ("fit", OwnLoss, "train", "compute_loss"),
    ("validate", OwnTestStep, "validate", "test_step"),
    ("validate", OwnLoss, "validate", "compute_loss"),
    ("predict", OwnPredictStep, "predict", "predict_step"),
]


@pytest.mark.parametrize(("verb", "make", "word", "method"), REFUSED)
def test_a_method_that_only_keras_own_loops_call_is_refused(backend, verb, make, word, method):
    net = make()
    with pytest.raises(UnsupportedValueError, match=rf"cannot {word} .* its {method}") as error:
        getattr(Trainer(1, backend=backend), verb)(net, BINARY)
    assert error.value.fix.startswith("def training_step(self, batch)")


@pytest.mark.parametrize(
    ("verb", "make"),
    [("fit", OwnPredictStep), ("fit", OwnTrainingStep), ("validate", OwnTrainStep)],
)
def test_a_method_that_is_not_wanted_does_not_matter(backend, verb, make):
    assert getattr(Trainer(1, backend=backend), verb)(make(), BINARY)["loss"]


def test_a_learning_rate_for_the_compiled_optimizer_is_refused(backend):
    net = compile_model(backend, optimizer="adam", loss="mse")
    with pytest.raises(UnsupportedValueError, match="a learning rate of its own") as error:
        Trainer(3, backend=backend).fit(net, BINARY, lr=0.5)
    assert error.value.fix == "leave lr out"


def two_outputs(**options):
    """Return a compiled model with two outputs, the same each time."""
    keras.utils.set_random_seed(0)
    x = keras.Input((2,))
    net = keras.Model(x, [layers.Dense(1, name="a")(x), layers.Dense(1, name="b")(x)])
    net.compile(optimizer=keras.optimizers.SGD(0.5), jit_compile=False, **options)
    return net


TWO = [(POINTS, (BINARY[0][1], POINTS[:, 1:]))]


OF_OUTPUTS = {
    "one for all": lambda: {"loss": "mse"},
    "lists": lambda: {
        "loss": ["mse", keras.losses.MeanAbsoluteError()],
        "loss_weights": [0.1, 10.0],
    },
    "names": lambda: {
        "loss": {"b": "mae", "a": squares},
        "loss_weights": {"b": 10.0, "a": 0.1},
    },
}


@pytest.mark.parametrize("options", OF_OUTPUTS.values(), ids=OF_OUTPUTS)
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_model_with_two_outputs_is_trained_as_keras_trains_it(backend, options, num_gpus):
    net, twin = two_outputs(**options()), two_outputs(**options())
    losses = [
        loss
        for _ in range(2)
        for loss in Trainer(2, num_gpus, backend=backend).fit(net, TWO)["loss"]
    ]
    expected = [twin.train_on_batch(*TWO[0], return_dict=True)["loss"] for _ in range(4)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for x, y in zip(net.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    # The means that Keras keeps of the losses are its own.
    assert {float(metric.result()) for metric in net.metrics} == {0.0}
    twin.set_weights(net.get_weights())
    assert net.evaluate(*TWO[0], verbose=0) == pytest.approx(twin.evaluate(*TWO[0], verbose=0))


def test_the_losses_that_layers_add_count_once_in_a_compiled_model(backend):
    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2,))
        options = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
        net = keras.Model(inputs, layers.Dense(1, **options)(inputs))
        net.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return net

    net, twin = make(), make()
    history = Trainer(3, backend=backend).fit(net, BINARY)
    expected = [float(twin.train_on_batch(*BINARY[0])) for _ in range(3)]
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)


def test_a_loss_that_is_compiled_again_counts_from_then_on(backend):
    net = compile_model(backend, optimizer=keras.optimizers.SGD(0.5), loss="mse")
    trainer = Trainer(1, backend=backend)
    before = trainer.validate(net, BINARY)["loss"]
    net.compile(net.optimizer, net.loss, loss_weights=[10.0])
    assert trainer.validate(net, BINARY)["loss"] == pytest.approx(10 * before, rel=1e-5)


def test_sample_weights_of_a_compiled_loss_are_those_of_keras(backend):
    (x, y), weights = BINARY[0], np.linspace(0, 2, len(BINARY[0][1]), dtype="float32")
    options = {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}
    net, twin = (
        compile_model(backend, optimizer=keras.optimizers.SGD(0.5), jit_compile=False, **options)
        for _ in range(2)
    )
    history = Trainer(2, backend=backend).fit(net, [{"x": x, "y": y, "sample_weight": weights}])
    expected = [float(twin.train_on_batch(x, y, sample_weight=weights)) for _ in range(2)]
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_a_compiled_loss_that_is_no_mean_is_refused_on_two_gpus(backend, reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    net = compile_model(backend, optimizer="sgd", loss=[loss])
    with pytest.raises(UnsupportedValueError, match=f"its reduction is '{reduction}'"):
        Trainer(1, 2, backend=backend).fit(net, BINARY)


def test_the_weight_of_a_compiled_loss_counts_for_one_output_too(backend):
    options = {"optimizer": keras.optimizers.SGD(0.5), "loss": "mse", "jit_compile": False}
    net, twin = (compile_model(backend, **options, loss_weights=[10.0]) for _ in range(2))
    found = Trainer(1, backend=backend).validate(net, BINARY)
    assert found["loss"] == pytest.approx(float(twin.test_on_batch(*BINARY[0])), rel=1e-5)


def test_losses_of_missing_outputs_are_an_error_of_keras(backend):
    net = two_outputs(loss={"a": "mae", "other": "mae"})
    with pytest.raises((KeyError, ValueError), match="other"):
        Trainer(3, backend=backend).fit(net, TWO)


def test_metrics_that_a_call_of_fit_names_win_over_compile(backend):
    net = compile_model(backend, optimizer="adam", loss="mse", metrics=["mae"])
    with pytest.warns(UserWarning, match="leaves out metrics"):
        history = Trainer(1, backend=backend).fit(net, BINARY, metrics=[rate])
    assert history.keys() == {"loss", "rate", "lr"}


UNUSED = {
    "metrics": {"metrics": ["mae"]},
    "weighted metrics": {"weighted_metrics": ["mae"]},
    "steps_per_execution": {"steps_per_execution": 4},
}


@pytest.mark.parametrize(("name", "options"), UNUSED.items(), ids=UNUSED)
def test_what_of_compile_is_not_used_is_said_with_what_to_do(backend, name, options):
    net = compile_model(backend, optimizer="adam", loss="mse", **options)
    with pytest.warns(UserWarning, match=rf"leaves out {name.split()[-1]}, which(.|\n)*fix: "):
        history = Trainer(1, backend=backend).fit(net, BINARY)
    assert history.keys() == {"loss", "lr"}


def test_options_that_compile_sets_itself_give_no_warning(backend, recwarn):
    net = compile_model(backend, optimizer="adam", loss="mse")
    Trainer(1, backend=backend).fit(net, BINARY)
    assert not [each for each in recwarn if "leaves out" in str(each.message)]


def test_a_model_that_runs_eagerly_runs_each_step_in_python(backend):
    calls = []

    def note(y_true, y_pred):
        calls.append(y_pred.numpy())
        return tf.square(y_true - y_pred)

    net = compile_model(backend, optimizer="adam", loss=note, run_eagerly=True)
    trainer = Trainer(3, backend=backend)
    trainer.fit(net, BINARY, BINARY)
    assert len(calls) == 6
    assert trainer.predict(net, BINARY)[0].shape == (16, 1)


# -- Prefetching -----------------------------------------------------------------------------------


DEVICES = ["cpu", "gpu:0", "gpu:1"]


@pytest.fixture
def dataset():
    """Five examples in three batches; TensorFlow keeps the labels' dtype in the host's memory."""
    x, y = np.arange(10, dtype="float32").reshape(5, 2), np.arange(5, dtype="int32")
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(2)


def fail_midway():
    """Yield two batches, then raise an error."""

    def source():
        yield np.float32(0)
        yield np.float32(1)
        raise ValueError("the third is broken")

    return tf.data.Dataset.from_generator(source, output_signature=tf.TensorSpec((), tf.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_all_of_a_batch_is_on_the_device(backend, dataset, device):
    for batch in backend.prefetch(dataset, device):
        found = {str(backend.device_of(x)) for x in batch.values()}
        assert found == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_a_dataset_comes_in_the_place_of_its_batch(backend, device):
    batches = backend.prefetch(fail_midway(), device)
    assert [float(next(batches)), float(next(batches))] == [0.0, 1.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="the third is broken"):
        next(batches)


def test_a_dataset_without_end_can_be_left(backend, dataset):
    batches = backend.prefetch(dataset.repeat(), "gpu:0")
    next(batches)
    batches.close()
    assert list(batches) == []


def test_an_error_of_what_the_backend_refuses_names_it(backend):
    windows = tf.data.Dataset.range(4).window(2)
    with pytest.raises(UnsupportedValueError, match="_VariantDataset"):
        next(backend.prefetch(windows, "gpu:0"))


@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
def test_words_are_prefetched_on_the_cpu(backend, device):
    words = tf.data.Dataset.from_tensor_slices(["a", "b"])
    prefetched = list(backend.prefetch(words, device))
    assert [word.numpy() for word in prefetched] == [b"a", b"b"]
    assert {backend.device_of(word) for word in prefetched} == {backend.cpu()}


# -- Resuming ----------------------------------------------------------------------------------


class Unbuilt(keras.Model):
    """A model that is built with the first batch."""

    def __init__(self, units=4):
        keras.utils.set_random_seed(0)
        super().__init__()
        self.hidden = layers.Dense(units)
        self.norm = layers.BatchNormalization()
        self.dropout = layers.Dropout(0.3)
        self.outer = layers.Dense(2)

    def call(self, x, training=False):
        """Call all of them in turn."""
        x = self.norm(self.hidden(x), training=training)
        return self.outer(self.dropout(x, training=training))


def sequential():
    """Return the same, without an Input."""
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.3)]
    return keras.Sequential([*hidden, layers.Dense(2)])


RUNS = {"subclass": Unbuilt, "Sequential": sequential}


def run_of(backend, name, epochs, **options):
    """Return the history and the weights, of a run that draws its batches' order."""
    random = np.random.default_rng(0)
    data = ArrayLoader(
        random.random((10, 3), "float32"), random.integers(0, 2, 10), batch_size=4, shuffle=True
    )
    trainer, net = Trainer(epochs, num_gpus=1, backend=backend), RUNS[name]()
    history = trainer.fit(net, data, loss="cross_entropy", optimizer="adam", **options)
    return history, [np.asarray(x, "float64").tolist() for x in net.get_weights()]


def test_a_state_from_before_the_first_batch_is_not_put_into_what_was_built_since(backend, path):
    run_of(backend, "subclass", 0, checkpoint=path)
    net = Unbuilt()
    net(np.ones((1, 3), "float32"))
    with pytest.raises(CheckpointError, match="create the model again"):
        Trainer(1, num_gpus=1, backend=backend).fit(
            net,
            [(np.ones((1, 3), "float32"), np.array([0]))],
            loss="cross_entropy",
            optimizer="adam",
            checkpoint=path,
            resume=True,
        )


def test_a_model_that_the_user_builds_meanwhile_takes_the_state(backend, path):
    run_of(backend, "Sequential", 2, checkpoint=path)
    learner = backend.learner(net := sequential(), loss="cross_entropy", optimizer="adam")
    assert not learner.is_built
    net.build((None, 3))
    learner.sync()
    assert learner.is_built


def test_the_state_of_another_model_is_refused(backend, path):
    run_of(backend, "subclass", 1, checkpoint=path)
    net = Unbuilt(units=5)
    with pytest.raises(CheckpointError, match=r"\(3, 5\)"):
        Trainer(2, num_gpus=1, backend=backend).fit(
            net,
            ArrayLoader(np.ones((4, 3), "float32"), np.zeros(4, "int64"), batch_size=4),
            loss="cross_entropy",
            optimizer="adam",
            checkpoint=path,
            resume=True,
        )


def test_the_global_generator_goes_on(backend):
    training = framework_of(backend).training
    generator = tf.random.get_global_generator()
    state = backend.to(training.random_state(cpu()), "cpu")
    drawn = generator.normal((3,)).numpy().tolist()
    training.check_random_state(state, cpu())()
    assert generator.normal((3,)).numpy().tolist() == drawn


@pytest.mark.parametrize("state", [None, {}, {"algorithm": 1, "state": "text"}], ids=repr)
def test_an_invalid_state_of_a_generator_is_refused(backend, state):
    with pytest.raises(CheckpointError):
        framework_of(backend).training.check_random_state(state, cpu())


def test_the_loss_of_a_model_that_configures_its_optimizer_is_used(backend):
    class Absolute(keras.Sequential):
        def loss(self, y_hat, y):
            return tf.reduce_mean(tf.abs(y_hat - y))

        def configure_optimizers(self):
            return keras.optimizers.SGD(0.0)

    model = Absolute([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    history = Trainer(1, backend=backend).fit(model, [(tf.ones((2, 1)), tf.fill((2, 1), 3.0))])
    assert history["loss"] == [3.0]
