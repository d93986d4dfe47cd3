"""torch's own operators with torch's own sample inputs, on the CPU and on a virtual GPU.

Run as a program, because torch's tests change settings of the process:
``python operator_sweep.py SAMPLES``. It prints, as JSON, how many calls were compared, and where
the two differ: operator -> what differs. Everything is compared bit for bit.
"""

import contextlib
import json
import sys
import types
import unittest
import warnings

import torch
from d2ldev_torch import TorchFramework
from torch.utils._pytree import tree_leaves, tree_map

TorchFramework(virtual_gpus=2)
PLACE = torch.device("vgpu:1")
DTYPES = (torch.float32, torch.complex64, torch.int64)


def operators():
    """Return torch's table of operators, whose module asks for a package only its tests need."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def moved(values, device):
    def move(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
        return device if isinstance(value, torch.device) or value == "cpu" else value

    return tree_map(lambda value: move(value) if _is_moved(value) else value, values)


def _is_moved(value):
    return isinstance(value, (torch.Tensor, torch.device)) or (
        isinstance(value, str) and value == "cpu"
    )


def tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def difference(expected, values):
    """Return how results of the CPU and of the virtual GPU differ; None if they do not."""
    pairs = list(zip(tree_leaves(expected), tree_leaves(values), strict=True))
    for x, y in pairs:
        if not isinstance(x, torch.Tensor):
            if x != y and x == x:  # a NaN is not itself
                return f"{x} is {y}"
            continue
        if y.device != PLACE:
            return f"on {y.device}"
        if (x.shape, x.stride(), x.dtype) != (y.shape, y.stride(), y.dtype):
            return f"{x.dtype} {x.shape} {x.stride()} is {y.dtype} {y.shape} {y.stride()}"
        if not torch.equal(bits(x), bits(y.cpu())):
            return "values"
    return None


def bits(x):
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)


def gradients(results, inputs, seeds):
    outputs = [y for y in tensors(results) if y.requires_grad]
    leaves = [x for x in tensors(inputs) if x.requires_grad]
    if not outputs or not leaves:
        return []
    found = torch.autograd.grad(outputs, leaves, seeds(outputs), allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def compare(op, sample, differentiable):
    """Return what differs in one call and its gradient; False if the CPU cannot do it."""
    values = ((sample.input, *sample.args), sample.kwargs)
    inputs, theirs = moved(values, torch.device("cpu")), moved(values, PLACE)

    def run(inputs, device):
        torch.manual_seed(1)
        results = op(*inputs[0], **inputs[1])
        torch.manual_seed(2)
        made = (
            []
            if not differentiable
            else gradients(
                results,
                inputs,
                lambda outputs: [torch.randn_like(y, device="cpu").to(device) for y in outputs],
            )
        )
        return results, made

    try:
        expected = run(inputs, torch.device("cpu"))
    except Exception:
        return False
    return difference(expected, run(theirs, PLACE))


def sweep(number):
    """Compare a number of samples of every operator."""
    compared, names, different = 0, set(), {}
    for op in operators():
        for dtype in DTYPES:
            differentiable = op.supports_autograd and dtype.is_floating_point
            samples = []
            if dtype in op.dtypes:
                with contextlib.suppress(Exception):
                    samples = list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
            for sample in samples[:number]:
                name = f"{op.name} {op.variant_test_name}".strip()
                try:
                    found = compare(op, sample, differentiable)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"[:200]
                if found is not False:
                    compared += 1
                    names.add(op.name)
                if found:
                    different[name] = found
    return {"compared": compared, "operators": len(names), "different": different}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(sweep(int(sys.argv[1]))))
