"""``JaxLearner``: steps of training of Flax's models, with optax's optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from nnx_models import INPUTS, Convolutional, TwoInputs, batches, made

from d2ldev import gpu

models = pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)


def by_hand(net, optimizer, inputs, y):
    """The step that one would write."""

    def loss(net):
        return optax.softmax_cross_entropy_with_integer_labels(net(*inputs), y).mean()

    value, gradients = nnx.value_and_grad(loss)(net)
    optimizer.update(net, gradients)
    return value


@pytest.fixture
def line(backend):
    """A linear model on the second virtual GPU, and a batch for it."""
    return backend.mlp([2, 1], device="gpu:1"), (
        (backend.rand((4, 2), seed=0, device="gpu:1"),),
        backend.rand((4, 1), seed=1, device="gpu:1"),
    )


@models
def test_the_losses_are_those_of_a_loop_that_is_written_by_hand(backend, model):
    data = batches(backend, model, "gpu:1")
    net = made(backend, model, "gpu:1")
    optimizer = backend.place(nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param), "gpu:1")
    step = nnx.jit(by_hand)
    expected = [float(step(net, optimizer, inputs, y)) for inputs, y in data]
    learner = backend.learner(
        made(backend, model, "gpu:1"), loss="cross_entropy", optimizer="adam", lr=0.01
    )
    losses = [float(learner.step(inputs, y)[0]) for inputs, y in data]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@models
def test_nothing_is_moved_and_nothing_leaves_the_device(backend, model):
    data = batches(backend, model, "gpu:1")
    learner = backend.learner(made(backend, model, "gpu:1"), loss="cross_entropy", optimizer="adam")
    learner.step(*data[0])
    with backend.strict(), jax.transfer_guard("disallow"):
        loss, prediction = learner.step(*data[1])
        learner.evaluate(*data[2])
    places = {backend.device_of(x) for x in (loss, prediction)}
    assert places | set(backend.placement(learner.parts).values()) == {gpu(1)}
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_a_step_is_traced_once_for_each_shape(backend):
    traced = []

    def loss(prediction, y):
        traced.append(prediction.shape)
        return jnp.mean((prediction - y) ** 2)

    learner = backend.learner(backend.mlp([2, 1]), loss=loss, optimizer="adam")
    for _ in range(2):  # epochs
        for count in (4, 4, 4, 3):
            learner.step((backend.ones((count, 2)),), backend.ones((count, 1)))
        assert learner.parts["model"]  # as at the end of an epoch
    assert traced == [(4, 1), (3, 1)]


def test_batch_norm_learns_its_statistics_in_training_and_uses_them_in_evaluation(backend):
    ((inputs, y),) = batches(backend, Convolutional, "cpu", 1)
    learner = backend.learner(made(backend, Convolutional, "cpu"), loss="cross_entropy")
    net = learner.parts["model"]
    before = np.asarray(net.norm.mean[...])
    learner.evaluate(inputs, y)
    assert np.array_equal(learner.parts["model"].norm.mean[...], before)
    learner.step(inputs, y)
    assert not np.array_equal(learner.parts["model"].norm.mean[...], before)
    net.eval()
    np.testing.assert_allclose(learner.evaluate(inputs, y)[1], net(*inputs), rtol=1e-5)


def test_dropout_draws_anew_in_each_step_and_not_in_evaluation(backend):
    ((inputs, y),) = batches(backend, Convolutional, "cpu", 1)
    learner = backend.learner(made(backend, Convolutional, "cpu"), loss="cross_entropy", lr=0.0)
    first, second = (float(learner.step(inputs, y)[0]) for _ in range(2))
    assert first != second
    first, second = (float(learner.evaluate(inputs, y)[0]) for _ in range(2))
    assert first == second


def test_only_parameters_are_trained(backend):
    class Frozen(nnx.Variable):
        pass

    net = backend.mlp([2, 3, 1], device="gpu:1")
    net.layers[0].kernel = Frozen(net.layers[0].kernel[...])
    before = {name: np.asarray(x) for name, x in nnx.to_flat_state(nnx.state(net))}
    learner = backend.learner(net, lr=0.1)
    x, y = backend.ones((4, 2), device="gpu:1"), backend.ones((4, 1), device="gpu:1")
    learner.step((x,), y)
    after = dict(nnx.to_flat_state(nnx.state(learner.parts["model"])))
    changed = {name for name, x in before.items() if not np.array_equal(x, after[name])}
    assert changed == {name for name in before if name != ("layers", 0, "kernel")}


def test_a_filter_of_the_optimizer_says_what_is_trained(backend):
    net = backend.mlp([2, 3, 1])
    last = nnx.All(nnx.Param, nnx.PathContains(2))
    before = np.asarray(net.layers[0].kernel[...])
    learner = backend.learner(net, optimizer=nnx.Optimizer(net, optax.sgd(0.1), wrt=last))
    loss = [float(learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))[0]) for _ in "ab"]
    assert np.array_equal(learner.parts["model"].layers[0].kernel[...], before)
    assert loss[1] < loss[0]


OPTIMIZERS = {
    "a schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 2)),
    "a chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
    "by the loss": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "accumulating": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_users_optimizers_train_on_the_device(backend, line, make):
    net, batch = line
    learner = backend.learner(net, optimizer=make())
    with backend.strict():
        losses = [float(learner.step(*batch)[0]) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert set(backend.placement(learner.parts).values()) == {gpu(1)}


def test_an_optimizer_with_state_goes_on_from_there(backend, line):
    net, batch = line
    learner = backend.learner(net, optimizer="momentum", lr=0.1)
    for _ in range(2):
        learner.step(*batch)
    again = backend.learner(learner.parts["model"], optimizer=learner.parts["optimizer"])
    assert again.parts["optimizer"] is learner.parts["optimizer"]
    assert float(again.step(*batch)[0]) == float(learner.step(*batch)[0])
    assert float(again.step(*batch)[0]) == float(learner.step(*batch)[0])


def test_the_users_model_and_optimizer_are_trained_themselves(backend, line):
    net, batch = line
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    learner = backend.learner(net, optimizer=optimizer)
    before = np.asarray(net.layers[0].kernel[...])
    learner.step(*batch)
    assert learner.parts == {"model": net, "optimizer": optimizer}
    assert not np.array_equal(net.layers[0].kernel[...], before)
    assert int(optimizer.step[...]) == 1


def test_what_the_user_changes_between_two_steps_counts(backend, line):
    net, batch = line
    learner = backend.learner(net, lr=0.0)
    learner.step(*batch)
    kernel = learner.parts["model"].layers[0].kernel
    kernel[...] = kernel[...] * 0 + 5
    _, prediction = learner.step(*batch)
    assert float(prediction[0, 0]) == pytest.approx(5 * float(batch[0][0][0].sum()), rel=1e-5)
    assert float(learner.parts["model"].layers[0].kernel[0, 0]) == 5


def test_a_learner_moves_between_two_steps(backend, line):
    net, (inputs, y) = line
    learner = backend.learner(net, optimizer="adam")
    learner.step(inputs, y)
    learner.place("gpu:0")
    loss, _ = learner.step(backend.to(inputs, "gpu:0"), backend.to(y, "gpu:0"))
    assert backend.device_of(loss) is gpu(0)
    assert set(backend.placement(learner.parts).values()) == {gpu(0)}


def test_a_model_that_was_never_committed_is_trained_where_it_is(backend):
    learner = backend.learner(TwoInputs(nnx.Rngs(0)), loss="cross_entropy")
    ((inputs, y),) = batches(backend, TwoInputs, "gpu:1", 1)
    with pytest.raises(ValueError, match="incompatible devices"):
        learner.step(inputs, y)


def test_arrays_of_numpy_in_a_model_are_parameters_too(backend):
    net = backend.mlp([2, 1])
    net.layers[0].kernel = nnx.Param(np.ones((2, 1), np.float32))
    learner = backend.learner(net, lr=0.1)
    losses = [float(learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))[0]) for _ in "ab"]
    assert losses[0] == 1
    assert losses[1] < 1


def test_a_model_of_bfloat16_has_a_loss_of_float32(backend):
    net = nnx.Linear(2, 1, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    learner = backend.learner(backend.place(net, "gpu:1"), optimizer="adam", gradient_clip_val=1.0)
    x = backend.ones((4, 2), device="gpu:1", dtype="bfloat16")
    loss, _ = learner.step((x,), x[:, :1])
    assert loss.dtype == jnp.float32
    assert learner.parts["model"].kernel[...].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_labels_are_of_any_integer_dtype(backend, dtype):
    learner = backend.learner(backend.mlp([2, 3]), loss="cross_entropy")
    y = backend.asarray([0, 2], dtype=dtype)
    assert float(learner.step((backend.ones((2, 2)),), y)[0]) > 0


def test_gradients_are_clipped_by_the_formula_of_torch(backend):
    net = backend.mlp([2, 1])
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(net))]
    x, y = backend.ones((4, 2)), backend.full((4, 1), 100.0)
    plain = backend.learner(nnx.clone(net), lr=1.0)
    clipped = backend.learner(nnx.clone(net), lr=1.0, gradient_clip_val=0.5)
    steps = []
    for learner in (plain, clipped):
        learner.step((x,), y)
        after = jax.tree.leaves(nnx.state(learner.parts["model"]))
        steps.append([a - b for a, b in zip(after, before, strict=True)])
    norm = np.sqrt(sum(np.sum(step**2) for step in steps[0]))
    for step, shorter in zip(*steps, strict=True):
        np.testing.assert_allclose(shorter, step * (0.5 / (norm + 1e-6)), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_a_model_sows_does_not_grow(backend):
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, x):
            x = self.dense(x)
            self.sow(nnx.Intermediate, "seen", x)
            return x

    net = Sowing(nnx.Rngs(0))
    net(jnp.ones((2, 2)))
    learner = backend.learner(net)
    losses = [float(learner.step((backend.ones((2, 2)),), backend.ones((2, 1)))[0]) for _ in "abc"]
    assert losses == sorted(losses, reverse=True)


def test_inputs_may_be_nested(backend):
    class Named(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, inputs):
            return self.dense(inputs["a"] - inputs["b"])

    learner = backend.learner(backend.place(Named(nnx.Rngs(0)), "gpu:1"), lr=0.1)
    x = backend.ones((4, 2), device="gpu:1")
    losses = [float(learner.step(({"a": 2 * x, "b": x},), x[:, :1])[0]) for _ in "ab"]
    assert losses[1] < losses[0]


def test_linen_modules_are_trained_when_they_are_wrapped(backend):
    module = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(1)])
    net = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(jnp.ones((2, 3)))
    learner = backend.learner(backend.place(net, "gpu:1"), optimizer="adam", lr=0.1)
    x, y = backend.ones((4, 3), device="gpu:1"), backend.ones((4, 1), device="gpu:1")
    losses = []
    for _ in range(2):
        losses += [float(learner.step((x,), y)[0]) for _ in range(3)]
        assert learner.parts["model"] is net
    assert losses[-1] < losses[0]
