"""The JAX backend's ``Learner``: ``jax.grad``, optax's optimizers, one jitted function per step.

Between two steps the arrays are in two lists of this object, which ``jax.jit`` takes apart in C++:
what a hand-written loop pays for taking Flax's objects apart is paid once. ``parts`` puts the
arrays into the model and the optimizer, which is no copy; the next step takes them from there, so
that what a user changed in between counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from d2ldev.errors import UnsupportedValueError, describe
from d2ldev.interface import Backend, Tensor
from d2ldev.operations.signatures import input_names
from d2ldev.training.learner import (
    ADAGRAD_EPSILON,
    ADAM_EPSILON,
    BETAS,
    MOMENTUM,
    Learner,
    Settings,
    check_labels,
    check_loss,
    check_shapes,
)
from d2ldev_jax.modes import (
    flags_of_evaluation,
    names_of_flags,
    set_flags_of_evaluation,
    train,
)
from d2ldev_jax.training_state import arrays_of, checked_arrays, checked_flags

_OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=MOMENTUM),
    "adam": lambda lr: optax.adam(lr, *BETAS, eps=ADAM_EPSILON),
    # optax adds it below the root.
    "adagrad": lambda lr: optax.adagrad(lr, 0.0, ADAGRAD_EPSILON**2),
}


def _mse(prediction: Tensor, y: Tensor) -> Tensor:
    check_shapes(prediction.shape, y.shape)
    return jnp.mean((_wide(prediction) - y) ** 2)


def _cross_entropy(prediction: Tensor, y: Tensor) -> Tensor:
    check_labels(prediction.shape, y.shape, y.dtype.name)
    losses = optax.softmax_cross_entropy_with_integer_labels(_wide(prediction), y)
    # Too large a label gives NaN, but a negative one counts from the last class.
    return jnp.mean(jnp.where(y < 0, jnp.nan, losses))


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": _mse, "cross_entropy": _cross_entropy}


def _wide(prediction: Tensor) -> Tensor:
    """A mean over a batch needs more digits than bfloat16 and float16 have."""
    return prediction.astype(jnp.promote_types(prediction.dtype, jnp.float32))


class _Split(NamedTuple):
    """A Flax object without its arrays.

    Args:
        graph: what is not in ``structure``, such as who is whose attribute.
        structure: where the arrays belong.
        names: what each of them is called.
    """

    graph: Any
    structure: Any
    names: tuple[str, ...]

    def merge(self, arrays: list[Any]) -> Any:
        """Such an object with these arrays."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.structure, arrays))

    def put(self, obj: Any, arrays: list[Any]) -> None:
        """Give the object itself these arrays."""
        nnx.update(obj, jax.tree.unflatten(self.structure, arrays))


def _split(obj: Any) -> tuple[_Split, list[Any]]:
    graph, state = nnx.split(obj)
    named, structure = jax.tree_util.tree_flatten_with_path(state)
    return _Split(graph, structure, tuple(_name(path) for path, _ in named)), [x for _, x in named]


def _name(path: tuple[Any, ...]) -> str:
    """``'layers/0/kernel'``: attributes are keys in a state, as is all but a variable's value."""
    keys = (getattr(key, "key", getattr(key, "idx", None)) for key in path)
    return "/".join(str(key) for key in keys if key is not None)


