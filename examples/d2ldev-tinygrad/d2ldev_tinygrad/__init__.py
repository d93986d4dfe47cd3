"""The tinygrad backend of d2ldev."""

from __future__ import annotations

from d2ldev.framework import Framework

requires = ("tinygrad",)


class TinygradFramework(Framework):
    """tinygrad on the CPU, and on its further CPU devices as virtual GPUs."""

    interface = 1
    name = "tinygrad"
    distributions = ("tinygrad", "d2ldev-tinygrad")
    max_virtual_gpus = 8
    cannot = {
        "dlpack": "tinygrad has no DLPack",
        "find leaks": "nothing follows the creation of its tensors",
        **dict.fromkeys(("train in bf16", "train in fp16"), "it has no mixed precision"),
        **dict.fromkeys(
            (
                "train on several GPUs",
                "train on several GPUs in one process",
                "train in several processes",
            ),
            "this example trains on one device",
        ),
    }

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        from d2ldev_tinygrad.devices import TinygradDevices
        from d2ldev_tinygrad.files import TinygradFiles
        from d2ldev_tinygrad.models import TinygradModels
        from d2ldev_tinygrad.parallel import TinygradParallel
        from d2ldev_tinygrad.strict import TinygradStrict
        from d2ldev_tinygrad.tensors import TinygradTensors
        from d2ldev_tinygrad.training import TinygradTraining

        self.devices = TinygradDevices(virtual_gpus)
        self.tensors = TinygradTensors()
        self.models = TinygradModels()
        self.files = TinygradFiles(self.tensors)
        self.training = TinygradTraining(self)
        self.strict = TinygradStrict(self)
        self.parallel = TinygradParallel()
