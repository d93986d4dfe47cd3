"""Steps of training in several processes, by ``DistributedDataParallel``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from d2ldev.framework import Framework, Settings, Tensor
from d2ldev.nesting.walk import map_tensors
from d2ldev_torch.training.learner import TorchLearner, list_trained

if TYPE_CHECKING:
    from d2ldev.processes.group import Group


class TorchGroupLearner(TorchLearner):
    """A module that several processes train, each on a part of every batch.

    Buffers, such as the running means of a batch normalisation, are computed from the part of rank
    0, and all processes have them after each step.
    """

    def __init__(self, framework: Framework, model: Any, settings: Settings, group: Group) -> None:
        super().__init__(framework, model, settings)
        self._size = group.size
        self._numbers = OwnNumbers(group.rank)
        # Made in the first step, which builds a model with lazy modules.
        self._shared: _Shared | None = None

    def replace(self, parts: dict[str, Any]) -> None:
        super().replace(parts)
        self._shared = None

    def step(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        if self._shared is None:
            if not self.is_built:
                self.build(inputs)
            # DDP begins with the parameters and buffers of rank 0.
            begin_as_the_first(self._framework, self._optimizer)
        if self._shared is None or self._shared.is_outdated():
            assert self._optimizer is not None
            # An optimizer of the user's may train more than the model, such as a loss.
            part = _Part(self._model, list_trained(self._optimizer), self._compute)
            # In float16 gradients are multiplied after they were reduced: on the way they are as
            # large as in one process.
            self._shared = _Shared(part, 1 if self._scaler is None else self._size)
        found = super().step(inputs, y)
        broadcast_buffers(self._shared.buffered)
        return found

    def flush(self) -> None:
        if self.pending and self.settings.accumulate_grad_batches > 1:
            assert self._shared is not None
            self._shared.reduce()
        super().flush()

    def _differentiate(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        shared, portion = self._shared, self.portion
        assert shared is not None
        assert portion is not None
        if not self.pending:
            shared.zero_grad()
        # With ``accumulate_grad_batches`` the gradients stay in this process until ``flush``.
        is_reduced = self.settings.accumulate_grad_batches == 1
        loss, prediction = (shared.reducing if is_reduced else shared.part)(inputs, y)
        # DDP takes the mean of the processes' gradients, and the sum is wanted.
        self._backward(loss * (portion.share * (self._size / shared.factor)))
        if is_reduced:
            shared.end_reduction([x for x in shared.trained if x.grad is None])
        return loss.detach(), prediction

    def _of_the_whole_batch(self, loss: Tensor) -> Tensor:
        assert self.portion is not None
        total = loss * self.portion.share
        # On its own device: the program's engine may be one for GPUs alone.
        distributed.all_reduce(total)
        return total.cpu()

    def _compute(self, inputs: tuple[Any, ...], y: Any) -> tuple[Tensor, Any]:
        with self._numbers.draw_own(self._place_of(inputs)):
            loss, prediction = self._compute_losses_of_step(inputs, y)
        return loss, self._map_prediction(torch.Tensor.detach, prediction)


class _Shared:
    """A model whose gradients are reduced by DDP.

    Args:
        part: the loss of a part of a batch, of which it has the parameters.
        factor: reduced gradients are multiplied by it.

    Attributes:
        part: without DDP.
        reducing: with it.
        trained: the parameters that are not frozen.
        buffered: the modules that have buffers.
    """

    def __init__(self, part: _Part, factor: int) -> None:
        parameters = list(part.parameters())
        self._were_trained = [(x, x.requires_grad) for x in parameters]
        self.trained = [x for x in parameters if x.requires_grad]
        self.buffered = [module for module in part.modules() if module._buffers]
        # In how many of the processes each parameter has a gradient: a gradient itself, so that it
        # goes in one message with those of its dtype.
        part.used = torch.nn.Parameter(parameters[0].new_zeros(len(self.trained)))
        self._used = part.used
        self._unused: list[bool] = []
        self.part, self.factor = part, factor
        self.reducing = DistributedDataParallel(part)
        # The buffers of rank 0 come after a step, and not before each forward pass. The argument
        # of the same name is deprecated.
        self.reducing.broadcast_buffers = False
        # DDP measures what nobody reads, and prints that it cannot on devices other than CUDA's.
        # https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/logger.cpp
        self.reducing.logger = SimpleNamespace(
            set_runtime_stats_and_log=lambda: None, set_error_and_log=lambda _: None
        )

    def is_outdated(self) -> bool:
        """Tell whether parameters were frozen or thawed, as by a callback."""
        return any(x.requires_grad is not was for x, was in self._were_trained)

    def zero_grad(self) -> None:
        """Remove all gradients, also those that belong to no optimizer."""
        for x in self.trained:
            x.grad = None

    def reduce(self) -> None:
        """Reduce the gradients that are there."""
        self.reducing(None, None)
        self.end_reduction(self.trained)

    def end_reduction(self, waited_for: Sequence[Tensor]) -> None:
        """Let DDP end its reduction, which waits for parameters that a batch does not use.

        As in one process, a parameter that no process has used has no gradient afterwards; one that
        only others have used has theirs.

        Args:
            waited_for: the parameters that have no part in the reduction yet.
        """
        unused = [x.grad is None for x in self.trained]
        if unused != self._unused:  # else a copy from the host would wait for a GPU in each step
            self._unused = unused
            self._uses = torch.tensor([not is_unused for is_unused in unused]).to(self._used)
        self._used.grad = None
        zeros = [torch.zeros_like(x) for x in waited_for]
        # A copy, into which DDP writes what all have.
        torch.autograd.backward([self._used, *waited_for], [self._uses.clone(), *zeros])
        if any(unused):
            assert self._used.grad is not None
            for x, share in zip(self.trained, self._used.grad.tolist(), strict=True):
                if not share:
                    x.grad = None
        if self.factor > 1:
            for x in self.trained:
                if x.grad is not None:
                    x.grad *= self.factor


class OwnNumbers:
    """The random numbers of a forward pass, such as masks of dropout: others in each process.

    The data may draw from the same generator, and all have to read the same batches. So the pass
    draws from another place, which the generator's state and the rank decide, and the generator
    goes on by one number in all processes. It stays as it is where no pass draws, and all learn
    what one process learns. A run that goes on from a checkpoint, which has this state, draws the
    same numbers.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Whether a pass has drawn: that of a part without examples does not.
        self._are_drawn = False

    @contextmanager
    def draw_own(self, place: torch.device) -> Iterator[None]:
        """Let a block draw this process's own numbers from the generator of a device."""
        module: Any = torch.random
        on: tuple[torch.device, ...] = ()
        if place.type != "cpu":
            module, on = torch.get_device_module(place), (place,)
        before = module.get_rng_state(*on)
        generator = torch.Generator(place)
        generator.manual_seed(zlib.crc32(before.numpy(), self._rank))
        own = generator.get_state()
        module.set_rng_state(own, *on)
        try:
            yield
        finally:
            self._are_drawn |= not torch.equal(module.get_rng_state(*on), own)
            module.set_rng_state(before, *on)
            if self._are_drawn:
                torch.rand(1, device=place)


