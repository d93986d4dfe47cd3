"""Training mode and evaluation mode of a module, and the mode in which it was handed over.

``Module.train()`` puts every module in it into training mode, also those that the user put into
evaluation mode to freeze them, such as the batch normalisation of a network that is fine-tuned.
They stay in it here. Only the module's own flag is asked in every step, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection

import torch


class Modes:
    """The modes of a module and of all modules in it.

    Args:
        module: the module, in the mode in which ``restore`` will leave it. If it is in training
            mode itself, those in it that are not are never put into it; else all of them are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._was_training = module.training
        self._frozen = _in_evaluation(module) if module.training else []

    def train(self) -> None:
        """Training mode, but for what is frozen."""
        if not self._module.training:
            self._begin()

    def _begin(self) -> None:
        self._module.train()
        for module in self._frozen:
            module.training = False

    def evaluate(self) -> None:
        """Evaluation mode for all; what else is in it now stays in it after this."""
        if self._module.training:
            self._frozen = _in_evaluation(self._module)
            self._module.eval()

    @property
    def frozen(self) -> list[str]:
        """The names of the modules that ``train`` leaves in evaluation mode."""
        frozen = _in_evaluation(self._module) if self._module.training else self._frozen
        ids = {id(inner) for inner in frozen}
        return [name for name, inner in self._module.named_modules() if id(inner) in ids]

    def freeze(self, names: Collection[str]) -> None:
        """Let ``train`` leave these in evaluation mode, and no others."""
        self._frozen = [inner for name, inner in self._module.named_modules() if name in names]
        if self._module.training:
            self._begin()

    def restore(self) -> None:
        """The mode in which the module was handed over."""
        if self._was_training:
            self.train()
        else:
            self.evaluate()


def _in_evaluation(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [inner for inner in module.modules() if not inner.training]
