"""Training steps in several processes with sharded parameters, by FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from d2ldev.framework import (
    Framework,
    Inputs,
    Tensor,
    TrainingSettings,
    UnsupportedValueError,
    describe,
)
from d2ldev_torch.models import original
from d2ldev_torch.optimizers import is_simple
from d2ldev_torch.training.learner import TorchLearner, list_trained, needs_closure
from d2ldev_torch.training.plain_attributes import PlainAttributes
from d2ldev_torch.training.replicated import OwnNumbers, begin_as_the_first, broadcast_buffers

if TYPE_CHECKING:
    from d2ldev.framework import Group

# FSDP gathers one unit at a time. Each module in one of these containers is a unit.
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
# It keeps a state for each row and column, which a shard of a parameter cannot give.
_OF_WHOLE_PARAMETERS = (torch.optim.Adafactor,)


class TorchShardLearner(TorchLearner):
    """A module whose parameters are sharded between several processes.

    The user's module stays on the host, whole. FSDP splits a copy of it on the batches' device, and
    the copy is trained. ``sync`` gathers it. The next step splits it again, with the user's
    changes in between.
    """

    def __init__(
        self, framework: Framework, model: Any, settings: TrainingSettings, group: Group
    ) -> None:
        super().__init__(framework, model, settings)
        self._check()
        self._size = group.size
        self._numbers = OwnNumbers(group.rank)
        self._has_begun = False
        self._split: _Split | None = None

    def _check(self) -> None:
        """Refuse a model that FSDP cannot split."""
        attempted = f"train the {type(self._model).__name__} with shard='parameters'"
        if original(self._model) is not self._model:
            raise UnsupportedValueError(
                attempted,
                "it is compiled as a whole, and FSDP has to split its modules",
                "compile its parts: net[0].compile(), or leave out torch.compile",
            )
        if self._scaler is not None:
            raise UnsupportedValueError(
                f"{attempted} and precision='fp16'",
                "torch.amp.GradScaler looks for gradients that are too large in one shard alone",
                "precision='bf16'",
            )
        for name, x in self._model.named_parameters():
            if not torch.nn.parameter.is_lazy(x) and not x.dim():
                raise UnsupportedValueError(
                    attempted,
                    f"FSDP splits the first axis of a parameter, and {name} has none",
                    "torch.nn.Parameter(torch.ones(1)), of shape (1,)",
                )

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super()._make_optimizer()
        known = {id(x) for x in self._model.parameters()}
        is_alone = all(id(x) in known for x in list_trained(optimizer))
        cls: Any = type(optimizer)
        works_on_shards = not needs_closure(cls) and cls not in _OF_WHOLE_PARAMETERS
        problem = "" if works_on_shards else "it looks at whole parameters"
        if not is_simple(optimizer):
            problem = "it keeps more than a state for each parameter, and only that is split"
        if not is_alone:
            problem = "it trains more than the net"
        if problem:
            raise UnsupportedValueError(
                f"train with the optimizer {cls.__name__} and shard='parameters'",
                problem,
                "optimizer='adam', or leave out shard",
            )
        return optimizer

    @property
    def components(self) -> dict[str, Any]:
        components = super().components
        return components if self._split is None else {**components, "model": self._split.whole}

    def replace(self, components: dict[str, Any]) -> None:
        super().replace(components)
        self._split = None

    def sync(self) -> None:
        if self._split is not None:
            self._split.gather()
        self._return()

    def leave(self) -> None:
        # Other processes may not reach the gathering of the parameters.
        self._return()

    def _return(self) -> None:
        """Go back to the user's own objects."""
        if self._split is not None:
            self._split.restore()
            self._model, self._split = self._split.whole, None
        super().sync()

    def build(self, inputs: Inputs) -> None:
        super().build(self._map_prediction(torch.Tensor.cpu, inputs))

    def step(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with self._spread(inputs):
            found = super().step(inputs, y)
        broadcast_buffers(self._model.modules())
        return found

    def evaluate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with self._spread(inputs):
            return super().evaluate(inputs, y)

    def predict(self, inputs: Inputs) -> Any:
        if not self.is_built:  # during ``build``
            return super().predict(inputs)
        with self._spread(inputs):
            return super().predict(inputs)

    def _differentiate(self, inputs: Inputs, y: Any) -> tuple[Tensor, Any]:
        with self._numbers.draw_own(self._place_of(inputs)):
            loss, prediction = self._compute_losses(inputs, y, is_step=True)
        # FSDP computes the mean of the processes' gradients, and the step needs the sum.
        self._backward(loss * (self._find_factor(inputs, y) * self._size))
        return loss.detach(), self._map_prediction(torch.Tensor.detach, prediction)

    def _take_mean(self, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.accumulate_grad_batches == 1 and self.weight is None:
            return  # the shares of the shards add up to 1
        first = next(x.grad for x in list_trained(optimizer) if x.grad is not None)
        total = torch.as_tensor(self._total, dtype=torch.float32, device=first.device).clone()
        distributed.all_reduce(total)
        for parameter in list_trained(optimizer):
            grad: Any = parameter.grad
            if grad is not None:
                grad.to_local().div_(total)

    @contextmanager
    def _spread(self, inputs: Inputs) -> Iterator[None]:
        """Split a whole model for a block, on the device of the inputs."""
        if not self.is_built:
            self.build(inputs)
        # Between its steps the whole model may be on the CPU.
        device = self._place_of_inputs(inputs)
        # FSDP reads the current device, which is the first one, and not the device of a tensor.
        is_current = device.type == "cpu"
        with nullcontext() if is_current else torch.get_device_module(device).device(device):
            if self._split is None:
                self._begin(device)
            yield

    def _begin(self, device: torch.device) -> None:
        assert self._optimizer is not None
        if not self._has_begun:
            for x in (*self._model.parameters(), *self._model.buffers()):
                distributed.broadcast(x.data, 0)
            begin_as_the_first(self._framework, self._optimizer)
            self._has_begun = True
        mesh = DeviceMesh(device.type, range(self._size))
        methods = self.settings.methods or ()
        self._split = _Split(self._model, self._optimizer, methods, mesh, device)
        self._model = self._split.model


class _Split:
    """A sharded copy of a model: each process has a shard, and the optimizer trains the shards.

    Args:
        whole: the user's model.
        optimizer: the user's optimizer; it trained the whole model until now.
        methods: the names of the methods that compute a loss.
        mesh: the mesh of the processes.
        device: the device of this process's shard.

    Attributes:
        whole: the user's model.
        model: the copy.
    """

    def __init__(
        self,
        whole: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        methods: Iterable[str],
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.whole, self._optimizer = whole, optimizer
        self._plain = PlainAttributes(whole)
        self.model = self._plain.copy_to(device)
        for unit in _units(self.model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        for name in methods:
            if hasattr(self.model, name):
                register_fsdp_forward_method(self.model, name)
        self._plain.begin()
        shards: dict[Any, Any]
        shards = dict(zip(whole.parameters(), self.model.parameters(), strict=True))
        self._parameters = {shard: x for x, shard in shards.items()}
        # The state of the whole parameters, from the last ``gather``.
        self._state: dict[Any, dict[str, Any]] = {**optimizer.state}
        optimizer.state.clear()
        for x, values in self._state.items():
            optimizer.state[shards[x]] = {
                name: _shard_state(value, shards[x], device) for name, value in values.items()
            }
        for group in optimizer.param_groups:
            group["params"] = [shards[x] for x in group["params"]]

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the trained parameters and state into the whole model, one tensor at a time."""
        for shard, whole in self._parameters.items():
            whole.copy_(shard.full_tensor())
        for whole, shard in zip(self.whole.buffers(), self.model.buffers(), strict=True):
            whole.copy_(shard)
        self._state.clear()
        if strange := self._optimizer.state.keys() - self._parameters.keys():
            name = type(self._optimizer).__name__
            raise UnsupportedValueError(
                f"gather what the optimizer {name} has learned with shard='parameters'",
                f"its state has {describe(strange.pop())}, which is not a parameter",
                "optimizer='adam', or leave out shard",
            )
        for shard, values in self._optimizer.state.items():
            whole = self._parameters[shard]
            self._state[whole] = {
                name: value.full_tensor().to(whole.device) if isinstance(value, DTensor) else value
                for name, value in values.items()
            }
        self._plain.bring_back()  # last: a user's property may refuse its value

    def restore(self) -> None:
        """Let the optimizer train the whole parameters again."""
        for group in self._optimizer.param_groups:
            group["params"] = [self._parameters[shard] for shard in group["params"]]
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _shard_state(value: Any, shard: Any, device: torch.device) -> Any:
    """Return the shard of a tensor of an optimizer's state for a shard of a parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != shard.shape:
        return value.clone()  # for example the number of steps
    mesh = shard.device_mesh
    shards = value.chunk(mesh.size())
    own = shards[mesh.get_rank()] if mesh.get_rank() < len(shards) else value[:0]
    return DTensor.from_local(
        own.to(device, copy=True),
        *(mesh, shard.placements),
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _units(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules whose parameters are gathered together, the inner ones first.

    A parameter that another module shares belongs to the model.
    """
    in_containers = {
        id(child)
        for module in model.modules()
        if isinstance(module, _CONTAINERS)
        for child in module.children()
    }
    uses = _uses(model)
    for module in reversed(list(model.modules())):
        is_unit = id(module) in in_containers and not isinstance(module, _CONTAINERS[1:])
        own = _uses(module)
        if module is model or (is_unit and own and all(own[x] == uses[x] for x in own)):
            yield module


def _uses(module: torch.nn.Module) -> Counter[int]:
    """Return how many times each parameter occurs in a module."""
    return Counter(id(x) for _, x in module.named_parameters(remove_duplicate=False))
