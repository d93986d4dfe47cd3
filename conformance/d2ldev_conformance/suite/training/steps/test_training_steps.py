"""D2L 6.7.3: training happens where the model is, and a move in between changes nothing.

A step computes losses, gradients and new parameters. Each framework does it in its own way, and all
of them have to agree.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from d2ldev import DeviceMismatchError, UnsupportedValueError, WeightedLoss
from d2ldev.framework import Weighted
from d2ldev_conformance.provision import (
    freezables,
    models_of_sequences,
    models_with_branches,
    models_with_tables,
    networks,
    networks_with_batch_norm,
    own_optimizers,
)
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import (
    assert_near,
    assert_same_values,
    make_repeated_tokens,
    needs_float32,
    read_saved_values,
    values_of,
)
from d2ldev_conformance.suite.devices.queues import becomes_idle

SECTION = "6.7.3"
SOURCE = "contract, Training"
STEPS = 4
WITH_OWN_LOSS = pytest.mark.needs("train", "train with a loss of your own")


@pytest.fixture
def data():
    """A line with a bend, for two features and one output."""
    inputs = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
    return inputs, (inputs.sum(1, keepdims=True) ** 2 - inputs[:, :1]).astype("float32")


def _learner(backend, device):
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    return backend.learner(net, optimizer="adam", lr=0.05)


def _train(backend, device, data, move_to=None):
    """Return a learner's components after some steps, and the losses; move halfway if asked to."""
    learner = _learner(backend, device)
    losses = []
    for i in range(STEPS):
        if i == STEPS // 2 and move_to is not None:
            learner.replace(backend.place(learner.sync(), move_to))
            device = move_to
        x, y = (backend.asarray(array, device=device) for array in data)
        losses.append(learner.step((x,), y)[0])
    return learner.sync(), losses


@pytest.fixture
def on_the_cpu(backend, data):
    """The losses of the same steps on the CPU."""
    return [float(backend.to_numpy(loss)) for loss in _train(backend, backend.cpu(), data)[1]]


@requirement("train.learns", section=SECTION, source="D2L")
def test_the_loss_falls(on_the_cpu):
    """Reduce the loss in four steps on the CPU."""
    assert on_the_cpu[-1] < on_the_cpu[0]


@requirement("train.places-own-optimizers", section=SECTION, source="contract, Training")
def test_an_optimizer_that_was_made_before_a_move_follows_the_model(
    backend, place, data, own_optimizer
):
    """Move the optimizer that the user gives to the device of the model.

    Users make an optimizer beside the model, and move the model later.
    """
    net = backend.mlp([2, 8, 1], device="cpu")
    optimizer = own_optimizers(backend)[own_optimizer](net)
    net = backend.place(net, place)
    learner = backend.learner(net, optimizer=optimizer)
    x, y = (backend.asarray(array, device=place) for array in data)
    with backend.strict():
        learner.step((x,), y)
    assert set(backend.placement(learner.sync()).values()) == {place}


@requirement("train.stays-on-the-device", section=SECTION, source="D2L")
def test_a_training_step_leaves_everything_on_the_device(backend, place, data):
    """Leave parameters, optimizer and losses on the device after steps."""
    with backend.strict():
        components, losses = _train(backend, place, data)
    assert set(backend.placement(components).values()) == {place}
    assert [backend.device_of(loss) for loss in losses] == [place] * STEPS


@requirement("train.changes-the-parameters", section=SECTION)
def test_a_training_step_changes_the_parameters(backend, place, data):
    """Change the parameters in a step.

    A loss that falls may come from the data alone.
    """
    learner = _learner(backend, place)
    before = values_of(backend, learner.sync()["model"])
    x, y = (backend.asarray(array, device=place) for array in data)
    learner.step((x,), y)
    after = values_of(backend, learner.sync()["model"])
    assert any(not np.array_equal(after[name], value) for name, value in before.items())


@requirement("train.same-losses", section=SECTION)
def test_the_losses_are_those_of_the_cpu(backend, place, data, on_the_cpu):
    """Compute on each device the losses of the CPU, to rounding."""
    losses = [float(backend.to_numpy(loss)) for loss in _train(backend, place, data)[1]]
    # Devices add in other orders, and a few steps multiply the difference.
    np.testing.assert_allclose(losses, on_the_cpu, rtol=1e-4)


@requirement("train.same-bits", section=SECTION, source="contract, Virtual GPUs")
@pytest.mark.usefixtures("virtual")
def test_virtual_gpus_compute_like_the_cpu(backend, route, data):
    """Compute on virtual GPUs the parameters of the CPU, bit for bit.

    Both compute with the same processor.
    """
    _, target = route
    there, on_cpu = (_train(backend, device, data)[0] for device in (target, backend.cpu()))
    assert_same_values(backend, there, values_of(backend, on_cpu))


