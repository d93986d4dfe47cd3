"""The named losses, clipping and optimizers in NumPy, in float64, with the sources of the formulas.

A backend is compared with them. The numbers stand here again, so that a change of the contract's
constants is seen, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Line:
    """An affine model with one layer, and its training.

    Args:
        weight, bias: its parameters; the weight has a row for each output.
    """

    def __init__(self, weight: Any, bias: Any) -> None:
        self.parameters = [np.array(weight, "float64"), np.array(bias, "float64")]

    def predict(self, x: Any) -> Array:
        """Return the outputs for rows of features."""
        weight, bias = self.parameters
        outputs: Array = np.asarray(x, "float64") @ weight.T + bias
        return outputs

    def differentiate(self, loss: str, x: Any, y: Any) -> list[Array]:
        """Return the derivatives of a mean loss by the weight and by the bias."""
        error = LOSSES[loss](self.predict(x), np.asarray(y))[1]
        return [error.T @ np.asarray(x, "float64"), error.sum(0)]

    def train(
        self,
        optimizer: Callable[..., Array],
        lr: float,
        batches: Sequence[tuple[Any, Any]],
        *,
        loss: str = "mse",
        clip: float = 0.0,
    ) -> None:
        """Take a step for each batch.

        Args:
            optimizer: a function of ``OPTIMIZERS``.
            lr: the learning rate.
            batches: the features and the target of each.
            loss: a name of ``LOSSES``.
            clip: the largest norm of the gradients; 0 does not clip.
        """
        moments = [(np.zeros_like(x), np.zeros_like(x)) for x in self.parameters]
        for step, (x, y) in enumerate(batches, 1):
            gradients = clip_by_norm(self.differentiate(loss, x, y), clip)
            self.parameters = [
                optimizer(step, lr, *each)
                for each in zip(self.parameters, gradients, moments, strict=True)
            ]


# -- losses ---------------------------------------------------------------------------------------


def take_mse(prediction: Array, y: NDArray[Any]) -> tuple[float, Array]:
    """Return the mean of the squares over all elements, and its derivative.

    Source: torch.nn.MSELoss, with its default reduction, the mean.
    """
    difference = prediction - y
    return float(np.mean(difference**2)), 2 * difference / difference.size


def take_bce(prediction: Array, y: NDArray[Any]) -> tuple[float, Array]:
    """Return the mean of binary cross-entropy over all elements, and its derivative.

    Source: torch.nn.BCEWithLogitsLoss, with its default reduction, the mean.
    """
    losses = y * np.logaddexp(0, -prediction) + (1 - y) * np.logaddexp(0, prediction)
    return float(np.mean(losses)), (np.exp(-np.logaddexp(0, -prediction)) - y) / losses.size


def take_cross_entropy(prediction: Array, y: NDArray[Any]) -> tuple[float, Array]:
    """Return the mean of cross-entropy over all labels, and its derivative.

    Source: torch.nn.CrossEntropyLoss, with its default reduction, the mean.
    """
    logarithms = prediction - np.logaddexp.reduce(prediction, -1, keepdims=True)
    is_class = y[..., np.newaxis] == np.arange(prediction.shape[-1])
    return float(-logarithms[is_class].mean()), (np.exp(logarithms) - is_class) / y.size


LOSSES: dict[str, Callable[[Array, NDArray[Any]], tuple[float, Array]]] = {
    "mse": take_mse,
    "bce": take_bce,
    "cross_entropy": take_cross_entropy,
}


# -- gradients ------------------------------------------------------------------------------------


def clip_by_norm(gradients: Sequence[Array], largest: float) -> list[Array]:
    """Return gradients whose norm, that of all their elements together, is at most ``largest``.

    Source: torch.nn.utils.clip_grad_norm_, with its 1e-6.
    """
    norm = math.sqrt(sum(float(np.sum(each**2)) for each in gradients))
    factor = min(1.0, largest / (norm + 1e-6)) if largest else 1.0
    return [each * factor for each in gradients]


# -- optimizers -----------------------------------------------------------------------------------


Moments = tuple[Array, Array]


def sgd(_step: int, lr: float, x: Array, gradient: Array, _moments: Moments) -> Array:
    """Return a parameter after a step of gradient descent.

    Source: D2L, section 12.4; torch.optim.SGD.
    """
    return x - lr * gradient


def momentum(_step: int, lr: float, x: Array, gradient: Array, moments: Moments) -> Array:
    """Return a parameter after a step with a momentum of 0.9, neither damped nor Nesterov's.

    Source: D2L, section 12.6; torch.optim.SGD.
    """
    velocity, _ = moments
    velocity[...] = 0.9 * velocity + gradient
    return x - lr * velocity


def adam(step: int, lr: float, x: Array, gradient: Array, moments: Moments) -> Array:
    """Return a parameter after a step of Adam: 0.9, 0.999, 1e-8, both moments corrected.

    Source: Kingma and Ba, "Adam" (2015), algorithm 1; torch.optim.Adam.
    """
    first, second = moments
    first[...] = 0.9 * first + 0.1 * gradient
    second[...] = 0.999 * second + 0.001 * gradient**2
    root: Array = np.sqrt(second / (1 - 0.999**step))
    return x - lr * first / (1 - 0.9**step) / (root + 1e-8)


def adamw(step: int, lr: float, x: Array, gradient: Array, moments: Moments) -> Array:
    """Return a parameter after a step of Adam that shortens it by 0.01 of the rate beside it.

    Source: Loshchilov and Hutter, "Decoupled weight decay" (2019); torch.optim.AdamW.
    """
    return adam(step, lr, x * (1 - 0.01 * lr), gradient, moments)


def adagrad(_step: int, lr: float, x: Array, gradient: Array, moments: Moments) -> Array:
    """Return a parameter after a step of AdaGrad, whose sums begin at 0, with 1e-10.

    Source: Duchi, Hazan and Singer (2011); torch.optim.Adagrad.
    """
    _, squares = moments
    squares[...] += gradient**2
    return x - lr * gradient / (np.sqrt(squares) + 1e-10)


def adagrad_inside(_step: int, lr: float, x: Array, gradient: Array, moments: Moments) -> Array:
    """Return a parameter after a step of AdaGrad with the square of the number inside the root.

    The contract allows it beside ``adagrad``.
    """
    _, squares = moments
    squares[...] += gradient**2
    root: Array = np.sqrt(squares + 1e-20)
    return x - lr * gradient / root


OPTIMIZERS: dict[str, tuple[Callable[..., Array], ...]] = {
    "sgd": (sgd,),
    "momentum": (momentum,),
    "adam": (adam,),
    "adamw": (adamw,),
    "adagrad": (adagrad, adagrad_inside),
}
"""The optimizers by name; one of the formulas of a name has to hold."""
