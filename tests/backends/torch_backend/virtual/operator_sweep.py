"""torch's own operators with torch's own sample inputs, on the CPU and on a virtual GPU.

Run as a program, because torch's tests change settings of the process:
``python operator_sweep.py SAMPLES``. It prints, as JSON, how many calls were compared, and where
the two differ: operator -> what differs. Everything is compared bit for bit. Every operator that
takes ``out=`` is called again with views of larger buffers, and mapped by ``torch.vmap``.
"""

import contextlib
import itertools
import json
import sys
import types
import unittest
import warnings
from functools import partial

import torch
from torch.utils._pytree import tree_leaves, tree_map

import d2ldev

d2ldev.virtual_gpus(2)
d2ldev.get_backend("torch")
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


def move_values(values, device):
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
    inputs, theirs = move_values(values, torch.device("cpu")), move_values(values, PLACE)

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


VIEWS = {
    "a row": lambda shape: (torch.zeros((3, *shape)), lambda buffer: buffer[1]),
    "a column": lambda shape: (torch.zeros((*shape, 2)), lambda buffer: buffer[..., 1]),
}


def compare_written(op, sample, _differentiable, view):
    """Return what differs if a call writes to views; False if the CPU cannot do it."""
    values = ((sample.input, *sample.args), sample.kwargs)

    def run(device):
        inputs = move_values(values, device)
        buffers, outs = [], []
        for x in shapes:
            buffer, part = VIEWS[view](x.shape)
            buffers.append(buffer.to(device, x.dtype))
            outs.append(part(buffers[-1]))
        torch.manual_seed(1)
        out = outs[0] if isinstance(expected, torch.Tensor) else tuple(outs)
        results = op(*inputs[0], **inputs[1], out=out)
        same = [x is y for x, y in zip(tensors(results), outs, strict=True)]
        addresses = [x.data_ptr() - y.data_ptr() for x, y in zip(outs, buffers, strict=True)]
        return [buffers, outs, same, addresses]

    try:
        inputs = move_values(values, torch.device("cpu"))
        expected = op(*inputs[0], **inputs[1])
        shapes = tensors(expected)
        written = run(torch.device("cpu"))
    except Exception:
        return False
    return difference(written, run(PLACE))


def compare_mapped(op, sample, _differentiable):
    """Return what differs if a call is mapped over two inputs; False if the CPU cannot do it."""
    values = ((sample.input, *sample.args), sample.kwargs)

    def run(device):
        (x, *args), kwargs = move_values(values, device)
        torch.manual_seed(1)
        mapped = torch.vmap(lambda one: op(one, *args, **kwargs), randomness="different")
        return mapped(torch.stack([x.detach(), x.detach()]))

    try:
        expected = run(torch.device("cpu"))
    except Exception:
        return False
    return difference(expected, run(PLACE))


def sweep(number, compare, selected=lambda op: True):
    """Compare a number of samples of every operator that is selected."""
    compared, names, different = 0, set(), {}
    for op in filter(selected, operators()):
        for dtype in DTYPES:
            differentiable = op.supports_autograd and dtype.is_floating_point
            samples = []
            if dtype in op.dtypes:
                with contextlib.suppress(Exception):
                    made = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
                    samples = list(itertools.islice(made, number))  # of up to hundreds
            for sample in samples:
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
    number = int(sys.argv[1])
    found = {"called": sweep(number, compare), "mapped": sweep(1, compare_mapped)}
    for view in VIEWS:
        written = partial(compare_written, view=view)
        found[view] = sweep(1, written, lambda op: op.supports_out)
    print(json.dumps(found))
