"""Training: steps of Flax's models with optax's optimizers, what they are fed, what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from nnx_models import INPUTS, TwoInputs, batches, build
from training_batches import linear_model_and_batch

from d2ldev import Trainer, UnsupportedValueError, gpu
from d2ldev.framework.testing import framework_of


def sync_and_read(learner):
    """Return the model and the optimizer as they are after the last step."""
    return learner.sync()


# -- steps -----------------------------------------------------------------------------------------

models = pytest.mark.parametrize("model", INPUTS, ids=lambda model: model.__name__)


def by_hand(net, optimizer, inputs, y):
    """Return the step that one would write by hand."""

    def loss(net):
        return optax.softmax_cross_entropy_with_integer_labels(net(*inputs), y).mean()

    value, gradients = nnx.value_and_grad(loss)(net)
    optimizer.update(net, gradients)
    return value


@pytest.fixture
def line(backend):
    """A linear model on the second virtual GPU, and a batch for it."""
    return linear_model_and_batch(backend)


@models
def test_the_losses_are_those_of_a_loop_that_is_written_by_hand(backend, model):
    data = batches(backend, model, "gpu:1")
    net = build(backend, model, "gpu:1")
    optimizer = backend.place(nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param), "gpu:1")
    step = nnx.jit(by_hand)
    expected = [float(step(net, optimizer, inputs, y)) for inputs, y in data]
    learner = backend.learner(
        build(backend, model, "gpu:1"), loss="cross_entropy", optimizer="adam", lr=0.01
    )
    losses = [float(learner.step(inputs, y)[0]) for inputs, y in data]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@models
def test_nothing_is_moved_and_nothing_leaves_the_device(backend, model):
    data = batches(backend, model, "gpu:1")
    learner = backend.learner(
        build(backend, model, "gpu:1"), loss="cross_entropy", optimizer="adam"
    )
    learner.step(*data[0])
    with jax.transfer_guard("disallow"):
        loss, prediction = learner.step(*data[1])
        learner.evaluate(*data[2])
    places = {backend.device_of(x) for x in (loss, prediction)}
    assert places | set(backend.placement(sync_and_read(learner)).values()) == {gpu(1)}
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
        learner.sync()  # as at the end of an epoch
    assert traced == [(4, 1), (3, 1)]


def test_only_parameters_are_trained(backend):
    class Frozen(nnx.Variable):
        pass

    net = backend.mlp([2, 3, 1], device="gpu:1")
    net.layers[0].kernel = Frozen(net.layers[0].kernel[...])
    before = {name: np.asarray(x) for name, x in nnx.to_flat_state(nnx.state(net))}
    learner = backend.learner(net, lr=0.1)
    x, y = backend.ones((4, 2), device="gpu:1"), backend.ones((4, 1), device="gpu:1")
    learner.step((x,), y)
    after = dict(nnx.to_flat_state(nnx.state(sync_and_read(learner)["model"])))
    changed = {name for name, x in before.items() if not np.array_equal(x, after[name])}
    assert changed == {name for name in before if name != ("layers", 0, "kernel")}


def test_a_filter_of_the_optimizer_says_what_is_trained(backend):
    net = backend.mlp([2, 3, 1])
    last = nnx.All(nnx.Param, nnx.PathContains(2))
    before = np.asarray(net.layers[0].kernel[...])
    learner = backend.learner(net, optimizer=nnx.Optimizer(net, optax.sgd(0.1), wrt=last))
    loss = [float(learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))[0]) for _ in "ab"]
    assert np.array_equal(sync_and_read(learner)["model"].layers[0].kernel[...], before)
    assert loss[1] < loss[0]


OPTIMIZERS = {
    "a schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 2)),
    "a chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.rmsprop)(learning_rate=0.1),
    "by the loss": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "accumulating": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "accumulating, as a function": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "a line search": optax.lbfgs,
    "a simpler line search": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9)
    ),
    "without extra arguments": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "lists of arrays": lambda: optax.sm3(0.1),
    "tuples of arrays": lambda: optax.contrib.muon(0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_users_optimizers_train_on_the_device(backend, line, make):
    net, batch = line
    learner = backend.learner(net, optimizer=make())
    with backend.strict():
        losses = [float(learner.step(*batch)[0]) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert set(backend.placement(sync_and_read(learner)).values()) == {gpu(1)}


def make_sharp():
    return optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)


def adapt(tx):
    """Return an optimizer with the update that the error names: it gets what it needs."""

    def update(gradients, state, parameters, *, value_fn, **_):
        grad_fn = jax.grad(lambda parameters, _: value_fn(parameters))
        return tx.update(gradients, state, parameters, grad_fn=grad_fn)

    return optax.GradientTransformationExtraArgs(tx.init, update)


OPTIMIZERS["another gradient, which it is given"] = lambda: adapt(make_sharp())
WANTING_MORE = {
    "a function of the gradient": make_sharp,
    "a function of the loss": lambda: optax.contrib.sophia(0.1),
    "parameters of its own": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
}


@pytest.mark.parametrize("make", WANTING_MORE.values(), ids=WANTING_MORE)
def test_an_optimizer_that_wants_more_than_a_step_has_is_refused(backend, line, make):
    net, batch = line
    before = np.array(net.layers[0].kernel[...])
    learner = backend.learner(net, optimizer=make())
    with pytest.raises(UnsupportedValueError, match=r"optimizer .*its update fails"):
        learner.step(*batch)
    assert np.array_equal(sync_and_read(learner)["model"].layers[0].kernel[...], before)


def test_a_line_search_computes_the_loss_of_the_batch(backend, line):
    """As in optax's own loop, with the functions of the model alone."""
    net, ((x,), y) = line
    graph, state = nnx.split(net)

    def compute_loss(parameters):
        return jnp.mean((nnx.merge(graph, parameters)(x) - y) ** 2)

    tx = optax.lbfgs()
    parameters = jax.tree.map(lambda x: x[...], state, is_leaf=lambda x: isinstance(x, nnx.Param))
    memory = tx.init(parameters)
    for _ in range(4):
        value, gradient = jax.value_and_grad(compute_loss)(parameters)
        updates, memory = tx.update(
            *(gradient, memory, parameters), value=value, grad=gradient, value_fn=compute_loss
        )
        parameters = optax.apply_updates(parameters, updates)
    learner = backend.learner(net, optimizer=optax.lbfgs())
    for _ in range(4):
        learner.step((x,), y)
    assert_close(jax.tree.leaves(nnx.state(learner_model(learner))), jax.tree.leaves(parameters))


