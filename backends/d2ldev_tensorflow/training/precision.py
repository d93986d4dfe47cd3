"""Precisions: the dtype policies of Keras layers while they compute in fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from d2ldev import UnsupportedValueError
from d2ldev.framework import TrainingSettings, describe, warn
from d2ldev_tensorflow.models import (
    is_of_keras,
    list_layers,
    list_parameters,
    list_statistics,
)

_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def find_policy(model: Any, settings: TrainingSettings) -> str | None:
    """Return the name of the policy for a precision; None for full precision.

    Raises:
        UnsupportedValueError: for a ``tf.Module``.
    """
    policy = _POLICIES.get(settings.precision)
    if policy is None:
        return None
    if not is_of_keras(model, "Layer"):
        raise UnsupportedValueError(
            f"train {describe(model)} with precision={settings.precision!r}",
            "a tf.Module has no dtype policy, which Keras layers have",
            "a keras.Model, or leave it out",
        )
    _warn_of_configuration(model, settings, policy)
    return policy


@contextmanager
def compute_in(policy: str, model: Any, settings: TrainingSettings) -> Iterator[None]:
    """Give the layers of a model a policy for a block, in which their functions are traced.

    Layers with a dtype of their own keep it.

    Raises:
        UnsupportedValueError: if all layers with weights have a dtype of their own.
    """
    layers = _list_without_own_dtype(model)
    variables = [[*list_parameters(x), *list_statistics(x)] for x in layers]
    if model.weights and not any(variables):
        raise UnsupportedValueError(
            f"train {describe(model)} with precision={settings.precision!r}",
            "each of its layers with weights has a dtype of its own",
            "Dense(...) without dtype=, or leave precision out",
        )
    policies = [(layer, layer.dtype_policy) for layer in layers]
    try:
        for layer, own in policies:
            if own.quantization_mode is None:
                layer.dtype_policy = policy
        yield
    finally:
        for layer, own in policies:
            layer.dtype_policy = own


def _list_without_own_dtype(model: Any) -> list[Any]:
    """Return the layers that were made without a dtype, unlike ``Dense(10, dtype='float32')``.

    The parts of a layer have its policy, for example those of an attention layer. ``clone_model``
    and files make a layer from a configuration, which lists all arguments, defaults included. Such
    a layer has a dtype of its own if most of these layers have another dtype.
    """
    layers, policies = list_layers(model), {id(model.dtype_policy)}
    for layer in layers:
        arguments = _find_arguments(layer)
        if arguments is not None and arguments.get("dtype") is None:
            policies.add(id(layer.dtype_policy))
    rebuilt = _list_rebuilt_policies(model)
    names = [policy.name for policy in rebuilt]
    usual = max(names, key=names.count, default=None)
    policies.update(id(policy) for policy in rebuilt if policy.name == usual)
    return [layer for layer in layers if id(layer.dtype_policy) in policies]


def _list_rebuilt_policies(model: Any) -> list[Any]:
    """Return the policies of the layers that were made from a configuration."""
    from keras.layers import InputLayer

    found = []
    for layer in list_layers(model):
        arguments = _find_arguments(layer) or {}
        named = signature(type(layer).__init__).parameters
        is_rebuilt = "trainable" in arguments and "trainable" not in named
        is_input = isinstance(layer, InputLayer)  # whose dtype says what data is
        if is_rebuilt and not is_input and arguments.get("dtype") is not None:
            found.append(layer.dtype_policy)
    return found


def _find_arguments(layer: Any) -> Any:
    """Return the arguments that a layer was made with; None if some are not plain values.

    The attribute is private, because a layer's public ``get_config`` may be its user's own.
    """
    return getattr(getattr(layer, "_auto_config", None), "config", None)


def _warn_of_configuration(model: Any, settings: TrainingSettings, policy: str) -> None:
    """Warn if a precision may replace a dtype that the user chose for some layers."""
    if len({each.name for each in _list_rebuilt_policies(model)}) == 1:
        warn(
            f"precision={settings.precision!r} is for all layers of {describe(model)} that were "
            "made from a configuration. A configuration does not tell which layers were given a "
            "dtype, as those of the logits often are\n"
            f"  fix: make the model by its code, and load_into it; or leave precision out, and set "
            f"layer.dtype_policy = {policy!r} on the layers that are to compute in it",
        )
