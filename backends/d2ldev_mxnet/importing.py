"""Import MXNet under NumPy 1.24 and newer, where a plain import fails.

NumPy 1.24 removed ``numpy.bool``, and MXNet 1.9.1, the last release, reads it. It does so during
its import, and later to index with a bool or to fill with one. d2ldev restores the name during the
import only. Afterwards the modules of MXNet that read it get a copy of NumPy's namespace with the
name. ``numpy`` itself does not change: https://github.com/apache/mxnet/issues/21165. If you
imported MXNet with your own workaround, it stays. After ``import_mxnet`` a plain ``import mxnet``
works everywhere.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from types import ModuleType

import numpy as np

from d2ldev import BackendNotInstalledError
from d2ldev.framework import nvml

# The modules whose functions read ``numpy.bool``, and the name by which they know NumPy.
_READERS = {
    "mxnet.numpy.multiarray": "_np",
    "mxnet.ndarray.numpy._op": "_np",
    "mxnet.symbol.numpy._symbol": "_np",
    "mxnet.test_utils": "np",
}

# NVIDIA's libraries that MXNet's CUDA wheels need and do not contain, by their packages. They find
# their own dependencies.
_LIBRARIES = {
    "cuda_runtime": "libcudart.so.11.0",
    "cublas": "libcublas.so.11",
    "cudnn": "libcudnn.so.8",
    "cufft": "libcufft.so.10",
    "curand": "libcurand.so.10",
    "cusolver": "libcusolver.so.11",
    "cusparse": "libcusparse.so.11",
    "nccl": "libnccl.so.2",
    "cuda_nvrtc": "libnvrtc.so.11.2",
    "nvtx": "libnvToolsExt.so.1",
}


def _prepare_cuda() -> None:
    """Load NVIDIA's libraries from their wheels, for an MXNet that was built for CUDA.

    The system's linker looks for those that are in no wheel.

    Raises:
        BackendNotInstalledError: without NVIDIA's driver: that MXNet could not be loaded.
    """
    with suppress(PackageNotFoundError):  # a CUDA wheel has another name, such as mxnet-cu117
        distribution("mxnet")
        return
    if not nvml.has_driver():
        raise BackendNotInstalledError(
            "use the mxnet backend",
            f"this MXNet is built for CUDA, and there is no NVIDIA driver here ({nvml.DRIVER})",
            "install the driver, or MXNet for the CPU: pip uninstall mxnet-cu117, "
            "pip install mxnet==1.9.1",
        )
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for package, library in _LIBRARIES.items():
            with suppress(OSError):
                ctypes.CDLL(f"{folder}/{package}/lib/{library}")


def import_mxnet() -> ModuleType:
    """Return MXNet, and import it if it is not imported yet.

    Raises:
        BackendNotInstalledError: if MXNet could not be loaded: without the driver that it was built
            for, and after TensorFlow.
    """
    if "mxnet" in sys.modules:
        return sys.modules["mxnet"]
    if "tensorflow" in sys.modules:
        # The load of the library would end the process with a segmentation fault.
        raise BackendNotInstalledError(
            "use the mxnet backend",
            "TensorFlow was imported before it, and MXNet's library then crashes while it loads",
            "write 'from d2ldev import mxnet' before anything imports tensorflow",
        )
    _prepare_cuda()
    # The remains of an import that failed without the name would make the next import fail, too.
    for name in [name for name in sys.modules if name.startswith("mxnet.")]:
        del sys.modules[name]
    # ``hasattr`` would ask NumPy's ``__getattr__``, which warns.
    is_missing = "bool" not in vars(np)
    if is_missing:
        vars(np)["bool"] = bool
    try:
        with warnings.catch_warnings():
            # It looks for functions that are in ``numpy_financial`` now, and works without them.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = import_module("mxnet")
    finally:
        if is_missing:
            del vars(np)["bool"]
    if is_missing:
        namespace = ModuleType("numpy")
        vars(namespace).update(vars(np), bool=bool)
        for reader, name in _READERS.items():
            if reader in sys.modules:
                setattr(sys.modules[reader], name, namespace)
    return module
