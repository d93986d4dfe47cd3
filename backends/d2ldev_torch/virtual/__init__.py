"""Virtual GPUs for PyTorch: real data, the CPU's kernels, real device semantics, no compiler.

A tensor on ``vgpu:1`` is a ``torch.Tensor`` and nothing more: no subclass, no wrapper, so that
``nn.Module``, ``torch.optim``, hooks and everything else in torch treat it as they treat a
tensor on a GPU. torch keeps one device type, ``PrivateUse1``, for backends that it does not know.
It is renamed, and its tensors are made of CPU memory. Backends in Python came with torch 2.10.
Low to high:

- ``devices.py``: how many there are, and the errors of those that are not there.
- ``memory.py``: CPU memory as memory of a virtual GPU and back, and how many bytes are in use.
- ``kernels.py``: every operator runs its CPU kernel, or refuses operands on different devices.
- ``copies.py``: operators that copy between devices, or give a tensor other memory.
- ``random.py``: ``torch.Generator``, and the devices that it may draw for.
- ``autograd.py``: backward passes, operators that torch composes by device, and autocast.
- ``communication.py``: ``torch.distributed`` between the virtual GPUs of several processes.
- ``torch_module.py``: ``torch.vgpu``. ``patches.py``: functions of torch that are replaced.
- ``rooms.py``: the rooms that differ from those of hardware, and the registration with torch.

Two other ways were tried. A tensor subclass with a device of its own
(``Tensor._make_wrapper_subclass``) has no storage and no gradients on any device but the first.
A tensor subclass on the CPU that carries its index is on the CPU to everything in torch that is
written in C++: ``deepcopy``, fused kernels, lazy modules and ``Module.to`` each have to be told
otherwise. An extension in C++ would need a compiler on the user's machine.

The limits of torch's hooks for backends in Python, which remain:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp

- The current device is always the first, but for what asks ``torch.vgpu.current_device()``.
- After a backward pass a forked process goes forward only, as with real GPUs.
- Forward-mode derivatives (``forward_ad``) of operators that torch composes by device, such as
  attention, are torch's own error; ``torch.func`` has them.
- There is no allocator: ``torch.accelerator`` tells no memory.
- There is no pinned memory: ``x.pin_memory()``, which loaders call, is a copy, and
  ``torch.empty(..., pin_memory=True)`` is torch's own error.
- ``torch.vmap`` of ``linspace`` and ``logspace`` from a tensor to a number is torch's own error.
  https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/python/pybind_utils.cpp
- ``torch.nn.DataParallel`` is torch's own error, as on every accelerator but CUDA.
  https://github.com/pytorch/pytorch/issues/143239
- ``torch.compile`` needs ``backend='eager'``: its default compiler does not know the device.

Sparse and quantized tensors are refused by name. Optimizers take ``foreach=True`` by default, as
on GPUs. What an operation costs more than on the CPU is a kernel in Python and a capsule for its
result. Views of operands, and above all ``out``, cost more, for aliases.
"""

import torch
from torch.utils import backend_registration

from d2ldev.errors import DeviceUnavailableError

# Asked before anything else is imported, which derives from classes that an older torch lacks.
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    raise DeviceUnavailableError(
        "make virtual GPUs",
        f"torch {torch.__version__} takes no backends that are written in Python, which there are "
        "since torch 2.10",
        "pip install --upgrade 'torch>=2.10', or unset D2LDEV_VIRTUAL_GPUS",
    )
