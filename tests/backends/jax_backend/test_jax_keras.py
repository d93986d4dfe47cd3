"""Keras models where Keras computes with JAX: placed, in files, trained as by Keras itself."""

import gc
import os
import weakref
from contextlib import suppress

# Keras reads it when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from keras_copies import check_copies_of_a_changed_model

from d2ldev import CheckpointError, Trainer, UnsupportedValueError, gpu

with suppress(ImportError):
    import tensorflow  # noqa: F401  # Keras imports it later, where it is installed

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 4)).astype("float32")
Y = (X @ RANDOM.normal(size=(4, 2))).astype("float32")
DATA = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 32, 8)]


def make_line():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def make_all():
    """A model with statistics, random numbers and a loss of a layer."""
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="relu", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=3),
        keras.layers.Dense(2),
    ]
    return keras.Sequential(layers)


class Own(keras.Model):
    """A model of the user's own, with an optional input."""

    def __init__(self):
        super().__init__()
        self.inner = [keras.layers.Dense(8), keras.layers.Dense(2)]

    def call(self, x, scale=None, training=False):
        for layer in self.inner:
            x = layer(x)
        return x if scale is None else x * scale


def make_own():
    model = Own()
    model(X)
    return model


MODELS = {"line": make_line, "all": make_all, "own": make_own}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def build(make):
    keras.utils.set_random_seed(0)
    return make()


def fit(backend, model, data=DATA, *, epochs=3, num_gpus=1, **options):
    Trainer(epochs, num_gpus=num_gpus, backend=backend).fit(model, data, **options)
    return model


def values(model):
    return [np.asarray(variable.value) for variable in model.variables]


