"""Virtual GPUs for PyTorch: real data, the CPU's kernels, real device semantics, no compiler.

A tensor on ``vgpu:1`` is a ``torch.Tensor`` and nothing more: no subclass, no wrapper, so that
``nn.Module``, ``torch.optim``, hooks and everything else in torch treat it as they treat a
tensor on a GPU. torch keeps one device type, ``PrivateUse1``, for backends that it does not know;
it is renamed, and its tensors are made by giving CPU memory another name.

- ``labels.py``: the two names of one memory. A DLPack capsule's device is rewritten.
- ``fallback.py``, ``schemas.py``: every operator runs its CPU kernel on the CPU's names of its
  operands. That is where operands on different devices are refused.
- ``copies.py``: what goes between devices, or gives a tensor other memory.
- ``composites.py``: what torch composes differently on the CPU, and autocast.
- ``storages.py``, ``ledger.py``: storages made by themselves, and how many bytes they hold.
- ``engine.py``: backward passes. ``module.py``: ``torch.vgpu``. ``methods.py``: what torch would
  do on the current device.
- ``generators.py``, ``drawing.py``: ``torch.Generator``, and what it may draw for.
  ``torch_accelerator.py``: ``torch.accelerator``.
- ``setup.py`` registers it all with torch, ``accelerator.py`` is what ``TorchBackend`` sees.

Views need none of that: torch's own kernels for views make them on the tensor itself, so that
they share its storage.

Two other ways were tried. A tensor subclass with a device of its own
(``Tensor._make_wrapper_subclass``) has no storage and no gradients on any device but the first.
A tensor subclass on the CPU that carries its index is on the CPU to everything in torch that is
written in C++: ``deepcopy``, fused kernels, lazy modules and ``Module.to`` each have to be told
otherwise. An extension in C++ would need a compiler on the user's machine.

What torch's hooks for backends in Python lack, and how it is made up for:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp

- They report one device, so that the engine would have a thread for the first one only
  (``engine.py``), and the current device is always the first (``current.py``). Where there are real
  GPUs, the engine's threads for those are started: after a backward pass, a forked process goes
  forward only, as without virtual ones.
- There is no allocator: a storage on its own cannot be made by torch (``storages.py``), and does
  not grow.
- There are no generators: random numbers are drawn by the CPU's, which takes the place of one
  (``generators.py``), and no queues (``torch_accelerator.py``).
- There is no pinned memory: ``x.pin_memory()``, which loaders call, is a copy (``methods.py``), and
  ``torch.empty(..., pin_memory=True)`` is an error of torch, which asks for it in C++ before any
  operator is chosen by its device.

Sparse and quantized tensors are refused by name. ``torch.compile`` needs ``backend='eager'``: its
default compiler writes no code for devices that it does not know. An operation costs about ten microseconds more than on the CPU.
"""

import torch
from torch.utils import backend_registration

from d2ldev.errors import DeviceUnavailableError

# Asked before anything else is imported, which derives from classes that an older torch lacks.
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    raise DeviceUnavailableError(
        "make virtual GPUs",
        f"torch {torch.__version__} takes no backends that are written in Python",
        "pip install --upgrade torch, or unset D2LDEV_VIRTUAL_GPUS",
    )