def learner_model(learner):
    return sync_and_read(learner)["model"]


def assert_close(found, expected):
    for x, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, other, rtol=1e-4, atol=1e-5)


def test_a_line_search_does_not_accumulate(backend, line):
    net, batch = line
    learner = backend.learner(net, optimizer=optax.lbfgs(), accumulate_grad_batches=2)
    learner.step(*batch)
    with pytest.raises(UnsupportedValueError, match="without accumulate_grad_batches value_fn="):
        learner.step(*batch)


def test_an_optimizer_of_optax_has_the_names_of_flax_in_files(backend, line):
    net, _ = line
    ours = backend.learner(net, optimizer=optax.adam(0.1))
    flaxs = backend.learner(net, optimizer=nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param))
    names = [list(backend.placement(each.sync()["optimizer"])) for each in (ours, flaxs)]
    assert names[0] == names[1]


def test_an_optimizer_with_state_goes_on_from_there(backend, line):
    net, batch = line
    learner = backend.learner(net, optimizer="momentum", lr=0.1)
    for _ in range(2):
        learner.step(*batch)
    again = backend.learner(
        sync_and_read(learner)["model"], optimizer=sync_and_read(learner)["optimizer"]
    )
    assert again.sync()["optimizer"] is sync_and_read(learner)["optimizer"]
    assert float(again.step(*batch)[0]) == float(learner.step(*batch)[0])
    assert float(again.step(*batch)[0]) == float(learner.step(*batch)[0])


def test_the_users_model_and_optimizer_are_trained_themselves(backend, line):
    net, batch = line
    optimizer = nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)
    learner = backend.learner(net, optimizer=optimizer)
    before = np.asarray(net.layers[0].kernel[...])
    learner.step(*batch)
    assert sync_and_read(learner) == {"model": net, "optimizer": optimizer}
    assert not np.array_equal(net.layers[0].kernel[...], before)
    assert int(optimizer.step[...]) == 1


def test_changes_by_the_user_between_two_steps_count(backend, line):
    net, batch = line
    learner = backend.learner(net, lr=0.0)
    learner.step(*batch)
    kernel = sync_and_read(learner)["model"].layers[0].kernel
    kernel[...] = kernel[...] * 0 + 5
    _, prediction = learner.step(*batch)
    assert float(prediction[0, 0]) == pytest.approx(5 * float(batch[0][0][0].sum()), rel=1e-5)
    assert float(sync_and_read(learner)["model"].layers[0].kernel[0, 0]) == 5


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
    assert sync_and_read(learner)["model"].kernel[...].dtype == jnp.bfloat16


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_sown_values_do_not_grow(backend):
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
        assert sync_and_read(learner)["model"] is net
    assert losses[-1] < losses[0]


def test_accuracy_is_traced_under_jit(backend):
    logits = backend.asarray(np.eye(3, dtype="float32"))
    labels = backend.asarray(np.array([0, 1, 0]))
    np.testing.assert_allclose(jax.jit(backend.accuracy)(logits, labels), 2 / 3, rtol=1e-6)


# -- what is fed -----------------------------------------------------------------------------------


def number_batches(backend, form, number=4):
    """Yield batches of three tensors of the CPU, with their number in them."""
    for each in range(number):
        yield form(
            backend.full((2, 3), float(each)),
            backend.full(2, each, dtype="int32"),
            backend.full((), float(each)),
        )