def assert_same(model, other, **tolerance):
    for x, expected in zip(values(model), values(other), strict=True):
        np.testing.assert_allclose(x, expected, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


# -- placing and files -----------------------------------------------------------------------------


@models
def test_all_variables_of_a_model_move_and_it_computes_there(backend, make):
    model = build(make)
    expected = np.asarray(model(X))
    assert backend.place(model, "gpu:1") is model
    assert set(backend.placement(model).values()) == {gpu(1)}
    assert len(backend.placement(model)) == len(model.variables)
    y = model(backend.to(X, "gpu:1"))
    assert backend.device_of(y) == gpu(1)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_the_names_count_the_layers_of_the_model_alone(backend):
    build(make_all)
    model = build(make_all)
    assert list(backend.named_tensors(model)) == [
        *("dense.kernel", "dense.bias", "batch_normalization.gamma", "batch_normalization.beta"),
        *("batch_normalization.moving_mean", "batch_normalization.moving_variance"),
        *("seed_generator.seed_generator_state", "dense_1.kernel", "dense_1.bias"),
    ]
    assert list(backend.named_tensors(model.layers[0])) == ["kernel", "bias"]


@models
def test_a_file_is_read_into_another_model(backend, make, tmp_path):
    model, other = build(make), build(make)
    for variable in other.variables:
        variable.assign(jnp.zeros_like(variable.value))
    backend.save(model, tmp_path / "net.safetensors")
    assert backend.load_into(other, tmp_path / "net.safetensors") is other
    assert_same(model, other)


def test_an_optimizer_moves_and_goes_through_a_file(backend, tmp_path):
    model, optimizer = build(make_line), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    backend.place((model, optimizer), "gpu:0")
    assert set(backend.placement(optimizer).values()) == {gpu(0)}
    backend.save(optimizer, tmp_path / "adam.safetensors")
    saved = [np.asarray(variable.value) for variable in optimizer.variables]
    optimizer.variables[2].assign(jnp.ones_like(optimizer.variables[2].value))
    backend.load_into(optimizer, tmp_path / "adam.safetensors")
    for variable, value in zip(optimizer.variables, saved, strict=True):
        assert np.array_equal(variable.value, value)


def test_a_model_is_replicated_with_its_values(backend):
    model = build(make_all)
    copies = backend.replicate(model, ["gpu:0", "gpu:1"])
    for copy, device in zip(copies, (gpu(0), gpu(1)), strict=True):
        assert set(backend.placement(copy).values()) == {device}
        assert_same(copy, model)
    assert copies[0] is not model


def test_the_copy_of_a_changed_layer_lacks_a_variable(backend):
    check_copies_of_a_changed_model(backend)


class Unregistered(keras.layers.Layer):
    """A layer that Keras cannot find by the name of its class."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 2), name="w")

    def call(self, x):
        return x @ self.w


def test_a_copy_has_layers_of_unregistered_classes_and_what_is_frozen(backend):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2)(Unregistered()(inputs)))
    model.layers[-1].kernel.trainable = False
    for copy in backend.replicate(model, ["gpu:0", "gpu:1"]):
        assert [x.trainable for x in copy.variables] == [True, False, True]
        for value, wanted in zip(copy.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_metrics_and_seeds_are_placed(backend):
    for obj in (keras.metrics.Mean(), keras.random.SeedGenerator(0), keras.Variable(1.0)):
        backend.place(obj, "gpu:1")
        assert set(backend.placement(obj).values()) == {gpu(1)}


def test_a_model_that_is_not_built_is_refused(backend, tmp_path):
    model = keras.Sequential([keras.layers.Dense(2)])
    for call in (
        lambda: backend.place(model, "gpu:0"),
        lambda: backend.save(model, tmp_path / "net.safetensors"),
        lambda: fit(backend, model),
    ):
        with pytest.raises(UnsupportedValueError, match="before it is built") as caught:
            call()
        assert "keras.Input" in caught.value.fix


def test_show_counts_what_is_trained(backend):
    model = build(make_line)
    model.layers[0].trainable = False
    summary = str(backend.summarize(model))
    assert "Sequential" in summary


# -- training --------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.5),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    ),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
}


@models
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_model_learns_what_it_learns_from_keras_own_fit(backend, make, optimizer):
    expected = build(make)
    expected.compile(optimizer=optimizer(), loss="mse")
    expected.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    ours = optimizer()
    model = fit(backend, build(make), epochs=2, optimizer=ours)
    ours.finalize_variable_values(model.trainable_variables)  # the averages, where there are any
    assert_same(model, expected)
    for variable, other in zip(ours.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(variable.value, other.value, rtol=1e-4, atol=1e-6)


@models
@pytest.mark.parametrize("optimizer", ["adam", keras.optimizers.Adam], ids=["name", "object"])
def test_two_gpus_learn_what_one_does(backend, make, optimizer):
    made = [
        fit(
            *(backend, build(make)),
            num_gpus=number,
            optimizer=optimizer if isinstance(optimizer, str) else optimizer(0.01),
        )
        for number in (1, 2)
    ]
    assert_same(*made, rtol=1e-4, atol=1e-5)


def test_names_and_optimizers_of_optax_train_a_model(backend):
    for optimizer in ("adam", optax.lbfgs()):
        history = Trainer(4, num_gpus=1, backend=backend).fit(
            build(make_line), DATA, optimizer=optimizer
        )
        assert history["loss"][-1] < history["loss"][0]


def test_a_functional_model_takes_its_inputs_by_name(backend):
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    for inputs in ([a, b], {"a": a, "b": b}):
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()([a, b])))
        expected = np.asarray(model([X, Y] if isinstance(inputs, list) else {"a": X, "b": Y}))
        trainer = Trainer(1, num_gpus=1, backend=backend)
        (found,) = trainer.predict(model, [{"b": Y, "a": X}])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        fit(backend, model, [{"b": Y, "y": Y, "a": X}])
    with pytest.raises(UnsupportedValueError, match="its inputs have names"):
        fit(backend, model, [(X, Y, Y)])


def test_an_own_model_takes_its_inputs_by_name(backend):
    model = build(make_own)
    trainer = Trainer(1, num_gpus=1, backend=backend)
    (found,) = trainer.predict(model, [{"scale": X[:, :1], "x": X}])
    np.testing.assert_allclose(found, np.asarray(model(X)) * X[:, :1], rtol=1e-4, atol=1e-6)


def test_a_run_of_a_model_resumes(backend, tmp_path):
    for optimizer in (lambda: "adam", lambda: keras.optimizers.Adam(0.01)):
        path = tmp_path / f"{type(optimizer()).__name__}.safetensors"
        fit(backend, build(make_all), epochs=1, optimizer=optimizer(), checkpoint=path)
        again = build(make_all)
        fit(backend, again, epochs=3, optimizer=optimizer(), checkpoint=path, resume=True)
        assert_same(again, fit(backend, build(make_all), optimizer=optimizer()))


def test_a_frozen_layer_stays_and_the_users_changes_count(backend):
    model = build(make_all)
    model.layers[0].trainable = False
    kernel = np.asarray(model.layers[0].kernel.value)
    backend.place(model, "gpu:0")
    learner = backend.learner(model, optimizer="adamw")
    batch = backend.to(((X,), Y), "gpu:0")
    learner.step(*batch)
    learner.sync()
    assert np.array_equal(model.layers[0].kernel.value, kernel)
    model.layers[0].kernel.assign(backend.to(kernel * 0, "gpu:0"))
    learner.step(*batch)
    learner.sync()
    assert not np.any(model.layers[0].kernel.value)


class Scaled(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.scale, self.function = 1.0, keras.activations.linear

    def call(self, x):
        return self.function(x) * self.scale


CHANGES = {
    "a number": lambda layer: setattr(layer, "scale", 3.0),
    "a function": lambda layer: setattr(layer, "function", keras.activations.tanh),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_layer_between_two_fits_counts(backend, change):
    layer = Scaled()
    model = build(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), layer]))
    trainer = Trainer(1, backend=backend)
    before = trainer.validate(model, DATA, loss="mse")
    assert trainer.validate(model, DATA, loss="mse") == before
    change(layer)
    expected = float(np.mean((np.asarray(model(X)) - Y) ** 2))
    assert trainer.validate(model, DATA, loss="mse")["loss"] == pytest.approx(expected, rel=1e-5)
    assert before["loss"] != pytest.approx(expected, rel=1e-2)


def test_a_second_fit_traces_nothing(backend, caplog):
    model = build(make_own)
    with jax.log_compiles():
        for number in (1, 0):
            caplog.clear()
            Trainer(1, backend=backend).fit(model, DATA, loss="mse", optimizer="adam", lr=0.01)
            texts = [each.getMessage() for each in caplog.records]
            assert (
                sum(x.startswith("Finished tracing + transforming step") for x in texts) == number
            )


def test_a_layer_that_is_frozen_later_is_refused(backend):
    model = build(make_line)

    def freeze(*_):
        model.layers[0].trainable = False

    trainer = Trainer(3, num_gpus=1, backend=backend, callbacks=freeze)
    with pytest.raises(UnsupportedValueError, match=r"layer\.trainable was changed: dense"):
        trainer.fit(model, DATA)


class WithoutModes(keras.Model):
    """A model whose ``call`` takes no ``training``."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(2)

    def call(self, x):
        return self.inner(x)


def test_a_model_that_is_not_told_the_mode_learns(backend):
    model = WithoutModes()
    model(X)
    before = values(model)
    fit(backend, model)
    assert not np.array_equal(model.inner.kernel.value, before[0])


def make_frozen():
    model = build(make_line)
    model.trainable = False
    return model


def make_compiled():
    model = build(make_line)
    model.compile(optimizer="adam", loss="mse")
    return model


def make_held():
    line = keras.layers.Dense(2, kernel_constraint="non_neg")
    return keras.Sequential([keras.Input((4,)), line])


class Around(nnx.Module):
    """A module of Flax with a layer of Keras in it."""

    def __init__(self):
        self.inner, self.scale = build(make_line), nnx.Param(jnp.ones(2))

    def __call__(self, x):
        return self.inner(x) * self.scale


REFUSED = {
    "precision": (lambda: build(make_line), {}, {"precision": "bf16"}, "mixed_bfloat16"),
    "statistics": (lambda: build(make_all), {}, {"batch_norm": "local", "num_gpus": 2}, "global"),
    "compiled": (make_compiled, {}, {}, "optimizer=model.optimizer"),
    "frozen": (make_frozen, {}, {}, "model.trainable = True"),
    "scaled loss": (
        lambda: build(make_line),
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())},
        {},
        "inner_optimizer",
    ),
    "a constraint": (make_held, {"optimizer": lambda: "sgd"}, {}, "keras.optimizers.SGD"),
    "a constraint in optax": (
        make_held,
        {"optimizer": lambda: optax.sgd(0.1)},
        {},
        "keras.optimizers.SGD",
    ),
    "a model around it": (Around, {}, {}, "train the Keras model itself"),
    "another model": (
        lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)),
        {"optimizer": keras.optimizers.SGD},
        {},
        "optax.sgd",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_no_effect_is_refused(backend, name):
    make, options, settings, fix = REFUSED[name]
    trainer = Trainer(1, **{"num_gpus": 1, **settings}, backend=backend)
    with pytest.raises(UnsupportedValueError) as caught:
        trainer.fit(make(), DATA, **{key: value() for key, value in options.items()})
    assert fix in caught.value.fix


