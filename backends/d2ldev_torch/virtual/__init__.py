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
- ``batch_norm.py``: the operators of ``SyncBatchNorm``, for which the CPU has no kernel.
- ``communication.py``: ``torch.distributed`` between the virtual GPUs of several processes.
- ``torch_module.py``: ``torch.vgpu``. ``patches.py``: functions of torch that are replaced.
- ``rooms.py``: the rooms that differ from those of hardware, and the registration with torch.

Other ways fail. A tensor subclass with a device of its own (``Tensor._make_wrapper_subclass``) has
no storage, and no gradients on any device but the first. One that is on the CPU and carries an
index is on the CPU to all of torch that is written in C++. An extension in C++ needs a compiler.

``docs/virtual-gpus.md`` lists the limits, which are those of torch's hooks for backends in Python:
https://github.com/pytorch/pytorch/blob/main/torch/csrc/acc/Module.cpp
https://github.com/pytorch/pytorch/blob/main/torch/csrc/jit/python/pybind_utils.cpp (``linspace``)
https://github.com/pytorch/pytorch/issues/143239 (``DataParallel``)

Sparse and quantized tensors are refused by name. An operation costs more than on the CPU by a
kernel in Python and a capsule for its result. Views as operands, and above all ``out``, need
aliases too.
"""
