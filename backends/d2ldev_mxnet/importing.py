"""Import MXNet, which NumPy 1.24 and newer do not let in.

NumPy 1.24 took ``numpy.bool`` away, and MXNet 1.9.1, the last release, reads it: while it is
imported, and later wherever it indexes with a bool or fills with one. The name is put back for
the import only; afterwards those of MXNet's modules that read it have a copy of NumPy's
namespace with the name in it, and ``numpy`` itself is as it was:
https://github.com/apache/mxnet/issues/21165. A user who imported MXNet with a shim of their own
keeps it. After ``import_mxnet`` everyone's ``import mxnet`` finds the module that is there.
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

from d2ldev.framework import BackendNotInstalledError, nvml

# The modules whose functions read ``numpy.bool``, and the name by which they know NumPy.
_READERS = {
    "mxnet.numpy.multiarray": "_np",
    "mxnet.ndarray.numpy._op": "_np",
    "mxnet.symbol.numpy._symbol": "_np",
    "mxnet.test_utils": "np",
}

# NVIDIA's libraries that MXNet's wheels for CUDA need and do not bring, by the packages that hold
# them. What they need themselves they find.
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
    with suppress(PackageNotFoundError):  # one for CUDA has another name, such as mxnet-cu117
        distribution("mxnet")
        return
    if not nvml.has_driver():
        raise BackendNotInstalledError(
            "use the mxnet backend",
            f"this MXNet is built for CUDA, and there is no NVIDIA driver here ({nvml.DRIVER})",
            "install the driver, or MXNet for the CPU: pip uninstall mxnet-cu117, "
            "pip install 'd2ldev[mxnet]'",
        )
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for package, library in _LIBRARIES.items():
            with suppress(OSError):
                ctypes.CDLL(f"{folder}/{package}/lib/{library}")


def import_mxnet() -> ModuleType:
    """Import MXNet if nobody has, and return it.

    Raises:
        BackendNotInstalledError: if MXNet could not be loaded: without the driver that it was built
            for, and after TensorFlow.
    """
    if "mxnet" in sys.modules:
        return sys.modules["mxnet"]
    if "tensorflow" in sys.modules:
        # Not only refused: loading the library would end the process with a segmentation fault.
        raise BackendNotInstalledError(
            "use the mxnet backend",
            "TensorFlow was imported before it, and MXNet's library then crashes while it loads",
            "write 'from d2ldev import mxnet' before anything imports tensorflow",
        )
    _prepare_cuda()
    # What an import without the name, which failed, has left: with it the next one fails, too.
    for name in [name for name in sys.modules if name.startswith("mxnet.")]:
        del sys.modules[name]
    # ``hasattr`` would ask NumPy's ``__getattr__``, which warns.
    is_missing = "bool" not in vars(np)
    if is_missing:
        vars(np)["bool"] = bool
    try:
        with warnings.catch_warnings():
            # It looks for functions that NumPy gave to ``numpy_financial``, and does without.
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
