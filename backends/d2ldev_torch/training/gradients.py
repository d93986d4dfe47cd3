"""Hooks on the gradients of parameters, which torch omits from copies and pickles.

https://github.com/pytorch/pytorch/blob/main/torch/nn/parameter.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from d2ldev import UnsupportedValueError

Hook = Callable[[torch.Tensor], Any]


def hooks_of(x: torch.Tensor) -> tuple[list[Hook], list[Hook]]:
    """Return a tensor's hooks: those on its gradient, and those after its accumulation."""
    # Private: no public function lists hooks.
    after = getattr(x, "_post_accumulate_grad_hooks", None)
    return [*(x._backward_hooks or {}).values()], [*(after or {}).values()]


def has_hooks(x: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf with hooks."""
    return x.is_leaf and any(hooks_of(x))


def add_hooks(x: torch.Tensor, hooks: tuple[list[Hook], list[Hook]]) -> None:
    """Add the hooks that ``hooks_of`` has returned for another tensor."""
    before, after = hooks
    tensor: Any = x
    for hook in before:
        tensor.register_hook(hook)
    for hook in after:
        tensor.register_post_accumulate_grad_hook(hook)


def reduce(parameter: Any) -> Any:
    """Return how ``pickle`` rebuilds a parameter with its hooks; see ``Parallel.reduce``."""
    if not has_hooks(parameter):
        return NotImplemented
    # The hooks are the state: a method of the model as a hook contains the parameter.
    return *parameter.__reduce_ex__(2), hooks_of(parameter), None, None, add_hooks


class Hooks:
    """The hooks of parameters, to be copied by ``copy.deepcopy`` together with their model."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self._of = [(x, hooks_of(x)) for x in parameters]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for x, hooks in state["_of"]:
            add_hooks(x, hooks)


def check_hooks(model: Any, size: int) -> None:
    """Refuse hooks that would see other gradients if several processes train a model.

    Raises:
        UnsupportedValueError: for a hook that is called before the gradients are summed.
    """
    named: Iterable[tuple[str, torch.Tensor]] = (
        model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    )
    for name, x in named:
        _, after = hooks_of(x)
        if after:
            raise UnsupportedValueError(
                f"train a model in {size} processes",
                f"{name} has a hook of register_post_accumulate_grad_hook, which would see the "
                "gradient of a part",
                "change gradients in a step of the optimizer; or Trainer(max_epochs, num_gpus=1)",
            )
