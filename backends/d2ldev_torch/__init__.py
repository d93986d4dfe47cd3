"""The PyTorch backend of d2ldev."""

from __future__ import annotations

from d2ldev.framework import Framework

requires = ("torch",)


class TorchFramework(Framework):
    """PyTorch on the CPU and on CUDA or ROCm, else XPU, else MPS; or on virtual GPUs."""

    name = "torch"
    distributions = ("torch", "numpy")
    max_virtual_gpus = 8
    cannot = {
        "train on several GPUs in one process": "torch.nn.parallel.DistributedDataParallel, its "
        "engine for this, has a process for each GPU, which Trainer.fit starts"
    }

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        from d2ldev_torch.devices import TorchDevices, find_devices
        from d2ldev_torch.files import TorchFiles
        from d2ldev_torch.models import TorchModels
        from d2ldev_torch.parallel import TorchParallel
        from d2ldev_torch.strict import TorchStrict
        from d2ldev_torch.tensors import TorchTensors
        from d2ldev_torch.training import TorchTraining

        if virtual_gpus:
            # Imported only where they are asked for: they change what torch knows of devices.
            from d2ldev_torch.virtual.rooms import VirtualDevices, VirtualTensors

            devices: TorchDevices = VirtualDevices(virtual_gpus)
            self.tensors = VirtualTensors(devices)
        else:
            devices = find_devices()
            self.tensors = TorchTensors(devices)
        self.devices = devices
        self.models = TorchModels()
        self.files = TorchFiles(self.tensors, self.kinds)
        self.training = TorchTraining(self, devices)
        self.strict = TorchStrict()
        self.parallel = TorchParallel(self, devices)
