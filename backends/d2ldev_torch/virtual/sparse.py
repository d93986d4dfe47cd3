"""Sparse tensors on virtual GPUs: kernels that read or make one, in the place of the CPU's.

All other operators run the CPU's kernel on a sparse tensor of the same memory, as in
``kernels.py``.

CUDA multiplies a COO matrix and a dense one in single and double precision only. It computes the
other products in half precision, too, and the CPU does not.
https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/native/sparse/cuda
(SparseCUDATensorMath.cu, SparseMatMul.cu, SparseBlas.cpp)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from d2ldev_torch.virtual.copies import COPY_KERNELS
from d2ldev_torch.virtual.devices import NAME
from d2ldev_torch.virtual.dtypes import refusal, run_wider
from d2ldev_torch.virtual.kernels import Operands, Schema, run_on_cpu
from d2ldev_torch.virtual.memory import CPU_KEYS, SPARSE_KEYS, make_coo

KEYS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}
"""The dispatch keys of sparse layouts on virtual GPUs, and the CPU's."""

# These operators read no element. The CPU's kernels return the parts themselves, on any device.
_LOOKS = frozenset(
    (
        *("_indices", "_values", "indices", "values", "_nnz", "_dimI", "_dimV"),
        *("crow_indices", "col_indices", "ccol_indices", "row_indices"),
        *("sparse_dim", "dense_dim", "is_coalesced", "_coalesced_"),
    )
)
_COPIES = ("copy_", "_to_copy", "_has_compatible_shallow_copy_type")
_PRODUCTS = frozenset(("addmm", "addmm_", "mm", "mv", "hspmm", "_sparse_sparse_matmul"))
UNDER_AUTOCAST = ("addmm", "mm", "matmul", "linear")
"""The products that autocast computes in half precision."""
_HALVES = frozenset((torch.float16, torch.bfloat16))
_DTYPES_OF_COO = frozenset((torch.float32, torch.float64, torch.complex64, torch.complex128))
# torch's own kernels make a second tensor of the same parts, or look at none.
_LEFT_TO_TORCH = frozenset(
    (
        *("alias", "detach", "is_same_size", "is_pinned", "lift", "lift_fresh"),
        "_sparse_addmm",  # it calls ``addmm``, under autocast, too
    )
)


def choose_kernel(
    name: str, schema: Schema, key: str, *, is_composed_elsewhere: bool
) -> Callable[..., Any] | None:
    """Return an operator's kernel for a sparse layout; None if the fallback is right.

    Args:
        name: the name of the operator, with its overload.
        schema: its schema.
        key: a dispatch key of ``KEYS``.
        is_composed_elsewhere: whether torch would run a composition in place of the fallback.
    """
    if schema.name in _PRODUCTS:
        return partial(_multiply, schema)
    if name in _COPIES:
        return COPY_KERNELS[name]
    if schema.name in _LOOKS:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEYS[key]))
        return partial(schema.op._handle.redispatch_boxed, keys)
    if schema.name in _MAKERS and not schema.outs:
        return partial(_MAKERS[schema.name], schema)
    if schema.name.startswith("_sparse_mm_reduce_impl"):
        return partial(_refuse, schema, key)
    if is_composed_elsewhere and schema.name not in _LEFT_TO_TORCH:
        return partial(run_on_cpu, schema)
    return None


def _multiply(schema: Schema, *args: Any, **kwargs: Any) -> Any:
    """Multiply in the dtypes in which CUDA does."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    refused = [x.dtype for x in tensors if x.dtype not in _DTYPES_OF_COO]
    factors = {x.layout for x in tensors[-2:]}
    if refused and factors == {torch.sparse_coo, torch.strided}:
        Operands(schema).to_cpu(args, kwargs)  # operands on different devices are refused first
        raise refusal("addmm_sparse_cuda", refused[0])
    if not _HALVES.isdisjoint(refused):
        return run_wider(schema, args, kwargs, _HALVES)
    return run_on_cpu(schema, *args, **kwargs)


def run_under_autocast(schema: Schema, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a product under autocast, which on CUDA casts sparse operands, too.

    Args:
        schema: the schema of the operator.
        run: its kernel for dense operands.
        args: the operands.
        kwargs: the operator's other arguments.
    """
    if not any(isinstance(x, torch.Tensor) and x.layout in SPARSE_KEYS for x in args):
        return run(*args, **kwargs)
    dtype = torch.get_autocast_dtype(NAME)
    is_cast = (*_HALVES, torch.float32)
    cast = [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in is_cast else x for x in args]
    with torch.autocast(NAME, enabled=False):
        return schema.op(*cast, **kwargs)


def refuse_two_devices(schema: Schema, *args: Any) -> Any:
    """Refuse factors on different devices by the name of their product, and not of its parts.

    Raises:
        DeviceMismatchError: if they are on different devices.
    """
    if len({x.device for x in args if isinstance(x, torch.Tensor)}) > 1:
        raise schema.mismatch(args, {})
    return schema.op.decompose(*args)


def _make_coo(schema: Schema, *args: Any, device: torch.device, **options: Any) -> torch.Tensor:
    _refuse_parts_apart(schema, args[-2:], device)
    return make_coo(*args, device=device, **options)


def _make_compressed(
    schema: Schema, *args: Any, device: torch.device, **options: Any
) -> torch.Tensor:
    _refuse_parts_apart(schema, args, device)
    made: torch.Tensor = schema.op.redispatch(CPU_KEYS, *args, device=device, **options)
    return made


_MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    "_sparse_coo_tensor_with_dims_and_tensors": _make_coo,
    "sparse_compressed_tensor": _make_compressed,
}


def _refuse_parts_apart(schema: Schema, args: tuple[Any, ...], device: torch.device) -> None:
    Operands(schema).to_cpu(args, {"device": device})


def _refuse(schema: Schema, key: str, *_args: Any, **_kwargs: Any) -> Any:
    # The class and the words are PyTorch's, because libraries catch them.
    raise NotImplementedError(
        f"Could not run 'aten::{schema.name}' with arguments from the "
        f"'{key.replace('PrivateUse1', 'CUDA')}' backend. CUDA has no such kernel, and a virtual "
        "GPU neither. fix: x.cpu()"
    )