FORMS = {
    "tuple": lambda *parts: parts,
    "nesting": lambda x, y, z: {"inputs": [x, (z,)], "y": y, "name": "batch"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", [0, 2])
def test_each_array_of_a_batch_is_copied_once(backend, copies, form, depth):
    source = list(number_batches(backend, FORMS[form]))
    moved = list(backend.prefetch(source, "gpu:1", depth))
    assert copies == [(backend.native("gpu:1"), True)] * 3 * 4
    for batch, expected in zip(moved, source, strict=True):
        leaves = jax.tree.leaves(batch)
        for x, y in zip(leaves, jax.tree.leaves(expected), strict=True):
            assert np.array_equal(x, y)
        devices = {backend.device_of(x) for x in leaves if not isinstance(x, str)}
        assert devices == {gpu(1)}


def test_arrays_of_numpy_go_to_a_real_gpu_together(backend, copies, monkeypatch):
    """By way of the host's memory, into which they are copied one by one."""
    monkeypatch.setattr(framework_of(backend).devices, "platform", lambda device: "cuda")
    source = [(np.full((2, 3), each, "float32"), np.full(2, each, "int32")) for each in range(4)]
    moved = list(backend.prefetch(source, "gpu:1"))
    to_the_gpu = [each for each in copies if each[0] == backend.native("gpu:1")]
    assert to_the_gpu == [(backend.native("gpu:1"), True)] * 2 * 4
    for batch, expected in zip(moved, source, strict=True):
        for x, array in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(x), array)


def test_nothing_is_waited_for(backend, monkeypatch):
    source = list(number_batches(backend, FORMS["tuple"]))

    def refuse(*args):
        raise AssertionError("it waits for the device")

    array = type(source[0][0])
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", refuse)
        patch.setattr(framework_of(backend).tensors, "to_numpy", refuse)
        for name in ("block_until_ready", "_value"):
            patch.setattr(array, name, property(refuse))
        moved = list(backend.prefetch(source, "gpu:0"))
        with pytest.raises(AssertionError, match="waits"):
            float(moved[0][2])
    assert [float(backend.to_numpy(z)) for *_, z in moved] == [0.0, 1.0, 2.0, 3.0]


# -- what is refused -------------------------------------------------------------------------------


def test_linens_train_state_is_refused_with_the_fix(backend):
    state = TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    with pytest.raises(UnsupportedValueError, match="ToNNX"):
        backend.learner(state)


@pytest.mark.parametrize(
    "optimizer",
    [object(), lambda net: nnx.ModelAndOptimizer(net, optax.sgd(0.1))],
    ids=["another's", "one with a model of its own"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_another_optimizer_is_refused(backend, optimizer):
    net = backend.mlp([2, 1])
    optimizer = optimizer(net) if callable(optimizer) else optimizer
    with pytest.raises(UnsupportedValueError, match="not an optax"):
        backend.learner(net, optimizer=optimizer)


@pytest.mark.parametrize(
    ("own", "fix"),
    [
        (partial(optax.adam, 0.1), "optimizer=own()"),
        (partial(optax.adam, learning_rate=0.1), "optimizer=own()"),
        (partial(optax.adam, b1=0.8), "optimizer=own(0.01)"),
        (optax.adam, "optimizer=own(0.01), or optimizer='adam'"),
        (nnx.Optimizer, "optimizer=optax.sgd(0.01), or another one of optax"),
    ],
    ids=str,
)
def test_what_makes_an_optimizer_is_refused_with_the_call_of_it(backend, own, fix):
    with pytest.raises(UnsupportedValueError, match=r"class, not|a call of it makes") as error:
        backend.learner(backend.mlp([2, 1]), optimizer=own)
    assert error.value.fix == fix


def test_a_model_that_makes_variables_in_a_step_is_refused(backend):
    class Growing(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Variable(x)
            return self.dense(x)

    learner = backend.learner(Growing(nnx.Rngs(0)))
    with pytest.raises(UnsupportedValueError, match=r"made or deleted variables: .*seen"):
        learner.step((backend.ones((4, 2)),), backend.ones((4, 1)))


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
@pytest.mark.parametrize("text", [["a", "b"], np.array(["a", "b"])], ids=["list", "array"])
def test_text_in_a_compiled_step_is_refused_by_name(backend, text, num_gpus):
    wanted = np.ones((2, 1), "float32")
    batch = {"x": np.ones((2, 3), "float32"), "y": {"wanted": wanted, "words": text}}
    trainer = Trainer(1, num_gpus=num_gpus, backend=backend)

    def loss(prediction, y):
        return ((prediction - y["wanted"]) ** 2).mean()

    with pytest.raises(UnsupportedValueError, match=r"\['words'\].*is text"):
        trainer.fit(backend.mlp([3, 1]), [batch], loss=loss)
