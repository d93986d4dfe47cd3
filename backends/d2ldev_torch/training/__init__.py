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
from d2ldev_torch.training.loaders import shard_loader


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
        labels = y.long()
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

    def loader_state(self, loader: Any) -> list[bytes]:
        # As bytes, which the file of a run accepts with any framework.
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
    """Set a state on a temporary generator: torch raises an error if the state is wrong."""
    try:
        torch.Generator(native).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise state_refusal("generator", str(error)) from error


def _generators(loader: Any) -> list[torch.Generator]:
    """Return torch's own generator, the loader's and its sampler's, each once.

    ``random_state`` covers torch's own generator, too, but not while another framework trains.
    """
    # A user's ``batch_sampler`` has the sampler itself.
    holders = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    own = (getattr(holder, "generator", None) for holder in holders)
    return list(dict.fromkeys([torch.default_generator, *(each for each in own if each)]))
