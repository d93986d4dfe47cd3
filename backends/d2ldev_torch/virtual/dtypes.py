"""Dtypes as on CUDA: what CUDA's kernels refuse is refused, and what they compute is computed.

The CPU has kernels for pairs of an operator and a dtype that CUDA lacks. Most are products of
integers. A virtual GPU raises CUDA's error there. For other pairs only CUDA has a kernel, such as
Fourier transforms in half precision. There a virtual GPU computes in the next wider dtype, and
casts the results back. ``cuda_dtypes.py`` has both tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from d2ldev_torch.virtual.cuda_dtypes import ONLY_ON_CPU, ONLY_ON_CUDA
from d2ldev_torch.virtual.devices import NAME
from d2ldev_torch.virtual.kernels import Operands, Schema

_WIDER = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
# What becomes of a wide result. An operator may make real numbers of complex ones, and the reverse.
_NARROWER = {
    torch.bool: {torch.uint8: torch.bool},
    torch.float16: {torch.float32: torch.float16, torch.complex64: torch.complex32},
    torch.bfloat16: {torch.float32: torch.bfloat16},
    torch.complex32: {torch.complex64: torch.complex32, torch.float32: torch.float16},
}
# The kernels by the names that CUDA's errors have, from torch's sources:
# https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/native/cuda (Blas.cpp,
# AveragePool2d.cu, DilatedMaxPool2d.cu, UpSampleBilinear2d.cu, UpSampleBicubic2d.cu, Dropout.cu)
_KERNELS = {
    **dict.fromkeys(("mm", "addmm", "addbmm"), "addmm_cuda"),
    **dict.fromkeys(("mv", "addmv"), "addmv_impl_cuda"),
    **dict.fromkeys(("bmm", "baddbmm", "_trilinear"), "baddbmm_cuda"),
    "dot": "dot",
    "vdot": "vdot",
    "avg_pool2d": "avg_pool2d_out_cuda_frame",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "upsample_bilinear2d": "upsample_bilinear2d_out_frame",
    "upsample_bicubic2d": "upsample_bicubic2d_out_frame",
    "native_dropout_backward": "masked_scale",
}
# The names of dtypes in these errors: https://github.com/pytorch/pytorch/blob/main/c10/core/ScalarType.h
_NAMES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}


def follow_cuda(
    schema: Schema, run: Callable[..., Any], *, is_composed: bool
) -> Callable[..., Any] | None:
    """Return a kernel that refuses and computes the dtypes that CUDA's does.

    Args:
        schema: the schema of the operator.
        run: its kernel for dtypes that the CPU and CUDA both compute.
        is_composed: whether torch composes it of others, which refuse their dtypes themselves.

    Returns:
        The kernel; None for an operator whose dtypes are alike on both.
    """
    name = schema.name.removesuffix("_")
    refused = "" if is_composed else ONLY_ON_CPU.get(name, "")
    widened = ONLY_ON_CUDA.get(name, "")
    if not refused and not widened:
        return None
    refuses, widens = _dtypes_in(refused), _dtypes_in(widened)
    return partial(_run, schema, run, refuses, widens, refuses | widens)


def _dtypes_in(names: str) -> frozenset[torch.dtype]:
    return frozenset(getattr(torch, name) for name in names.split())


def _run(
    schema: Schema,
    run: Callable[..., Any],
    refused: frozenset[torch.dtype],
    widened: frozenset[torch.dtype],
    unusual: frozenset[torch.dtype],
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Outputs are written in any dtype, and are keyword arguments.
    for value in args:
        if (
            isinstance(value, torch.Tensor)
            and value.dtype in unusual
            and value.device.type == NAME  # ``vmap`` calls it for any device
        ):
            break
    else:
        if not kwargs:
            return run(*args)
        if widened.isdisjoint(v for v in kwargs.values() if type(v) is torch.dtype):
            return run(*args, **kwargs)
    dtypes = {value.dtype for value in args if isinstance(value, torch.Tensor)}
    if dtypes & refused:
        Operands(schema).to_cpu(args, kwargs)  # operands on different devices are refused first
        kernel = _KERNELS.get(schema.name.removesuffix("_"), f"{schema.name}_cuda")
        raise refusal(kernel, next(iter(dtypes & refused)))
    return run_wider(schema, args, kwargs, widened)


def refusal(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    """Return the error of a kernel that CUDA lacks for a dtype."""
    is_wide = dtype in (torch.float32, torch.float64)
    # The class and the words are PyTorch's, because libraries catch them.
    return NotImplementedError(
        f"\"{kernel}\" not implemented for '{_NAMES[dtype]}': CUDA has no such kernel, and a "
        f"virtual GPU neither. fix: {'x.cpu()' if is_wide else 'x.float()'}"
    )


def run_wider(
    schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any], widened: frozenset[torch.dtype]
) -> Any:
    """Run an operator in the next wider dtype, and cast what it returns or writes back."""
    asked = [value for value in kwargs.values() if type(value) is torch.dtype]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    # An operand that is wide already makes CUDA's result wide, too, but not one without axes.
    wides = set() if asked else {x.dtype for x in tensors if x.dim()}
    narrow: dict[torch.dtype, torch.dtype] = {}
    for dtype in widened.intersection(asked or (x.dtype for x in tensors)):
        if wides.isdisjoint(_NARROWER[dtype]):
            narrow |= _NARROWER[dtype]
    operands: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def widen(value: Any, dtypes: Any = widened) -> Any:
        if isinstance(value, torch.dtype):
            return _WIDER[value] if value in dtypes else value
        if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
            return value
        wide = value.to(_WIDER[value.dtype])
        operands[id(wide)] = wide, value
        return wide

    def cast_back(value: Any) -> Any:
        if id(value) in operands:
            return operands[id(value)][1]
        is_wide = isinstance(value, torch.Tensor) and value.dtype in narrow
        return value.to(narrow[value.dtype]) if is_wide else value

    new, named = tree_map(widen, (args, kwargs))
    named |= {name: widen(named[name], _WIDER) for name in schema.outs}
    result = schema.op(*new, **named)
    for x in schema.list_written(new, named):
        if id(x) in operands:
            _, operand = operands[id(x)]
            if operand.shape != x.shape:
                operand.resize_(x.shape)
            operand.copy_(x)
    return tree_map(cast_back, result)