@requirement("train.state-follows", section=SECTION)
def test_a_move_between_two_steps_changes_nothing(backend, route, data, on_the_cpu):
    """Continue with the same losses after a move between two steps.

    Momentum that stays behind, or is lost, changes the next step.
    """
    source, target = route
    with backend.strict():
        components, losses = _train(backend, source, data, move_to=target)
    assert set(backend.placement(components).values()) == {target}
    values = [float(backend.to_numpy(loss)) for loss in losses]
    np.testing.assert_allclose(values, on_the_cpu, rtol=1e-4)


@requirement("train.data-from-elsewhere-raises", section=SECTION, source="D2L")
def test_a_step_with_data_on_another_device_raises(backend, route, data):
    """Raise in a strict step with inputs on another device."""
    source, target = route
    learner = _learner(backend, source)
    x, y = (backend.asarray(array, device=target) for array in data)
    with pytest.raises(DeviceMismatchError), backend.strict():
        learner.step((x,), y)


@requirement(
    "train.targets-from-elsewhere-raise", section=SECTION, source="contract, Mixing devices"
)
def test_a_step_with_targets_on_another_device_raises(backend, route, data):
    """Raise in a strict step with targets on another device.

    A scalar loss hides where its operands were.
    """
    source, target = route
    learner = _learner(backend, source)
    x, y = backend.asarray(data[0], device=source), backend.asarray(data[1], device=target)
    with pytest.raises(DeviceMismatchError), backend.strict():
        learner.step((x,), y)


# -- losses and gradients --------------------------------------------------------------------------


@requirement("train.refuses-other-shapes", section=SECTION)
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_targets_that_would_be_broadcast_are_refused(backend, place, method):
    """Refuse targets whose shape would be broadcast against the prediction.

    ``(4, 1)`` against ``(4,)`` is a matrix of 16 errors, and learns the mean.
    """
    learner = backend.learner(backend.mlp([2, 1], device=place))
    x, y = backend.ones((4, 2), device=place), backend.ones(4, device=place)
    with pytest.raises(UnsupportedValueError, match=r"\(4, 1\).*\(4,\)"):
        getattr(learner, method)((x,), y)


@requirement("train.refuses-losses-that-are-no-scalar", section=SECTION)
@WITH_OWN_LOSS
@pytest.mark.parametrize(
    "loss",
    [
        lambda p, y: (p - y) ** 2,
        lambda *_: 1.0,
        lambda p, y: (p[0, 0] - y[0, 0], p[0, 0]),
        lambda p, y: WeightedLoss((p - y) ** 2, 4),
        lambda p, y: WeightedLoss(p[0, 0] - y[0, 0], y),
        lambda p, y: WeightedLoss(p[0, 0] - y[0, 0], -4),
    ],
    ids=["rows", "1.0", "tuple", "sums", "weights", "negative"],
)
def test_a_loss_that_is_not_a_scalar_is_refused_and_nothing_changes(backend, place, loss):
    """Refuse a loss that is not a scalar tensor, or of a negative weight, and change nothing.

    Frameworks sum over the rows, or fail without a name.
    """
    net = backend.mlp([2, 1], device=place)
    before = values_of(backend, net)
    x, y = backend.ones((4, 2), device=place), backend.ones((4, 1), device=place)
    with pytest.raises(UnsupportedValueError, match="loss"):
        backend.learner(net, loss=loss).step((x,), y)
    after = values_of(backend, net)
    assert all(np.array_equal(after[name], value) for name, value in before.items() if value.any())


class WithReduction:
    """A loss that names its reduction, as those of torch and Keras do."""

    def __init__(self, reduction):
        self.reduction = reduction

    def __call__(self, prediction, y):
        return (prediction[0, 0] - y[0, 0]) ** 2


def take_reduction(prediction, y, reduction):
    """Return a loss by its reduction, as the functions of ``torch.nn.functional`` do."""
    return WithReduction(reduction)(prediction, y)


@requirement("train.refuses-sums", section=SECTION, source="contract, Training")
@WITH_OWN_LOSS
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_loss_that_is_no_mean_is_refused_in_several_batches(backend, reduction, is_partial):
    """Refuse a loss whose ``reduction`` differs from a mean if several batches make a step.

    Its sums would be averaged.
    """
    net, loss = backend.mlp([2, 1]), WithReduction(reduction)
    if is_partial:
        loss = partial(take_reduction, reduction=reduction)
    with pytest.raises(UnsupportedValueError, match=reduction):
        backend.learner(net, loss=loss, accumulate_grad_batches=2)
    learner = backend.learner(net, loss=loss)
    learner.step((backend.ones((4, 2)),), backend.zeros((4, 1)))


