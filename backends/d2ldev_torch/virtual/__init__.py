"""Virtual GPUs for PyTorch: real data, the CPU's kernels, real device semantics, no compiler.

A tensor on ``vgpu:1`` is a plain ``torch.Tensor``, not a subclass and not a wrapper. So
``nn.Module``, ``torch.optim``, hooks and the rest of torch treat it like a tensor on a GPU. torch
keeps one device type, ``PrivateUse1``, for backends that it does not know. d2ldev renames it, and
makes its tensors of CPU memory. Torch 2.10 introduced backends in Python. The modules, low to high:

- ``devices.py``: the number of virtual GPUs, and the error for a missing one.
- ``memory.py``: CPU memory as memory of a virtual GPU and back, and the number of bytes in use.
- ``kernels.py``: every operator runs its CPU kernel, or refuses operands on different devices.
- ``copies.py``: operators that copy between devices, or give a tensor other memory.
- ``random.py``: ``torch.Generator``, and the devices that it may draw for.
- ``autograd.py``: backward passes, operators that torch composes by device, and autocast.
- ``sparse.py``: sparse tensors, which are dense tensors of indices and values.
- ``cuda_kernels.py``: operators for which CUDA has a kernel, and the CPU has none.
- ``communication.py``: ``torch.distributed`` between the virtual GPUs of several processes.
- ``torch_module.py``: ``torch.vgpu``. ``patches.py``: functions of torch that d2ldev replaces.
- ``tensors.py``: the area of tensors. ``areas.py``: the area of devices, and the registration with
  torch.

Other designs fail. A tensor subclass with its own device (``Tensor._make_wrapper_subclass``) has no
storage, and gradients only on the first device. If the subclass is on the CPU and carries an index,
torch's C++ code takes it for a CPU tensor. An extension in C++ needs a compiler.

``docs/virtual-gpus.md`` lists the limits. They come from torch's hooks for backends in Python:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/python/pybind_utils.cpp (``linspace``)
https://github.com/pytorch/pytorch/issues/143239 (``DataParallel``)

d2ldev refuses quantized tensors by name. In addition to the CPU's time, an operation
takes a kernel in Python and a capsule for its result. Views as operands, and above all ``out``,
also need aliases.
"""
