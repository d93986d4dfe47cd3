"""``TensorFlowLearner``: steps of training of Keras' models and ``tf.Module``s."""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_models import INPUTS, Plain, batches, build, convolutional, recurrent
from training_batches import linear_model_and_batch

from d2ldev import Trainer, UnsupportedValueError, gpu
from d2ldev.framework import Weighted
from d2ldev.framework.testing import framework_of

models = pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)


def values(variable):
    return np.array(variable.numpy())  # a copy: what ``numpy`` returns may change with it


@pytest.fixture
def line(backend):
    """A linear model on the second virtual GPU, and a batch for it."""
    return linear_model_and_batch(backend)


def test_weights_that_add_up_to_0_are_divided_by_1_as_in_the_other_frameworks(backend, line):
    net, (inputs, y) = line
    learner = backend.learner(net, loss="mse", optimizer="sgd")

    def loss(*weights):
        place = backend.device_of(y)
        return learner.evaluate(inputs, Weighted(y, backend.asarray(weights, device=place)))[0]

    found = float(loss(1.0, -1.0, 0.0, 0.0))
    assert found == pytest.approx(float(loss(1.0, 0.0, 0.0, 0.0) - loss(0.0, 1.0, 0.0, 0.0)))
    assert found != 0


@models
def test_everything_stays_on_the_device(backend, model):
    data = batches(backend, model, "gpu:1")
    learner = backend.learner(
        build(backend, model, "gpu:1"), loss="cross_entropy", optimizer="adam"
    )
    with backend.strict():
        steps = [learner.step(*batch) for batch in data]
        evaluated = learner.evaluate(*data[0])
    assert {backend.device_of(x) for x in (*steps[-1], *evaluated)} == {gpu(1)}
    assert set(backend.placement(learner.sync()).values()) == {gpu(1)}
    assert (tuple(steps[0][0].shape), steps[0][0].dtype) == ((), tf.float32)


@models
def test_a_traced_step_has_no_copy_between_devices(backend, model):
    ((inputs, y),) = batches(backend, model, "gpu:1", 1)
    learner = backend.learner(
        build(backend, model, "gpu:1"), loss="cross_entropy", optimizer="adam"
    )
    learner.step(inputs, y)
    nodes = list(_nodes(learner._step.get_concrete_function(*inputs, y)))
    kinds = {node.op for node in nodes}
    assert kinds.isdisjoint({"_Send", "_Recv", "PyFunc", "EagerPyFunc", "NumpyFunction"})
    computing = {"MatMul", "ResourceApplyAdam", "AssignSubVariableOp", "ReadVariableOp"}
    places = {x.device for x in nodes if x.op in computing and x.device}
    assert set(map(backend.device, places)) == {gpu(1)}


def _nodes(function):
    definition = function.graph.as_graph_def()
    yield from definition.node
    for inner in definition.library.function:
        yield from inner.node_def


@models
def test_the_losses_fall_and_are_those_of_the_cpu(backend, model):
    losses = {}
    for device in ("cpu", "gpu:1"):
        learner = backend.learner(build(backend, model, device), loss="cross_entropy", lr=0.1)
        (batch,) = batches(backend, model, device, 1)
        losses[device] = [float(learner.step(*batch)[0]) for _ in range(10)]
    assert losses["gpu:1"] == losses["cpu"]
    assert losses["cpu"][-1] < losses["cpu"][0]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    # In Keras' own fit, Adam squares the gradients of a repeated token one by one.
    [(convolutional, "adam"), (recurrent, "momentum")],
    ids=["convolutional", "recurrent"],
)
def test_the_losses_are_those_of_keras_own_fit(backend, model, optimizer):
    data = batches(backend, model, "cpu", 4)
    learner = backend.learner(
        build(backend, model, "cpu"), loss="cross_entropy", optimizer=optimizer, lr=0.01
    )
    losses = [float(learner.step(*batch)[0]) for batch in data]
    evaluated = float(learner.evaluate(*data[0])[0])
    net = build(backend, model, "cpu")
    own = learner.sync()["optimizer"]
    net.compile(
        type(own).from_config(own.get_config()),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    expected = [net.train_on_batch(x, y) for (x,), y in data]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    ((x,), y) = data[0]
    np.testing.assert_allclose(evaluated, net.test_on_batch(x, y), rtol=1e-5)


def test_the_averages_are_those_that_keras_own_fit_writes_into_the_model(backend):
    found = []
    for is_keras in (False, True):
        net = backend.mlp([2, 1])
        x = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2)
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        if is_keras:
            net.compile(optimizer, "mse")
            net.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0)
        else:
            trainer = Trainer(3, num_gpus=0, backend=backend)
            trainer.fit(net, [(x, x[:, :1])], optimizer=optimizer)
            optimizer.finalize_variable_values(net.trainable_variables)
        found.append(net.get_weights()[0])
    np.testing.assert_allclose(*found, rtol=1e-5)


