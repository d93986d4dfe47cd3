"""Single steps of training: how a model is to be trained, and what trains it.

Source: D2L, section 3.2; the optimizers are those of chapter 12, with the same numbers everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, Generic, NamedTuple, NoReturn

from d2ldev.contract.training.batches import Portion
from d2ldev.contract.training.calls import Signature
from d2ldev.errors import CheckpointError, UnsupportedValueError, describe
from d2ldev.options import (
    CONVERSIONS,
    LOSSES,
    OPTIMIZERS,
    OWN_PRECISIONS,
    PRECISIONS,
    STATISTICS,
    Loss,
    OwnPrecision,
    Statistics,
    nearest,
    problem_of,
    write_option,
)
from d2ldev.program import spell
from d2ldev.typing import JSON, Inputs, Target, TensorT

MOMENTUM = 0.9
"""The momentum of ``'momentum'``."""
BETAS = (0.9, 0.999)
"""The decay of the means that ``'adam'`` and ``'adamw'`` keep: of gradients, and of squares."""
ADAM_EPSILON = 1e-8
"""The number that ``'adam'`` and ``'adamw'`` add to the root of the corrected mean of squares.

A framework that adds it before the correction is given ``ADAM_EPSILON * sqrt(1 - BETAS[1]**step)``.
"""
WEIGHT_DECAY = 0.01
"""The fraction of the learning rate by which ``'adamw'`` shortens each parameter in a step."""
ADAGRAD_EPSILON = 1e-10
"""The number that ``'adagrad'`` adds outside the root.

