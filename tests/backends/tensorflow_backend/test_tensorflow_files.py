"""TensorFlow's tensors, models and optimizers in files."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from saved_files import bits

from d2ldev import CheckpointError
from d2ldev.framework.testing import framework_of

layers = keras.layers


def build_pair(seed):
    """Return a model with statistics, and an optimizer that has made no step yet."""
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


def test_an_optimizer_without_variables_is_refused_with_the_way_to_make_them(backend, path):
    backend.save(build_pair(1)["optimizer"], path)
    with pytest.raises(CheckpointError, match=r"optimizer\.build"):
        backend.load_into(keras.optimizers.Adam(0.1), path)


def test_the_state_of_another_optimizer_is_refused(backend, path):
    whole = build_pair(1)
    backend.save(whole["optimizer"], path)
    other = keras.optimizers.SGD(0.25)
    other.build(whole["net"].trainable_variables)
    with pytest.raises(CheckpointError, match="SGD"):
        backend.load_into(other, path)
    assert float(other.learning_rate) == 0.25


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    # Keras does not list the product of a Nadam that another optimizer has built.
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Nadam(0.1), dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_is(backend, path, make):
    whole, resumed = ({"net": build_pair(seed)["net"], "optimizer": make()} for seed in (1, 2))
    train(**whole)
    backend.save(whole, path)
    resumed["optimizer"].build(resumed["net"].trainable_variables)
    backend.place(resumed, "gpu:1")
    backend.load_into(resumed, path)
    for each in (whole, resumed):
        train(**each)
    values = [backend.named_tensors(each).values() for each in (whole, resumed)]
    assert [bits(backend, x) for x in values[0]] == [bits(backend, x) for x in values[1]]
    assert {str(place) for place in backend.placement(resumed).values()} == {"gpu:1"}


class Scaled(keras.Layer):
    """A layer with weights that have no names, so that Keras numbers them in the process."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1],))
        self.bias = self.add_weight(shape=(shape[-1],))
        self.count = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        return x * self.kernel + self.bias


def test_weights_without_names_are_the_same_in_the_next_model(backend, path):
    first, second = (sequential((3,), Scaled(), layers.Dense(2)) for _ in range(2))
    assert first.layers[0].kernel.name != second.layers[0].kernel.name
    for number, weight in enumerate(first.weights):
        weight.assign(tf.fill(weight.shape, float(number)))
    backend.save(first, path)
    backend.load_into(second, path)
    for number, weight in enumerate(second.weights):
        np.testing.assert_array_equal(weight, np.full(weight.shape, number))


def compile_model(optimizer="adam", *, is_fitted=False):
    """Return a compiled model; a fitted one has a state of its optimizer, of five steps."""
    net = sequential((3,), layers.Dense(4), layers.Dense(1))
    net.compile(optimizer, "mse")
    if is_fitted:
        net.optimizer.build(net.trainable_variables)
        net.optimizer.iterations.assign(5)
        for x in net.trainable_variables + net.optimizer.variables[2:]:
            x.assign(tf.ones_like(x))
    return net


def test_a_compiled_model_takes_over_the_state_of_its_optimizer(backend, path):
    backend.save(compile_model(is_fitted=True), path)
    net = compile_model()
    net.fit(np.zeros((4, 3)), np.ones((4, 1)), verbose=0)
    backend.load_into(net, path)
    assert int(net.optimizer.iterations) == 5
    for x in net.trainable_variables + net.optimizer.variables[2:]:
        np.testing.assert_array_equal(x, tf.ones_like(x))


def test_an_optimizer_that_has_made_no_step_is_built_for_the_state_of_one_that_has(backend, path):
    backend.save(compile_model(is_fitted=True), path)
    net = backend.load_into(compile_model(), path)
    assert int(net.optimizer.iterations) == 5
    for x in net.optimizer.variables[2:]:
        np.testing.assert_array_equal(x, tf.ones_like(x))


