"""The interface for authors of backends: a ``Framework`` with seven areas.

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

import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from d2ldev.errors import (
    DeviceInitializationWarning,
    DeviceUnavailableError,
    UnsupportedValueError,
    describe,
    warn,
)
from d2ldev.framework.devices import Devices, Memory
from d2ldev.framework.files import Files, Layer, Layout
from d2ldev.framework.models import Models, NoTensor, Part, Put
from d2ldev.framework.parallel import Parallel
from d2ldev.framework.precision import MatmulPrecision
from d2ldev.framework.state import FrameworkState
from d2ldev.framework.strict import Strict, Strictness
from d2ldev.framework.tensors import Tensor, Tensors
from d2ldev.framework.training import (
    Copier,
    Learner,
    Portion,
    Settings,
    Sharded,
    Training,
    Weighted,
)
from d2ldev.settings import check_matmul_precision, peer_timeout
from d2ldev.settings import peers as launched
from d2ldev.typing import DeviceLike, DTypeLike, Shape

if TYPE_CHECKING:
    from d2ldev.processes.group import Group

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
    "Memory",
    "Models",
    "NoTensor",
    "Parallel",
    "Part",
    "Portion",
    "Put",
    "Settings",
    "Shape",
    "Sharded",
    "Strict",
    "Strictness",
    "Tensor",
    "Tensors",
    "Training",
    "Weighted",
]


class Framework:
    """Describe one framework: its names, and its seven areas.

    A subclass creates the areas in its ``__init__``, after a call of this one.

    Args:
        virtual_gpus: how many virtual GPUs to make; ``None`` for the hardware's GPUs.

    Attributes:
        name: the name that selects it.
        distributions: the distributions whose versions identify it, the framework's first.
        max_virtual_gpus: how many virtual GPUs it can make.
        devices, tensors, models, files, training, strict, parallel: the areas.
        state: what d2ldev keeps of the framework; an author leaves it alone.

    Raises:
        DeviceUnavailableError: if it cannot make so many virtual GPUs.
    """

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
    - ``'train with sharded parameters'``: ``shard='parameters'``.
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

    def num_gpus(self) -> int:
        """Return how many GPUs there are; hardware that fails counts as none, with a warning."""
        if self.virtual_gpus == 0:
            return 0
        try:
            return self.devices.count()
        except Exception as error:
            text = f"{self.name} found GPUs and cannot use them: {error}"
            warn(text, DeviceInitializationWarning)
            return 0

    def check_matmul_precision(self, precision: object, attempted: str, fix: str) -> str:
        """Return a precision of products that the framework supports.

        Args:
            precision: the user's argument.
            attempted: the current operation, for messages.
            fix: the line that sets ``'highest'``.

        Raises:
            UnsupportedValueError: if the precision is invalid, or the framework cannot use it.
        """
        precision = check_matmul_precision(precision, attempted, fix)
        if precision == "highest":
            self.require("multiply in float32", attempted, fix.replace("highest", "high"))
        return precision

    def matmul_precision(self, precision: str) -> MatmulPrecision:
        """Set the precision of products, which was checked, and return the block that ends it."""
        return MatmulPrecision(self.state.matmul_switch, precision)

    def require(self, ability: str, attempted: str, fix: str | None = None) -> None:
        """Raise an ``UnsupportedValueError`` if an ability is in ``cannot``.

        Args:
            ability: its name there.
            attempted: the current operation.
            fix: the line that works; None is another backend.
        """
        if ability in self.cannot:
            other = "use another backend for it: D2LDEV_BACKEND=torch"
            raise UnsupportedValueError(attempted, self.inability(ability), fix or other)

    def group(self) -> Group | None:
        """Return the processes that train together, with a running engine; None without a launch.

        Raises:
            PeerLostError: if the others do not connect.
            UnsupportedValueError: if the framework trains in one process only, or the processes run
                different programs. If only the framework's own engine or launcher knows of the
                others.
        """
        if (peers := launched()) is None:
            self._check_alone()
            return None
        self.require(
            "train in several processes",
            f"train in {peers.world_size} processes",
            "unset WORLD_SIZE for a process of its own",
        )
        from d2ldev.processes.join import find_group, join  # only a launch needs it

        is_new = find_group() is None
        if is_new and self.parallel.is_joined():
            # The program has started the engine itself, which may listen at this port.
            peers = peers._replace(port=peers.port + 1)
        group = join(peers, self._program(), peer_timeout())
        if is_new:
            with group.work():
                self.parallel.join(group)
        return group

    def _check_alone(self) -> None:
        """Check that this process is not one of several, which would each train its own model."""
        if variable := self.parallel.launch_variable():
            problem = f"by {variable} this process may be one of several"
            fix = f"unset {variable}"
        elif self.parallel.is_joined():
            problem = f"the program has started the engine of {self.name} between several processes"
            fix = "leave the engine out"
        else:
            return
        raise UnsupportedValueError(
            "train in one process of several",
            f"{problem}, but RANK and WORLD_SIZE are not set",
            "d2ldev launch, or torchrun's variables before the first use of the backend; or "
            f"{fix}, for a model in each process",
        )

    def _program(self) -> dict[str, str]:
        """Return the versions that have to be the same in all processes of a launch."""
        from importlib.metadata import PackageNotFoundError, version  # only a launch needs it

        found = {}
        for name in ("d2ldev", *self.distributions):
            with suppress(PackageNotFoundError):
                # The first on the path, as of what is imported: there may be several.
                found[name] = version(name)
        return {**found, "backend": self.name, "python": sys.version.split()[0]}

    def check_settings(self, settings: Settings) -> Settings:
        """Return the settings of a training with Python's own numbers.

        Raises:
            UnsupportedValueError: if they cannot be used, or the framework cannot train with them.
        """
        settings = settings.check()
        if callable(settings.loss):
            attempted = f"train with the loss {describe(settings.loss)}"
            self.require("train with a loss of your own", attempted, "loss='mse'")
        precision = settings.precision
        self.require(f"train in {precision}", f"train with precision={precision!r}")
        if settings.shard is not None:
            attempted = f"train with shard={settings.shard!r}"
            self.require("train with sharded parameters", attempted, "leave shard out")
        return settings

    def inability(self, ability: str) -> str:
        """Return a sentence: what the framework cannot do, and why."""
        return f"the {self.name} backend cannot {ability}: {self.cannot[ability]}"
