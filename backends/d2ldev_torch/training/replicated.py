"""Training steps in several processes, with ``DistributedDataParallel``."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from d2ldev import UnsupportedValueError
from d2ldev.framework import Framework, Inputs, Tensor, TrainingSettings, map_tensors
from d2ldev_torch.training.learner import TorchLearner, list_trained

if TYPE_CHECKING:
    from d2ldev.framework import Group


# Of the sums of parameters, on different GPUs.
_ROUNDING = 1e-6


class TorchGroupLearner(TorchLearner):
    """A module that several processes train, each on a shard of every batch.

    Buffers, for example running means, are computed from rank 0's shard. After each step all
    processes have them.
    """

    def __init__(
        self, framework: Framework, model: Any, settings: TrainingSettings, group: Group
    ) -> None:
        super().__init__(framework, model, settings)
        self._group, self._size = group, group.size
        self._numbers = OwnNumbers(group.rank)
        # The first step makes it, after it has built a model with lazy modules.
        self._shared: _Shared | None = None

    def replace(self, components: dict[str, Any]) -> None:
        super().replace(components)
        self._shared = None

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        if self._shared is None:
            if not self.is_built:
                self.build(inputs)
            # DDP begins with the parameters and buffers of rank 0.
            begin_as_the_first(self._framework, self._optimizer)
        if self._shared is None or self._shared.is_outdated():
            assert self._optimizer is not None
            # In a cycle with the learner, DDP would outlive ``fit``, with gloo's group and threads.
            # A thread that still has a tensor when Python ends would abort the process.
            # https://github.com/pytorch/pytorch/issues/190489
            compute = weakref.WeakMethod(self._compute)
            # A user's optimizer may also train parameters outside of the model, for example a loss.
            module = _LossOfShard(self._model, list_trained(self._optimizer), compute)
            # In float16, gradients are scaled after the reduction. During it they are as large as
            # in one process.
            self._shared = _Shared(module, 1 if self._scaler is None else self._size)
        found = super().step(inputs, y)
        broadcast_buffers(self._shared.buffered)
        return found

    def check_labels(self) -> None:
        super().check_labels()
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Check that all processes have the same parameters.

        The steps of the optimizer keep them equal. ``Embedding(max_norm=...)`` changes its rows
        where it reads them, in each process by itself.
        """
        named = dict(self._model.named_parameters())
        sums = [x.detach().abs().sum(dtype=torch.float32) for x in named.values()]
        own = torch.stack(sums).nan_to_num().tolist() if sums else []
        everyone = self._group.gather("the sums of the parameters", own)
        for name, found in zip(named, zip(*everyone, strict=True), strict=True):
            if max(found) - min(found) > _ROUNDING * max(found):
                raise UnsupportedValueError(
                    f"train in {self._size} processes",
                    f"{name} is not the same in all of them: the model or a callback changes it, "
                    "beside the optimizer",
                    "Trainer(max_epochs, num_gpus=1), or a model without such a change, as "
                    "Embedding(max_norm=...) makes it",
                )

    def _take_mean(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.accumulate_grad_batches > 1:
            assert self._shared is not None
            self._total = self._shared.reduce(self._total)
        super()._take_mean(optimizer)

    def _differentiate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        shared = self._shared
        assert shared is not None
        if not self.pending:
            shared.zero_grad()
        # With ``accumulate_grad_batches`` the gradients stay in this process until ``flush``.
        is_reduced = self.settings.accumulate_grad_batches == 1
        loss, prediction = (shared.reducing if is_reduced else shared.module)(inputs, y)
        # DDP computes the mean of the processes' gradients, and the step needs the sum.
        factor = self._find_factor(inputs, y)
        self._backward(loss * (factor * (self._size / shared.factor)))
        if is_reduced:
            # The shares of shards that count by their elements add up to 1.
            total = None if self.weight is None else factor
            self._total = shared.end_reduction([x for x in shared.trained if x.grad is None], total)
        return loss.detach(), prediction

    def _of_the_whole_batch(self, loss: Tensor) -> Tensor:
        # On its own device: the program's engine may serve only GPUs.
        total = loss * self._factor
        distributed.all_reduce(total)
        return (total / self._total).cpu()

    def _compute(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with self._numbers.draw_own(self._place_of(inputs)):
            loss, prediction = self._compute_losses(inputs, y, is_step=True)
        return loss, self._map_prediction(torch.Tensor.detach, prediction)


class _Shared:
    """A model whose gradients are reduced by DDP.

    Args:
        module: returns the loss of a shard of a batch, and has the model's parameters.
        factor: multiplies the reduced gradients.

    Attributes:
        module: the module without DDP.
        reducing: the module in DDP.
        trained: the parameters that are not frozen.
        buffered: the modules that have buffers.
    """

    def __init__(self, module: _LossOfShard, factor: int) -> None:
        parameters = list(module.parameters())
        self._were_trained = [(x, x.requires_grad) for x in parameters]
        self.trained = [x for x in parameters if x.requires_grad]
        # Private: the public list leaves out a buffer that is None until the first call.
        self.buffered = [each for each in module.modules() if each._buffers]
        # The number of processes in which each parameter has a gradient. It is a gradient itself:
        # DDP sends it in one message with other gradients of its dtype.
        # Its last number is the sum of the factors of their losses.
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        used = parameters[0].new_zeros(len(self.trained) + 1, dtype=dtype)
        module.used = torch.nn.Parameter(used)
        self._used = module.used
        self._unused: list[bool] = []
        self.module, self.factor = module, factor
        self.reducing = DistributedDataParallel(module)
        # Rank 0's buffers are sent after a step, not before each forward pass. The argument of
        # the same name is deprecated.
        self.reducing.broadcast_buffers = False
        # DDP measures times that nobody reads, and prints a warning on devices other than CUDA's.
        # https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/logger.cpp
        self.reducing.logger = SimpleNamespace(
            set_runtime_stats_and_log=lambda: None, set_error_and_log=lambda _: None
        )

    def is_outdated(self) -> bool:
        """Return whether parameters were frozen or thawed, for example by a callback."""
        return any(x.requires_grad is not was for x, was in self._were_trained)

    def zero_grad(self) -> None:
        """Remove all gradients, also of parameters outside of the optimizer."""
        for x in self.trained:
            x.grad = None

    def reduce(self, total: Any) -> Any:
        """Reduce the present gradients, and the sum of their factors."""
        self.reducing(None, None)
        return self.end_reduction(self.trained, total)

    def end_reduction(self, waited_for: Sequence[Tensor], total: Any) -> Any:
        """Let DDP end its reduction, which waits for parameters that a batch does not use.

        As in one process, a parameter that no process has used then has no gradient. If only other
        processes have used it, it has their gradient.

        Args:
            waited_for: the parameters that DDP still waits for.
            total: the sum of the factors here; None if it is 1 over all processes.

        Returns:
            The sum of the factors over all processes.
        """
        unused = [x.grad is None for x in self.trained]
        if unused != self._unused:  # else each step would wait for a copy from the host
            self._unused = unused
            are_used = [float(not is_unused) for is_unused in unused]
            self._uses = torch.tensor([*are_used, 0.0]).to(self._used)
        self._used.grad = None
        zeros = [torch.zeros_like(x) for x in waited_for]
        uses = self._uses.clone()  # into which DDP writes the result
        if total is not None:
            uses[-1] = total
        torch.autograd.backward([self._used, *waited_for], [uses, *zeros])
        sums: Any = self._used.grad
        if any(unused):
            for x, share in zip(self.trained, sums.tolist(), strict=False):
                if not share:
                    x.grad = None
        if self.factor > 1:
            for x in self.trained:
                if x.grad is not None:
                    x.grad *= self.factor
        return 1.0 if total is None else sums[-1] * distributed.get_world_size()


class OwnNumbers:
    """The random numbers of a forward pass, for example of dropout, which differ in each process.

    The data may draw from the same generator, and all processes have to read the same batches. So
    the pass draws from another state, which depends on the generator's state and the rank.
    Afterwards the generator advances by one number in all processes. If no pass draws, it stays as
    it is. All processes learn from one whether a pass has drawn. A run that resumes from a
    checkpoint restores this state, and draws the same numbers.

    Args:
        rank: the rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Whether a pass has drawn: a shard without examples draws nothing.
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
        optimizer: this process's optimizer, with the same parameters.
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
    """Send rank 0's buffers to all processes, in one message for each dtype."""
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


class _LossOfShard(torch.nn.Module):
    """A module that returns the loss of a shard of a batch, for DDP.

    Args:
        model: computes the loss, perhaps in a method of its own.
        others: trained parameters outside of the model.
        compute: the method of a learner that returns the loss and the prediction.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        others: Iterable[Tensor],
        compute: weakref.WeakMethod[Callable[..., Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self.others = torch.nn.ParameterList(others)
        self._compute = compute

    def forward(self, inputs: Any, y: Any) -> Any:
        if inputs is None:
            return None
        compute = self._compute()
        assert compute is not None
        return compute(inputs, y)