def begin_as_the_first(framework: Framework, optimizer: Any) -> None:
    """Give an optimizer the state of rank 0's optimizer.

    Args:
        framework: its area of files reads and restores the state of an optimizer.
        optimizer: of this process, with the same parameters.
    """
    is_first = distributed.get_rank() == 0
    state = [None]
    if is_first:
        found = framework.files.state(optimizer)
        state = [
            map_tensors(torch.Tensor.cpu, found, framework.state.kinds, "send an optimizer's state")
        ]
    distributed.broadcast_object_list(state)
    if not is_first:
        framework.files.prepare_state(optimizer, state[0])()


def broadcast_buffers(modules: Iterable[torch.nn.Module]) -> None:
    """Give all processes the buffers of rank 0, in as few messages as there are dtypes."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for module in modules:
        for x in module.buffers(recurse=False):
            by_dtype.setdefault(x.dtype, []).append(x)
    with torch.no_grad():
        for found in by_dtype.values():
            flat = torch.cat([x.reshape(-1) for x in found])
            distributed.broadcast(flat, 0)
            sizes = [x.numel() for x in found]
            for x, new in zip(found, torch.split(flat, sizes), strict=True):
                x.copy_(new.reshape(x.shape))


class _Part(torch.nn.Module):
    """A module whose call is the loss of a part of a batch, which DDP is to see.

    Args:
        model: which is called for it, perhaps by a method of its own.
        others: parameters that are trained besides the model's.
        compute: returns the loss and the prediction.
    """

    def __init__(
        self, model: torch.nn.Module, others: Iterable[Tensor], compute: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.model = model
        self.others = torch.nn.ParameterList(others)
        self._compute = compute

    def forward(self, inputs: Any, y: Any) -> Any:
        return None if inputs is None else self._compute(inputs, y)