def test_a_model_that_is_not_compiled_passes_over_the_state_of_an_optimizer(backend, path):
    backend.save(compile_model(is_fitted=True), path)
    net = backend.load_into(sequential((3,), layers.Dense(4), layers.Dense(1)), path)
    for x in net.trainable_variables:
        np.testing.assert_array_equal(x, tf.ones_like(x))


WITHOUT_STATE = {
    "not compiled": lambda: sequential((3,), layers.Dense(4), layers.Dense(1)),
    "compiled": compile_model,
}


@pytest.mark.parametrize("make", WITHOUT_STATE.values(), ids=WITHOUT_STATE)
def test_an_optimizer_stays_as_it_is_if_the_file_has_no_state_of_one(backend, path, make):
    net = make()
    backend.save(net, path)
    fitted = backend.load_into(compile_model(is_fitted=True), path)
    for x, saved in zip(fitted.trainable_variables, net.trainable_variables, strict=True):
        np.testing.assert_array_equal(x, saved)
    assert int(fitted.optimizer.iterations) == 5


def test_a_model_that_was_compiled_with_another_optimizer_is_refused(backend, path):
    backend.save(compile_model(is_fitted=True), path)
    net = compile_model("sgd")
    before = [x.numpy() for x in net.variables]
    with pytest.raises(CheckpointError, match=r"unexpected optimizer\.0\.momentum"):
        backend.load_into(net, path)
    for x, value in zip(net.variables, before, strict=True):
        np.testing.assert_array_equal(x, value)


def momentum():
    return keras.optimizers.SGD(0.25, momentum=0.9)


@pytest.mark.parametrize("is_fitted", [False, True], ids=["not built", "built"])
@pytest.mark.parametrize("saved", ["adam", "sgd"])
def test_in_part_no_state_of_another_optimizer_is_read(backend, path, saved, is_fitted):
    other = compile_model(saved, is_fitted=True)
    backend.save(other, path)
    net = compile_model(momentum(), is_fitted=is_fitted)
    before = [x.numpy() for x in net.optimizer.variables]
    loaded = backend.load_into(net, path, strict=False)
    for x, value in zip(net.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(x, value)
    assert not [name for name in loaded.matched if name.startswith("optimizer.")]
    names = [
        [name for name in backend.named_tensors(each) if name.startswith("optimizer.")]
        for each in (net, other)
    ]
    assert [loaded.missing, loaded.unexpected] == names
    for x in net.trainable_variables:
        np.testing.assert_array_equal(x, tf.ones_like(x))


def test_the_momentum_of_another_optimizer_is_refused(backend, path):
    backend.save(compile_model(momentum(), is_fitted=True), path)
    with pytest.raises(CheckpointError, match=r"it lacks optimizer\.0\.velocity"):
        backend.load_into(compile_model(is_fitted=True), path)


def test_in_part_the_state_of_the_same_optimizer_is_read(backend, path):
    backend.save(compile_model(is_fitted=True), path)
    net = compile_model()
    loaded = backend.load_into(net, path, strict=False)
    assert (loaded.missing, loaded.unexpected) == ([], [])
    assert int(net.optimizer.iterations) == 5


# -- Refused, and as it was ------------------------------------------------------------------------


def attributes(*held):
    """Return the names of the attributes of layers, with those in them, and optimizers."""
    layers_or_self = [getattr(each, "_flatten_layers", lambda each=each: [each]) for each in held]
    return [sorted(vars(each)) for found in layers_or_self for each in found()]


COMPILED = {
    "Adam": "adam",
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.1)),
}


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_an_optimizer_is_not_built_for_what_is_refused(backend, path, make):
    made_optimizer = (lambda: make) if isinstance(make, str) else make
    saved, net = (compile_model(made_optimizer()) for _ in range(2))
    saved.optimizer.build(saved.trainable_variables)
    backend.save({"net": saved, "other": tf.zeros(2)}, path)
    net.layers[0].trainable = False
    before = attributes(net, net.optimizer)
    with pytest.raises(CheckpointError, match="other"):
        backend.load_into({"net": net, "other": tf.zeros(3)}, path)
    assert not net.optimizer.built
    assert attributes(net, net.optimizer) == before
    # It is built for what is trainable then.
    net.layers[0].trainable = True
    kernel = net.layers[0].kernel.numpy()
    net.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    assert not np.array_equal(net.layers[0].kernel, kernel)
    assert len(net.optimizer.variables) == len(saved.optimizer.variables)
    # TensorFlow keeps all of it.
    tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(path.with_name("own")))


