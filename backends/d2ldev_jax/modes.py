"""Training mode of a Flax module, which is flags of the modules in it."""

from __future__ import annotations

from flax import nnx

_FLAGS = ("deterministic", "use_running_average")


def train(model: nnx.Module) -> None:
    """Put a model into training mode, but for what the user has frozen in it.

    ``Module.train`` puts every module in it into training mode, also those that were put into
    evaluation mode to freeze them, such as the batch normalisation of a network that is fine-tuned.
    They stay in it, unless the whole model is in it.
    """
    flags = [
        (module, name, getattr(module, name))
        for _, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
        for name in _FLAGS
        if hasattr(module, name)
    ]
    model.train()
    if not all(is_set for _, _, is_set in flags):
        for module, name, is_set in flags:
            if is_set:
                setattr(module, name, True)
