"""The current virtual GPU, which is always the first one: making another one current is refused.

torch asks the C++ half of a backend for its current device, and that of a backend in Python
always answers 0: ``device='vgpu'`` means the first one wherever it stands.
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
"""

from __future__ import annotations

from types import FrameType

from d2ldev.errors import DeviceUnavailableError
from d2ldev_torch.virtual.labels import NAME


def make_current(index: int) -> None:
    """Make a virtual GPU torch's current one; a negative index stands for none.

    Raises:
        DeviceUnavailableError: if it is not the first one.
    """
    if index > 0:
        raise DeviceUnavailableError(
            f"make {NAME}:{index} torch's current device",
            "torch's current virtual GPU is always the first one",
            f"name the device: device='{NAME}:{index}', or with torch.device('{NAME}:{index}'):",
            [f"{NAME}:{index}"],
        )


def enter(index: int, caller: FrameType | None) -> None:
    """Enter a context in which a virtual GPU is to be the current one.

    torch's own code may: a checkpoint enters one to keep the random state, and a storage that is
    moved one around its copy. Both name devices, or go by those of their tensors.
    https://github.com/pytorch/pytorch/blob/main/torch/utils/checkpoint.py
    https://github.com/pytorch/pytorch/blob/main/torch/_utils.py

    Args:
        index: of the virtual GPU.
        caller: whose context it is.

    Raises:
        DeviceUnavailableError: if it is not the first one, and the code is not torch's.
    """
    name = "" if caller is None else str(caller.f_globals.get("__name__", ""))
    if name.partition(".")[0] != "torch":
        make_current(index)