@requirement("train.passes-on-what-is-no-number", section=SECTION)
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_value_that_is_not_a_number_passes_through(backend, place, clip):
    """Let NaN pass into the loss and the parameters, clipped or not.

    A hidden NaN is found days later.
    """
    net = backend.mlp([2, 1], device=place)
    learner = backend.learner(net, gradient_clip_val=clip)
    x = backend.full((4, 2), float("nan"), device=place)
    loss, _ = learner.step((x,), backend.zeros((4, 1), device=place))
    assert np.isnan(backend.to_numpy(loss))
    prediction = learner.sync()["model"](backend.zeros((1, 2), device=place))
    assert np.isnan(backend.to_numpy(prediction)).all()


@requirement("train.binary-cross-entropy", section=SECTION, source="PyTorch, BCEWithLogitsLoss")
@pytest.mark.parametrize("logit", [-200.0, -3.0, 0.0, 2.0, 15.0, 200.0])
@pytest.mark.parametrize("y", [0.0, 0.25, 1.0])
def test_binary_cross_entropy_and_its_gradient_are_right_for_every_logit(backend, place, logit, y):
    """Compute binary cross-entropy and its gradient for each logit from -200 to 200.

    The plain formula overflows.
    """
    net = backend.mlp([1, 1], device=place)
    weight = backend.to_numpy(net(backend.ones((1, 1), device=place)))
    learner = backend.learner(net, loss="bce", lr=1.0)
    x = backend.asarray((logit / weight).astype("float32"), device=place)
    loss, prediction = learner.step((x,), backend.full((1, 1), y, device=place))
    found = float(backend.to_numpy(prediction)[0, 0])
    expected = y * np.logaddexp(0, -found) + (1 - y) * np.logaddexp(0, found)
    np.testing.assert_allclose(backend.to_numpy(loss), expected, rtol=1e-5, atol=1e-30)
    bias = backend.to_numpy(learner.sync()["model"](backend.zeros((1, 1), device=place)))[0, 0]
    np.testing.assert_allclose(bias, y - 1 / (1 + np.exp(-found)), rtol=1e-5, atol=1e-7)


# From inputs of 0 a line learns only its bias, which begins at 0. Its gradient is twice the target.
@requirement("train.clips-as-torch-does", section=SECTION, source="PyTorch, clip_grad_norm_")
@pytest.mark.parametrize(
    ("norm", "clip"), [(2.0, 4.0), (2.0, 0.5), (2e-6, 1e-6)], ids=["below", "above", "tiny"]
)
def test_gradients_are_divided_by_their_norm_plus_a_millionth(backend, place, norm, clip):
    """Divide clipped gradients by their norm plus a millionth."""
    net = backend.mlp([2, 1], device=place)
    learner = backend.learner(net, lr=1.0, gradient_clip_val=clip)
    x = backend.zeros((4, 2), device=place)
    learner.step((x,), backend.full((4, 1), norm / 2, device=place))
    bias = backend.to_numpy(learner.sync()["model"](x))[0, 0]
    np.testing.assert_allclose(bias, norm * min(1, clip / (norm + 1e-6)), rtol=1e-4)


# -- batches that share a step ---------------------------------------------------------------------


def _quarters(backend, device, data):
    """Return the data in four batches of one size."""
    parts = (np.split(array, 4) for array in data)
    return [
        tuple(backend.asarray(array, device=device) for array in batch)
        for batch in zip(*parts, strict=True)
    ]


def _accumulate(backend, device, accumulate_grad_batches=1, clip=0.0):
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    return backend.learner(
        net,
        optimizer="momentum",
        lr=0.1,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate_grad_batches,
    )


@requirement("train.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks")
def test_a_step_is_computed_without_a_wait(backend, place, data):
    """Compute each batch of a step, and each evaluation, although nobody waits for it.

    A loop that only records its work keeps all its batches in memory.
    """
    learner, kept = _accumulate(backend, place, 4), []
    for x, y in _quarters(backend, place, data):
        kept.append(learner.step((x,), y))
        assert becomes_idle(backend, place)
    kept += learner.evaluate((x,), y), learner.predict((x,))
    assert becomes_idle(backend, place)


@requirement("train.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks")
def test_running_statistics_are_computed_without_a_wait(backend, normalized_network):
    """Compute the running statistics of each step, although nobody reads them.

    The next step changes them again, so that their record would grow with each one.
    """
    net = networks_with_batch_norm(backend)[normalized_network](backend.cpu())
    learner = backend.learner(net, optimizer="sgd", lr=0.05)
    learner.step((backend.rand((8, 4), seed=0),), backend.rand((8, 2), seed=1))
    assert becomes_idle(backend, backend.cpu())