@models
def test_a_step_is_traced_once_for_each_shape(backend, model):
    traced = []

    def loss(prediction, y):
        traced.append(prediction.shape[0])
        return tf.reduce_mean(prediction**2)

    data = batches(backend, model, "cpu", 3)
    data.append(tf.nest.map_structure(lambda x: x[:3], data[0]))
    learner = backend.learner(build(backend, model, "cpu"), loss=loss, optimizer="adam")
    for _ in range(2):  # epochs
        for batch in data:
            learner.step(*batch)
        assert learner.sync()["model"]  # as at the end of an epoch
    assert traced == [4, 3]


def test_frozen_variables_of_a_module_are_not_trained(backend):
    net = build(backend, Plain, "gpu:1")
    before = values(net.weight)
    learner = backend.learner(net, loss="cross_entropy", lr=0.1)
    learner.step(*batches(backend, Plain, "gpu:1", 1)[0])
    assert not np.any(net.bias)
    assert not np.array_equal(net.weight, before)


SCHEDULE = keras.optimizers.schedules


OPTIMIZERS = {
    "schedule": lambda: keras.optimizers.SGD(SCHEDULE.CosineDecay(0.1, 8)),
    "AdamW": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "averaging": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaling the loss": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_users_optimizers_train_on_the_device(backend, line, make):
    net, batch = line
    learner = backend.learner(net, optimizer=make())
    with backend.strict():
        losses = [float(learner.step(*batch)[0]) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert set(backend.placement(learner.sync()).values()) == {gpu(1)}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_optimizer_is_built_before_the_model_is_placed_or_after(backend, before):
    net, optimizer = backend.mlp([2, 1]), keras.optimizers.Adam(0.1)
    if before:
        optimizer.build(net.trainable_variables)
    backend.place(net, "gpu:1")
    learner = backend.learner(net, optimizer=optimizer)
    x, y = backend.ones((4, 2), device="gpu:1"), backend.ones((4, 1), device="gpu:1")
    with backend.strict():
        losses = [float(learner.step((x,), y)[0]) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert learner.sync() == {"model": net, "optimizer": optimizer}
    assert set(backend.placement(optimizer).values()) == {gpu(1)}


def test_the_scale_of_a_loss_changes_neither_the_loss_nor_the_clipping(backend, line):
    _, batch = line
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024)
    losses = []
    for optimizer in (scaling, keras.optimizers.SGD(0.1)):
        clone = backend.mlp([2, 1], device="gpu:1")
        learner = backend.learner(clone, optimizer=optimizer, gradient_clip_val=0.1)
        losses.append([float(learner.step(*batch)[0]) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_the_gradient_of_a_word_that_is_used_twice_has_the_norm_of_the_sum(backend):
    net = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(3, 1, "zeros")]
    )
    before = values(net.variables[0])
    learner = backend.learner(
        net, loss=lambda prediction, y: -tf.reduce_sum(prediction), lr=1.0, gradient_clip_val=1.0
    )
    learner.step((backend.zeros((4, 2), dtype="int32"),), backend.ones(4))
    step = values(net.variables[0]) - before
    np.testing.assert_allclose(step, [[1], [0], [0]], rtol=1e-5)


def test_a_model_of_mixed_precision_has_a_loss_of_float32(backend):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="mixed_bfloat16")])
    learner = backend.learner(backend.place(net, "gpu:1"), optimizer="adam", gradient_clip_val=1.0)
    x = backend.ones((4, 2), device="gpu:1")
    loss, prediction = learner.step((x,), x[:, :1])
    assert (loss.dtype, prediction.dtype) == (tf.float32, tf.bfloat16)


