"""Steps of training in several processes, by ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from d2ldev.framework import Framework, Settings, Tensor
from d2ldev.processes.group import Group
from d2ldev_torch.training.learner import TorchLearner, trained


class TorchGroupLearner(TorchLearner):
    """A module that several processes train, each on a part of every batch.

    Buffers, such as the running means of a batch normalisation, are computed from the part of rank
    0, and all processes have them after each step.
    """

    def __init__(self, framework: Framework, model: Any, settings: Settings, group: Group) -> None:
        super().__init__(framework, model, settings)
        self._size = group.size
        # None before the first step, which builds a model with lazy modules.
        self._reducing: DistributedDataParallel | None = None
        self._part: _Part | None = None
        self._thawed: list[tuple[torch.nn.Parameter, bool]] = []

    def replace(self, parts: dict[str, Any]) -> None:
        super().replace(parts)
        self._reducing = None

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if self._reducing is None:
            if not self.is_built:
                self.build(inputs)
            self._begin()
        elif any(x.requires_grad is not was for x, was in self._thawed):
            # A callback has frozen parameters, or thawed them.
            self._reduce_anew()
        found = super().step(inputs, y)
        _broadcast(self._model.buffers())
        return found

    def flush(self) -> None:
        if self.pending and self.settings.accumulate > 1:
            assert self._reducing is not None
            self._reducing(None, None)
            self._complete([x for x, is_trained in self._thawed if is_trained])
        super().flush()

    def _differentiated(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        assert self._reducing is not None
        assert self.portion is not None
        # With ``accumulate`` the gradients stay in this process until ``flush``.
        is_reduced = self.settings.accumulate == 1
        loss, prediction = (self._reducing if is_reduced else self._part)(inputs, y)
        # DDP takes the mean of the processes' gradients.
        self._backward(loss * (self.portion.share * self._size))
        if is_reduced:
            self._complete([x for x, is_trained in self._thawed if is_trained and x.grad is None])
        return loss.detach(), prediction

    def _complete(self, waited_for: list[Tensor]) -> None:
        """Let DDP end its reduction, which waits for parameters that a batch does not use.

        As in one process, a parameter that no process has used has no gradient afterwards; one that
        only others have used has theirs.

        Args:
            waited_for: the parameters that have no part in the reduction yet.
        """
        assert self._part is not None
        trained = [x for x, is_trained in self._thawed if is_trained]
        unused = [x.grad is None for x in trained]
        used = self._part.used
        flags = torch.tensor([not is_unused for is_unused in unused]).to(used)
        zeros = [torch.zeros_like(x) for x in waited_for]
        used.grad = None
        torch.autograd.backward([used, *waited_for], [flags, *zeros])
        if any(unused):
            for x, share in zip(trained, used.grad.tolist(), strict=True):
                if not share:
                    x.grad = None

    def _of_the_whole_batch(self, loss: Tensor) -> Tensor:
        assert self.portion is not None
        total = (loss * self.portion.share).cpu()
        distributed.all_reduce(total)
        return total

    def _computed(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        loss, prediction = self._losses(inputs, y, is_step=True)
        return loss, self._detached(prediction)

    def _begin(self) -> None:
        """Begin with the optimizer of rank 0; DDP begins with its parameters and buffers."""
        optimizer: Any = self._optimizer
        state = [optimizer.state_dict() if distributed.get_rank() == 0 else None]
        distributed.broadcast_object_list(state)
        if distributed.get_rank():
            optimizer.load_state_dict(state[0])
        self._reduce_anew()

    def _reduce_anew(self) -> None:
        # An optimizer of the user's may train more than the model, such as a loss.
        part = self._part = _Part(self._model, trained(self._optimizer), self._computed)
        self._thawed = [(x, x.requires_grad) for x in part.parameters() if x is not part.used]
        self._reducing = DistributedDataParallel(part, broadcast_buffers=False)


class _Part(torch.nn.Module):
    """A module whose call is the loss of a part of a batch, which DDP is to see.

    Args:
        model: which is called for it, perhaps by a method of its own.
        others: parameters that are trained besides the model's.
        compute: returns the loss and the prediction.

    Attributes:
        used: its "gradient" says of each parameter that is trained, in how many of the processes it
            has a gradient.
    """

    def __init__(
        self, model: torch.nn.Module, others: Iterable[Tensor], compute: Callable[..., Any]
    ) -> None:
        super().__init__()
        parameters = [x for x in model.parameters() if x.requires_grad]
        # Of the dtype of others, so that it goes in a message with them.
        self.used = torch.nn.Parameter(parameters[0].new_zeros(len(parameters)))
        self.model = model
        self.others = torch.nn.ParameterList(others)
        self._compute = compute

    def forward(self, inputs: Any, y: Any) -> Any:
        return None if inputs is None else self._compute(inputs, y)


def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Give all processes the tensors of rank 0, in as few messages as there are dtypes."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        by_dtype.setdefault(x.dtype, []).append(x)
    for found in by_dtype.values():
        flat = torch.cat([x.reshape(-1) for x in found])
        distributed.broadcast(flat, 0)
        for x, new in zip(found, flat.split([x.numel() for x in found]), strict=True):
            x.copy_(new.reshape(x.shape))
