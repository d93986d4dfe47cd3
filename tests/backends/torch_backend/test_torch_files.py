"""torch's tensors, models and optimizers in files."""

import numpy as np
import pytest
import torch


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.safetensors"


def bits(x):
    """The bytes of a tensor, which are the same for NaNs, too."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(torch_backend, path, shape):
    size = int(np.prod(shape))
    saved = {}
    for name in torch_backend.dtype_names:
        dtype = getattr(torch, name)
        # Of a bool's bytes, only 0 and 1 have a meaning.
        data = torch.arange(size * dtype.itemsize) % (2 if name == "bool" else 256)
        empty = torch.empty(shape, dtype=dtype)
        saved[name] = data.to(torch.uint8).view(dtype).reshape(shape) if size else empty
    torch_backend.save(saved, path)
    loaded = torch_backend.load(path)
    assert [(x.dtype, x.shape, bits(x)) for x in loaded.values()] == [
        (x.dtype, x.shape, bits(x)) for x in saved.values()
    ]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, 1:],
        lambda x: x[0].expand(4, 4),
        lambda x: x.to(torch.complex64).conj(),
        lambda x: (x * 1j).conj().imag,  # negated when it is read
        lambda x: x.to_sparse(),
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "negated", "sparse"],
)
def test_a_tensor_that_is_not_contiguous_is_saved_in_the_order_of_its_indices(
    torch_backend, path, view
):
    x = view(torch.arange(16, dtype=torch.float32).reshape(4, 4))
    torch_backend.save(x, path)
    loaded = torch_backend.load(path)
    assert loaded.is_contiguous()
    torch.testing.assert_close(loaded, x.to_dense(), rtol=0, atol=0)


def test_a_tensor_of_the_cpu_is_written_from_its_own_memory(torch_backend):
    x = torch.zeros(4)
    assert torch_backend._borrow(x).ctypes.data == x.data_ptr()


def test_a_tensor_of_the_cpu_is_loaded_without_another_copy(torch_backend):
    data = np.arange(4.0)
    assert torch_backend._adopt(data, torch.float64, torch.device("cpu")).data_ptr() == (
        data.ctypes.data
    )


def test_what_is_loaded_can_be_written_to_and_trained(torch_backend, path):
    torch_backend.save(torch.ones(3), path)
    x = torch_backend.load(path).requires_grad_()
    (x * x).sum().backward()
    with torch.no_grad():
        x -= x.grad
    assert x.tolist() == [-1, -1, -1]


def test_buffers_are_saved_and_what_was_tied_is_one_tensor(torch_backend, path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    net.append(net[0])
    net(torch.rand(4, 3))
    torch_backend.save(net, path)
    loaded = torch_backend.load(path)
    assert {"1.running_mean", "1.num_batches_tracked"} <= loaded.keys()
    assert bits(loaded["1.running_mean"]) == bits(net[1].running_mean)


def test_gradients_are_not_saved(torch_backend, path):
    net = torch_backend.mlp([2, 1])
    net(torch.ones(1, 2)).sum().backward()
    torch_backend.save(net, path)
    assert list(torch_backend.load(path)) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_file_from_a_virtual_gpu_is_read_where_there_is_none(virtual, torch_backend, path, index):
    x = virtual.arange(4, dtype="bfloat16", device=f"gpu:{index}")
    virtual.save({"x": x}, path)
    loaded = torch_backend.load(path)["x"]
    assert loaded.device.type == "cpu"
    assert bits(loaded) == bits(x)


def test_tensors_are_loaded_straight_to_a_device(virtual, path):
    virtual.save([torch.arange(3), torch.ones(2, dtype=torch.bfloat16)], path)
    loaded = virtual.load(path, device="gpu:1")
    assert [str(virtual.device_of(x)) for x in loaded] == ["gpu:1", "gpu:1"]
    assert [x.cpu().tolist() for x in loaded] == [[0, 1, 2], [1, 1]]


NOT_STANDARD = {
    "batch normalization": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
    ),
    "a subclass": lambda: type("Net", (torch.nn.Sequential,), {})(torch.nn.Linear(3, 3)),
    "a layer of one's own": lambda: torch.nn.Sequential(
        torch.nn.Linear(3, 3), type("Flip", (torch.nn.Module,), {})()
    ),
    "a parametrized layer": lambda: torch.nn.Sequential(
        torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    ),
    "a layer twice": lambda: torch.nn.Sequential(*[torch.nn.Linear(3, 3)] * 2),
    "no layers": lambda: torch.nn.Sequential(),
    "no sequence": lambda: torch.nn.Linear(3, 3),
}


@pytest.mark.parametrize("make", NOT_STANDARD.values(), ids=NOT_STANDARD.keys())
def test_no_layouts_are_claimed_for_other_models(torch_backend, make):
    assert torch_backend._layouts(make()) is None


def test_layers_of_a_convolutional_network_are_counted_over_those_with_parameters(torch_backend):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2, bias=False),
    )
    layouts = torch_backend._layouts(net)
    assert {name: layout.role for name, layout in layouts.items()} == {
        "0.weight": "0.weight",
        "0.bias": "0.bias",
        "3.weight": "1.weight",
    }