class JaxLearner(Learner):
    """A ``flax.nnx.Module`` that an ``nnx.Optimizer`` trains.

    The model is in training mode in ``step`` (but for modules in it that are frozen by ``eval()``),
    in evaluation mode in ``evaluate``, and its own flags stay as the user has set them. A model
    all of whose flags are set was left in evaluation mode, and is trained. To freeze the batch
    normalisations of one that has no other flags, give it one that is not set:
    ``net.deterministic = False``, then ``net.norm.eval()``.
    """

    def __init__(self, backend: Backend, model: Any, settings: Settings) -> None:
        super().__init__(backend, model, settings)
        if not isinstance(model, nnx.Module):
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "it is no flax.nnx.Module",
                "wrap a linen module: nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X); "
                "put parameters of your own into an nnx.Module, as nnx.Param",
            )
        self._loss = settings.loss_among(_LOSSES)
        self._splits: tuple[_Split, ...] = ()
        self.replace({"model": model, "optimizer": self._made(model, settings)})

    def _made(self, model: nnx.Module, settings: Settings) -> nnx.Optimizer[Any]:
        optimizer = settings.optimizer
        if isinstance(optimizer, str):
            optimizer = _OPTIMIZERS[optimizer](settings.lr)
        if isinstance(optimizer, optax.GradientTransformation):
            optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        if not isinstance(optimizer, nnx.Optimizer) or isinstance(optimizer, nnx.ModelAndOptimizer):
            raise UnsupportedValueError(
                f"train with the optimizer {describe(optimizer)}",
                "it is neither an optax.GradientTransformation nor an nnx.Optimizer",
                "optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), or optimizer='sgd'",
            )
        return optimizer

    @property
    def parts(self) -> dict[str, Any]:
        if not self._lent:
            model_split, optimizer_split = self._splits
            model_split.put(self._model, self._model_arrays)
            optimizer_split.put(self._optimizer, self._optimizer_arrays)
            self._lent = True
        return {"model": self._model, "optimizer": self._optimizer}

    @property
    def input_names(self) -> tuple[str, ...]:
        model = self._model
        if isinstance(model, nnx.bridge.ToNNX):  # it takes what its linen module takes
            wrapped = "to_nnx__module" if hasattr(model, "to_nnx__module") else "module"
            return input_names(getattr(model, wrapped))
        return input_names(model)

    def replace(self, parts: dict[str, Any]) -> None:
        self._model, self._optimizer = parts["model"], parts["optimizer"]
        if not jax.tree.leaves(nnx.state(self._model, self._optimizer.wrt)):
            raise UnsupportedValueError(
                f"train {describe(self._model)}",
                f"it has no parameters: nothing of it is {self._optimizer.wrt}",
                "self.weight = nnx.Param(...) in its __init__",
            )
        device = next(iter(self.backend.placement(self._model).values()))
        # An optimizer makes its counter of steps on the default device.
        self._optimizer = self.backend.place(self._optimizer, device)
        self._native = self.backend.native(device)
        self._take()

    def _take(self) -> None:
        """Take the arrays from the model and the optimizer."""
        if nnx.state(self._model, nnx.Intermediate):
            nnx.pop(self._model, nnx.Intermediate)
        model_split, model_arrays = _split(self._model)
        optimizer_split, optimizer_arrays = _split(self._optimizer)
        self._model_arrays = self._settled(model_arrays)
        self._optimizer_arrays = self._settled(optimizer_arrays)
        if self._splits != (model_split, optimizer_split):
            self._splits = model_split, optimizer_split
            self._step = jax.jit(
                _make_step(model_split, optimizer_split, self._loss, self.settings)
            )
            self._evaluate = jax.jit(_make_evaluation(model_split, self._loss))
        self._lent = False

    def _settled(self, leaves: list[Any]) -> list[Tensor]:
        """Arrays as a step returns them, bound to their device, so that it is traced once."""
        strong = [
            jnp.asarray(x, jnp.result_type(x)) if getattr(x, "weak_type", False) else x
            for x in leaves
        ]
        made = [
            x if isinstance(x, jax.Array) else self.backend.asarray(x, device=self._native)
            for x in strong
        ]
        arrays: list[Tensor] = jax.device_put(made, self._native)
        return arrays

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if self._lent:
            self._take()
        self._model_arrays, self._optimizer_arrays, loss, prediction = self._step(
            self._model_arrays, self._optimizer_arrays, inputs, y
        )
        return loss, prediction

    def evaluate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if self._lent:
            self._take()
        loss, prediction = self._evaluate(self._model_arrays, inputs, y)
        return loss, prediction

    def state(self) -> dict[str, Any]:
        if self._lent:
            self._take()
        model_split, optimizer_split = self._splits
        return {
            "model": arrays_of(model_split.names, self._model_arrays),
            "optimizer": arrays_of(optimizer_split.names, self._optimizer_arrays),
            "evaluation": flags_of_evaluation(self._model),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        current = self.state()
        self._require_parts(state, current)
        model, optimizer = (
            checked_arrays(self.backend, part, current, state, self._native)
            for part in ("model", "optimizer")
        )
        flags = checked_flags(names_of_flags(self._model), state["evaluation"])
        set_flags_of_evaluation(self.parts["model"], flags)
        self._take()
        self._model_arrays, self._optimizer_arrays = model, optimizer


def _make_step(
    model_split: _Split, optimizer_split: _Split, loss: Callable[..., Any], settings: Settings
) -> Callable[..., Any]:
    def loss_and_prediction(model: Any, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        prediction = model(*inputs)
        return _checked(loss(prediction, y)), prediction

    def step(
        model_arrays: list[Any], optimizer_arrays: list[Any], inputs: tuple[Any, ...], y: Any
    ) -> Any:
        model, optimizer = model_split.merge(model_arrays), optimizer_split.merge(optimizer_arrays)
        train(model)
        gradient = nnx.value_and_grad(
            loss_and_prediction, argnums=nnx.DiffState(0, optimizer.wrt), has_aux=True
        )
        (value, prediction), gradients = gradient(model, inputs, y)
        if settings.gradient_clip_val:
            gradients = _clipped(gradients, settings.gradient_clip_val)
        takes_more = isinstance(optimizer.tx, optax.GradientTransformationExtraArgs)
        optimizer.update(model, gradients, **({"value": value} if takes_more else {}))
        return _arrays(model, model_split), _arrays(optimizer, optimizer_split), value, prediction

    return step


def _make_evaluation(split: _Split, loss: Callable[..., Any]) -> Callable[..., Any]:
    def evaluate(arrays: list[Any], inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        model = split.merge(arrays)
        model.eval()
        prediction = model(*inputs)
        return _checked(loss(prediction, y)), prediction

    return evaluate


def _checked(loss: Any) -> Any:
    check_loss(getattr(loss, "shape", None), loss)
    return loss


def _arrays(obj: Any, before: _Split) -> list[Any]:
    """The arrays of an object after a step, one for each that it had before."""
    if nnx.state(obj, nnx.Intermediate):
        nnx.pop(obj, nnx.Intermediate)  # what ``sow`` leaves behind grows with each call
    after, arrays = _split(obj)
    if after.names != before.names:
        raise UnsupportedValueError(
            f"train {describe(obj)}",
            f"a step made or deleted {sorted({*after.names} ^ {*before.names})}",
            "make all variables in __init__",
        )
    return arrays


def _clipped(gradients: Any, largest: float) -> Any:
    """The gradients, shortened as ``torch.nn.utils.clip_grad_norm_`` does it."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    factor = jnp.minimum(1.0, largest / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)