def _assert_same_model(backend, found, expected):
    for learner in (found, expected):
        learner.sync()
    after = read_saved_values(backend, expected.sync()["model"])
    for name, value in read_saved_values(backend, found.sync()["model"]).items():
        np.testing.assert_allclose(value, after[name], rtol=1e-5, atol=1e-7, err_msg=name)


def _assert_values(backend, model, expected):
    for name, value in read_saved_values(backend, model).items():
        np.testing.assert_array_equal(value, expected[name])


@requirement("train.accumulates", section=SECTION)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_accumulated_batches_equal_one_large_batch(backend, place, data, clip):
    """Make one step from accumulated batches, equal to that of one large batch.

    A model trains with batches that do not fit at once.
    """
    found = _accumulate(backend, place, 4, clip)
    before = read_saved_values(backend, found.sync()["model"])
    expected = _accumulate(backend, place, 1, clip)
    x, y = (backend.asarray(array, device=place) for array in data)
    for _ in range(2):
        expected.step((x,), y)
        for quarter, target in _quarters(backend, place, data):
            _assert_values(backend, found.sync()["model"], before)
            found.step((quarter,), target)
        _assert_same_model(backend, found, expected)
        before = read_saved_values(backend, found.sync()["model"])
    assert found.pending == 0


def _take_weighted(prediction, y):
    """Return squares, each with the weight in the second column of the target."""
    rows = range(y.shape[0])
    squares = [(prediction[i, 0] - y[i, 0]) ** 2 * y[i, 1] for i in rows]
    return WeightedLoss(sum(squares), sum(y[i, 1] for i in rows))


def _take_mean(prediction, y):
    """Return the mean of squares."""
    rows = range(y.shape[0])
    return sum((prediction[i, 0] - y[i, 0]) ** 2 for i in rows) / len(rows)


class _Weighing:
    """Batches whose losses weigh differently: of 5, 4, 1 and 3 examples, the second of weight 0.

    Args:
        backend, place: where they are.
        kind: what weighs.
    """

    def __init__(self, backend, place, kind):
        self._backend, self._place = backend, place
        draw = np.random.default_rng(0)
        self._x = draw.standard_normal((13, 2)).astype("float32")
        self._y = draw.random((13, 3)).astype("float32")
        self.loss = {"own": _take_weighted, "mean": _take_mean}.get(kind, kind.split()[0])
        if self.loss == "cross_entropy":
            self._y = self._y.argmax(-1).astype("int32")
        weights = np.array([1, 2, 0, 0.5, 3, 0, 0, 0, 0, 2, 1, 0, 1], "float32")
        self._weights = weights if kind.endswith("weights") else None
        if kind.endswith("labels"):
            self._y[weights == 0] = -100
        if kind == "own":
            self._y = np.stack([self._y[:, 0], weights], 1)

    def take(self, *rows):
        """Return the operands of a step."""
        part = slice(*rows)
        x, y = (self._backend.asarray(a[part], device=self._place) for a in (self._x, self._y))
        if self._weights is not None:
            y = Weighted(y, self._backend.asarray(self._weights[part], device=self._place))
        return (x,), y

    def learn(self, steps, **options):
        """Return a learner after steps from these rows."""
        net = self._backend.mlp([2, 3], device=self._place)
        options = {"loss": self.loss, "optimizer": "momentum", "lr": 0.2, **options}
        learner = self._backend.learner(net, **options)
        for rows in steps:
            learner.step(*self.take(*rows))
        learner.flush()
        return learner


@requirement("train.accumulates-by-weight", section=SECTION)
@needs_float32
@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        *(("mse", 0.0), ("bce", 0.0), ("cross_entropy", 0.0), ("cross_entropy labels", 0.0)),
        *(("mse weights", 0.0), ("bce weights", 0.0), ("cross_entropy weights", 0.0)),
        # A clipped gradient has lost its length, and shows its direction alone.
        *(("mse", 0.05), ("cross_entropy labels", 0.05)),
        pytest.param("own", 0.0, marks=WITH_OWN_LOSS),
        pytest.param("mean", 0.0, marks=WITH_OWN_LOSS),
    ],
)
def test_accumulated_batches_count_by_the_weights_of_their_losses(backend, place, kind, clip):
    """Count each accumulated batch by what its mean is taken over.

    Labels that are left out, weights of examples and uneven batches must change no step. A loss of
    the user's may tell its weight, and a mean counts by its examples.
    """
    data = _Weighing(backend, place, kind)
    options = {"gradient_clip_val": clip}
    pieces = [(0, 5), (5, 9), (9, 10), (10, 13)]
    found = data.learn(pieces, accumulate_grad_batches=6, **options)
    _assert_same_model(backend, found, data.learn([(0, 13)], **options))
    # Batches of weight 0 alone change nothing, and give no NaN.
    if kind not in ("mse", "bce", "cross_entropy", "mean"):
        before = read_saved_values(backend, backend.mlp([2, 3], device=place))
        still = data.learn([(5, 7), (7, 9)], accumulate_grad_batches=2, **options)
        for name, value in read_saved_values(backend, still.sync()["model"]).items():
            np.testing.assert_allclose(value, before[name], atol=1e-7, err_msg=name)


