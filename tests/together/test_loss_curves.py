"""Same data, same initial parameters: the same loss curve under every framework.

Each curve is compared with that of the reference backend, whose gradients and optimizers are
written out. The tolerance is 1e-4 of each loss, over 50 steps. The largest measured differences are
3e-6 with ``'sgd'``, ``'momentum'`` and ``'adagrad'``, and 2e-5 with ``'adam'`` and ``'adamw'``, for
two reasons:

- float32: a prediction of size 4 is rounded by 2e-7. Where the linear regression ends, at a root
  mean squared error of 0.01, that is 2e-5 of the error, and 4e-5 of its square.
- Adam's ``1 - 0.999**t`` is 0.001 in the first step. optax, Keras and MXNet compute with 0.999 in
  float32, which is 1e-8 off: 1e-5 of the first steps. Keras and MXNet add the epsilon of 1e-8
  before the correction, which makes it up to 30 times as large.

Products are computed in float32 everywhere (``matmul_precision='highest'``). So each framework's
curve on a GPU is held by the requirement ``precision.curves-agree`` of the suite, which is compared
with the reference as well, and runs on hardware.

A learning rate that is 1% off is far outside, and so is an epsilon of Adagrad that is added inside
the root in one framework and outside it in another.
"""

import numpy as np
import pytest
from parameters import draw, mlp_of

import d2ldev
from d2ldev import Trainer

FRAMEWORKS = ("torch", "jax", "tensorflow", "mxnet")
RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 0.02, "adamw": 0.02, "adagrad": 0.1}
TOLERANCE = 1e-4
EPOCHS, BATCH = 10, 32
CLIP = 0.2

frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)


def batch(inputs, y):
    """Return batches of which the last one is smaller."""
    return [(inputs[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(inputs), BATCH)]


def linear_regression():
    """Return the data of a line, with noise of 0.01: D2L 3.3."""
    random = np.random.default_rng(1)
    inputs = random.standard_normal((150, 2))
    y = inputs @ [[2.0], [-3.4]] + 4.2 + 0.01 * random.standard_normal((150, 1))
    return batch(inputs.astype("float32"), y.astype("float32")), draw([2, 1], 0), "mse"


def classification():
    """Return data of three classes, for an MLP with two hidden layers."""
    random = np.random.default_rng(2)
    inputs = random.standard_normal((150, 8)).astype("float32")
    y = np.argmax(inputs[:, :3] ** 2 + inputs[:, 3:6], axis=1).astype("int32")
    return batch(inputs, y), draw([8, 16, 16, 3], 0), "cross_entropy"


def decisions():
    """Return data of two questions each to be answered with yes or no, for an MLP."""
    random = np.random.default_rng(4)
    inputs = 3 * random.standard_normal((150, 4)).astype("float32")
    y = (inputs[:, :2] + inputs[:, 2:] > 0).astype("float32")
    return batch(inputs, y), draw([4, 16, 2], 0), "bce"


def regression():
    """Return the data of a curve, for an MLP with a hidden layer."""
    random = np.random.default_rng(3)
    inputs = random.standard_normal((150, 4)).astype("float32")
    return batch(inputs, inputs[:, :1] ** 2 - inputs[:, 1:2]), draw([4, 16, 1], 0), "mse"


TASKS = (linear_regression, classification, decisions, regression)
# Every task with every optimizer, and each of both with clipped and with unclipped gradients.
runs = pytest.mark.parametrize(
    ("task", "optimizer", "clip"),
    [
        pytest.param(task, optimizer, CLIP * clipped, id=f"{task.__name__}-{optimizer}-{clipped}")
        for i, task in enumerate(TASKS)
        for j, optimizer in enumerate(RATES)
        for clipped in [(i + j) % 2]
    ],
)


def curve(name, task, optimizer, clip=0, rate=1.0, num_gpus=0):
    """Return the losses of a framework, one per epoch."""
    data, layers, loss = task()
    backend = d2ldev.get_backend(name)
    trainer = Trainer(EPOCHS, num_gpus, clip, backend=backend, matmul_precision="highest")
    net = mlp_of(backend, layers)
    return trainer.fit(net, data, loss=loss, optimizer=optimizer, lr=rate * RATES[optimizer])[
        "loss"
    ]


@pytest.fixture(scope="module", autouse=True)
def _all_have_trained():
    """The first training leaves its own traces, which are no test's leaks."""
    for name in FRAMEWORKS:
        curve(name, linear_regression, "adam", CLIP)


@pytest.fixture(scope="module")
def expected():
    """The reference's curves, each computed once."""
    known = {}

    def reference(*arguments):
        if arguments not in known:
            known[arguments] = curve("reference", *arguments)
        return known[arguments]

    return reference


@runs
@frameworks
def test_the_curve_is_that_of_the_reference(framework, task, optimizer, clip, expected):
    losses = curve(framework, task, optimizer, clip)
    np.testing.assert_allclose(losses, expected(task, optimizer, clip), rtol=TOLERANCE)


@runs
def test_there_is_something_to_agree_on(task, optimizer, clip, expected):
    losses = expected(task, optimizer, clip)
    assert losses[-1] < 0.95 * losses[0]


@runs
def test_the_tolerance_tells_a_learning_rate_apart_that_is_off_by_a_hundredth(
    task, optimizer, clip, expected
):
    off = np.array(curve("reference", task, optimizer, clip, 1.01))
    right = np.array(expected(task, optimizer, clip))
    assert np.max(np.abs(off - right) / right) > TOLERANCE


@runs
def test_clipping_makes_another_curve(task, optimizer, clip, expected):
    curves = expected(task, optimizer, clip), expected(task, optimizer, CLIP - clip)
    one, other = map(np.array, curves)
    assert np.max(np.abs(one - other) / other) > TOLERANCE


@frameworks
def test_so_it_is_on_a_gpu(framework, expected):
    losses = curve(framework, classification, "adam", CLIP, num_gpus=1)
    np.testing.assert_allclose(losses, expected(classification, "adam", CLIP), rtol=TOLERANCE)


@frameworks
def test_adagrad_takes_the_same_steps_with_small_gradients(framework):
    """Then it matters whether the epsilon is added inside the root or outside it."""
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(32, 2)
    data = [(inputs, 1e-5 * inputs[:, :1])]
    zeros = [(np.zeros((1, 2), "float32"), np.zeros(1, "float32"))]
    losses = []
    for name in (framework, "reference"):
        backend = d2ldev.get_backend(name)
        trainer = Trainer(EPOCHS, backend=backend)
        history = trainer.fit(mlp_of(backend, zeros), data, optimizer="adagrad", lr=1e-6)
        losses.append(history["loss"])
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)