class TwoLayers(keras.Model):
    """A model that makes its variables with the first batch."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, activation="tanh")
        self.rest = [layers.LayerNormalization(), layers.Dense(2)]

    def call(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


class WithArguments(keras.Model):
    """A model that Keras cannot make again: without ``get_config`` its arguments are lost."""

    def __init__(self, first, size):
        super().__init__()
        self.parts = {"first": first, "last": layers.Dense(size)}

    def call(self, x):
        return self.parts["last"](self.parts["first"](x))


UNBUILT = {
    "dense": (lambda: keras.Sequential([layers.Dense(4), layers.BatchNormalization()]), (5, 3)),
    "convolution": (
        lambda: keras.Sequential([layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)]),
        (2, 8, 8, 1),
    ),
    "a class": (TwoLayers, (5, 3)),
    "a class with arguments": (lambda: WithArguments(layers.Dense(4), 2), (5, 3)),
    "a layer": (lambda: layers.Dense(4), (5, 3)),
}


class WithOwnWeight(TwoLayers):
    """A model that has a variable before the first batch, and makes the others with it."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(2,), initializer="ones")

    def call(self, x):
        return super().call(x) * self.scale


def test_the_variable_of_a_model_that_is_not_built_is_read_in_part(backend, path):
    other = WithOwnWeight()
    (name,) = backend.named_tensors(other)
    backend.save({name: tf.zeros(2), "more": tf.zeros(2)}, path)
    loaded = backend.load_into(other, path, strict=False)
    assert (loaded.matched, loaded.unexpected, other.built) == ([name], ["more"], False)


def recurrent():
    parts = [layers.Bidirectional(layers.LSTM(3)), layers.Dropout(0.5, seed=1), layers.Dense(1)]
    return keras.Sequential(parts)


@pytest.mark.parametrize(
    ("make", "shape"),
    [*UNBUILT.values(), (WithOwnWeight, (5, 3)), (recurrent, (2, 5, 3))],
    ids=[*UNBUILT, "a class with a variable", "recurrent"],
)
def test_a_model_that_is_not_built_is_refused_until_it_is_called(backend, path, make, shape):
    net, x = make(), backend.rand(shape, seed=1)
    net(x)
    backend.save(net, path)
    other = backend.place(make(), "gpu:1")
    if isinstance(other, keras.Model):
        other.compile("adam", "mse")
    before = attributes(other)
    fix = r"it is not built: call it on a batch first, as model\(x\)"
    with pytest.raises(CheckpointError, match=fix):
        backend.load_into(other, path)
    assert (other.built, attributes(other)) == (False, before)
    there = backend.to(x, "gpu:1")
    other(there)
    backend.load_into(other, path)
    assert bits(backend, other(there)) == bits(backend, net(x))


BROKEN = {
    "no state": lambda state: "text",
    "no class": lambda state: {"variables": state["variables"]},
    "another class": lambda state: state | {"class": "SGD"},
    "the class of what is wrapped": lambda state: state | {"class": "LossScaleOptimizer(SGD)"},
    "no variables": lambda state: state | {"variables": None},
    "a variable less": lambda state: state | {"variables": state["variables"][:-1]},
    "another shape": lambda state: (
        state | {"variables": [*state["variables"][:-1], tf.zeros((1, 7))]}
    ),
    "another dtype": lambda state: (
        state | {"variables": [*state["variables"][:-1], tf.zeros((1,), "float64")]}
    ),
    "no tensor": lambda state: state | {"variables": [*state["variables"][:-1], "text"]},
}


