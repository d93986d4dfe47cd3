"""Memory by DLPack, in both directions, with what MXNet leaves unchecked checked before."""

from __future__ import annotations

from typing import Any

from d2ldev.operations.dlpack import ON_CPU, ON_CUDA
from d2ldev_mxnet.framework import NumPyShapes, mx


def from_dlpack(x: Any, gpus: int) -> Any:
    """An array on the memory of ``x``.

    Args:
        x: an array of MXNet, which has no ``__dlpack__``, or anything that has.
        gpus: how many GPUs of CUDA MXNet can use; it believes the memory of any other.

    Raises:
        BufferError: if the memory is on a device that MXNet does not have, or ``x`` refuses.
    """
    if isinstance(x, mx.nd.NDArray):
        # By a capsule it would lose its context, and its place in the engine's queue.
        return x.as_np_ndarray().detach()
    kind, index = x.__dlpack_device__()
    if kind != ON_CPU and not (kind == ON_CUDA and index < gpus):
        raise BufferError(f"MXNet has no device of DLPack's type {int(kind)} and index {index}")
    with NumPyShapes():
        # Of no version, which has no flag for read-only memory, so that its owner refuses.
        return mx.nd.from_dlpack(x.__dlpack__()).as_np_ndarray()


class Exported:
    """An array of MXNet with the methods of DLPack's protocol, which came after it.

    Args:
        x: the array; its contexts on the CPU are numbered in DLPack as in MXNet.
    """

    def __init__(self, x: Any) -> None:
        self._array = x

    def __dlpack_device__(self) -> tuple[int, int]:
        context = self._array.ctx
        is_gpu = context.device_type == "gpu"
        return (ON_CUDA if is_gpu else ON_CPU, context.device_id)

    def __dlpack__(self, **_: Any) -> Any:
        # MXNet returns when nothing that is queued reads or writes the memory: no stream of the
        # consumer's has anything to wait for. Its capsules are of no version.
        return self._array.to_dlpack_for_write()