@requirement("train.accumulates-what-is-left", section=SECTION)
@needs_float32
def test_the_mean_is_taken_of_as_many_batches_as_there_are(backend, place, data):
    """Take the mean over as many batches as have accumulated.

    Dividing by the full number shortens the last step.
    """
    found, expected = _accumulate(backend, place, 3), _accumulate(backend, place)
    for x, y in _quarters(backend, place, data):
        found.step((x,), y)
    assert found.pending == 1
    found.flush()
    assert found.pending == 0
    for part in (slice(12), slice(12, 16)):
        x, y = (backend.asarray(array[part], device=place) for array in data)
        expected.step((x,), y)
    _assert_same_model(backend, found, expected)
    before = read_saved_values(backend, found.sync()["model"])
    found.flush()
    _assert_values(backend, found.sync()["model"], before)


@requirement("train.accumulates-in-a-move", section=SECTION)
def test_gradients_that_wait_for_a_step_move_with_the_model(backend, route, data):
    """Move accumulated gradients along with the model.

    Half of a step would be lost.
    """
    source, target = route
    found, expected = _accumulate(backend, source, 4), _accumulate(backend, target)
    there = _quarters(backend, target, data)
    with backend.strict():
        for x, y in _quarters(backend, source, data)[:2]:
            found.step((x,), y)
        found.replace(backend.place(found.sync(), target))
        for x, y in there[2:]:
            found.step((x,), y)
    x, y = (backend.asarray(array, device=target) for array in data)
    expected.step((x,), y)
    _assert_same_model(backend, found, expected)


# -- layers that a step does not use ---------------------------------------------------------------


@requirement("train.leaves-unused-parameters", section=SECTION)
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_a_layer_that_a_step_does_not_use_stays_as_it_is(
    backend, place, data, model_with_branches, optimizer, accumulate_grad_batches
):
    """Leave a layer that a step does not use as it is, with its state in the optimizer.

    A gradient of zeros would decay its values and its moments.
    """

    def learn(sizes):
        net = models_with_branches(backend)[model_with_branches](place)
        options = {"accumulate_grad_batches": accumulate_grad_batches, "lr": 0.1}
        learner = backend.learner(net, optimizer=optimizer, **options)
        found = []
        for size in sizes:
            x, y = (backend.asarray(array[:size], device=place) for array in data)
            for _ in range(accumulate_grad_batches):
                learner.step((x,), y)
            found.append(read_saved_values(backend, learner.sync()["model"]))
        return found

    first, second, third = learn([8, 3, 8])
    by_small = {name for name in first if not np.array_equal(first[name], second[name])}
    by_large = {name for name in first if not np.array_equal(second[name], third[name])}
    assert by_small
    assert by_large
    assert not by_small & by_large
    if optimizer in ("sgd", "momentum", "adagrad"):  # the others may count the steps of all
        _, expected = learn([8, 8])
        for name in by_large:
            np.testing.assert_array_equal(third[name], expected[name])


@requirement("train.adds-up-repeated-rows", section=SECTION)
@needs_float32
@pytest.mark.parametrize(("accumulate_grad_batches", "clip"), [(1, 0), (2, 0.05)])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "adagrad"])
def test_a_token_that_repeats_has_one_gradient(
    backend, place, table, optimizer, accumulate_grad_batches, clip
):
    """Take the rows of a token that repeats in a batch for one gradient, which is their sum.

    An optimizer that squares each row alone learns other numbers than one that squares the sum.
    """
    found = []
    for batches in make_repeated_tokens():
        net = models_with_tables(backend)[table](place)
        options = {"accumulate_grad_batches": accumulate_grad_batches, "gradient_clip_val": clip}
        learner = backend.learner(net, optimizer=optimizer, lr=0.1, **options)
        for batch in batches:
            parts = (np.array_split(array, accumulate_grad_batches) for array in batch)
            for arrays in zip(*parts, strict=True):
                x, y = (backend.asarray(array, device=place) for array in arrays)
                learner.step((x,), y)
        found.append(read_saved_values(backend, learner.sync()["model"]))
    assert_near(*found)


