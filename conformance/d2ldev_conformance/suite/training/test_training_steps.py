"""D2L 6.7.3: training happens where the model is, and a move in between changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev import DeviceMismatchError
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import assert_same_values, values_of

SECTION = "6.7.3"
STEPS = 4


@pytest.fixture
def data():
    """A line with a bend, for two features and one output."""
    inputs = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
    return inputs, (inputs.sum(1, keepdims=True) ** 2 - inputs[:, :1]).astype("float32")


def _learner(backend, device):
    net = backend.mlp([2, 8, 1], activation="tanh", device=device)
    return backend.learner(net, optimizer="adam", lr=0.05)


def _trained(backend, device, data, move_to=None):
    """A learner's parts after some steps, with the losses; moved in the middle, if asked to."""
    learner = _learner(backend, device)
    losses = []
    for i in range(STEPS):
        if i == STEPS // 2 and move_to is not None:
            learner.sync()
            learner.replace(backend.place(learner.parts, move_to))
            device = move_to
        x, y = (backend.asarray(array, device=device) for array in data)
        losses.append(learner.step((x,), y)[0])
    return learner.parts, losses


@pytest.fixture
def on_the_cpu(backend, data):
    """The losses of the same steps on the CPU."""
    return [float(backend.to_numpy(loss)) for loss in _trained(backend, backend.cpu(), data)[1]]


@requirement("train.learns", section=SECTION)
def test_the_loss_falls(on_the_cpu):
    assert on_the_cpu[-1] < on_the_cpu[0]


@requirement("train.stays-on-the-device", section=SECTION)
def test_a_training_step_leaves_everything_on_the_device(backend, place, data):
    with backend.strict():
        parts, losses = _trained(backend, place, data)
    assert set(backend.placement(parts).values()) == {place}
    assert [backend.device_of(loss) for loss in losses] == [place] * STEPS


@requirement("train.changes-the-parameters", section=SECTION)
def test_a_training_step_changes_the_parameters(backend, place, data):
    learner = _learner(backend, place)
    before = values_of(backend, learner.parts["model"])
    x, y = (backend.asarray(array, device=place) for array in data)
    learner.step((x,), y)
    learner.sync()
    after = values_of(backend, learner.parts["model"])
    assert any(not np.array_equal(after[name], value) for name, value in before.items())


@requirement("train.same-losses", section=SECTION)
def test_the_losses_are_those_of_the_cpu(backend, place, data, on_the_cpu):
    losses = [float(backend.to_numpy(loss)) for loss in _trained(backend, place, data)[1]]
    # Devices add in other orders, and a few steps multiply what is left of it.
    np.testing.assert_allclose(losses, on_the_cpu, rtol=1e-4)


@requirement("train.same-bits", section=SECTION)
@pytest.mark.usefixtures("virtual")
def test_virtual_gpus_compute_what_the_cpu_computes(backend, route, data):
    _, target = route
    there, on_cpu = (_trained(backend, device, data)[0] for device in (target, backend.cpu()))
    assert_same_values(backend, there, values_of(backend, on_cpu))


@requirement("train.state-follows", section=SECTION)
def test_a_move_between_two_steps_changes_nothing(backend, route, data, on_the_cpu):
    source, target = route
    with backend.strict():
        parts, losses = _trained(backend, source, data, move_to=target)
    assert set(backend.placement(parts).values()) == {target}
    values = [float(backend.to_numpy(loss)) for loss in losses]
    np.testing.assert_allclose(values, on_the_cpu, rtol=1e-4)


@requirement("train.data-from-elsewhere-raises", section=SECTION)
def test_a_step_with_data_from_elsewhere_raises(backend, route, data):
    source, target = route
    learner = _learner(backend, source)
    x, y = (backend.asarray(array, device=target) for array in data)
    with pytest.raises(DeviceMismatchError), backend.strict():
        learner.step((x,), y)


@requirement("train.targets-from-elsewhere-raise", section=SECTION)
def test_a_step_with_targets_from_elsewhere_raises(backend, route, data):
    source, target = route
    learner = _learner(backend, source)
    x, y = backend.asarray(data[0], device=source), backend.asarray(data[1], device=target)
    with pytest.raises(DeviceMismatchError), backend.strict():
        learner.step((x,), y)
