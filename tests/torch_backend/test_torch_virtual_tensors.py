"""What a tensor on a virtual GPU is: a tensor like any other, and never one of the CPU."""

import copy

import numpy as np
import pytest
import torch
from d2ldev_torch.backend import TorchBackend
from hypothesis import given
from hypothesis import strategies as st

from d2ldev.errors import UnsupportedValueError


def test_it_is_a_tensor_of_torch(vgpu):
    x = torch.ones(2, device=vgpu)
    assert type(x) is torch.Tensor
    assert (x.device, x.is_cpu, x.is_cuda) == (vgpu, False, False)


@pytest.mark.parametrize("name", TorchBackend.dtype_names)
def test_every_dtype_goes_there_and_back(vgpu, name):
    x = torch.tensor([0, 1, 1]).to(getattr(torch, name))
    y = x.to(vgpu)
    assert (y.device, y.dtype) == (vgpu, x.dtype)
    assert torch.equal(y.cpu().to(torch.complex64), x.to(torch.complex64))


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    permuted=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    function=st.sampled_from(
        [
            lambda x: x + x,
            lambda x: x.sum(),
            lambda x: x.clone(),
            lambda x: x.reshape(-1),
            lambda x: x.to(torch.float64),
            lambda x: torch.cat([x.flatten(), x.flatten()]),
            lambda x: x[..., None].expand(*x.shape, 3),
            lambda x: x.contiguous(),
            lambda x: torch.zeros_like(x),
            lambda x: x.cumsum(0) if x.dim() else x,
        ]
    ),
)
def test_shapes_strides_and_values_are_the_cpus(virtual, shape, permuted, step, function):
    order = list(range(len(shape)))
    permuted.shuffle(order)

    def view(x):
        return x.permute(order)[tuple(slice(None, None, step) for _ in order)]

    x = torch.arange(float(np.prod(shape))).reshape(shape)
    expected, y = function(view(x)), function(view(x.to("vgpu:1")))
    assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert y.device == torch.device("vgpu:1")
    assert torch.equal(y.cpu(), expected)


def test_views_are_of_one_memory(vgpu):
    x = torch.zeros(2, 3, device=vgpu)
    views = [x[1], x.T, x.view(6), x.unfold(1, 2, 1), x.diagonal(), x.unsqueeze(0), x.detach()]
    x.add_(1)
    assert {view.untyped_storage()._cdata for view in views} == {x.untyped_storage()._cdata}
    assert [view.min().item() for view in views] == [1] * len(views)
    assert all(view._base is x for view in views[:6])


def test_what_works_in_place_returns_its_operand(vgpu):
    x = torch.ones(2, 3, device=vgpu)
    address = x.data_ptr()
    assert x.add_(1) is x
    assert x.t_() is x
    assert torch.mul(x, 2, out=x) is x
    assert (x.shape, x.data_ptr()) == ((3, 2), address)
    assert x.to(vgpu) is x


def test_a_result_grows_to_what_it_holds(vgpu):
    values, indices = torch.empty(0, device=vgpu), torch.empty(0, dtype=torch.long, device=vgpu)
    torch.max(torch.tensor([[1.0, 3.0], [5.0, 4.0]], device=vgpu), 1, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([3, 5], [1, 0])


def test_a_result_is_written_where_it_is_wanted(vgpu):
    x = torch.zeros(4, device=vgpu)
    torch.add(torch.ones(2, device=vgpu), 1, out=x[1:3])
    assert x.tolist() == [0, 2, 2, 0]


def test_a_tensor_is_resized_with_its_values(vgpu):
    x = torch.arange(4.0, device=vgpu)
    x.resize_(2)
    assert x.tolist() == [0, 1]
    x.resize_(3, 3)
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]


def test_a_tensor_takes_the_memory_of_another(vgpu):
    x, y = torch.ones(3, device=vgpu), torch.zeros(5, device=vgpu)
    x.set_(y)
    assert (x.shape, x.data_ptr()) == ((5,), y.data_ptr())
    assert x.set_().shape == (0,)
    assert x.device == vgpu


def test_lazily_conjugated_values_are_computed_with(vgpu):
    host = torch.tensor([1 + 2j, 3 - 1j])
    x = host.to(vgpu).conj()
    assert x.is_conj()
    assert x.imag.is_neg()
    for result, expected in (
        (x, host.conj()),
        (x.imag, host.conj().imag),
        (x @ x, host.conj() @ host.conj()),
    ):
        assert torch.equal(result.cpu(), expected)
    assert torch.equal(copy.deepcopy(x).cpu(), host.conj())


def test_it_says_where_it_is(vgpu):
    assert repr(torch.ones(2, device=vgpu)) == "tensor([1., 1.], device='vgpu:1')"
    assert repr(torch.empty(0, device=vgpu)) == "tensor([], device='vgpu:1')"