# -- weights ---------------------------------------------------------------------------------------


@requirement("train.weighs-examples", section=SECTION)
@needs_float32
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "bce"])
@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_an_example_of_weight_three_counts_as_three_do(backend, place, loss, kind):
    """Count an example of weight 3 as three examples, in each loss.

    A weight of another dtype must not change the mean.
    """
    weights = np.array([1, 2, 0, 3])
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((4, 2)).astype("float32")
    y = draw.random((4, 3), "float32")
    if loss == "cross_entropy":
        y = y.argmax(-1).astype("int32")
    weighted, repeated = (
        backend.learner(backend.mlp([2, 3], device=place), loss=loss, lr=0.5) for _ in range(2)
    )
    x, target, w = (
        backend.asarray(array, device=place) for array in (inputs, y, weights.astype(kind))
    )
    many, targets = (
        backend.asarray(array.repeat(weights, axis=0), device=place) for array in (inputs, y)
    )
    for method in ("step", "evaluate"):
        found, _ = getattr(weighted, method)((x,), Weighted(target, w))
        expected, _ = getattr(repeated, method)((many,), targets)
        np.testing.assert_allclose(*map(backend.to_numpy, (found, expected)), rtol=1e-5)
    _assert_same_model(backend, weighted, repeated)


@requirement("train.weighs-steps-of-sequences", section=SECTION)
def test_weights_of_more_axes_are_those_of_the_steps_of_sequences(backend, place):
    """Weigh the steps of sequences by weights with more axes.

    Padding is masked step by step.
    """
    (build,) = models_of_sequences(backend).values()
    learner = backend.learner(build(place))
    draw = np.random.default_rng(0)
    inputs, y = (draw.random((4, 5, size), "float32") for size in (2, 3))
    mask = draw.random((4, 5)) < 0.5
    x, target, weights = (
        backend.asarray(array, device=place) for array in (inputs, y, mask.astype("float32"))
    )
    loss, prediction = learner.evaluate((x,), Weighted(target, weights))
    expected = np.mean((backend.to_numpy(prediction) - y)[mask] ** 2)
    np.testing.assert_allclose(backend.to_numpy(loss), expected, rtol=1e-5)


@requirement("train.leaves-out-weights-of-zero", section=SECTION)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy", "bce"])
@pytest.mark.parametrize("kind", ["float32", "bool"])
def test_an_example_of_weight_zero_may_have_any_target(backend, place, loss, kind):
    """Ignore the target of an example of weight 0, also NaN.

    0 times NaN is NaN, and would spread to all parameters.

    Padding is an example: its loss is infinite or NaN, and so would be 0 times its loss.
    """
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((4, 2)).astype("float32")
    y, padding = draw.random((4, 3), "float32"), np.float32("nan")
    if loss == "cross_entropy":
        y, padding = y.argmax(-1).astype("int32"), np.int32(-1)
    padded = y.copy()
    padded[:2] = padding
    weights = np.array([0, 0, 1, 3], kind)
    found, expected = (
        backend.learner(backend.mlp([2, 3], device=place), loss=loss, lr=0.5) for _ in range(2)
    )
    losses = []
    for learner, target in ((found, padded), (expected, y)):
        x, target, w = (backend.asarray(a, device=place) for a in (inputs, target, weights))
        results = [
            getattr(learner, each)((x,), Weighted(target, w)) for each in ("step", "evaluate")
        ]
        losses.append([backend.to_numpy(value) for value, _ in results])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    _assert_same_model(backend, found, expected)


@requirement("train.refuses-other-weights", section=SECTION)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 2), (4, 1, 1)], ids=str)
def test_weights_that_are_not_those_of_the_examples_are_refused(backend, place, shape):
    """Refuse weights whose shape does not match the examples.

    Broadcast weights weigh other examples.
    """
    learner = backend.learner(backend.mlp([2, 1], device=place))
    x, y = backend.ones((4, 2), device=place), backend.ones((4, 1), device=place)
    with pytest.raises(UnsupportedValueError, match="weigh the examples"):
        learner.step((x,), Weighted(y, backend.ones(shape, device=place)))


# -- fewer bits ------------------------------------------------------------------------------------

precisions = pytest.mark.parametrize("precision", ["bf16", "fp16"])


