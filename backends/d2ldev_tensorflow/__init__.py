"""The TensorFlow backend: TensorFlow 2 and Keras 3 behind the d2ldev contract.

The backend corrects these behaviours of TensorFlow:

- ``tf.device`` falls back to the CPU if a device does not exist. d2ldev checks the device before it
  enters a scope.
- ``tensor.device`` names the device where the operation ran, and the bytes may be on another.
  ``tensors.device_of`` returns the device of the bytes.
- int32 tensors stay in the host's memory, whatever the scope, except on virtual GPUs
  (https://github.com/tensorflow/tensorflow/issues/46833). See ``tensors``.
- Variables cannot move, and a model may compute on another device than its variables.
  See ``models``.
- Operations silently copy operands from other devices. See ``strict``.

Strings exist only on the CPU. TensorFlow's GPU kernels do not support int32 variables
(https://github.com/tensorflow/tensorflow/issues/59803). ``placement`` returns where they are.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from d2ldev.framework import Framework

requires = ("tensorflow",)
libraries = ("keras",)


def _distribution() -> str:
    """Return the distribution that ``tensorflow`` was installed from; several provide it."""
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"):
        with suppress(PackageNotFoundError):
            version(name)
            return name
    return "tensorflow"


class TensorFlowFramework(Framework):
    """TensorFlow on the CPU, on CUDA, ROCm and Metal, and on virtual GPUs."""

    interface = 1
    name = "tensorflow"
    distributions = (_distribution(), "keras", "numpy")
    max_virtual_gpus = 8

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        from d2ldev_tensorflow.devices import TensorFlowDevices
        from d2ldev_tensorflow.files import TensorFlowFiles
        from d2ldev_tensorflow.models import TensorFlowModels
        from d2ldev_tensorflow.parallel import TensorFlowParallel
        from d2ldev_tensorflow.strict import TensorFlowStrict
        from d2ldev_tensorflow.tensors import TensorFlowTensors
        from d2ldev_tensorflow.training import TensorFlowTraining

        devices = TensorFlowDevices(virtual_gpus)
        self.devices = devices
        self.tensors = TensorFlowTensors(devices)
        self.models = TensorFlowModels(devices)
        self.files = TensorFlowFiles(self)
        self.training = TensorFlowTraining(self)
        self.strict = TensorFlowStrict(devices)
        self.parallel = TensorFlowParallel(self)
