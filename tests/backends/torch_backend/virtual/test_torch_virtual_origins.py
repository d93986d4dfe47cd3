"""Tensors and views are computed with as the CPU tensors that they were made of, or views of it."""

import pytest
import torch
from d2ldev_torch.virtual import kernels
from d2ldev_torch.virtual.memory import origin_of
from torch_versions import needs_other_memory

from d2ldev.errors import DeviceMismatchError

USUAL = {
    "add": lambda x: x + x,
    "a number": lambda x: x * 2,
    "relu": torch.relu,
    "matmul": lambda x: x @ x,
    "in place": lambda x: x.clone().add_(x),
    "several results": lambda x: x.max(dim=0).values,
    "a list of dimensions": lambda x: x.sum(dim=[0, 1]),
    "views": lambda x: x.t()[1:] * x[0, :, None].T,
    "in place in a view": lambda x: x.clone()[1:].add_(x[0]),
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_calls_make_no_aliases(vgpu, monkeypatch, name):
    def refuse(*_):
        raise AssertionError("an alias of each operand is made")

    x = torch.randn(3, 3)
    there = x.to(vgpu)
    monkeypatch.setattr(kernels, "Operands", refuse)
    y = USUAL[name](there)
    monkeypatch.undo()
    assert y.device == vgpu
    assert torch.equal(y.cpu(), USUAL[name](x))


def transpose(x):
    x.data = x.data.t()
    return x


def of_another_dtype(x):
    x.data = x.data.view(torch.int32)
    return x


def in_the_memory_of(x):
    x.data = x.new_full((3, 3), 7.0)
    return x


def of_another_size(x):
    return x.resize_(2, 2)


@pytest.mark.parametrize(
    "change",
    [
        transpose,
        of_another_dtype,
        in_the_memory_of,
        of_another_size,
        torch._neg_view,
        lambda x: x.t_(),
        lambda x: x[1:],
        lambda x: x[:2],
        lambda x: x[1:, 1:][1:],
        lambda x: x[3:],
        lambda x: torch.complex(x, x).conj().imag,
    ],
)
def test_what_looks_at_its_memory_in_another_way_is_computed_with_as_the_cpu_does(vgpu, change):
    x = torch.randn(3, 3)
    there = change(x.to(vgpu))
    here = change(x.clone())
    assert torch.equal((there + 1).cpu(), here + 1)
    there.mul_(2)
    assert torch.equal(there.cpu(), here.mul_(2))


def test_tensors_on_one_memory_see_what_is_written(vgpu):
    x = torch.ones(2, 2, device=vgpu)
    y, z = x.detach(), x.view(4)
    x.add_(y)
    y.mul_(x)
    assert (x.tolist(), z.tolist()) == ([[4, 4]] * 2, [4] * 4)
    assert x.add_(1) is x


@needs_other_memory
def test_memory_that_was_freed_is_not_kept(vgpu):
    x = torch.ones(4, device=vgpu)
    assert origin_of(x) is not None
    storage = x.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    x.fill_(3)
    assert origin_of(x) is None
    assert (x + 1).tolist() == [4] * 4


def test_no_history_is_kept(vgpu):
    x = torch.ones(4, device=vgpu, requires_grad=True)
    y = torch.dropout(x, 0.5, True)  # it is composed of the CPU's, with its gradient
    assert y.grad_fn is not None
    assert origin_of(y) is None
    (y + 1).sum().backward()
    assert x.grad is not None


def test_other_devices_are_refused_as_ever(vgpu):
    x = torch.ones(2, device=vgpu)
    for other in (torch.ones(2), torch.ones(2, device="vgpu:1" if vgpu.index == 0 else "vgpu:0")):
        with pytest.raises(DeviceMismatchError):
            x + other
        with pytest.raises(DeviceMismatchError):
            x.add_(other)
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]
    with pytest.raises(DeviceMismatchError):
        torch.tensor(1.0).add_(x[0])
