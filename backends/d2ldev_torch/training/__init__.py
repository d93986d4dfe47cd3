"""Training: steps, batches that are copied ahead, and what a resumed run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from d2ldev.device import Device
from d2ldev.errors import describe
from d2ldev.framework import Copier, Framework, Learner, Settings, Tensor, Training
from d2ldev.framework.training import refused_state
from d2ldev_torch.devices import Accelerator
from d2ldev_torch.training.learner import TorchLearner
from d2ldev_torch.training.prefetching import SideStream


class TorchTraining(Training):
    """Training of torch modules.

    Args:
        framework: whose models are trained.
        accelerator: of its devices.
    """

    loader_types = (torch.utils.data.DataLoader,)

    def __init__(self, framework: Framework, accelerator: Accelerator) -> None:
        self._framework = framework
        self._accelerator = accelerator

    def learner(self, model: Any, settings: Settings) -> Learner:
        return TorchLearner(self._framework, model, settings)

    def accuracy(self, prediction: Tensor, y: Tensor) -> Tensor:
        return (prediction.argmax(-1) == y.long()).float().mean()

    def copier(self, device: Device) -> Copier | None:
        streams = self._accelerator.streams()
        if streams is None:
            return None
        framework = self._framework
        return SideStream(framework.tensors, streams, framework.devices.native(device))

    # -- resuming ---------------------------------------------------------------------------------

    def random_state(self, device: Device) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        native = self._framework.devices.native(device)
        if native.type != "cpu":
            states["device"] = torch.get_device_module(native).get_rng_state(native)
        return states

    def checked_random_state(self, state: Any, device: Device) -> Callable[[], None]:
        if not isinstance(state, Mapping) or "cpu" not in state:
            raise refused_state("generator", f"{describe(state)} is no state of one")
        native = self._framework.devices.native(device)
        self._check_state(torch.device("cpu"), state["cpu"])
        # A run that began on the CPU has none for a GPU, and is continued as far as it goes.
        has_device = native.type != "cpu" and "device" in state
        if has_device:
            self._check_state(native, state["device"])

        def put() -> None:
            torch.set_rng_state(state["cpu"])
            if has_device:
                torch.get_device_module(native).set_rng_state(state["device"], native)

        return put

    def loader_state(self, loader: Any) -> list[bytes]:
        # As bytes, which the file of a run takes whatever framework is trained.
        return [generator.get_state().numpy().tobytes() for generator in _generators(loader)]

    def checked_loader_state(self, loader: Any, state: Any) -> Callable[[], None]:
        generators = _generators(loader)
        if not isinstance(state, list) or not all(isinstance(each, bytes) for each in state):
            raise refused_state("loader", f"{describe(state)} is no list of states of generators")
        if len(generators) != len(state):
            raise refused_state("loader", f"it has {len(generators)} generators, not {len(state)}")
        states = [torch.tensor(list(each), dtype=torch.uint8) for each in state]
        for generator, each in zip(generators, states, strict=True):
            self._check_state(generator.device, each)

        def put() -> None:
            for generator, each in zip(generators, states, strict=True):
                generator.set_state(each)

        return put

    def _check_state(self, native: torch.device, state: Any) -> None:
        """Set a state on a generator that is thrown away: torch refuses what is none."""
        try:
            self._accelerator.generator(native).set_state(state)
        except (RuntimeError, TypeError) as error:
            raise refused_state("generator", str(error)) from error


def _generators(loader: Any) -> list[torch.Generator]:
    """Return torch's own generator, the loader's and that of its sampler, each once.

    Torch's own belongs to ``random_state`` too, but another framework's model may be trained.
    """
    own = (getattr(holder, "generator", None) for holder in (loader, loader.sampler))
    return list(dict.fromkeys([torch.default_generator, *(each for each in own if each)]))
