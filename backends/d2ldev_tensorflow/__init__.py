"""The TensorFlow backend: TensorFlow 2 and Keras 3 behind the d2ldev contract.

Behaviour of TensorFlow that is put right, and where:

- A device that does not exist means the CPU to it: devices are checked before any scope.
- ``tensor.device`` is where the operation ran, which may not be where the bytes are:
  ``tensors.device_of``.
- int32 tensors stay in the host's memory, whatever the scope (but on virtual GPUs)
  (https://github.com/tensorflow/tensorflow/issues/46833): ``tensors``.
- Variables cannot move, and a model computes elsewhere than where it is: ``models``.
- Operands on other devices are silently copied: ``strict``.

Strings have no place but the CPU, and int32 variables none in TensorFlow's GPU kernels
(https://github.com/tensorflow/tensorflow/issues/59803): ``placement`` says where they are.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from d2ldev.framework import Framework

requires = ("tensorflow",)
libraries = ("keras",)


def _distribution() -> str:
    """Return the distribution that ``tensorflow`` was installed from; there are several."""
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly"):
        with suppress(PackageNotFoundError):
            version(name)
            return name
    return "tensorflow"


class TensorFlowFramework(Framework):
    """TensorFlow on the CPU, on CUDA, ROCm and Metal, and on virtual GPUs."""

    name = "tensorflow"
    distributions = (_distribution(), "keras", "numpy")
    max_virtual_gpus = 8
    cannot = {
        "train with sharded parameters": "the strategies of tf.distribute keep each variable whole "
        "on each device, and keras.distribution, which splits them, is for Keras on JAX alone"
    }

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
