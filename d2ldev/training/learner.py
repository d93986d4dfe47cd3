"""``Learner``: a model, its loss and its optimizer, as one framework trains them.

It has what differs between frameworks, one step of training, and nothing about epochs, data or
devices; ``Trainer`` has those, and says them once.

Source: D2L, section 3.2; the optimizers are those of chapter 12, with the same numbers everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.training.metrics import comparison

if TYPE_CHECKING:
    from d2ldev.interface import Backend, DeviceLike, Tensor

Loss = str | Callable[[Any, Any], Any]
"""``'mse'``, ``'cross_entropy'``, or ``(prediction, y) -> scalar tensor``.

Or ``(y_true, y_pred) -> scalar tensor``, with these names.
"""

LOSSES = ("mse", "cross_entropy")
OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")

MOMENTUM = 0.9
BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8
# Added beside the root; a framework that adds below it is given the square. So a gradient of 0 is
# divided by the same number, and what is larger cannot be told apart but by the rounding.
ADAGRAD_EPSILON = 1e-10


class Settings(NamedTuple):
    """How a model is to be trained.

    Args:
        loss: ``'mse'`` (the mean of the squared errors), ``'cross_entropy'`` (the mean over all
            labels, which are integers of shape ``(n, ...)``, of logits ``(n, ..., classes)``), or
            ``(prediction, y) -> scalar tensor``. Of a function or an object whose first parameter
            is named ``y_true``, as in Keras, ``y`` is the first.
        optimizer: ``'sgd'``, ``'momentum'`` (0.9), ``'adam'`` (0.9, 0.999, 1e-8), ``'adagrad'``,
            or the framework's own object, whose learning rate is its own.
        lr: the learning rate.
        gradient_clip_val: the largest global norm of the gradients; 0 is no clipping.
    """

    loss: Loss = "mse"
    optimizer: Any = "sgd"
    lr: float = 0.01
    gradient_clip_val: float = 0.0

    def loss_among(
        self, losses: Mapping[str, Callable[[Any, Any], Any]]
    ) -> Callable[[Any, Any], Any]:
        """The loss: a framework's own of that name, or the function that was given.

        Raises:
            UnsupportedValueError: for a metric that keeps a running value.
        """
        return losses[self.loss] if isinstance(self.loss, str) else comparison(self.loss)

    def checked(self) -> Settings:
        """The settings with Python's own numbers; UnsupportedValueError if they cannot be used."""
        if not callable(self.loss) and self.loss not in LOSSES:
            raise UnsupportedValueError(
                f"train with the loss {describe(self.loss)}",
                f"a loss is one of {', '.join(LOSSES)}, or (prediction, y) -> scalar tensor",
                "loss='mse'",
            )
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise UnsupportedValueError(
                f"train with the optimizer {self.optimizer!r}",
                f"an optimizer is one of {', '.join(OPTIMIZERS)}, or the framework's own object",
                "optimizer='sgd'",
            )
        for name in ("lr", "gradient_clip_val"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value < float("inf"):
                raise UnsupportedValueError(
                    f"train with {name}={describe(value)}",
                    "it is a number that is not negative",
                    f"{name}={0.01 if name == 'lr' else 0}",
                )
        return self._replace(lr=float(self.lr), gradient_clip_val=float(self.gradient_clip_val))


def check_shapes(prediction: Iterable[int], y: Iterable[int]) -> None:
    """That ``'mse'`` can be taken: frameworks would subtract each of ``y`` from each prediction.

    Args:
        prediction: the shape of the prediction.
        y: that of what it is compared with.

    Raises:
        UnsupportedValueError: if they are not the same.
    """
    if tuple(prediction) != tuple(y):
        raise UnsupportedValueError(
            "take the squared errors of a prediction",
            f"it is of shape {tuple(prediction)}, and y of shape {tuple(y)}",
            "y.reshape(prediction.shape), or a loss of your own",
        )


def check_labels(prediction: Iterable[int | None], y: Iterable[int | None], dtype: str) -> None:
    """That labels are compared with the logits of their own examples: frameworks would broadcast.

    Args:
        prediction: the shape of the logits, ``(n, ..., classes)``; None is a length that is not
            known yet.
        y: the shape of the labels, ``(n, ...)``.
        dtype: theirs, by name.

    Raises:
        UnsupportedValueError: if there is not one label for each row of logits, or they are no
            integers.
    """
    logits, labels = tuple(prediction), tuple(y)
    rows = logits[:-1]
    attempted = f"compare logits of shape {logits} with labels of shape {labels} and dtype {dtype}"
    known = zip(rows, labels, strict=False)
    if (
        not logits
        or len(rows) != len(labels)
        or any(a != b for a, b in known if None not in (a, b))
    ):
        raise UnsupportedValueError(
            attempted,
            "there is one label for each row of logits, which has one number for each class",
            "y.reshape(prediction.shape[:-1]); y.argmax(-1) of labels that are one-hot",
        )
    if not dtype.startswith(("int", "uint")):
        raise UnsupportedValueError(
            attempted, "a label is the number of a class", "backend.asarray(y, dtype='int64')"
        )


def check_loss(shape: Iterable[int] | None, loss: object) -> None:
    """That a loss is one number; some frameworks would take the gradient of the sum.

    Args:
        shape: its shape; None if it has none.
        loss: what the function returned.

    Raises:
        UnsupportedValueError: if it is none.
    """
    if shape is None or tuple(shape):
        found = describe(loss) if shape is None else f"of shape {tuple(shape)},"
        raise UnsupportedValueError(
            "take a step of training", f"the loss is {found} and no scalar", "loss.mean()"
        )


def refused_state(part: str, problem: str) -> CheckpointError:
    """The error of a state that is of another run.

    Args:
        part: what differs: ``'model'``, ``'optimizer'``, ``'generator'``.
        problem: how.
    """
    return CheckpointError(
        "restore a training state",
        f"it is of another {part}: {problem}",
        "resume with the model and the optimizer that the run began with",
    )


class Learner(ABC):
    """A model that is trained, one step after the other, on the device where it is.

    Args:
        backend: the framework's.
        model: placed already.
        settings: how it is trained; checked already.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        self.backend = backend
        self.settings = settings

    @property
    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """``{'model': ..., 'optimizer': ...}`` as they are after the last step, for ``place``."""

    @property
    @abstractmethod
    def input_names(self) -> tuple[str, ...]:
        """The names of what the model is called with, in order; empty if it does not say."""

    @property
    def takes_mapping(self) -> bool:
        """Whether these are the keys of one mapping, with which the model is called."""
        return False

    @abstractmethod
    def replace(self, parts: dict[str, Any]) -> None:
        """Go on with these parts, as ``place`` returned them."""

    @abstractmethod
    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        """One step of training on one batch, without waiting for it.

        Args:
            inputs: what the model is called with, on its device.
            y: what its prediction is compared with, there too.

        Returns:
            The loss before the step, a scalar on the device, and the prediction.
        """

    @abstractmethod
    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        """The loss and the prediction on one batch, without dropout and without gradients."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, as a nesting that ``save`` takes.

        The model, the optimizer, and the framework's random state as far as it can be read.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned, in this process or an earlier one.

        Raises:
            CheckpointError: if it is the state of another model or optimizer; nothing has
                changed then.
        """

    def _require_parts(self, state: Any, parts: Collection[str]) -> None:
        """Raise a ``CheckpointError`` unless a state has these parts, and no others."""
        if not isinstance(state, Mapping) or state.keys() != set(parts):
            raise CheckpointError(
                "restore a training state",
                f"{describe(state)} is none of a learner of {self.backend.name}",
                "restore what learner.state() returned, with the backend that it is of",
            )

    def hand_back(self) -> None:
        """Leave the user's own model and optimizer as they are after the last step."""
        self.parts  # noqa: B018  # a framework that lends them gives them back when it is asked

    def place(self, device: DeviceLike) -> None:
        """Move the model and the optimizer with its state, between two steps."""
        self.replace(self.backend.place(self.parts, device))
