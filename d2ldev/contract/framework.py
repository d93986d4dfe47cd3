"""``Framework``: the names of one framework, its seven areas, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import d2ldev.settings as settings
from d2ldev.contract.devices import Devices
from d2ldev.contract.files import Files
from d2ldev.contract.models import Models
from d2ldev.contract.parallel import Parallel
from d2ldev.contract.precision import Switch
from d2ldev.contract.strict import Strict, Strictness
from d2ldev.contract.tensors import Tensors
from d2ldev.contract.training import Training
from d2ldev.device import Device
from d2ldev.errors import DeviceInitializationWarning, DeviceUnavailableError, warn
from d2ldev.nesting.kinds import Kinds
from d2ldev.scopes import Contexts, Scopes

INTERFACE = 1
"""The version of the interface between d2ldev and the packages of backends.

It changes if a package has to change: for another signature, or for another meaning of a method.
"""


ABILITIES = {
    "mlp": "``backend.mlp``",
    "dlpack": "``from_dlpack``",
    "multiply in float32": "``matmul_precision('highest')``",
    "seed other threads": "``seed`` for the numbers of other threads",
    "train": "``learner``, ``accuracy`` and ``Trainer``",
    "train with a loss of your own": "a function in the place of ``'mse'``",
    "train in bf16": "``precision='bf16'``",
    "train in fp16": "``precision='fp16'``",
    "train on several GPUs": "``num_gpus=2``",
    "train on several GPUs in one process": "``learner`` with several ``devices``",
    "train in several processes": "``d2ldev launch``",
    "lose a process while the engine begins": "``PeerLostError`` in the others then",
    "split sequences over processes": "lists of examples in a batch, in ``d2ldev launch``",
    "find leaks": "``d2ldev.find_leaks`` and ``pytest --d2ldev-leaks``",
}
"""The names for ``Framework.cannot``: each with what users lack then."""


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
        cannot: what the framework cannot do, with the reasons; its keys are those of ``ABILITIES``.
        as_cuda: whether the program wants virtual GPUs that stand for CUDA devices. A framework
            whose programs do not name CUDA takes no notice.
        devices, tensors, models, files, training, strict, parallel: the areas.
        state: what d2ldev keeps of the framework. An author hands ``state.kinds`` to the helpers
            that take ``kinds``, and leaves the rest alone.

    Raises:
        DeviceUnavailableError: if it cannot make so many virtual GPUs.
    """

    interface: ClassVar[int]
    name: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    max_virtual_gpus: ClassVar[int] = 0
    cannot: Mapping[str, str] = MappingProxyType({})

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
        self.as_cuda = settings.virtual_cuda()
        self.models = Models()
        self.training = Training()
        self.strict = Strict()
        self.parallel = Parallel()
        self.state = FrameworkState(self)

    @cached_property
    def files(self) -> Files:
        """Return the area of files. Its defaults make one copy more than necessary."""
        return Files(self.tensors)


class FrameworkState:
    """Devices, types and blocks that d2ldev knows of a framework.

    Args:
        framework: whose state it is.

    Attributes:
        scope: the devices of the blocks ``with backend.on(device):``.
        contexts: the framework's own contexts of these blocks.
        strictness: the blocks ``with backend.strict():``.
        matmul_switch: the switch of ``backend.matmul_precision``.
        kinds: the kind of each type: a tensor, an object, a container, or plain.
        known_devices: devices that exist, by every spelling in which they were asked for.
        known_natives: the framework's own objects for these devices.
    """

    # All are attributes of the instance, because ``to`` reads them at each call. Python reads a
    # property at half the speed.
    def __init__(self, framework: Framework) -> None:
        self.scope: Scopes[Device] = Scopes(f"{framework.name}_scope")
        self.contexts = Contexts()
        self.strictness = Strictness(framework.name, lambda: framework.strict)
        self.matmul_switch = Switch(lambda: framework.devices)
        self.kinds = Kinds(framework)
        self.known_devices: dict[Any, Device] = {}
        self.known_natives: dict[Any, Any] = {}


def count_gpus(framework: Framework) -> int:
    """Return the number of GPUs: 0, with a warning, if the hardware cannot be initialised."""
    if framework.virtual_gpus == 0:
        return 0
    try:
        return framework.devices.count()
    except DeviceInitializationWarning:  # raised where warnings are errors: it has said it all
        raise
    except Exception as error:
        text = f"{framework.name} found GPUs and cannot use them: {error}"
        warn(text, DeviceInitializationWarning)
        return 0
