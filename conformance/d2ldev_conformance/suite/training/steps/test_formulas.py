"""D2L 12: a named loss, clipping and a named optimizer compute what their formulas say.

A framework's defaults have other numbers, and its loss falls with them, too.
"""

from __future__ import annotations

import numpy as np
import pytest

from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import needs_float32
from d2ldev_conformance.suite.training.formulas import LOSSES, OPTIMIZERS, Line

SECTION = "6.7.3"
SOURCE = "contract, Training"
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}
"""It is some rounding of float32 in each of ten steps with parameters near 1."""


def _line(backend, device, sizes):
    """Return a model with one layer, and the same one in NumPy."""
    net = backend.mlp(sizes, device=device)
    return net, Line(*_read(backend, net, device, sizes[0]))


def _read(backend, net, device, features):
    """Return the weight and the bias of a model with one layer, from what it computes."""
    x = np.concatenate([np.zeros((1, features)), np.eye(features)]).astype("float32")
    bias, *columns = backend.to_numpy(net(backend.asarray(x, device=device))).astype("float64")
    return np.stack([column - bias for column in columns], 1), bias


def _draw_batches():
    """Return ten batches with gradients of many sizes.

    The gradients of a feature's weights are as large as the feature. So Adam's 1e-8 halves a step,
    and so does the 1e-10 of AdaGrad, while the errors themselves are near 1. They change their
    size and their sign, without which other means of the gradients would be the same.
    """
    draw = np.random.default_rng(0)
    sizes = np.array([1, 1e-4, 2e-8, 2e-10, 0])
    for step in range(10):
        x = (draw.uniform(0.5, 1, (4, 5)) * sizes).astype("float32")
        y = draw.uniform(3, 4, (4, 2)) * (1 + step % 4) * (-1 if step in (3, 4, 8) else 1)
        yield x, y.astype("float32")


@requirement("train.named-optimizers", section=SECTION, source="PyTorch, optimizers")
@needs_float32
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_named_optimizer_follows_its_formula(backend, place, optimizer):
    """Follow the formula of a named optimizer in NumPy for ten steps, with all of its numbers.

    A framework's own defaults are other betas or another epsilon. Some correct no first steps, damp
    the momentum, or decay in the gradient.

    Adam corrects by the number of steps, and not of batches, and the momentum decays with a step.
    """
    net, line = _line(backend, place, [5, 2])
    count = 2 if optimizer in ("adam", "momentum") else 1
    options = {"lr": 0.2, "accumulate_grad_batches": count}
    learner = backend.learner(net, optimizer=optimizer, **options)
    batches = list(_draw_batches())
    for batch in batches:
        for arrays in zip(*(np.split(array, count) for array in batch), strict=True):
            x, y = (backend.asarray(array, device=place) for array in arrays)
            learner.step((x,), y)
    found = _read(backend, learner.sync()["model"], place, 5)
    allowed = []
    for formula in OPTIMIZERS[optimizer]:
        expected = Line(*line.parameters)
        expected.train(formula, 0.2, batches)
        allowed.append(expected.parameters)
    if not any(_are_near(found, each) for each in allowed):
        for value, right in zip(found, allowed[0], strict=True):
            np.testing.assert_allclose(value, right, **TOLERANCE)


def _are_near(found, expected):
    return all(np.allclose(a, b, **TOLERANCE) for a, b in zip(found, expected, strict=True))


@requirement("train.named-losses", section=SECTION, source="PyTorch, loss functions")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_named_loss_follows_its_formula(backend, place, loss):
    """Compute a named loss and its gradient as NumPy does, as the mean over all elements.

    With large logits a plain formula overflows, or loses all digits.
    """
    draw = np.random.default_rng(0)
    net, line = _line(backend, place, [2, 3])
    learner = backend.learner(net, loss=loss, lr=1.0)
    target = draw.random((4, 3), "float32")
    if loss == "cross_entropy":
        target = np.array([0, 1, 2, 1], "int32")
    y, before = backend.asarray(target, device=place), line.parameters[1]
    for size in (1, 300):
        x = backend.asarray(draw.normal(0, size, (4, 2)).astype("float32"), device=place)
        results = [getattr(learner, method)((x,), y) for method in ("evaluate", "step")]
        prediction = backend.to_numpy(results[1][1]).astype("float64")
        expected, error = LOSSES[loss](prediction, target)
        losses = [backend.to_numpy(found) for found, _ in results]
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
        _, after = _read(backend, learner.sync()["model"], place, 2)
        np.testing.assert_allclose(before - after, error.sum(0), rtol=1e-5, atol=1e-6)
        before = after


@requirement("train.clips-as-torch-does", section=SECTION, source="PyTorch, clip_grad_norm_")
@needs_float32
@pytest.mark.parametrize("clip", [20.0, 0.5])
def test_all_gradients_are_divided_by_their_norm_together(backend, place, clip):
    """Divide all gradients by one norm, that of all their elements.

    Clipping each parameter, or each number, changes the direction of a step.
    """
    net, line = _line(backend, place, [2, 3])
    learner = backend.learner(net, lr=1.0, gradient_clip_val=clip)
    inputs = np.array([[1, 2], [3, -1]], "float32")
    target = np.array([[4, 1, -2], [3, 0, 5]], "float32")
    x, y = (backend.asarray(array, device=place) for array in (inputs, target))
    learner.step((x,), y)
    line.train(OPTIMIZERS["sgd"][0], 1.0, [(inputs, target)], clip=clip)
    found = _read(backend, learner.sync()["model"], place, 2)
    for value, right in zip(found, line.parameters, strict=True):
        np.testing.assert_allclose(value, right, **TOLERANCE)


# From inputs of 0 a line learns only its bias, which begins at 0. Its gradient is twice the target.
@requirement(
    "train.clips-in-fewer-bits", section=SECTION, source="PyTorch, automatic mixed precision"
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_that_were_scaled_are_clipped_as_they_are(backend, place, precision):
    """Clip gradients in fewer bits by their own norm, without the factor that keeps them from 0.

    Otherwise a step is thousands of times too short, and the model learns nothing.
    """
    net = backend.mlp([2, 1], device=place)
    learner = backend.learner(net, lr=1.0, gradient_clip_val=0.01, precision=precision)
    x = backend.zeros((4, 2), device=place)
    learner.step((x,), backend.full((4, 1), 0.01, device=place))
    _, bias = _read(backend, learner.sync()["model"], place, 2)
    np.testing.assert_allclose(bias, [0.01], rtol=0.01)
