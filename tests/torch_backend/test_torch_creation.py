"""Creation on torch: made on the device, and torch's own defaults left alone."""

import pytest
import torch
from d2ldev_torch.backend import TorchBackend

from d2ldev import OutOfDeviceMemoryError, cpu

FLOATS = ("float16", "bfloat16", "float32", "float64")
TOO_MUCH = 1 << 50

MAKE = {
    "zeros": lambda backend, **arguments: backend.zeros((2, 3), **arguments),
    "ones": lambda backend, **arguments: backend.ones((2, 3), **arguments),
    "full": lambda backend, **arguments: backend.full((2, 3), 4.0, **arguments),
    "arange": lambda backend, **arguments: backend.arange(3, **arguments),
    "rand": lambda backend, **arguments: backend.rand((2, 3), **arguments),
    "randn": lambda backend, **arguments: backend.randn((2, 3), **arguments),
    "asarray": lambda backend, **arguments: backend.asarray([1.0, 2.0], **arguments),
}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


@pytest.fixture
def other_default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def default_on_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_torch_s_default_device_is_not_followed(torch_backend, make, default_on_meta):
    assert make(torch_backend).is_cpu


def test_torch_s_default_device_is_left_as_it_was(torch_backend, make, default_on_meta):
    make(torch_backend, device="cpu")
    assert torch.get_default_device() == torch.device("meta")


def test_on_the_cpu_torch_itself_makes_tensors_there(torch_backend, default_on_meta):
    with torch_backend.on(cpu()):
        assert torch.ones(1).is_cpu
    assert torch.ones(1).is_meta


def test_a_scope_is_followed(meta, make):
    with meta.on("gpu"):
        assert make(meta).is_meta


def test_a_scope_is_torch_s_own_default_too(meta):
    with meta.on("gpu"):
        assert torch.ones(1).is_meta
    assert torch.ones(1).is_cpu


def test_on_another_device_tensors_are_made_there_without_a_detour(meta, make, monkeypatch):
    def refuse(self, x, native):
        raise AssertionError("made elsewhere and copied")

    monkeypatch.setattr(TorchBackend, "_copy_all", refuse)
    assert make(meta, device="gpu").is_meta


@pytest.mark.parametrize("name", ["zeros", "ones", "rand", "randn", "asarray"])
def test_torch_s_default_dtype_is_followed(torch_backend, name, other_default_dtype):
    assert MAKE[name](torch_backend).dtype is torch.float64


def test_torch_s_default_dtype_is_left_as_it_was(torch_backend, make, other_default_dtype):
    make(torch_backend, dtype="float32")
    assert torch.get_default_dtype() is torch.float64


@pytest.mark.parametrize("name", TorchBackend.dtype_names)
def test_ones_has_every_dtype(torch_backend, name):
    assert torch_backend.ones(2, dtype=name).dtype is getattr(torch, name)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("draw", ["rand", "randn"])
def test_random_numbers_have_every_floating_dtype(torch_backend, draw, name):
    assert MAKE[draw](torch_backend, dtype=name).dtype is getattr(torch, name)


def test_torch_s_own_dtype_is_taken(torch_backend):
    assert torch_backend.zeros(2, dtype=torch.int8).dtype is torch.int8


def test_an_alias_of_torch_s_dtype_is_the_same(torch_backend):
    assert torch_backend.zeros(2, dtype=torch.half).dtype is torch.float16


def test_like_gives_dtype_and_device(meta):
    x = torch.ones(1, dtype=torch.int16, device="meta")
    y = meta.zeros(3, like=x)
    assert (y.dtype, y.device) == (x.dtype, x.device)


def test_a_tensor_that_is_as_asked_for_comes_back_itself(torch_backend):
    x = torch.ones(2, requires_grad=True)
    assert torch_backend.asarray(x, dtype="float32", device="cpu") is x


def test_a_list_of_tensors_becomes_one(torch_backend):
    assert torch_backend.asarray([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]


def test_tensors_are_made_without_gradients(torch_backend, make):
    assert not make(torch_backend).requires_grad


@pytest.mark.parametrize("name", ["rand", "randn", "zeros", "ones", "full"])
def test_too_large_a_tensor_is_out_of_memory(torch_backend, name):
    arguments = (4.0,) if name == "full" else ()
    with pytest.raises(OutOfDeviceMemoryError, match="cpu has too little free memory") as caught:
        getattr(torch_backend, name)(TOO_MUCH, *arguments, device="cpu")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_too_large_a_range_is_out_of_memory(torch_backend):
    with pytest.raises(OutOfDeviceMemoryError):
        torch_backend.arange(TOO_MUCH)


def test_a_size_that_no_address_reaches_is_out_of_memory(torch_backend):
    with pytest.raises(OutOfDeviceMemoryError):
        torch_backend.zeros((1 << 40, 1 << 40))


def test_too_large_a_copy_is_out_of_memory(torch_backend):
    with pytest.raises(OutOfDeviceMemoryError):
        torch_backend.copy(torch.ones(1).expand(TOO_MUCH))


def test_a_seed_leaves_torch_s_random_state_alone(torch_backend):
    before = torch.get_rng_state()
    torch_backend.rand(3, seed=1)
    torch_backend.randn(3, seed=1)
    torch_backend.mlp([2, 2], seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_numbers(torch_backend):
    first, second = (torch_backend.randn(3, seed=7) for _ in range(2))
    assert torch.equal(first, second)


def test_another_seed_gives_other_numbers(torch_backend):
    assert not torch.equal(torch_backend.rand(3, seed=7), torch_backend.rand(3, seed=8))


def test_without_a_seed_numbers_come_from_torch_s_random_state(torch_backend):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ours = torch_backend.rand(3)
        torch.manual_seed(3)
        assert torch.equal(ours, torch.rand(3))


def test_an_mlp_is_made_on_the_device_without_a_detour(meta, monkeypatch):
    def refuse(self, x, native):
        raise AssertionError("made elsewhere and copied")

    monkeypatch.setattr(TorchBackend, "_copy_all", refuse)
    net = meta.mlp([3, 4, 1], device="gpu")
    assert all(parameter.is_meta for parameter in net.parameters())


def test_an_mlp_s_parameters_are_leaves_that_train(torch_backend):
    net = torch_backend.mlp([3, 4, 1])
    net(torch.ones(2, 3)).sum().backward()
    assert all(parameter.is_leaf and parameter.grad is not None for parameter in net.parameters())


def test_an_mlp_starts_within_the_book_s_bounds(torch_backend):
    net = torch_backend.mlp([4, 100])
    assert net[0].weight.abs().max() <= 0.5
    assert net[0].weight.abs().max() > 0.45
    assert not net[0].bias.any()
