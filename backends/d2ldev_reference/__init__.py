"""The reference backend: array-api-strict behind the d2ldev contract.

It needs no framework: it runs if none is installed, and the tests of the conformance suite use it.
``device1`` and ``device2`` are its virtual GPUs.
"""

from __future__ import annotations

from d2ldev.framework import Framework

requires = ("array_api_strict",)


class ReferenceFramework(Framework):
    """array-api-strict on the CPU and on up to two virtual GPUs; the default is two."""

    interface = 1
    name = "reference"
    distributions = ("array-api-strict", "numpy")
    max_virtual_gpus = 2
    cannot = {
        **dict.fromkeys(("train in bf16", "train in fp16"), "array-api-strict has no such dtype"),
        "train with a loss of your own": "array-api-strict has no gradients",
        "find leaks": "array-api-strict has no hook for its functions",
    }

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        from d2ldev_reference.devices import ReferenceDevices
        from d2ldev_reference.files import ReferenceFiles
        from d2ldev_reference.models import ReferenceModels
        from d2ldev_reference.parallel import ReferenceParallel
        from d2ldev_reference.strict import ReferenceStrict
        from d2ldev_reference.tensors import ReferenceTensors
        from d2ldev_reference.training import ReferenceTraining

        self.devices = ReferenceDevices(virtual_gpus)
        self.tensors = ReferenceTensors()
        self.models = ReferenceModels()
        self.files = ReferenceFiles(self.tensors)
        self.training = ReferenceTraining(self)
        self.strict = ReferenceStrict(self)
        self.parallel = ReferenceParallel(self)
