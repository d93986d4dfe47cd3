"""The PyTorch backend of d2ldev."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from d2ldev import DeviceUnavailableError
from d2ldev.framework import Framework

requires = ("torch",)


def _max_virtual_gpus() -> int:
    """Return the number of virtual GPUs that this torch supports, without importing it."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return 8
    return 8 if (int(major), int(minor)) >= (2, 10) else 0


class TorchFramework(Framework):
    """PyTorch on the CPU and on CUDA or ROCm, else XPU, else MPS; or on virtual GPUs."""

    interface = 1
    name = "torch"
    distributions = ("torch", "numpy")
    max_virtual_gpus = _max_virtual_gpus()
    cannot = {
        "train on several GPUs in one process": "torch.nn.parallel.DistributedDataParallel, its "
        "engine for this, has a process for each GPU, which Trainer.fit starts"
    }

    def __init__(self, virtual_gpus: int | None = None) -> None:
        if virtual_gpus and not self.max_virtual_gpus:
            raise DeviceUnavailableError(
                "make virtual GPUs",
                f"torch {version('torch')} supports no backends that are written in Python, which "
                "torch 2.10 added",
                "pip install --upgrade 'torch>=2.10', or unset D2LDEV_VIRTUAL_GPUS",
            )
        super().__init__(virtual_gpus)
        from d2ldev_torch.devices import TorchDevices, find_devices
        from d2ldev_torch.files import TorchFiles
        from d2ldev_torch.models import TorchModels
        from d2ldev_torch.parallel import TorchParallel
        from d2ldev_torch.strict import TorchStrict
        from d2ldev_torch.tensors import TorchTensors
        from d2ldev_torch.training import TorchTraining

        if virtual_gpus:
            # Imported only on request: it changes the devices that torch knows.
            from d2ldev_torch.virtual.areas import VirtualDevices
            from d2ldev_torch.virtual.as_cuda import stand_for_cuda
            from d2ldev_torch.virtual.tensors import VirtualTensors

            devices: TorchDevices = VirtualDevices(virtual_gpus)
            self.tensors = VirtualTensors(devices)
            self.strict = TorchStrict(self, stand_for_cuda)
        else:
            devices = find_devices()
            self.tensors = TorchTensors(devices)
            self.strict = TorchStrict(self)
        self.devices = devices
        self.models = TorchModels(devices, self.tensors)
        self.files = TorchFiles(self.tensors, self.state.kinds)
        self.training = TorchTraining(self, devices)
        self.parallel = TorchParallel(self, devices)
        if virtual_gpus and self.as_cuda:
            from d2ldev_torch.virtual.as_cuda import switch_on

            switch_on()
