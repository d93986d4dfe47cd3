"""torch's own operators with torch's own sample inputs, on the CPU and on a virtual GPU.

Run as a program, because torch's tests change settings of the process:
``python operator_sweep.py SAMPLES``. It prints, as JSON, how many calls were compared, and where
the two differ: operator -> what differs. Everything is compared bit for bit. Every operator that
takes ``out=`` is called again with views of larger buffers, and mapped by ``torch.vmap``. Dtypes
that only the CPU or only CUDA computes, by torch's own table, are called by themselves.
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
WIDER = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Kernels of attention that only cards have.
OF_CARDS = ("_flash_attention", "_efficient_attention")


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
        if x.layout is not torch.strided:
            if x.layout is not y.layout:
                return f"{x.layout} is {y.layout}"
            x, y = x.to_dense(), y.to_dense()
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
            if dtype in op.dtypes & op.dtypesIfCUDA:
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


def sweep_refused():
    """Return the pairs of operator and dtype that a virtual GPU refuses as CUDA, and the others.

    Half precision is left out: a build for the CPU does not know whether CUDA computes it. The
    table names one integer for some operators whose kernels take several.
    """
    refused, computed = [], []
    for op in operators():
        dtypes = op.dtypes - op.dtypesIfCUDA - set(WIDER)
        if dtypes & INTEGERS and not op.dtypesIfCUDA & INTEGERS:
            dtypes |= INTEGERS
        for dtype in dtypes:
            if "float8" in str(dtype):
                continue
            error = None
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), 6):
                args, kwargs = move_values(((sample.input, *sample.args), sample.kwargs), PLACE)
                try:
                    op(*args, **kwargs)
                except NotImplementedError as raised:
                    error = raised
            pair = f"{op.name} {dtype}"
            (refused if "CUDA has no such kernel" in str(error) else computed).append(pair)
    return {"refused": refused, "computed": computed}


def sweep_wider():
    """Return the pairs that CUDA computes, and the CPU does not, and what goes wrong with them."""
    computed, wrong = [], {}
    for op in operators():
        if any(name in op.name for name in OF_CARDS):
            continue
        for dtype in (op.dtypesIfCUDA - op.dtypes) & set(WIDER):
            pair = f"{op.name} {dtype}"
            has_gradient = dtype in op.backward_dtypesIfCUDA and dtype is not torch.bool
            made = op.sample_inputs("cpu", dtype, requires_grad=has_gradient)
            for sample in itertools.islice(made, 4):
                try:
                    found = compare_wider(op, sample, dtype)
                except Exception as error:
                    found = f"{type(error).__name__}: {error}"[:200]
                if found:
                    wrong[pair] = found
            computed.append(pair)
    return {"computed": computed, "wrong": wrong}


def compare_wider(op, sample, dtype):
    """Return how a call in a narrow dtype differs from the next wider one's on the CPU."""
    values = ((sample.input, *sample.args), sample.kwargs)
    args, kwargs = move_values(values, PLACE)
    torch.manual_seed(1)
    results = op(*args, **kwargs)
    if not all(x.device == PLACE for x in tensors(results)):
        return "another device"
    for gradient in gradients(
        results, (args, kwargs), lambda outputs: map(torch.ones_like, outputs)
    ):
        if gradient.device != PLACE or not gradient.dtype.is_floating_point | gradient.is_complex():
            return "another gradient"

    def widen(value):
        if isinstance(value, torch.dtype):
            return WIDER.get(value, value)
        is_narrow = isinstance(value, torch.Tensor) and value.dtype is dtype
        return value.detach().to(WIDER[dtype]) if is_narrow else value

    wide_args, wide_kwargs = tree_map(widen, values)
    torch.manual_seed(1)
    try:
        expected = op(*wide_args, **wide_kwargs)
    except RuntimeError:  # the CPU has no kernel for the wider dtype either
        return None
    for x, y in zip(tensors(results), tensors(expected), strict=True):
        # The largest numbers overflow, and several operations round several times.
        y = y.to(x.dtype)
        if not torch.allclose(x.cpu().to(y.dtype), y, rtol=0.05, atol=0.15, equal_nan=True):
            return f"{x.dtype}: {x} is not {y}"[:300]
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    number = int(sys.argv[1])
    found = {"called": sweep(number, compare), "mapped": sweep(1, compare_mapped)}
    for view in VIEWS:
        written = partial(compare_written, view=view)
        found[view] = sweep(1, written, lambda op: op.supports_out)
    found["only on the CPU"], found["only on CUDA"] = sweep_refused(), sweep_wider()
    print(json.dumps(found))
