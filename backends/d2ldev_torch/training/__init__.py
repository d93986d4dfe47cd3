"""Training: steps, batches that are copied ahead, and the state for resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from d2ldev import Device
from d2ldev.framework import (
    NO_LABEL,
    Framework,
    Learner,
    Tensor,
    Training,
    TrainingSettings,
    describe,
    state_refusal,
)
from d2ldev_torch.devices import NATIVE_CPU, TorchDevices
from d2ldev_torch.training.loaders import Workers, shard_loader


class TorchTraining(Training):
    """Training of torch modules.

    Args:
        framework: the framework of the models.
        devices: its area of devices.
    """

    loader_types = (torch.utils.data.DataLoader,)

    def __init__(self, framework: Framework, devices: TorchDevices) -> None:
        self._framework, self._devices = framework, devices

    def learner(self, model: Any, settings: TrainingSettings) -> Learner:
        from d2ldev_torch.training.learner import TorchLearner  # only training needs it

        return TorchLearner(self._framework, model, settings)

    def module_class(self, methods: type) -> type:
        return type("Module", (methods, torch.nn.Module), {})

    def accuracy(self, prediction: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        labels = widen_labels(y)
        is_right, counts = prediction.argmax(-1) == labels, labels != NO_LABEL
        number = counts.sum(dtype=torch.float32)
        return is_right.sum(dtype=torch.float32) / number.clamp(min=1), number

    # -- resuming ---------------------------------------------------------------------------------

    def random_state(self, device: Device) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        native = self._devices.native(device)
        if native.type != "cpu":
            states["device"] = torch.get_device_module(native).get_rng_state(native)
        return states

    def check_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        if not isinstance(state, Mapping) or "cpu" not in state:
            raise state_refusal("generator", f"{describe(state)} is not a generator's state")
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

    def order_of(self, loader: Any) -> list[Any]:
        sources = super().order_of(loader)
        own = [getattr(each, "generator", None) for each in sources]
        generators = [each for each in own if isinstance(each, torch.Generator)]
        # ``random_state`` covers torch's own, too, but not while another framework trains.
        each_once = dict.fromkeys([torch.default_generator, *generators])
        is_told = hasattr(getattr(loader, "dataset", None), "set_epoch")
        workers = [Workers(loader)] if is_told else []
        return [*sources, *workers, *map(_Generator, each_once)]


def widen_labels(y: Tensor) -> Tensor:
    """Return labels in 64 bits. A great one of ``uint64`` stays great: -100 counts as no label."""
    labels = y.long()
    return labels.masked_fill(labels < 0, 2**63 - 1) if y.dtype is torch.uint64 else labels


class _Generator:
    """A generator whose state is bytes, which the file of a run accepts with any framework."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get_state(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    def set_state(self, state: Any) -> None:
        if not isinstance(state, bytes):
            raise state_refusal("loader", f"{describe(state)} is not a generator's state")
        numbers = torch.from_numpy(np.frombuffer(state, "uint8").copy())
        _check_state(self._generator.device, numbers)
        self._generator.set_state(numbers)


def _check_state(native: torch.device, state: Any) -> None:
    """Set a state on a temporary generator: torch raises an error if the state is wrong."""
    try:
        torch.Generator(native).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise state_refusal("generator", str(error)) from error
