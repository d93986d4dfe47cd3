"""Training mode of a Flax module, which is flags of the modules in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from flax import nnx

_FLAGS = ("deterministic", "use_running_average")


def train(model: nnx.Module) -> None:
    """Put a model into training mode, but for what the user has frozen in it.

    ``Module.train`` puts every module in it into training mode, also those that were put into
    evaluation mode to freeze them, such as the batch normalisation of a network that is fine-tuned.
    They stay in it, unless all flags are set: ``model.eval()``, after which a model is to be
    trained all the same, leaves no other trace than ``eval()`` of each module that has one.
    """
    frozen = flags_of_evaluation(model)
    model.train()
    if len(frozen) < len(names_of_flags(model)):
        set_flags_of_evaluation(model, frozen)


def names_of_flags(model: nnx.Module) -> list[str]:
    """``'layers/0/norm/use_running_average'``: the path of each flag."""
    return [name for name, _, _ in _flags(model)]


def flags_of_evaluation(model: nnx.Module) -> list[str]:
    """The names of those that are set."""
    return [name for name, module, flag in _flags(model) if getattr(module, flag)]


def set_flags_of_evaluation(model: nnx.Module, names: Collection[str]) -> None:
    """Set these flags, and no others; what need not change is left alone, such as None."""
    for name, module, flag in _flags(model):
        if bool(getattr(module, flag)) != (name in names):
            setattr(module, flag, name in names)


def _flags(model: nnx.Module) -> Iterator[tuple[str, Any, str]]:
    for path, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Module):
            for flag in _FLAGS:
                if hasattr(module, flag):
                    yield "/".join(map(str, (*path, flag))), module, flag