def test_an_optimizer_of_keras_applies_constraints(backend):
    model = fit(backend, make_held(), optimizer=keras.optimizers.SGD(0.1))
    assert np.asarray(model.layers[0].kernel.value).min() == 0


def test_a_trained_model_is_freed(backend):
    model = fit(backend, build(make_line))
    reference = weakref.ref(model)
    del model
    keras.utils.clear_session()
    gc.collect()
    assert reference() is None


def test_a_loss_of_keras_is_called_as_keras_does(backend):
    model = fit(backend, build(make_line), loss=keras.losses.Huber(), optimizer="sgd")
    loss = keras.losses.Huber()(Y, model(jax.device_put(X, backend.native("gpu:0"))))
    assert float(loss) < float(keras.losses.Huber()(Y, build(make_line)(X)))


def test_an_optimizer_with_its_variables_in_another_order_is_refused(backend, tmp_path):
    def build(order):
        layers = {name: keras.layers.Dense(3, use_bias=False) for name in "ac"}
        for layer in layers.values():
            layer.build((None, 3))
        optimizer = keras.optimizers.Adam()
        variables = [layers[name].kernel for name in order]
        optimizer.build(variables)
        optimizer.apply([jnp.full((3, 3), float(ord(name))) for name in order], variables)
        return {"layers": layers, "optimizer": optimizer}

    saved = build("ac")
    backend.save(saved, tmp_path / "both")
    found = backend.load_into(build("ac"), tmp_path / "both")["optimizer"].variables
    for x, other in zip(found, saved["optimizer"].variables, strict=True):
        assert np.array_equal(x.value, other.value)
    with pytest.raises(CheckpointError, match="optimizer: it has the parameters in another order"):
        backend.load_into(build("ca"), tmp_path / "both")
