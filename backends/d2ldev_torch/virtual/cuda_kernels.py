"""Operators for which CUDA has a kernel, and the CPU has none.

- The operators of ``torch.nn.SyncBatchNorm``. For an input of fewer bits they compute in float32,
  as CUDA's kernels do:
  https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Normalization.cuh
- ``torch.histc`` of integers, with which mixtures of experts count their tokens:
  https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/SummaryOps.cu
- ``torch.nansum`` of complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from d2ldev_torch.virtual.kernels import Operands, Schema, run_on_cpu, schema_of

_Tensor = torch.Tensor


def _wide(x: _Tensor) -> _Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _others(x: _Tensor) -> list[int]:
    """Return all axes except the channels'."""
    return [i for i in range(x.dim()) if i != 1]


def _along(values: _Tensor, x: _Tensor) -> _Tensor:
    """Return one value for each channel, in a shape that broadcasts with ``x``."""
    return values.reshape([-1 if i == 1 else 1 for i in range(x.dim())])


def stats(x: _Tensor, eps: float) -> tuple[_Tensor, _Tensor]:
    """Return the mean of each channel, and 1 over its standard deviation."""
    variance, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    _x: _Tensor,
    means: _Tensor,
    invstds: _Tensor,
    running_mean: _Tensor | None,
    running_var: _Tensor | None,
    momentum: float,
    eps: float,
    counts: _Tensor,
) -> tuple[_Tensor, _Tensor]:
    """Return the ``stats`` of several parts together, and update the running statistics."""
    counts = counts.to(means.dtype)[:, None]
    number = counts.sum()
    mean = (means * counts).sum(0) / number
    variances = invstds**-2 - eps + (means - mean) ** 2
    variance = (variances * counts).sum(0) / number
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * number / (number - 1)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def normalize(
    x: _Tensor,
    weight: _Tensor | None,
    bias: _Tensor | None,
    mean: _Tensor,
    invstd: _Tensor,
    _eps: float,
) -> _Tensor:
    """Return the result of the layer."""
    scale = invstd if weight is None else invstd * _wide(weight)
    found = (_wide(x) - _along(mean, x)) * _along(scale, x)
    return (found if bias is None else found + _along(_wide(bias), x)).to(x.dtype)


def backward_reduce(
    gradient: _Tensor,
    x: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    weight: _Tensor | None,
    *_needed: bool,
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    """Return two sums for the gradient of the input, and the gradients of weight and bias."""
    wide = _wide(gradient)
    total = wide.sum(_others(x))
    of_products = (wide * (_wide(x) - _along(mean, x))).sum(_others(x))
    dtype = mean.dtype if weight is None else weight.dtype
    return total, of_products, (of_products * invstd).to(dtype), total.to(dtype)


def backward(
    gradient: _Tensor,
    x: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    weight: _Tensor | None,
    total: _Tensor,
    of_products: _Tensor,
    counts: _Tensor,
) -> _Tensor:
    """Return the gradient of the input from the sums over all parts."""
    number = counts.sum()
    scale = invstd if weight is None else invstd * _wide(weight)
    along = _along(invstd**2 * of_products / number, x) * (_wide(x) - _along(mean, x))
    found = (_wide(gradient) - _along(total / number, x) - along) * _along(scale, x)
    return found.to(x.dtype)


def histc(x: _Tensor, bins: int = 100, lowest: float = 0, highest: float = 0) -> _Tensor:
    """Return the number of elements in each bin, in the dtype of the input."""
    if x.is_floating_point():
        return run_on_cpu(_HISTC, x, bins, lowest, highest)  # type: ignore[no-any-return]
    low, high = int(lowest), int(highest)
    if low == high:
        low, high = (int(x.min()), int(x.max())) if x.numel() else (low, high)
        # One value has the middle of the bins.
        low, high = (low - 1, high + 1) if low == high else (low, high)
    if bins <= 0:
        raise RuntimeError("bins must be > 0")
    if low > high:
        raise RuntimeError("max must be larger than min")
    kept = x[(x >= low) & (x <= high)].long()
    found = ((kept - low) * bins // (high - low)).clamp(max=bins - 1)
    return torch.bincount(found, minlength=bins).to(x.dtype)


_HISTC = schema_of(torch.ops.aten.histc.default)


def nansum(
    x: _Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> _Tensor:
    """Return the sum of the elements that are numbers."""
    if not x.is_complex():
        return run_on_cpu(_NANSUM, x, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
    return torch.where(x.isnan(), 0, x).sum(dim, keepdim, dtype=dtype)


_NANSUM = schema_of(torch.ops.aten.nansum.default)


def write(schema: Schema, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write the results of a kernel to the tensors that are given as ``out``."""
    Operands(schema).to_cpu(args, kwargs)  # operands on different devices are refused
    outs = tuple(kwargs.pop(name) for name in schema.outs)
    results = kernel(*args, **kwargs)
    for out, result in zip(outs, results if len(outs) > 1 else (results,), strict=True):
        if out.shape != result.shape:
            out.resize_(result.shape)
        out.copy_(result)
    return outs if len(outs) > 1 else outs[0]


KERNELS: dict[str, Callable[..., Any]] = {
    "histc": histc,
    "nansum": nansum,
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalize,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward,
}
"""The kernels, by the names of their operators."""