def test_single_numbers_are_read(vgpu):
    x = torch.tensor(2.5, device=vgpu)
    assert (x.item(), float(x), f"{x:.2f}", bool(x)) == (2.5, 2.5, "2.50", True)
    assert torch.arange(3, device=vgpu).tolist() == [0, 1, 2]
    assert "abc"[torch.tensor(1, device=vgpu)] == "b"


@pytest.mark.parametrize(
    "export",
    [
        lambda x: x.numpy(),
        np.asarray,
        np.from_dlpack,
        lambda x: x.__array_interface__,
        lambda x: x.__cuda_array_interface__,
        torch.from_dlpack,
    ],
    ids=["numpy", "asarray", "from_dlpack", "array interface", "CUDA's", "torch's"],
)
def test_it_is_never_taken_for_the_cpus(vgpu, export):
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)):
        export(torch.ones(2, device=vgpu))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.ones(2, device=d),
        lambda d: torch.tensor([1.0, 2.0], device=d),
        lambda d: torch.as_tensor(np.ones(2), device=d),
        lambda d: torch.arange(3, device=d),
        lambda d: torch.ones(2).to(d),
        lambda d: torch.zeros_like(torch.ones(2), device=d),
        lambda d: torch.ones(2, device=d).new_tensor([1.0]),
        lambda d: torch.ones(2, device=d).new(3),
        lambda d: torch.ones(2, device=d).new(),
        lambda d: torch.ones(2, device=d).new([1.0]),
        lambda d: torch.ones(2, device=d).new(size=(2, 3)),
        lambda d: torch.ones(2, device=d).new(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).new_full((2,), 3.0),
        lambda d: torch.ones(2, device=d).new_empty(2),
        lambda d: torch.ones(2, device=d).new_empty_strided((2,), (1,)),
        lambda d: torch.rand_like(torch.ones(2, device=d)),
        lambda d: torch.Tensor(torch.ones(2, device=d)),
        lambda d: type(torch.ones(2, device=d))(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).type(torch.float64),
        lambda d: torch.ones(2, device=d).type("torch.vgpu.DoubleTensor"),
        lambda d: torch.ones(2, dtype=torch.int64).type_as(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).new_zeros(2),
        lambda d: torch.randperm(3, device=d),
        lambda d: torch.ones(3, device=d)[[0, 1]],
        lambda d: torch.ones(2).type("torch.vgpu.DoubleTensor").to(d),
        lambda d: torch.nn.Linear(2, 2, device=d).weight,
        lambda d: torch.linspace(0, 1, 3, device=d),
        lambda d: torch.nn.functional.one_hot(torch.arange(3, device=d)),
    ],
)
def test_every_way_to_make_a_tensor_makes_it_there(place, make):
    assert make(place).device == place


def test_new_of_a_tensor_is_that_tensor_by_another_name(vgpu):
    x = torch.ones(2, 3, device=vgpu).t()
    made = x.new(x)
    assert (made.data_ptr(), made.stride()) == (x.data_ptr(), x.stride())
    with pytest.raises(TypeError, match="device=cpu"):
        x.new(torch.ones(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_made_like_it_elsewhere_is_elsewhere(vgpu, device):
    x = torch.ones(2, device=vgpu)
    made = [torch.zeros_like(x, device=device), x.new_ones(2, device=device), x.to(device)]
    assert {y.device for y in made} == {torch.device(device)}


def test_random_numbers_are_the_cpus(vgpu):
    draw = (
        lambda device: torch.randn(5, device=device),
        lambda device: torch.randint(9, (5,), device=device),
        lambda device: torch.randperm(5, device=device),
        lambda device: torch.empty(5, device=device).exponential_(),
        lambda device: torch.nn.functional.dropout(torch.ones(9, device=device), 0.3),
        lambda device: torch.bernoulli(torch.full((5,), 0.5, device=device)),
        lambda device: torch.multinomial(torch.ones(5, device=device), 3),
    )
    torch.manual_seed(0)
    expected = [one("cpu") for one in draw]
    torch.manual_seed(0)
    drawn = [one(vgpu) for one in draw]
    assert all(torch.equal(x.cpu(), y) for x, y in zip(drawn, expected, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: torch.sparse_coo_tensor(x[None].long(), x, (3,)),
        lambda x: torch.eye(2).to_sparse().to(x.device),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x[None].to_mkldnn(),
        lambda x: torch.empty(2, dtype=torch.bits8, device=x.device),
    ],
    ids=["sparse", "of indices", "moved", "quantized", "mkldnn", "bits"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_holds_no_dense_numbers_is_refused(vgpu, make):
    with pytest.raises(UnsupportedValueError, match="dense numbers"):
        make(torch.ones(2, device=vgpu))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_held(vgpu):
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    x = torch.nested.nested_tensor(parts, device=vgpu)
    assert x.device == vgpu
    assert torch.equal(
        x.to_padded_tensor(-1).cpu(), torch.nested.nested_tensor(parts).to_padded_tensor(-1)
    )
