"""The JAX backend: JAX behind the d2ldev contract, with Flax's ``nnx`` for models.

JAX binds an array to its device only if the array is *committed*. d2ldev commits each array that it
makes or moves.
"""

from __future__ import annotations

from d2ldev.framework import Framework

requires = ("jax",)
libraries = ("flax", "optax")
environment = ("XLA_FLAGS=--xla_force_host_platform_device_count={cpus}",)


class JaxFramework(Framework):
    """JAX on the CPU, on CUDA or ROCm, and on up to eight virtual GPUs."""

    interface = 1
    name = "jax"
    distributions = ("jax", "jaxlib", "flax", "numpy")
    max_virtual_gpus = 8
    cannot = {
        "lose a process while the engine begins": "jax.distributed itself may end the others then, "
        "without an exception",
        "split sequences over processes": "each of its programs has the whole batch, and a process "
        "knows only its own part; arrays are put together again",
    }

    def __init__(self, virtual_gpus: int | None = None) -> None:
        super().__init__(virtual_gpus)
        from d2ldev_jax.devices import HardwareDevices, VirtualDevices, is_initialized
        from d2ldev_jax.files import JaxFiles
        from d2ldev_jax.models import JaxModels
        from d2ldev_jax.parallel import JaxParallel
        from d2ldev_jax.strict import JaxStrict
        from d2ldev_jax.tensors import JaxTensors
        from d2ldev_jax.training import JaxTraining

        # With 0 virtual GPUs, JAX itself uses no GPU, unless it is initialised already.
        is_virtual = virtual_gpus or (virtual_gpus == 0 and not is_initialized())
        devices = VirtualDevices(virtual_gpus or 0) if is_virtual else HardwareDevices()
        self.devices = devices
        self.tensors = JaxTensors(devices)
        self.models = JaxModels()
        self.files = JaxFiles(self.tensors)
        self.training = JaxTraining(self)
        self.strict = JaxStrict(devices)
        self.parallel = JaxParallel(self, devices)
