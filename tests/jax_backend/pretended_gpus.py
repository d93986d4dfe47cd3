"""A plugin of JAX, and a driver, for GPUs that are not there: to JAX they are, with a client of
their own, so that it initialises them, makes them its default and can fail to.

Each is source for a process of its own.
"""

from processes import make_package

PLUGIN = """
def initialize():
    from jax._src import hardware_utils, xla_bridge
    from jax._src.lib import xla_client

    def make():
        if {failure!r}:
            raise RuntimeError({failure!r})
        return xla_client.make_cpu_client(num_devices=2)

    hardware_utils.has_visible_nvidia_gpu = lambda: True
    xla_bridge.register_backend_factory("cuda", make, priority=200, fail_quietly=False)
"""

DRIVER = """
import warnings
from d2ldev_jax import nvml
nvml._uuids = lambda: ["GPU-a", "GPU-b"]
import d2ldev, jax, os
from d2ldev_jax.accelerator import is_initialized
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""


def install_plugin(folder, failure=""):
    """Make two GPUs in ``folder``, which cannot be initialised if there is a failure to tell of."""
    make_package(folder / "jax_plugins", "xla_cuda99", PLUGIN.format(failure=failure))
    return folder