@requirement(
    "train.computes-in-fewer-bits", section=SECTION, source="PyTorch, automatic mixed precision"
)
@needs_float32
@precisions
@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_fewer_bits_lose_digits_and_the_prediction_is_float32(backend, place, precision, method):
    """Compute in bf16 or fp16 if asked, and return float32."""
    one, y = backend.ones((1, 1), device=place), backend.zeros((1, 1), device=place)
    more = backend.full((1, 1), 1 + 2.0**-12, device=place)
    is_same = []
    for chosen in (precision, "model"):
        learner = backend.learner(backend.mlp([1, 1], device=place), lr=0.0, precision=chosen)
        results = [getattr(learner, method)((x,), y) for x in (one, more)]
        assert {backend.dtype_of(x) for result in results for x in result} == {"float32"}
        is_same.append(len({backend.to_numpy(prediction).item() for _, prediction in results}) == 1)
    assert is_same == [True, False]


@requirement("train.names-of-precisions", section=SECTION, source="Lightning, precision")
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        (16, "fp16"),
        ("32-true", "model"),
        ("32", "model"),
    ],
)
def test_a_precision_has_lightnings_name_too(backend, place, name, own):
    """Compute in the precision that Lightning's name says.

    Programs for Lightning have these names.
    """
    x = backend.full((1, 1), 1 + 2.0**-12, device=place)
    values = []
    for precision in (name, own):
        learner = backend.learner(backend.mlp([1, 1], device=place), lr=0.0, precision=precision)
        assert learner.settings.precision == own
        values.append(backend.to_numpy(learner.predict((x,))).item())
    assert values[0] == values[1]


@requirement("train.refuses-converting-precisions", section=SECTION, source="Lightning, precision")
@pytest.mark.needs("train")
@pytest.mark.parametrize("name", ["bf16-true", "16-true", "64-true", "64", 64])
def test_a_precision_that_converts_parameters_is_refused(backend, name):
    """Refuse a precision that converts the parameters, and say so.

    Computing in fewer bits is another thing, and the name would look like a misspelt one.
    """
    with pytest.raises(UnsupportedValueError, match=r"it converts the parameters to .*float"):
        backend.learner(backend.mlp([1, 1]), precision=name)


@requirement(
    "train.learns-in-fewer-bits", section=SECTION, source="PyTorch, automatic mixed precision"
)
@precisions
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_the_loss_in_fewer_bits_is_near_that_in_float32_and_falls(
    backend, place, data, precision, accumulate_grad_batches
):
    """Reduce the loss in fewer bits, from nearly the same first loss."""
    losses = []
    for chosen in (precision, "model"):
        net = backend.mlp([2, 8, 1], activation="tanh", device=place)
        learner = backend.learner(
            net,
            optimizer="adam",
            lr=0.05,
            accumulate_grad_batches=accumulate_grad_batches,
            precision=chosen,
        )
        x, y = (backend.asarray(array, device=place) for array in data)
        # In float16 the first ones are left out, until the factor of the gradients is small enough.
        found = [backend.to_numpy(learner.step((x,), y)[0]) for _ in range(32)]
        losses.append([float(loss) for loss in found])
    (first, *_, last), (expected, *_) = losses
    np.testing.assert_allclose(first, expected, rtol=0.02)
    assert last < 0.9 * first


@requirement(
    "train.keeps-parameters-in-float32",
    section=SECTION,
    source="PyTorch, automatic mixed precision",
)
@needs_float32
@precisions
def test_a_change_that_fewer_bits_would_lose_is_kept(backend, place, precision):
    """Keep a change of a parameter that fewer bits would lose.

    Small steps add up only in float32.
    """
    net = backend.mlp([1, 1], device=place)
    one = backend.ones((1, 1), device=place)
    before = backend.to_numpy(net(one)).item()
    y = backend.full((1, 1), before + 0.2, device=place)
    learner = backend.learner(net, lr=1e-5, precision=precision)
    learner.step((one,), y)
    learner.sync()
    # By the weight and the bias, each by twice the error.
    change = backend.to_numpy(learner.sync()["model"](one)).item() - before
    np.testing.assert_allclose(change, 2e-5 * 2 * 0.2, rtol=0.1)


@requirement(
    "train.keeps-parameters-in-float32",
    section=SECTION,
    source="PyTorch, automatic mixed precision",
)
@precisions
def test_everything_in_a_network_keeps_its_dtype(backend, place, precision, examples, network):
    """Keep the dtype of all that a network has.

    Statistics in 10 bits stop moving.
    """
    net = networks(backend)[network](place)
    learner = backend.learner(net, loss="cross_entropy", optimizer="adam", precision=precision)
    x, y = (backend.asarray(array, device=place) for array in examples)
    found = []
    for _ in range(2):
        learner.step((x,), y)
        learner.evaluate((x,), y)
        learner.sync()
        found.append({n: v.dtype for n, v in values_of(backend, learner.sync()["model"]).items()})
    assert found[0] == found[1]
    assert {"float16", "bfloat16"}.isdisjoint(map(str, found[0].values()))


