"""What d2ldev keeps of a framework beside what its author wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2ldev.contract.precision import Switch
from d2ldev.contract.strict import Strictness
from d2ldev.device import Device
from d2ldev.nesting.kinds import Kinds
from d2ldev.scopes import Contexts, Scopes

if TYPE_CHECKING:
    from d2ldev.contract import Framework


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
        self.strictness = Strictness(framework)
        self.matmul_switch = Switch(framework)
        self.kinds = Kinds(framework)
        self.known_devices: dict[Any, Device] = {}
        self.known_natives: dict[Any, Any] = {}
