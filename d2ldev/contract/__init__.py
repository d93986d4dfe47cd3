"""The interface for authors of backends: a ``Framework`` with seven areas.

``d2ldev.framework`` exports it, with the helpers of the core. The core itself imports it from here.

Design rules, as in einops' backends:

- Native tensors go in and come out. A framework wraps nothing.
- Each area is a small object with public methods. ``devices`` and ``tensors`` are required. The
  other five have a default for every method. ``d2ldev.Backend`` derives the user's calls from
  them, once.
- The core has checked the arguments of a method, and the devices exist. It translates the errors
  that the method raises.
- A copy happens only where the user wrote one, and never by way of another device.
- A framework's state changes only where the user asked for it.

An entry point of the group ``d2ldev.backends`` names a subclass of ``Framework``. The class imports
the framework in its ``__init__``. The package lists the modules that it needs in ``requires``. A
framework owns a tensor if its class, or a base of the class, comes from one of these modules.
``libraries = ("flax", "optax")`` names further libraries of the framework. Other backends name them
in errors about their models.

``d2ldev conformance NAME`` runs the conformance suite on a backend. The module ``provision`` of the
package has the fixtures of the suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

from d2ldev.contract.devices import Devices, Memory
from d2ldev.contract.files import Files, Layer, Layout
from d2ldev.contract.models import Member, Models, NoTensor, Put
from d2ldev.contract.parallel import Parallel
from d2ldev.contract.state import FrameworkState
from d2ldev.contract.strict import Strict, Strictness
from d2ldev.contract.tensors import Tensor, Tensors
from d2ldev.contract.training import (
    Copier,
    Learner,
    Portion,
    Sharded,
    Training,
    TrainingSettings,
    Weighted,
)
from d2ldev.errors import DeviceUnavailableError
from d2ldev.typing import DeviceLike, DTypeLike, Shape

__all__ = [
    "Copier",
    "DTypeLike",
    "DeviceLike",
    "Devices",
    "Files",
    "Framework",
    "Layer",
    "Layout",
    "Learner",
    "Member",
    "Memory",
    "Models",
    "NoTensor",
    "Parallel",
    "Portion",
    "Put",
    "Shape",
    "Sharded",
    "Strict",
    "Strictness",
    "Tensor",
    "Tensors",
    "Training",
    "TrainingSettings",
    "Weighted",
]

INTERFACE = 1
"""The version of the interface between d2ldev and the packages of backends.

It changes if a package has to change: for another signature, or for another meaning of a method.
"""


class Framework:
    """Describe one framework: its names, and its seven areas.

    A subclass creates the areas in its ``__init__``, after a call of this one.

    Args:
        virtual_gpus: how many virtual GPUs to make; ``None`` for the hardware's GPUs.

    Attributes:
        interface: the version of the interface that the class was written for: see ``INTERFACE``.
        name: the name that selects it.
        distributions: the distributions whose versions identify it, the framework's first.
        max_virtual_gpus: how many virtual GPUs it can make.
        cannot: what the framework cannot do, with the reasons.
        virtual_gpus: see Args.
        devices, tensors, models, files, training, strict, parallel: the areas.
        state: what d2ldev keeps of the framework; an author leaves it alone.

    Raises:
        DeviceUnavailableError: if it cannot make so many virtual GPUs.
    """

    interface: ClassVar[int]
    name: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    max_virtual_gpus: ClassVar[int] = 0
    cannot: Mapping[str, str] = MappingProxyType({})
    """What the framework cannot do, and why. The names of what it may lack:

    - ``'mlp'``: ``backend.mlp``; ``'dlpack'``: ``from_dlpack``;
    - ``'multiply in float32'``: ``matmul_precision('highest')``;
    - ``'train'``: ``learner``, ``accuracy`` and ``Trainer``;
    - ``'train with a loss of your own'``: a function in the place of ``'mse'``;
    - ``'train in bf16'``, ``'train in fp16'``: ``precision='bf16'``, ``'fp16'``;
    - ``'train on several GPUs'``: ``num_gpus=2``;
    - ``'train on several GPUs in one process'``: ``learner`` with several ``devices``;
    - ``'train in several processes'``: ``d2ldev launch``;
    - ``'lose a process while the engine begins'``: ``PeerLostError`` in the others then;
    - ``'split sequences over processes'``: lists of examples in a batch, in ``d2ldev launch``;
    - ``'train with sharded parameters'``: ``shard='parameters'``;
    - ``'find leaks'``: ``d2ldev.find_leaks`` and ``pytest --d2ldev-leaks``.
    """

    devices: Devices
    tensors: Tensors
    models: Models
    training: Training
    strict: Strict
    parallel: Parallel

    def __init__(self, virtual_gpus: int | None = None) -> None:
        if virtual_gpus is not None and virtual_gpus > self.max_virtual_gpus:
            raise DeviceUnavailableError(
                f"make {virtual_gpus} virtual GPUs",
                f"the {self.name} backend can make {self.max_virtual_gpus}",
                f"D2LDEV_VIRTUAL_GPUS={self.max_virtual_gpus}, or unset it",
            )
        self.virtual_gpus = virtual_gpus
        self.models = Models()
        self.training = Training()
        self.strict = Strict()
        self.parallel = Parallel()
        self.state = FrameworkState(self)

    @cached_property
    def files(self) -> Files:
        """Return the area of files. Its defaults make one copy more than necessary."""
        return Files(self.tensors)