# From inputs of 0 a line learns only its bias, which begins at 0. Its gradient is twice the target.
@requirement(
    "train.learns-from-small-gradients",
    section=SECTION,
    source="PyTorch, automatic mixed precision",
)
@precisions
def test_gradients_that_are_0_in_float16_are_learnt_from(backend, place, precision):
    """Learn from gradients that are 0 in float16."""
    learner = backend.learner(backend.mlp([2, 1], device=place), lr=1.0, precision=precision)
    x = backend.zeros((4, 2), device=place)
    learner.step((x,), backend.full((4, 1), 4e-8, device=place))
    bias = backend.to_numpy(learner.sync()["model"](x))[0, 0]
    np.testing.assert_allclose(bias, 8e-8, rtol=0.01)


@requirement(
    "train.leaves-out-gradients-that-are-too-large",
    section=SECTION,
    source="PyTorch, automatic mixed precision",
)
def test_a_step_whose_gradients_are_too_large_changes_nothing_and_later_ones_do(backend, place):
    """Skip a step whose gradients overflow float16, and make later ones."""
    learner = backend.learner(backend.mlp([2, 1], device=place), lr=1e-4, precision="fp16")
    x, y = backend.zeros((4, 2), device=place), backend.full((4, 1), 1e4, device=place)
    biases = []
    for _ in range(20):
        learner.step((x,), y)
        biases.append(backend.to_numpy(learner.sync()["model"](x))[0, 0])
    assert biases[0] == 0
    assert 0 < biases[-1] < 1e4


@requirement(
    "train.leaves-out-gradients-that-are-too-large",
    section=SECTION,
    source="PyTorch, automatic mixed precision",
)
def test_a_step_that_is_left_out_is_not_counted(backend, place):
    """Count no step that is skipped.

    Adam's first step moves a parameter by the learning rate. A schedule counts with it.
    """
    net = backend.mlp([2, 1], device=place)
    learner = backend.learner(net, optimizer="adam", lr=0.5, precision="fp16")
    x, y = backend.zeros((4, 2), device=place), backend.full((4, 1), 1e4, device=place)
    biases = [0.0]
    while biases[-1] == 0 and len(biases) < 20:
        learner.step((x,), y)
        biases.append(backend.to_numpy(learner.sync()["model"](x))[0, 0])
    assert len(biases) > 2  # the first step is left out
    np.testing.assert_allclose(biases[-1], 0.5, rtol=1e-3)


# -- networks that are not the same in training and in use -----------------------------------------


@pytest.fixture
def examples():
    """Four features and the number of one of two classes."""
    inputs = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
    return inputs, (inputs.sum(1) > 0).astype("int32")


@requirement("train.evaluates-the-model-in-use", section=SECTION, source="D2L 5.6")
def test_evaluation_has_no_dropout_and_no_statistics_of_the_batch(
    backend, place, examples, network
):
    """Evaluate without dropout and without statistics of the batch.

    An answer must not depend on the other rows.
    """
    learner = backend.learner(networks(backend)[network](place), loss="cross_entropy", lr=0.0)
    x, y = (backend.asarray(array, device=place) for array in examples)
    drawn = {float(backend.to_numpy(learner.step((x,), y)[0])) for _ in range(3)}
    assert len(drawn) == 3
    before = values_of(backend, learner.sync()["model"])
    found = [learner.evaluate((x,), y) for _ in range(2)]
    (loss, prediction), (same_loss, _) = ([backend.to_numpy(each) for each in two] for two in found)
    assert loss == same_loss
    part = learner.evaluate((x[:4, :],), y[:4])[1]
    # Devices add in other orders for other numbers of rows.
    np.testing.assert_allclose(backend.to_numpy(part), prediction[:4], rtol=1e-4, atol=1e-6)
    assert_same_values(backend, learner.sync()["model"], before)


@requirement("train.leaves-what-is-frozen", section=SECTION)
def test_frozen_parameters_stay_until_they_are_thawed(backend, place, examples, freezable):
    """Leave frozen parameters as they are until they are thawed.

    Fine-tuning trains the last layers only.
    """
    build, freeze = freezables(backend)[freezable]
    learner = backend.learner(build(place), loss="cross_entropy", optimizer="adam")
    x, y = (backend.asarray(array, device=place) for array in examples)
    changed = []
    for is_frozen in (False, True, False):
        freeze(learner.sync()["model"], is_frozen)
        before = read_saved_values(backend, learner.sync()["model"])
        for _ in range(2):
            learner.step((x,), y)
        after = read_saved_values(backend, learner.sync()["model"])
        changed.append({name for name in before if not np.array_equal(before[name], after[name])})
    trained, while_frozen, thawed = changed
    assert set() < while_frozen < trained
    assert thawed == trained
