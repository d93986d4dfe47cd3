"""Taking over memory by DLPack, with what torch leaves unchecked checked before.

Given a negative stride torch ends the process, and given memory that was exported as read-only
it writes to it. Only arrays on the CPU, NumPy's above all, come with either.
"""

from __future__ import annotations

from typing import Any

import torch

from d2ldev.operations.dlpack import ON_CPU, description_of


def from_dlpack(x: Any) -> torch.Tensor:
    """A tensor on the memory of ``x``.

    Raises:
        BufferError: if the memory is read-only or is walked backwards, or ``x`` refuses.
    """
    if isinstance(x, torch.Tensor) and x.device.type == torch._C._get_privateuse1_backend_name():
        # DLPack has no name for a virtual GPU, and needs none within torch.
        if x.requires_grad:
            raise BufferError("it requires a gradient: x.detach()")
        return x.detach()
    if x.__dlpack_device__()[0] != ON_CPU:
        return torch.utils.dlpack.from_dlpack(x)
    # Of no version, which has no flag for read-only memory, so that its owner refuses to give it.
    capsule = x.__dlpack__()
    if description_of(capsule).is_walked_backwards:
        raise BufferError("torch has no negative strides")
    return torch.utils.dlpack.from_dlpack(capsule)
