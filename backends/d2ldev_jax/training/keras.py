"""Train Keras models where Keras computes with JAX: ``stateless_call``, ``stateless_apply``.

These are the methods of Keras's own guide to training loops in JAX. A model becomes an ``nnx``
module of its variables, which the steps of Flax's models train, on several devices, too.
"""

from __future__ import annotations

from inspect import signature
from typing import Any
from weakref import ref

import optax
from flax import nnx

from d2ldev import UnsupportedValueError
from d2ldev.framework import (
    Signature,
    Tensor,
    TrainingSettings,
    describe,
    join_keras_inputs,
    read_keras_signature,
)
from d2ldev_jax.keras import KerasObject, list_layers, name_variables
from d2ldev_jax.training.wrappers import Wrapper

# No variable has such a name.
_PREFIX = "variables."


class _Owner:
    """An attribute that ``vars`` does not show, so that Flax's graph of the object lacks it.

    The table of programs keeps such graphs, which must not keep Keras's own object.
    """

    __slots__ = ("owned",)


class KerasModule(_Owner, Wrapper):
    """The variables of a Keras layer or model by their names.

    Args:
        model: the layer or the model.

    Raises:
        UnsupportedValueError: if it is not built.
    """

    def __init__(self, model: Any) -> None:
        if not model.built:
            raise UnsupportedValueError(
                f"train {describe(model)}",
                "its variables are not made before it is built",
                "model(X), with one batch, or a keras.Input as its first layer",
            )
        self.owned, self.model = model, ref(model)
        self.deterministic = False
        self.is_told = "training" in signature(model.call).parameters
        self.trained = self._list_trained()
        names = {id(variable): name for name, variable in name_variables(model)}
        self.others = tuple(_PREFIX + names[id(x)] for x in model.non_trainable_variables)
        for name, variable in name_variables(model):
            kind = nnx.Param if _PREFIX + name in self.trained else nnx.Variable
            setattr(self, _PREFIX + name, kind(variable.value))

    def _list_trained(self) -> tuple[str, ...]:
        model = self.unwrap()
        names = {id(variable): name for name, variable in name_variables(model)}
        return tuple(_PREFIX + names[id(x)] for x in model.trainable_variables)

    def unwrap(self) -> Any:
        return self.model()

    def pull(self) -> None:
        if changed := {*self._list_trained()} ^ {*self.trained}:
            names = ", ".join(sorted(name.removeprefix(_PREFIX) for name in changed))
            raise UnsupportedValueError(
                f"train {describe(self.unwrap())}",
                f"since the training began, layer.trainable was changed: {names}",
                "set layer.trainable before fit, and call fit again after a change",
            )
        for name, variable in name_variables(self.unwrap()):
            getattr(self, _PREFIX + name)[...] = variable.value

    def push(self) -> None:
        for name, variable in name_variables(self.unwrap()):
            variable.assign(getattr(self, _PREFIX + name)[...])

    def check(self, settings: TrainingSettings) -> None:
        if settings.precision != "model":
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[settings.precision]
            raise UnsupportedValueError(
                f"train {describe(self.unwrap())} with precision={settings.precision!r}",
                "its layers compute in the dtype of their own policy",
                f"keras.config.set_dtype_policy('mixed_{dtype}'), before the model is made",
            )
        is_own = settings.optimizer is None or isinstance(settings.optimizer, KerasObject)
        held = [x.path for x in self.unwrap().trainable_variables if x.constraint is not None]
        if held and not is_own:
            raise UnsupportedValueError(
                f"train {describe(self.unwrap())} with the optimizer "
                f"{describe(settings.optimizer)}",
                f"{held[0]} has a constraint, which only optimizers of Keras apply",
                "optimizer=keras.optimizers.SGD(0.1)",
            )

    def read_signature(self) -> Signature:
        return read_keras_signature(self.unwrap())

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        operands, options = join_keras_inputs(self.unwrap(), inputs, named)
        prediction, others, losses = self.unwrap().stateless_call(
            [getattr(self, name)[...] for name in self.trained],
            [getattr(self, name)[...] for name in self.others],
            *operands,
            **options,
            **({"training": not self.deterministic} if self.is_told else {}),
            return_losses=True,
        )
        for name, value in zip(self.others, others, strict=True):
            getattr(self, name)[...] = value
        # Not through ``setattr``, which would make it a part of the state.
        self.__dict__["losses"] = losses
        return prediction

    def list_dependencies(self) -> list[Any]:
        return list_layers(self.unwrap())

    def take_losses(self) -> list[Tensor]:
        losses: list[Tensor] = self.__dict__.pop("losses", [])
        return losses


class KerasOptimizer(_Owner, nnx.Optimizer):
    """An optimizer of Keras for the trained variables of a model.

    Args:
        model: the model.
        optimizer: the optimizer; it is built for the model, if it is not.

    Raises:
        UnsupportedValueError: if it scales the loss.
    """

    def __init__(self, model: KerasModule, optimizer: Any) -> None:
        if optimizer.scale_loss(1.0) != 1.0:
            raise UnsupportedValueError(
                f"train with the optimizer {describe(optimizer)}",
                "it expects gradients of a loss that it has scaled",
                "the optimizer without a scale, such as LossScaleOptimizer.inner_optimizer",
            )
        if not optimizer.built:
            optimizer.build(model.unwrap().trainable_variables)
        self.owned, self.optimizer = optimizer, ref(optimizer)
        values = tuple(variable.value for variable in optimizer.variables)
        tx = optax.GradientTransformation(lambda _: values, optax.identity().update)
        super().__init__(model, tx, wrt=nnx.Param)
        self.tx = optax.identity()

    def unwrap(self) -> Any:
        """Return the optimizer itself."""
        return self.optimizer()

    def pull(self) -> None:
        """Take the values of the optimizer's variables."""
        for kept, variable in zip(self.opt_state, self.unwrap().variables, strict=True):
            kept[...] = variable.value

    def push(self) -> None:
        """Give the optimizer's variables the values from here."""
        for kept, variable in zip(self.opt_state, self.unwrap().variables, strict=True):
            variable.assign(kept[...])

    def update(self, model: KerasModule, gradients: Any, /, **_: Any) -> None:
        """Change the trained variables, and those of the optimizer."""
        parameters = [getattr(model, name) for name in model.trained]
        new, state = self.unwrap().stateless_apply(
            [x[...] for x in self.opt_state],
            [gradients[name][...] for name in model.trained],
            [x[...] for x in parameters],
        )
        for variable, value in zip((*parameters, *self.opt_state), (*new, *state), strict=True):
            variable[...] = value
        self.step[...] += 1