class Summed(keras.layers.Layer):
    """A layer with a loss of its own, and one parameter."""

    def build(self, _):
        self.weight = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        self.add_loss(3 * self.weight)
        return x * self.weight


def test_losses_that_layers_add_are_minimised_and_reported(backend):
    net = keras.Sequential([keras.Input((2,)), Summed()])
    learner = backend.learner(net, lr=0.1)
    x = backend.ones((4, 2))
    assert float(learner.evaluate((x,), x)[0]) == 3
    assert float(learner.step((x,), x)[0]) == 3
    assert float(net.layers[0].weight.numpy()) == pytest.approx(0.7)


def test_inputs_with_names_are_given_by_name(backend):
    a, b = backend.ones((4, 2)), backend.zeros((4, 2))
    names = {"b": keras.Input((2,), name="b"), "a": keras.Input((2,), name="a")}
    net = keras.Model(names, Summed()(2 * names["a"] - names["b"]))
    learner = backend.learner(net)
    assert np.all(learner.step(({"b": b, "a": a},), a)[1].numpy() == 2)
    with pytest.raises(UnsupportedValueError, match="its inputs have names"):
        learner.step((b, a), a)


# -- What is refused -------------------------------------------------------------------------------


def test_an_object_that_is_not_a_model_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match="neither a Keras model"):
        backend.learner(lambda x: x)


def test_another_optimizer_is_refused(backend):
    with pytest.raises(UnsupportedValueError, match=r"not a keras\.optimizers\.Optimizer"):
        backend.learner(backend.mlp([2, 1]), optimizer=object())


@pytest.mark.parametrize("name", ["Optimizer", "LossScaleOptimizer"])
def test_a_name_of_kerass_that_makes_no_optimizer_is_not_proposed(backend, name):
    with pytest.raises(UnsupportedValueError) as error:
        backend.learner(backend.mlp([2, 1]), optimizer=name)
    assert error.value.fix.startswith("optimizer=keras.optimizers.SGD(0.01), ")


def test_a_model_of_which_all_is_frozen_is_refused(backend):
    net = backend.mlp([2, 1])
    net.trainable = False
    with pytest.raises(UnsupportedValueError, match="no trainable variables"):
        backend.learner(net)


# -- Labels ----------------------------------------------------------------------------------------


# Of logits of shape (4, 5, 3) and labels of shape (4, 5), as much as a function is traced with.
LENGTHS = [None, None, None], [None, None]


def _trace(function, shapes, dtype="int32"):
    signature = [tf.TensorSpec(shapes[0], tf.float32), tf.TensorSpec(shapes[1], dtype)]
    return tf.function(function, input_signature=signature, autograph=False)


@pytest.fixture
def of_sequences():
    """Logits, and labels of which three quarters are those of the largest logits."""
    logits = np.random.default_rng(0).standard_normal((4, 5, 3)).astype("float32")
    labels = logits.argmax(-1).astype("int32")
    labels[0] = (labels[0] + 1) % 3
    return logits, labels


def test_accuracy_is_traced_in_a_function(backend):
    logits = backend.asarray(np.eye(3, dtype="float32"))
    labels = backend.asarray(np.array([0, 1, 0]))
    traced = tf.function(backend.accuracy, autograph=False)
    np.testing.assert_allclose(traced(logits, labels), 2 / 3, rtol=1e-6)


def test_accuracy_is_that_of_labels_whose_lengths_are_not_known_yet(backend, of_sequences):
    found = _trace(backend.accuracy, LENGTHS)(*of_sequences)
    np.testing.assert_allclose(found, 0.75, rtol=1e-6)


