"""The MXNet backend: the contract on MXNet 1.9.1, the last release, with its NumPy arrays.

Behaviour of MXNet that is put right:

- ``numpy.bool`` is gone, and MXNet reads it (``importing``).
- Shapes with a 0, and ``()``, are unknown shapes to MXNet until ``npx.set_np()`` is called, in each
  thread. Everything here works without it and leaves it as it was; call it for your own code, as
  MXNet asks.
- Memory is taken when an operator runs, not when it is called (``tensors``).
- ``reset_ctx`` forgets gradients, plain arrays and trainers, and refuses parameters that are not
  initialised (``models``).
- Operands on two GPUs are not refused (``strict``).
- Each CPU context has memory of its own: with virtual GPUs ``gpu(i)`` is ``mx.cpu(i + 1)``.
"""

from __future__ import annotations

from d2ldev.framework import Framework

requires = ("mxnet",)


class MXNetFramework(Framework):
    """MXNet on the CPU and on CUDA, or on up to eight virtual GPUs."""

    interface = 1
    name = "mxnet"
    distributions = ("mxnet", "numpy")
    max_virtual_gpus = 8
    cannot = {
        **dict.fromkeys(
            ("train in bf16", "train in fp16"),
            "MXNet 1.9.1's mxnet.contrib.amp replaces functions of mx.nd and mx.sym, for good and "
            "in the whole process, and none of mx.np and mx.npx, with which Gluon computes here",
        ),
        "seed other threads": "each thread of MXNet 1.9.1 has random states of its own, and no "
        "function of MXNet seeds those of another thread",
        "find leaks": "MXNet 1.9.1 has no hook for its operators, which are written out when it is "
        "imported",
    }

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        from d2ldev_mxnet.devices import MXNetDevices, rounds_convolutions
        from d2ldev_mxnet.files import MXNetFiles
        from d2ldev_mxnet.models import MXNetModels
        from d2ldev_mxnet.parallel import MXNetParallel
        from d2ldev_mxnet.strict import MXNetStrict
        from d2ldev_mxnet.tensors import MXNetTensors
        from d2ldev_mxnet.training import MXNetTraining

        if virtual_gpus is None and rounds_convolutions():
            self.cannot = {
                **self.cannot,
                "multiply in float32": "it leaves convolutions to cuDNN, which computes them in "
                "TensorFloat-32 unless NVIDIA_TF32_OVERRIDE=0 is set before MXNet is imported",
            }
        self.devices = MXNetDevices(virtual_gpus)
        self.tensors = MXNetTensors(self.devices)
        self.models = MXNetModels(self.devices)
        self.files = MXNetFiles(self.tensors)
        self.training = MXNetTraining(self)
        self.strict = MXNetStrict(self)
        self.parallel = MXNetParallel(self)