A framework that adds it inside is given the square. So a gradient of 0 is divided by the same
number, and larger gradients differ by rounding only.
"""


class TrainingSettings(NamedTuple):
    """The settings of a training.

    Args:
        loss: ``'mse'``, ``'cross_entropy'``, ``'bce'``, ``'model'``, or a function or an object,
            ``(prediction, y) -> scalar tensor``. Its first parameter may have the name of a
            target, such as ``y_true``, and then the second is the prediction. It may return a
            ``WeightedLoss``. ``'mse'`` is the mean of all squared errors. ``'cross_entropy'`` is
            the mean over all valid labels, 0 if there are none, without a wait for the device. It
            takes integers of shape ``(n, ...)`` and logits of shape ``(n, ..., classes)``.
            ``'bce'`` is the mean
            binary cross-entropy of logits with numbers from 0 to 1, of the same shape.
            ``'model'`` is the model's own loss: the attribute or the key ``loss`` of its output.
        optimizer: ``'sgd'``, ``'momentum'`` (0.9), ``'adam'`` (0.9, 0.999, 1e-8), ``'adamw'`` or
            ``'adagrad'``. Or the framework's own object, with its own learning rate. ``'adamw'`` is
            ``'adam'`` that also shortens every parameter, by 0.01 of the learning rate, in each
            step. None is for a model that is only evaluated.
        lr: the learning rate.
        gradient_clip_val: the largest global norm of the gradients; 0 does not clip.
        accumulate_grad_batches: how many batches make one step of the optimizer, as one batch of
            them all would. Each counts by the weight of its loss.
        precision: ``'bf16'`` or ``'fp16'``: the model computes in it, and its parameters stay in
            float32. The loss and the metrics get its prediction in float32. ``'fp16'`` scales the
            gradients, and skips a step whose gradients are too large. ``'model'`` changes nothing.
            Lightning's names ``'bf16-mixed'``, ``'16-mixed'`` and ``'32-true'`` say the same.
        methods: the names of two methods of the model that return the loss of a batch, for ``step``
            and ``evaluate``. An example is ``('training_step', 'validation_step')``. None uses
            ``loss``.
        batch_norm: batch normalizations use the statistics of the whole batch (``'global'``), or of
            each device's or process's shard (``'local'``). None changes nothing.
    """

    loss: Loss = "mse"
    optimizer: Any = "sgd"
    lr: float = 0.01
    gradient_clip_val: float = 0.0
    accumulate_grad_batches: int = 1
    precision: OwnPrecision = "model"
    methods: tuple[str, str] | None = None
    batch_norm: Statistics | None = None

    def check(self) -> TrainingSettings:
        """Return the settings with Python's own numbers.

        Raises:
            UnsupportedValueError: if they cannot be used.
        """
        if not callable(self.loss):
            other = "(prediction, y) -> scalar tensor"
            names = ", ".join(f"loss={name!r}" for name in LOSSES if name != "model")
            fix = f"one of {names}, or a function of the framework's own"
            _check_choice("loss", self.loss, LOSSES, other, fix)
        # The framework refuses any other name, in its own words.
        if nearest(self.optimizer, OPTIMIZERS):
            _check_choice("optimizer", self.optimizer, OPTIMIZERS, "the framework's own object")
        precision = find_precision(self.precision)
        if self.batch_norm is not None:
            _check_choice("batch_norm", self.batch_norm, STATISTICS, "left out")
        for name, right in (("lr", 0.01), ("gradient_clip_val", 0)):
            if not _is_rate(value := getattr(self, name)):
                problem = "it must be a number, 0 or more"
                raise _refusal(name, value, problem, f"{name}={right}")
        is_whole = isinstance(self.accumulate_grad_batches, Integral) and not isinstance(
            self.accumulate_grad_batches, bool
        )
        if not is_whole or self.accumulate_grad_batches < 1:
            problem = "it must be a number of batches, 1 or more, for each step of the optimizer"
            raise _refusal(
                "accumulate_grad_batches",
                self.accumulate_grad_batches,
                problem,
                "accumulate_grad_batches=4, or leave it out",
            )
        if self.methods is not None and not (
            isinstance(self.methods, tuple)
            and len(self.methods) == 2
            and all(isinstance(name, str) for name in self.methods)
        ):
            problem = "it must be a tuple with the names of two methods of the model"
            fix = "methods=('training_step', 'validation_step')"
            raise _refusal("methods", self.methods, problem, fix)
        if precision != "model" and self.methods is not None:
            raise UnsupportedValueError(
                f"train a model with its own {self.methods[0]} with precision={self.precision!r}",
                "the method chooses its own dtypes",
                "leave precision out, and compute in fewer bits in the method",
            )
        return self._replace(
            precision=precision,
            lr=float(self.lr),
            gradient_clip_val=float(self.gradient_clip_val),
            accumulate_grad_batches=int(self.accumulate_grad_batches),
        )


class Learner(ABC, Generic[TensorT]):
    """A model in training, one step after the other, on its device.

    Args:
        settings: of the training, already checked.

    Attributes:
        pending: the number of batches since the last step of the optimizer; always 0 without
            ``accumulate_grad_batches``.
        portion: the shard of its batch that the next ``step`` gets. It is set before each step if
            several processes train together, and is None otherwise.
        batch: the number of the batch that the next ``step`` or ``evaluate`` gets. The Trainer
            counts from 0 in each epoch. The error of a label names it; None names none.
        weight: the weight of the loss that the last ``step`` or ``evaluate`` returned, in a mean
            over batches. A scalar on the device of the loss. With None the batch counts by the
            elements of its target. With a loss that returns a mean it counts by its examples.

    >>> net = backend.mlp([2, 1], device='gpu:0')
    >>> learner = backend.learner(net, lr=0.1)
    >>> X, y = backend.ones((4, 2), device='gpu:0'), backend.zeros((4, 1), device='gpu:0')
    >>> for _ in range(3):
    ...     loss, prediction = learner.step((X,), y)
    >>> learner.check_labels()                          # for 'cross_entropy': waits, and may raise
    >>> components = learner.sync()                     # the user's model is as after the last step
    >>> learner.predict((X,)).shape
    (4, 1)
    """

    weight: Any = None

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.pending = 0
        self.portion: Portion | None = None
        self.batch: int | None = None
        if settings.optimizer is None:
            # In place of the framework's own, which need not ask then.
            vars(self)["step"] = self._refuse_step

    def __repr__(self) -> str:
        usual = TrainingSettings()._asdict()
        shown_always = ("loss", "optimizer", "lr")
        given = ", ".join(
            f"{name}={_in_short(value)}"
            for name, value in self.settings._asdict().items()
            if name in shown_always or value != usual[name]
        )
        return f"{type(self).__name__}({given})"

    def __reduce__(self) -> NoReturn:
        raise UnsupportedValueError(
            f"copy or pickle {self!r}",
            "a learner trains one model, in one process",
            "learner.sync(), whose model and optimizer can be copied; then backend.learner(model)",
        )

    def _refuse_step(self, inputs: Inputs, y: Target[TensorT]) -> tuple[TensorT, Any]:
        raise UnsupportedValueError(
            "take a step of training",
            "the learner was made with is_trained=False, and has no optimizer",
            "backend.learner(model, optimizer='sgd')",
        )

    @abstractmethod
    def sync(self) -> dict[str, Any]:
        """Bring the user's own model and optimizer to the state after the last step.

        A framework may run steps on copies of their arrays, or change their modes.

        Returns:
            The components ``{'model': ..., 'optimizer': ...}``, and what else ``replace`` takes and
            a file holds. The optimizer is None as long as it waits for the first batch.
        """

    @abstractmethod
    def replace(self, components: dict[str, Any]) -> None:
        """Continue with these components, as ``place`` or ``load_into`` returned them.

        Args:
            components: with the keys of those that ``sync`` returns.
        """

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """Return the inputs with which the model is called; see ``read_signature``.

        They are those of the model behind wrappers, such as a compiled one. Each method that
        is given inputs gives the model ``self.signature.arrange(inputs)``. A ``cached_property``
        reads them once.
        """

    @property
    def takes_marks(self) -> bool:
        """Return whether ``step`` and ``evaluate`` take ``Broadcast`` itself, not its value.

        A learner for several devices needs it, to know which values of a batch it does not split.
        ``shard_batch`` splits such a batch, and its shards have no marks. Where the learner does
        not split, it calls ``unwrap_broadcasts(operands, framework.state.kinds)`` itself.
        """
        return False

    @abstractmethod
    def step(self, inputs: Inputs, y: Target[TensorT]) -> tuple[TensorT, Any]:
        """Run one training step on a batch, without waiting for it.

        A lazy framework computes what it returns and what it keeps, in ``evaluate`` and ``predict``
        too: its record would grow with each batch.

        With ``accumulate_grad_batches``, the optimizer takes its step with the last of so many.
        Between two epochs a callback may freeze or unfreeze parameters. So the optimizer has a
        state for all of them. A frozen parameter has the gradient None, and stays as it is.

        Args:
            inputs: the arguments of the model, on its device: a tuple, or a mapping of their names.
                They are ``(batch,)`` with ``TrainingSettings.methods``.
            y: the target, on the same device, or a ``Weighted`` target. None with
                ``TrainingSettings.methods``, and if nothing compares with it.

        Returns:
            The loss before the step, a scalar on the device, and the prediction.
        """

    def flush(self) -> None:
        """Run the optimizer's step for the batches since its last step, if there are any.

        Called at the end of each epoch, whose last batches may be fewer than
        ``accumulate_grad_batches``. A framework whose processes have running statistics of their
        own then takes those of rank 0. The step takes the mean of their gradients, each with the
        weight of its batch: see ``Objective.weigh``.
        """

    @abstractmethod
    def evaluate(self, inputs: Inputs, y: Target[TensorT]) -> tuple[TensorT, Any]:
        """Return the loss and the prediction on one batch, without dropout and gradients.

        The loss is None if the model's own method returned nothing.

        Args:
            inputs, y: see ``step``.
        """

    @abstractmethod
    def predict(self, inputs: Inputs) -> Any:
        """Return the prediction on one batch, without dropout and gradients.

        Args:
            inputs: see ``step``.
        """

    @abstractmethod
    def check_labels(self) -> None:
        """Check the labels of the batches since the last check, and wait for them.

        ``Objective.check_labels`` does it. The Trainer calls it after the first batch of ``fit``,
        and at the end of each epoch. A loop of your own calls it when it wants to know.

        Raises:
            UnsupportedValueError: for a label outside the classes of its prediction. The steps have
                ignored it.
        """

    # -- resuming ---------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        """Return whether the model and the optimizer have all of their tensors.

        A model whose shapes come with the first batch has them only then.
        """
        return True

    def build(self, inputs: Inputs) -> None:
        """Create the tensors of an unbuilt model for the shapes of these inputs; train nothing.

        Args:
            inputs: see ``step``.
        """

    def modes(self) -> JSON:
        """Return the frozen layers and those in evaluation mode, as plain values.

        A callback may change them between two epochs. None if the framework has no modes.
        """
        return None

    def check_modes(self, modes: JSON) -> Callable[[], None]:
        """Return a function that restores ``modes``; nothing changes before you call it.

        Args:
            modes: what ``modes()`` returned.

        Raises:
            CheckpointError: if they are another model's (``state_refusal``).
        """
        return lambda: None


def _in_short(value: object) -> str:
    """Return a setting in a word: an object by its class, which waits for no device."""
    if isinstance(value, (str, int, float, tuple)) or value is None:
        return repr(value)
    return str(getattr(value, "__name__", f"<{type(value).__name__}>"))


def _is_rate(value: object) -> bool:
    """Return whether a value is a number that a float holds, and not negative."""
    try:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return is_number and 0 <= float(value) < float("inf")  # type: ignore[arg-type]
    except OverflowError:  # an integer of 400 digits
        return False


def find_precision(wanted: Any) -> OwnPrecision:
    """Return d2ldev's own name of a precision.

    Args:
        wanted: that name, or Lightning's.

    Raises:
        UnsupportedValueError: for any other value.
    """
    is_name = isinstance(wanted, (str, int))  # anything else may have no hash
    if is_name and wanted in CONVERSIONS:
        raise _refusal(
            "precision",
            wanted,
            f"it converts the parameters to {CONVERSIONS[wanted]}, and a training leaves them "
            "in the dtype of the model",
            f"make a model with {CONVERSIONS[wanted]} parameters, and leave precision out",
        )
    found: OwnPrecision = OWN_PRECISIONS.get(wanted, wanted) if is_name else wanted
    fix = "precision='bf16', precision='fp16', or leave it out for the model's dtype"
    _check_choice("precision", found, PRECISIONS, "left out", fix)
    return found


def _check_choice(
    name: str, value: object, choices: Sequence[str], other: str, fix: str = ""
) -> None:
    """Check a setting that is one of several names; ``other`` is what the caller allows besides."""
    if problem := problem_of(value, choices, other):
        usual = f"{name}={TrainingSettings._field_defaults[name]!r}"
        fix = write_option(name, value, choices, fix or usual)
        raise _refusal(name, value, problem, fix)


def _refusal(name: str, value: object, problem: str, fix: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"train with {name}={describe(value)}", problem, fix)


def optimizer_refusal(
    optimizer: Any,
    kind: str,
    *,
    module: Any,
    path: str,
    arguments: str,
    owns: Callable[[Any], bool],
) -> UnsupportedValueError:
    """Return the error of an optimizer that a framework does not know, with the line that makes it.

    Args:
        optimizer: the user's: an unknown name, a class, or anything else.
        kind: the objects that the framework takes, such as ``'a torch.optim.Optimizer'``.
        module: the module with the framework's optimizers.
        path: the name of the module in a program, such as ``'torch.optim'``.
        arguments: those that make one, such as ``'net.parameters(), lr=0.01'``.
        owns: tells whether a function or a class makes an optimizer: it may try, and raise.
    """
    is_partial = isinstance(optimizer, partial)
    maker = optimizer.func if is_partial else optimizer
    text = optimizer if isinstance(optimizer, str) else getattr(maker, "__name__", "")
    name = _find_own(text, module, owns)
    made = f"{path}.{name}" if name else ""
    problem = f"it is not {kind}"
    near, hint = nearest(text, OPTIMIZERS), ""
    if isinstance(optimizer, str):
        problem = problem_of(optimizer, OPTIMIZERS, kind)
    elif _can_make(maker, owns):
        problem += ", but a call of it makes one, with its own learning rate"
        made = spell(optimizer) or ("" if is_partial else made or text).replace("<lambda>", "")
        if is_partial:
            arguments, near = _without_bound(optimizer, arguments), ""
        if not made:
            made, hint = "make", ", after make = ..."
    elif isinstance(optimizer, type):
        problem = f"it is a class, not {kind}"
    if not made:
        others = (x for x in dir(module) if _can_make(getattr(module, x), owns))
        example = _find_own("sgd", module, owns) or next(others, "")
        fix = f"optimizer={path}.{example}({arguments}), or another one of {path}"
    else:
        fix = f"optimizer={made}({arguments}){hint}"
        fix += f", or optimizer={near!r}" if near else ""
    return UnsupportedValueError(f"train with optimizer={describe(optimizer)}", problem, fix)


def _find_own(text: str, module: Any, owns: Callable[[Any], bool]) -> str:
    """Return the name of a module that a text means, and that makes an optimizer."""
    near = [name for name in dir(module) if nearest(text, [name])]
    return nearest(text, [name for name in near if _can_make(getattr(module, name), owns)])


def _can_make(function: Any, owns: Callable[[Any], bool]) -> bool:
    """Tell whether a function or a class makes an optimizer; an abstract class makes none."""
    try:
        return callable(function) and owns(function)
    except Exception:  # it takes something else
        return False


def _without_bound(function: partial[Any], arguments: str) -> str:
    """Return the text of the arguments that a partial function does not have yet."""
    import inspect

    signature = inspect.signature(function.func)
    bound = {*signature.bind_partial(*function.args, **function.keywords).arguments}
    bound.update(function.keywords)
    # ``net.parameters()`` or a number is by position, and ``lr=0.01`` has its name.
    named = zip(arguments.split(", "), [*signature.parameters, *[""] * 9], strict=False)
    return ", ".join(
        text
        for text, name in named
        if (text.partition("=")[0] if "=" in text else name) not in bound
    )


def state_refusal(kind: str, problem: str) -> CheckpointError:
    """Return the error of a state that is of another ``kind``: ``'model'``, ``'loader'``."""
    return CheckpointError(
        "restore a training state",
        f"it is of another {kind}: {problem}",
        "resume with the model, the optimizer and the loader that the run began with",
    )
