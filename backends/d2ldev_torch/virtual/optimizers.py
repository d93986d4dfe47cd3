"""The way in which optimizers step, which torch chooses by device when nothing is said.

On the CPU an optimizer goes from parameter to parameter; on GPUs, and on any ``PrivateUse1``, it
takes them all in one ``_foreach`` operation, in another order of additions: the last digit of
NAdam, RAdam and ASGD differs. Results are the CPU's bit for bit only if the choice is, too;
``foreach=True`` and ``fused=True`` remain what they are.
"""

from __future__ import annotations

from typing import Any

from torch.optim import optimizer

from d2ldev_torch.virtual.labels import NAME


def install() -> None:
    """Choose for virtual GPUs what is chosen for the CPU."""
    module: Any = optimizer
    devices_with_foreach = module._get_foreach_kernels_supported_devices

    def without_virtual() -> list[str]:
        return [name for name in devices_with_foreach() if name != NAME]

    module._get_foreach_kernels_supported_devices = without_virtual