class Scaled(tf.Module):
    """A module that is given logits, and has one parameter."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(1.0)

    def __call__(self, logits):
        return logits * self.factor


def test_cross_entropy_is_that_of_labels_whose_lengths_are_not_known_yet(backend, of_sequences):
    logits, labels = of_sequences
    learner = backend.learner(Scaled(), loss="cross_entropy")
    found, _ = _trace(lambda x, y: learner.evaluate((x,), y), LENGTHS)(logits, labels)
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logarithms, labels[..., np.newaxis], -1).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_accuracy_does_not_broadcast_labels_whose_lengths_were_not_known(backend, of_sequences):
    logits, labels = of_sequences
    traced = _trace(backend.accuracy, LENGTHS)
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(logits, labels[:, :1])


def test_labels_that_are_not_integers_are_refused_for_any_length(backend):
    traced = _trace(backend.accuracy, LENGTHS, "float32")
    with pytest.raises(UnsupportedValueError, match="a label is the number of a class"):
        traced.get_concrete_function()


@pytest.mark.parametrize("shapes", [([None, 3], [None, 1]), ([4, 3], [None, None])], ids=str)
def test_labels_of_which_enough_is_known_are_refused_when_a_function_is_traced(backend, shapes):
    traced = _trace(backend.accuracy, shapes)
    with pytest.raises(UnsupportedValueError, match="one label for each row"):
        traced.get_concrete_function()


# -- batches that share a step, and fewer bits -----------------------------------------------------


def test_what_is_frozen_between_batches_of_a_step_stays_from_the_next_step_on(backend):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    learner = backend.learner(net, accumulate_grad_batches=2)
    kernel = net.layers[0].kernel
    found = [values(kernel)]
    for _ in range(4):
        learner.step((tf.ones((1, 2)),), tf.ones((1, 1)))
        net.layers[0].trainable = False
        found.append(values(kernel))
    changed = [not np.array_equal(a, b) for a, b in itertools.pairwise(found)]
    assert changed == [False, True, False, False]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layers_have_their_own_policies_after_a_step(backend, precision):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    before = [layer.dtype_policy for layer in net._flatten_layers()]
    learner = backend.learner(net, precision=precision)
    learner.step((tf.ones((1, 2)),), tf.ones((1, 1)))
    learner.evaluate((tf.ones((1, 2)),), tf.ones((1, 1)))
    after = [layer.dtype_policy for layer in net._flatten_layers()]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert net(tf.ones((1, 2))).dtype == tf.float32


class Noted(keras.layers.Layer):
    """A layer that notes the dtype that it computes in."""

    def call(self, x):
        self.noted = x.dtype
        return x


def attention(part):
    """Return a model with an attention, whose parts are given its policy."""
    x = keras.Input((4, 3))
    return keras.Model(x, part(keras.layers.MultiHeadAttention(2, 3)(x, x)))


def clone_model(part):
    """Return a model with a layer that was made from a configuration, and one by hand."""
    backbone = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    return keras.Sequential([keras.Input((3,)), keras.models.clone_model(backbone), part])


MIXED = {
    "a sequence": lambda part: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), part]),
    "an attention": attention,
    "a clone": clone_model,
}


@pytest.mark.filterwarnings("ignore:precision=")
@pytest.mark.parametrize("own", [None, "float32", "mixed_float16"])
@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_a_layer_computes_in_its_own_dtype_and_the_others_in_fewer_bits(backend, make, own):
    keras.config.set_dtype_policy("mixed_bfloat16")  # Keras' own way, for the twin
    try:
        theirs = Noted(dtype=own)
        twin = make(theirs)
    finally:
        keras.config.set_dtype_policy("float32")
    ours = Noted(dtype=own)
    net = make(ours)
    x = tf.ones((2, *net.input_shape[1:]))
    twin(x)
    backend.learner(net, precision="bf16").predict((x,))
    assert ours.noted == theirs.noted
    assert ours.noted.name == {None: "bfloat16", "float32": "float32"}.get(own, "float16")


def test_layers_made_from_a_configuration_compute_in_fewer_bits_with_a_warning(backend):
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    clone = keras.models.clone_model(net)
    with pytest.warns(UserWarning, match=r"made from a configuration(.|\n)*fix: ") as noted:
        learner = backend.learner(clone, precision="fp16")
    assert noted[0].filename == __file__
    assert np.isinf(learner.predict((tf.fill((1, 1), 1e5),)).numpy())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("own", ["float32", "float64"])
def test_a_dtype_that_is_not_that_of_the_others_survives_a_configuration(backend, own):
    usual = "mixed_bfloat16" if own == "float32" else "float32"
    more = 1 + 2.0**-12  # which bfloat16 has not
    values = [(1, usual), (1, usual), (more, own)]
    dense = [
        keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(value), dtype=dtype)
        for value, dtype in values
    ]
    clone = keras.models.clone_model(keras.Sequential([keras.Input((1,)), *dense]))
    learner = backend.learner(clone, precision="bf16")
    for x, expected in ((1.0, more), (more, more)):  # what the input has more is lost
        assert learner.predict((tf.fill((1, 1), x),)).numpy().item() == expected


@pytest.mark.filterwarnings("error")
def test_a_model_that_was_made_by_its_code_is_not_warned_about(backend):
    net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, dtype="float32")])
    backend.learner(net, precision="bf16")
    backend.learner(keras.models.clone_model(net))


def test_a_precision_that_no_layer_would_compute_in_is_refused(backend):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="float32")])
    learner = backend.learner(net, precision="bf16")
    with pytest.raises(UnsupportedValueError, match="has a dtype of its own") as error:
        learner.step((tf.ones((1, 2)),), tf.ones((1, 1)))
    assert error.value.fix == "Dense(...) without dtype=, or leave precision out"


def test_an_optimizer_that_is_built_already_is_given_a_scale_for_float16(backend):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(net.trainable_variables)
    learner = backend.learner(net, optimizer=optimizer, precision="fp16")
    before = values(net.layers[0].kernel)
    for _ in range(8):  # the first ones are left out, until the scale is small enough
        learner.step((tf.ones((1, 2)),), tf.ones((1, 1)))
    assert int(optimizer.iterations) > 0
    assert not np.array_equal(values(net.layers[0].kernel), before)


def test_a_tf_module_has_no_policy(backend):
    with pytest.raises(UnsupportedValueError, match=r"a tf\.Module has no dtype policy"):
        backend.learner(Plain(), precision="bf16")


def _shard(backend, dataset, size=3):
    return [
        framework_of(backend).training.shard_loader(dataset, rank, size) for rank in range(size)
    ]


def test_a_sharded_dataset_has_each_example_once_and_in_the_same_batches(backend):
    numbers = np.random.default_rng(5).permutation(13)
    dataset = tf.data.Dataset.from_tensor_slices({"x": numbers, "y": -numbers}).batch(4)
    shards = [list(each) for each in _shard(backend, dataset)]
    batches = [
        np.concatenate([shard.operands["x"].numpy()[: shard.number] for shard in parts]).tolist()
        for parts in zip(*shards, strict=True)
    ]
    assert list(itertools.chain(*batches)) == numbers.tolist()
    assert [shard.length for shard in shards[0]] == [4, 4, 4, 1] == [*map(len, batches)]
    assert [shard.number for shard in shards[2]] == [1, 1, 1, 0]
    contents = [[shard.content for shard in each] for each in shards]
    assert contents[0] == contents[1] == contents[2]
    assert len(set(contents[0])) == 4


def test_map_of_a_sharded_dataset_processes_the_part_alone(backend):
    seen = []

    def read(x, y):
        tf.py_function(lambda x: seen.extend(x.numpy().tolist()), [x], [])
        return x * 2, y

    dataset = tf.data.Dataset.from_tensor_slices((np.arange(5), np.arange(5))).batch(5)
    first, second = (list(each.map(read)) for each in _shard(backend, dataset, 2))
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert [x.numpy().tolist() for x in first[0].operands] == [[0, 2, 4], [0, 1, 2]]
    assert [x.numpy().tolist() for x in second[0].operands] == [[6, 8], [3, 4]]


def test_a_sharded_dataset_hands_over_named_tuples_as_the_dataset_does(backend):
    pair = collections.namedtuple("Pair", "x y")
    dataset = tf.data.Dataset.from_tensor_slices(pair(np.arange(5), -np.arange(5))).batch(5)

    def double(batch):  # one argument
        return pair(batch.x * 2, batch.y)

    _, second = _shard(backend, dataset, 2)
    for shard, x in ((second, [3, 4]), (second.map(double).map(double), [12, 16])):
        (part,) = shard
        assert type(part.operands).__name__ == "Pair"
        assert part.operands.x.numpy().tolist() == x


def test_a_dataset_of_examples_is_not_sharded(backend):
    with pytest.raises(UnsupportedValueError, match="nobody knows its examples"):
        framework_of(backend).training.shard_loader(tf.data.Dataset.range(3), 0, 2)
