"""Training: steps, batches that are copied ahead, and the state for resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from d2ldev.device import Device
from d2ldev.errors import describe
from d2ldev.framework import Copier, Framework, Learner, Settings, Tensor, Tensors, Training
from d2ldev.framework.training import NO_LABEL, state_refusal
from d2ldev_torch.devices import NATIVE_CPU, TorchDevices
from d2ldev_torch.training.learner import TorchLearner
from d2ldev_torch.training.loaders import shard_loader


class TorchTraining(Training):
    """Training of torch modules.

    Args:
        framework: whose models are trained.
        devices: its room of devices.
    """

    loader_types = sharded_types = (torch.utils.data.DataLoader,)

    def __init__(self, framework: Framework, devices: TorchDevices) -> None:
        self._framework, self._devices = framework, devices

    def learner(self, model: Any, settings: Settings) -> Learner:
        return TorchLearner(self._framework, model, settings)

    def module_class(self, methods: type) -> type:
        return type("Module", (methods, torch.nn.Module), {})

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        labels = y.long()
        is_right, counts = prediction.argmax(-1) == labels, labels != NO_LABEL
        return is_right.sum(dtype=torch.float32) / counts.sum().clamp(min=1)

    def label_range(self, y: Tensor, weights: Any) -> Tensor:
        labels = y.long()
        left_out = labels == NO_LABEL
        if weights is not None:
            left_out |= (weights == 0).reshape(*weights.shape, *[1] * (y.dim() - weights.dim()))
        return torch.stack(labels.masked_fill(left_out, 0).aminmax())

    def copier(self, device: Device) -> Copier | None:
        streams = self._devices.streams
        if streams is None:
            return None
        return SideStream(self._framework.tensors, streams, self._devices.native(device))

    # -- resuming ---------------------------------------------------------------------------------

    def random_state(self, device: Device) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        native = self._devices.native(device)
        if native.type != "cpu":
            states["device"] = torch.get_device_module(native).get_rng_state(native)
        return states

    def check_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        if not isinstance(state, Mapping) or "cpu" not in state:
            raise state_refusal("generator", f"{describe(state)} is not a state of one")
        native = self._devices.native(device)
        _check_state(NATIVE_CPU, state["cpu"])
        # A run that began on the CPU has no state for a GPU.
        has_device = native.type != "cpu" and "device" in state
        if has_device:
            _check_state(native, state["device"])

        def put() -> None:
            torch.set_rng_state(state["cpu"])
            if has_device:
                torch.get_device_module(native).set_rng_state(state["device"], native)

        return put

    def shard_loader(self, loader: Any, rank: int, size: int) -> Any:
        return shard_loader(loader, rank, size)

    def loader_state(self, loader: Any) -> list[bytes]:
        # As bytes, which the file of a run takes whatever framework is trained.
        return [generator.get_state().numpy().tobytes() for generator in _generators(loader)]

    def check_loader_state(self, loader: Any, state: Any) -> Callable[[], None]:
        generators = _generators(loader)
        if not isinstance(state, list) or not all(isinstance(each, bytes) for each in state):
            raise state_refusal(
                "loader", f"{describe(state)} is not a list of states of generators"
            )
        if len(generators) != len(state):
            raise state_refusal("loader", f"it has {len(generators)} generators, not {len(state)}")
        states = [torch.from_numpy(np.frombuffer(each, "uint8").copy()) for each in state]
        for generator, each in zip(generators, states, strict=True):
            _check_state(generator.device, each)

        def put() -> None:
            for generator, each in zip(generators, states, strict=True):
                generator.set_state(each)

        return put


def _check_state(native: torch.device, state: Any) -> None:
    """Set a state on a temporary generator: torch refuses a wrong state."""
    try:
        torch.Generator(native).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise state_refusal("generator", str(error)) from error


def _generators(loader: Any) -> list[torch.Generator]:
    """Return torch's own generator, the loader's and that of its sampler, each once.

    Torch's own belongs to ``random_state`` too, but another framework's model may be trained.
    """
    # A ``batch_sampler`` of the user's has the sampler itself.
    holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    own = (getattr(holder, "generator", None) for holder in holders)
    return list(dict.fromkeys([torch.default_generator, *(each for each in own if each)]))


class SideStream(Copier):
    """Copies to a GPU: of large batches beside what it computes, in a stream of their own.

    A copy waits for everything that was queued before it in its stream. From memory that is not
    pinned torch copies at a sixth of the speed, and Python waits until the bytes are on their way.

    Args:
        tensors: the room of tensors, which makes the other copies.
        module: ``torch.cuda`` or ``torch.xpu``.
        native: where to.

    Attributes:
        large: from so many bytes on a batch is copied beside. At 50 GB/s the copy takes 0.35 ms, as
            long as the calls that a step makes for a second stream.
        pinned: from so many bytes on a tensor is pinned for its copy. A smaller one gains nothing
            measurable by it, and torch asks the driver whether it is pinned already.
    """

    large = 2**24
    pinned = 2**20

    def __init__(self, tensors: Tensors, module: ModuleType, native: torch.device) -> None:
        self._tensors, self._module, self._native = tensors, module, native
        self._stream: Any = None
        self._copies: list[torch.Tensor] = []

    def is_large(self, xs: list[Tensor]) -> bool:
        size: int = sum([x.nbytes for x in xs if _is_dense(x)])
        return size >= self.large

    def copy_in_turn(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        return [
            (x.pin_memory() if x.nbytes >= self.pinned else x).to(native, non_blocking=True)
            if _is_dense(x)
            else self._tensors.copy(x, native)
            for x in xs
        ]

    def copy_all(self, xs: list[Tensor], native: Any) -> list[Tensor]:
        if self._stream is None:
            self._stream = self._module.Stream(device=self._native)
        with self._module.stream(self._stream):
            beside = [
                x.pin_memory().to(native, non_blocking=True) if _is_dense(x) else None for x in xs
            ]
        self._copies += [new for new in beside if new is not None]
        return [
            self._tensors.copy(x, native) if new is None else new
            for x, new in zip(xs, beside, strict=True)
        ]

    def mark_start(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the event after the copies of a batch, and these copies."""
        copies, self._copies = self._copies, []
        return self._stream.record_event(), copies

    def finish(self, mark: tuple[Any, list[torch.Tensor]]) -> None:
        event, copies = mark
        current = self._module.current_stream(self._native)
        current.wait_event(event)
        for x in copies:
            # Else the allocator, which knows only the side stream, would give the memory to the
            # next batch while this one is still computed with.
            x.record_stream(current)


def _is_dense(x: Tensor) -> bool:
    """Return whether a tensor is plain memory of the host.

    Tensors that a GPU computes, or that gradients flow through, keep their place in the queue.
    """
    return bool(x.is_cpu and x.layout is torch.strided and not x.requires_grad)
