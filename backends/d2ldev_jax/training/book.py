"""D2L's ``Module`` for JAX: a linen module with its parameters in the ``state`` of its trainer.

Its ``training_step(params, batch, state)`` returns the gradients itself. So a step is the step of
the book's ``fit_epoch``. JAX compiles only the functions that the user compiles.

Source: D2L, sections 3.2.4 and 3.4, for JAX.
"""

from __future__ import annotations

import inspect
from dataclasses import field
from functools import cached_property
from typing import Any

import jax
from flax import linen
from flax.training.train_state import TrainState

from d2ldev import UnsupportedValueError
from d2ldev.framework import (
    Framework,
    Inputs,
    Learner,
    Objective,
    Signature,
    Tensor,
    TrainingSettings,
    describe,
    read_signature,
)
from d2ldev_jax.training.learner import clip, make_optimizer, name_failed_update
from d2ldev_jax.training.wrappers import SWITCHES


class BooksState(TrainState):
    """The class of ``trainer.state``.

    Args:
        batch_stats: the running statistics of batch normalization; empty without such layers.
        dropout_rng: the random key of the next step.
    """

    batch_stats: Any
    dropout_rng: Tensor


def make_module_class(methods: Any) -> type:
    """Return D2L's ``Module`` as a linen module, with the methods that differ in JAX.

    Args:
        methods: a class with the methods that are the same in all frameworks.
    """

    class Module(linen.Module, methods):
        plot_train_per_epoch: int = field(default=2, init=False)
        plot_valid_per_epoch: int = field(default=1, init=False)
        board: Any = field(default_factory=methods.board_class, init=False)

        def __call__(self, X: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
            return self.forward(X, *args, **kwargs)

        def training_step(self, params: Any, batch: Any, state: Any) -> Any:
            value, gradients = jax.value_and_grad(self.loss)(params, batch[:-1], batch[-1], state)
            self.plot("loss", value, train=True)
            return value, gradients

        def validation_step(self, params: Any, batch: Any, state: Any) -> Any:
            value = self.loss(params, batch[:-1], batch[-1], state)
            self.plot("loss", value, train=False)
            return value

        def apply_init(self, dummy_input: Any, key: Any) -> Any:
            return self.init(key, *dummy_input)

    return Module


def begin(framework: Framework, module: Any, optimizer: Any, inputs: Inputs) -> None:
    """Give a module's trainer the state at the begin of its training.

    Args:
        framework: draws the random key of the parameters.
        module: its ``apply_init(inputs, key)`` returns its variables.
        optimizer: optax's or the user's own, with the methods ``init`` and ``update``.
        inputs: the inputs of the first batch.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise UnsupportedValueError(
            f"train with the optimizer {describe(optimizer)}",
            "it is not an optax.GradientTransformation",
            "return optax.sgd(self.lr) from configure_optimizers",
        )
    native = framework.devices.native(module.trainer.device)
    number = framework.tensors.random("uniform", (), None, None, native)
    params_key, dropout_key = jax.random.split(jax.random.PRNGKey(int(number * 2**24)))
    variables = module.apply_init(inputs, key={"params": params_key, "dropout": dropout_key})
    variables, dropout_key = jax.device_put((variables, dropout_key), native)
    module.trainer.state = BooksState.create(
        apply_fn=module.apply,
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        dropout_rng=dropout_key,
        tx=optimizer,
    )


class BooksLearner(Learner):
    """Train a linen module with its ``training_step(params, batch, state)``.

    An evaluation uses the state of the trainer that has trained the module.
    """

    def __init__(self, framework: Framework, module: Any, settings: TrainingSettings) -> None:
        super().__init__(settings)
        self._framework, self._module = framework, module
        self._objective = Objective(framework, settings, {})
        trainer = getattr(module, "trainer", None)
        is_trained = settings.optimizer is not None
        if trainer is None or not (is_trained or getattr(trainer, "state", None)):
            raise UnsupportedValueError(
                f"{'train' if is_trained else 'evaluate'} {describe(module)}",
                "a linen module holds no parameters, and this one has no trainer that holds them",
                "trainer.fit(module, data), and then the same trainer's validate and predict",
            )
        if settings.accumulate_grad_batches > 1:
            raise UnsupportedValueError(
                f"train {describe(module)} with "
                f"accumulate_grad_batches={settings.accumulate_grad_batches}",
                "each step uses the gradients that its training_step returns",
                "leave accumulate_grad_batches out, and yield larger batches",
            )
        for method in settings.methods or ():
            try:
                inspect.signature(getattr(module, method)).bind("params", "batch", "state")
            except TypeError as error:
                raise UnsupportedValueError(
                    f"train {describe(module)}",
                    f"its {method} cannot be called with parameters, a batch and a state: {error}",
                    f"def {method}(self, params, batch, state): ...",
                ) from error
        self._trainer, self._is_built = trainer, not is_trained

    def sync(self) -> dict[str, Any]:
        # The state has the parameters and the optimizer; the module has no arrays.
        state = self._trainer.state if self.is_built else None
        return {"model": self._module, "optimizer": state}

    def replace(self, components: dict[str, Any]) -> None:
        self._trainer.state = components["optimizer"]

    @cached_property
    def signature(self) -> Signature:
        return read_signature(self._module, switches=SWITCHES, by_position=True)

    @property
    def is_built(self) -> bool:
        return self._is_built

    def build(self, inputs: Inputs) -> None:
        optimizer = make_optimizer(self.settings)
        begin(self._framework, self._module, optimizer, inputs)
        self._is_built = True

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        assert self.settings.methods is not None  # JaxTraining makes no such learner without them
        in_step, _ = self.settings.methods
        self._module.training = True
        value, gradients = self._call_method(in_step, inputs, "(loss, gradients)", tuple)
        loss, variables = value if isinstance(value, tuple) else (value, {})
        if self.settings.gradient_clip_val:
            gradients = clip(gradients, self.settings.gradient_clip_val)
        with name_failed_update(self._trainer.state.tx):
            state = self._trainer.state.apply_gradients(grads=gradients)
        state = state.replace(dropout_rng=jax.random.split(state.dropout_rng)[0])
        if state.batch_stats:
            state = state.replace(batch_stats=variables["batch_stats"])
        self._trainer.state = state
        self._objective.check_own(loss, self._module, in_step)
        return loss, None

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if self.settings.methods is None:
            raise UnsupportedValueError(
                f"evaluate {describe(self._module)}",
                "the loss of a linen module comes from its own method, and methods= names none",
                "backend.learner(module, methods=('training_step', 'validation_step'), "
                "is_trained=False)",
            )
        in_step, in_evaluation = self.settings.methods
        self._module.training = False
        if in_evaluation == in_step:
            value, _ = self._call_method(in_step, inputs, "(loss, gradients)", tuple)
        else:
            value = self._call_method(in_evaluation, inputs, "the loss, or nothing", object)
        loss = value[0] if isinstance(value, tuple) else value
        self._objective.check_own(loss, self._module, in_evaluation)
        return loss, None

    def predict(self, inputs: Inputs) -> Any:
        self._module.training = False
        state = self._trainer.state
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return state.apply_fn(variables, *self.signature.arrange(inputs))

    def check_labels(self) -> None:
        """Check nothing: the module computes its own loss."""

    def _call_method(self, method: str, inputs: Inputs, wanted: str, kind: type) -> Any:
        """Return the value of one of the module's own methods for a batch."""
        state = self._trainer.state
        returned = getattr(self._module, method)(state.params, *inputs, state)
        if not isinstance(returned, kind):
            raise UnsupportedValueError(
                f"train {describe(self._module)}",
                f"its {method} returned {describe(returned)}",
                f"return {wanted} from it",
            )
        return returned