@pytest.mark.parametrize("break_it", BROKEN.values(), ids=BROKEN)
def test_a_broken_state_of_an_optimizer_is_refused_and_nothing_changes(backend, break_it):
    optimizer = build_pair(1)["optimizer"]
    before = [np.array(v.numpy()) for v in optimizer.variables]
    files = framework_of(backend).files
    with pytest.raises((ValueError, TypeError, AttributeError)):
        files.prepare_state(optimizer, break_it(dict(files.state(optimizer))))
    for variable, value in zip(optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


class Pair(keras.Model):
    """Two layers, made in the order of their names in a text."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            setattr(self, name, keras.layers.Dense(3, use_bias=False))

    def call(self, x):
        return self.c(self.a(x))


def test_a_compiled_model_whose_optimizer_has_the_layers_in_another_order_is_refused(backend, path):
    models = [Pair(order) for order in ("ac", "ca", "ac")]
    for net in models:
        net.compile(optimizer="adam", loss="mse")
        net.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)
    backend.save(models[0], path)
    backend.load_into(models[2], path)
    with pytest.raises(CheckpointError, match="optimizer: it has the parameters in another order"):
        backend.load_into(models[1], path)


def test_an_optimizer_in_another_one_is_told_from_it(backend, path):
    net = build_pair(1)["net"]
    optimizers = [
        keras.optimizers.LossScaleOptimizer(inner)
        for inner in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adagrad(0.1))
    ]
    for each in optimizers:
        each.build(net.trainable_variables)
    backend.save(optimizers[0], path)
    with pytest.raises(CheckpointError, match=r"LossScaleOptimizer\(Adagrad\)"):
        backend.load_into(optimizers[1], path)


def test_variables_keep_their_identity_and_traced_functions_use_the_new_values(backend, path):
    weight = tf.Variable([1.0, 2.0])
    traced = tf.function(lambda: weight * 1, autograph=False)
    traced()
    backend.save({"w": tf.constant([3.0, 4.0])}, path)
    assert backend.load_into({"w": weight}, path)["w"] is weight
    assert traced().numpy().tolist() == [3, 4]


def sequential(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts])


def layouts_of(backend, net):
    """Return how the kernel of each layer is brought into the canonical form."""
    found = framework_of(backend).files.layers(net)
    return [layer.layout("weight", tuple(layer.weight.shape)) for layer in found]


def test_a_dense_layer_behind_a_flattened_convolution_has_its_columns_as_the_channels_are(
    backend,
):
    net = sequential((4, 4, 1), layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(2))
    weight = layouts_of(backend, net)[1]
    assert (weight.split, weight.shape) == ((4, 3, 2), (2, 12))


@pytest.mark.parametrize("first", ["convolution", "flatten"])
def test_channels_that_come_first_are_not_guessed(backend, first):
    formats = {"convolution": "channels_last", "flatten": "channels_last", first: "channels_first"}
    net = sequential(
        (4, 4, 4),
        layers.Conv2D(3, 3, data_format=formats["convolution"]),
        layers.Flatten(data_format=formats["flatten"]),
        layers.Dense(2),
    )
    assert framework_of(backend).files.layers(net) is None


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)], ids=str)
def test_an_input_that_is_flattened_has_its_order_from_whoever_calls_the_model(backend, shape):
    (weight,) = layouts_of(backend, sequential(shape, layers.Flatten(), layers.Dense(2)))
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
def test_no_layouts_are_claimed_for_other_models(backend, make):
    assert not framework_of(backend).files.layers(make())
