"""``Learner.state`` and ``restore`` on MXNet: what was interrupted goes on to the same last bit."""

import numpy as np
import pytest
from d2ldev_mxnet.framework import mx

from d2ldev.errors import CheckpointError

nn = mx.gluon.nn
STEPS = 3

# As a user of Gluon with NumPy arrays begins.
pytestmark = pytest.mark.usefixtures("set_np")


@pytest.fixture(autouse=True)
def _numpy_s_generator():
    """A state holds it, and restoring one sets it."""
    before = np.random.get_state()
    yield
    np.random.set_state(before)


def dense(width=8, depth=1):
    """With deferred shapes, and numbers in its names that count on from model to model."""
    net = nn.HybridSequential()
    for _ in range(depth):
        net.add(nn.Dense(width), nn.BatchNorm(), nn.Activation("tanh"), nn.Dropout(0.4))
    net.add(nn.Dense(3))
    return net


def through_numpy(backend, x, device):
    """A nesting with its tensors made anew from NumPy arrays, as when it is read from a file."""
    if isinstance(x, mx.nd.NDArray):
        return backend.asarray(backend.to_numpy(x), device=device)
    if isinstance(x, dict):
        return {key: through_numpy(backend, value, device) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(through_numpy(backend, value, device) for value in x)
    assert x is None or isinstance(x, (bool, int, float, str))
    return x


def batches(backend, device):
    draw = np.random.RandomState(1)
    for _ in range(2 * STEPS):
        x, y = draw.randn(16, 4).astype("float32"), draw.randint(0, 3, 16)
        yield (backend.asarray(x, device=device),), backend.asarray(y, device=device)


def make_learner(backend, device, optimizer, net=None, hybridized=False, **options):
    net = dense() if net is None else net
    net.initialize(ctx=backend.native(device))
    net.hybridize(hybridized)
    if not isinstance(optimizer, str):
        optimizer = optimizer(net)
    return backend.learner(net, loss="cross_entropy", optimizer=optimizer, lr=0.05, **options)


def train(learner, some):
    return [learner.step(*batch)[0].item() for batch in some]


def values(learner):
    named = learner.parts["model"]._collect_params_with_prefix()
    return {name: p.data().asnumpy() for name, p in named.items()}


def assert_goes_on(backend, device, optimizer, **options):
    every = list(batches(backend, device))
    mx.random.seed(0)
    learner = make_learner(backend, device, optimizer, **options)
    train(learner, every[:STEPS])
    state = through_numpy(backend, learner.state(), device)
    losses = train(learner, every[STEPS:])

    again = make_learner(backend, device, optimizer, **options)
    again.restore(state)
    assert train(again, every[STEPS:]) == losses
    np.testing.assert_equal(values(again), values(learner))


@pytest.mark.parametrize("where", ["cpu", "gpu:0", "gpu:1"])
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad"])
def test_six_steps_are_three_and_three_with_dropout(backend, optimizer, hybridized, where):
    assert_goes_on(backend, where, optimizer, hybridized=hybridized, gradient_clip_val=0.5)


def scheduled(_net):
    schedule = mx.lr_scheduler.MultiFactorScheduler([2, 4], 0.1)
    return mx.optimizer.SGD(momentum=0.9, lr_scheduler=schedule)


def for_weights_and_biases(net):
    parameters = list(net.collect_params(".*weight|.*bias").values())
    return mx.gluon.Trainer(parameters[::-1], "adam", {"learning_rate": 0.05})


OWN = {
    "nadam": lambda net: mx.optimizer.Nadam(),
    "rmsprop": lambda net: mx.optimizer.RMSProp(centered=True),
    "lamb": lambda net: mx.optimizer.LAMB(),
    "adadelta": lambda net: mx.optimizer.AdaDelta(),
    "ftrl": lambda net: mx.optimizer.Ftrl(),
    "a schedule": scheduled,
    "a trainer": for_weights_and_biases,
}


@pytest.mark.parametrize("where", ["cpu", "gpu:1"])
@pytest.mark.parametrize("optimizer", OWN)
def test_an_optimizer_of_the_users_own_goes_on(backend, optimizer, where):
    assert_goes_on(backend, where, OWN[optimizer])


class Scale(mx.gluon.Block):
    """A layer of half precision that MXNet has on the CPU too; it has no dense one there."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(2,), dtype="float16", init="ones")

    def forward(self, x):
        return x * self.weight.data()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_half_precision_goes_on_with_its_single_precision_copies(backend, optimizer):
    def with_copies(_net):
        return mx.optimizer.create(optimizer, learning_rate=0.05, multi_precision=True)

    def learner():
        net = Scale()
        net.initialize(ctx=backend.native("gpu:1"))
        return backend.learner(net, optimizer=with_copies(net))

    x = backend.ones((3, 2), dtype="float16", device="gpu:1")
    y = backend.full((3, 2), 2.0, dtype="float16", device="gpu:1")
    first = learner()
    train(first, [((x,), y)] * STEPS)
    state = through_numpy(backend, first.state(), "gpu:1")
    again = learner()
    again.restore(state)
    assert train(again, [((x,), y)] * STEPS) == train(first, [((x,), y)] * STEPS)
    np.testing.assert_equal(values(again), values(first))


def test_a_model_that_has_no_shapes_yet_has_a_state(backend):
    learner = make_learner(backend, "cpu", "adam")
    again = make_learner(backend, "cpu", "adam")
    again.restore(learner.state())
    assert train(again, list(batches(backend, "cpu"))[:1])[0] > 0


def test_a_model_that_has_no_shapes_yet_evaluates_what_it_is_given(backend):
    learner = make_learner(backend, "gpu:1", "sgd")
    every = list(batches(backend, "gpu:1"))
    train(learner, every[:1])
    again = make_learner(backend, "gpu:1", "sgd")
    again.restore(learner.state())
    assert again.evaluate(*every[1])[0].item() == learner.evaluate(*every[1])[0].item()


def test_a_state_is_what_was_when_it_was_asked_for(backend):
    learner = make_learner(backend, "cpu", "adam")
    every = list(batches(backend, "cpu"))
    train(learner, every[:STEPS])
    state = learner.state()
    losses = train(learner, every[STEPS:])
    for _ in range(2):  # restoring it does not hand it over
        learner.restore(state)
        assert train(learner, every[STEPS:]) == losses


def test_a_run_that_asks_for_its_state_is_repeated_by_its_seed(backend):
    def losses():
        mx.random.seed(0)
        learner, found = make_learner(backend, "cpu", "adam"), []
        for batch in batches(backend, "cpu"):
            found += train(learner, [batch])
            learner.state()
        return found

    assert losses() == losses()


def test_a_state_of_one_device_goes_on_on_another(backend):
    mx.random.seed(0)
    learner = make_learner(backend, "cpu", "adam")
    train(learner, list(batches(backend, "cpu"))[:STEPS])
    state = through_numpy(backend, learner.state(), "cpu")
    losses = train(learner, list(batches(backend, "cpu"))[STEPS:])
    again = make_learner(backend, "gpu:1", "adam")
    again.restore(state)
    assert train(again, list(batches(backend, "gpu:1"))[STEPS:]) == losses
    assert set(backend.placement(again.parts).values()) == {backend.gpu(1)}


def backwards(net):
    return mx.gluon.Trainer(list(net.collect_params().values())[::-1], "adam")


OTHERS = {
    "more layers": ({"depth": 2}, "adam", "only one of the two has"),
    "other shapes": ({"width": 9}, "adam", "0.weight"),
    "another optimizer": ({}, "sgd", "its class: SGD, Adam in the state"),
    "another order": ({}, backwards, "its parameters"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_state_of_another_run_is_refused_and_changes_nothing(backend, case):
    sizes, optimizer, words = OTHERS[case]
    every = list(batches(backend, "cpu"))
    learner = make_learner(backend, "cpu", "adam")
    train(learner, every[:1])
    other = make_learner(backend, "cpu", optimizer, dense(**sizes))
    train(other, every[:1])
    before = values(other)
    with pytest.raises(CheckpointError, match=words):
        other.restore(learner.state())
    np.testing.assert_equal(values(other), before)


def test_another_dtype_is_refused(backend):
    learner = make_learner(backend, "cpu", "sgd")
    train(learner, list(batches(backend, "cpu"))[:1])
    state = learner.state()
    state["model"]["0.weight"] = state["model"]["0.weight"].astype("float16")
    with pytest.raises(CheckpointError, match=r"0.weight is float32 .*, and float16"):
        learner.restore(state)


def test_a_state_of_the_optimizer_of_another_shape_is_refused(backend):
    learner = make_learner(backend, "cpu", "momentum")
    train(learner, list(batches(backend, "cpu"))[:1])
    state = learner.state()
    state["optimizer"]["states"]["0.weight"] = backend.zeros((2, 2))
    with pytest.raises(CheckpointError, match=r"0.weight has .*float32 \(2, 2\)"):
        learner.restore(state)


@pytest.mark.parametrize("part", ["model", "optimizer", "random"])
@pytest.mark.parametrize("broken", [None, "3", {"a": 1}])
def test_what_is_no_state_is_refused(backend, part, broken):
    learner = make_learner(backend, "cpu", "adam")
    train(learner, list(batches(backend, "cpu"))[:1])
    state, before = learner.state(), values(learner)
    with pytest.raises(CheckpointError):
        learner.restore({**state, part: broken})
    np.testing.assert_equal(values(learner), before)


@pytest.mark.parametrize("seed", [-1, 2**31, 2**32 + 5, 10**30])
def test_a_seed_of_which_mxnet_would_take_another_is_refused(backend, seed):
    learner = make_learner(backend, "cpu", "adam")
    train(learner, list(batches(backend, "cpu"))[:1])
    state, before = learner.state(), values(learner)
    train(learner, list(batches(backend, "cpu"))[:1])
    after = values(learner)
    with pytest.raises(CheckpointError, match="is no state of one"):
        learner.restore({**state, "random": seed})
    np.testing.assert_equal(values(learner), after)
    learner.restore(state)
    np.testing.assert_equal(values(learner), before)


@pytest.mark.parametrize("broken", [None, {}, {"model": {}}, [1]])
def test_what_has_not_the_parts_of_a_state_is_refused(backend, broken):
    with pytest.raises(CheckpointError, match="restore what learner"):
        make_learner(backend, "cpu", "adam").restore(broken)
