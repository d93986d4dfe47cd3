"""Sparse tensors on virtual GPUs: the CPU's results, on the GPU, with gradients."""

import copy
import io
import re

import pytest
import torch
from torch import nn

from d2ldev import DeviceMismatchError, gpu

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*sparse.*prototype")

INDICES = torch.tensor([[0, 1, 1], [1, 0, 0]])
VALUES = torch.tensor([1.0, 2.0, 3.0])
LAYOUTS = {
    "COO": lambda x: x.to_sparse(),
    "CSR": lambda x: x.to_sparse_csr(),
    "CSC": lambda x: x.to_sparse_csc(),
    "BSR": lambda x: x.to_sparse_bsr((1, 1)),
    "BSC": lambda x: x.to_sparse_bsc((1, 1)),
}


def make_coo(device, values=VALUES):
    """Return a COO tensor with one element in two parts."""
    return torch.sparse_coo_tensor(INDICES.to(device, copy=True), values.to(device).clone(), (2, 3))


def make_csr(device, values=VALUES):
    rows, columns = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 2])
    parts = (x.to(device) for x in (rows, columns))
    return torch.sparse_csr_tensor(*parts, values.to(device).clone(), (2, 3))


MAKERS = {"COO": make_coo, "CSR": make_csr}


def dense(device, *shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), device=device).reshape(shape)


def assert_same(expected, found, device):
    """Check that what a virtual GPU computes is what the CPU computes."""
    if isinstance(expected, (tuple, list)):
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other, device)
    elif isinstance(expected, torch.Tensor):
        assert (found.device, found.layout, found.dtype) == (
            *(torch.device(device), expected.layout, expected.dtype),
        )
        if expected.layout is torch.sparse_coo:
            assert found.is_coalesced() == expected.is_coalesced()
        assert torch.equal(found.detach().cpu().to_dense(), expected.detach().to_dense())
    else:
        assert expected == found


# -- operators -------------------------------------------------------------------------------------

OF_BOTH = {
    "layout": lambda x: (x.layout, x.is_sparse, x.is_sparse_csr, x.shape, x.dtype, x.dim()),
    "number of elements": lambda x: (x._nnz(), x.sparse_dim(), x.dense_dim()),
    "to_dense": lambda x: x.to_dense(),
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse_csr": lambda x: x.to_sparse_csr(),
    "to_sparse_csc": lambda x: x.to_sparse_csc(),
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "double": lambda x: x.double(),
    "sum": lambda x: x.sum(),
    "a row": lambda x: x[0],
    "an element": lambda x: x[1, 0],
    "select": lambda x: x.select(1, 0),
    "zeros_like": torch.zeros_like,
    "sin": torch.sin,
    "neg": torch.neg,
    "relu": torch.relu,
    "mul of a number": lambda x: x * 2,
    "mul of a number on the host": lambda x: x * torch.tensor(2.0),
    "mul of a dense": lambda x: x * dense(x.device, 2, 3),
    "mul of itself": lambda x: x * x,
    "add": lambda x: x + x,
    "add to a dense": lambda x: dense(x.device, 2, 3) + x,
    "matmul": lambda x: x @ dense(x.device, 3, 2),
    "matmul of a dense": lambda x: dense(x.device, 3, 2) @ x,
    "sparse.mm": lambda x: torch.sparse.mm(x, dense(x.device, 3, 2)),
    "mv": lambda x: torch.mv(x, dense(x.device, 3)),
    "addmm": lambda x: torch.addmm(dense(x.device, 2, 2), x, dense(x.device, 3, 2)),
    "sparse.addmm": lambda x: torch.sparse.addmm(dense(x.device, 2, 2), x, dense(x.device, 3, 2)),
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(x),
    "zero_": lambda x: x.zero_(),
    "dense.add_": lambda x: dense(x.device, 2, 3).add_(x),
    "copy_": lambda x: torch.zeros_like(x.clone().mul_(2)).copy_(torch.zeros_like(x)),
    "mul, out": lambda x: torch.mul(x, x, out=torch.zeros_like(x)),
    "mm, out": lambda x: torch.mm(x, dense(x.device, 3, 2), out=torch.empty(2, 2, device=x.device)),
    "equality": lambda x: torch.equal(x.to_dense(), x.clone().to_dense()),
}
OF_COO = {
    "indices": lambda x: (x._indices(), x._values()),
    "coalesced indices": lambda x: (x.coalesce().indices(), x.coalesce().values()),
    "coalesce": lambda x: x.coalesce(),
    "is_coalesced": lambda x: (x.is_coalesced(), x.coalesce().is_coalesced()),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 0], device=x.device)),
    "narrow_copy": lambda x: x.narrow_copy(1, 0, 2),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "t_": lambda x: x.t_(),
    "div by a number": lambda x: x / 2,
    "unbind": lambda x: x.unbind(),
    "sum of columns": lambda x: torch.sparse.sum(x, 0),
    "softmax": lambda x: torch.sparse.softmax(x, 1),
    "sparse_mask": lambda x: dense(x.device, 2, 3).sparse_mask(x.coalesce()),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "bmm": lambda x: torch.bmm(torch.stack([x, x]), dense(x.device, 2, 3, 2)),
    "product of two": lambda x: torch.sparse.mm(x, x.t()),
    "hspmm": lambda x: torch.hspmm(x, dense(x.device, 3, 2)),
    "norm": lambda x: x.norm(),
    "zeros of a layout": lambda x: torch.zeros(2, 2, layout=torch.sparse_coo, device=x.device),
    "sparse_resize_": lambda x: x.sparse_resize_((4, 4), 2, 0),
    "resize_as_sparse_": lambda x: torch.zeros_like(x).resize_as_sparse_(x),
    "dense values": lambda x: torch.sparse_coo_tensor(x._indices()[:1], dense(x.device, 3, 2)),
}
OF_CSR = {
    "indices": lambda x: (x.crow_indices(), x.col_indices(), x.values()),
    "written values": lambda x: (x.values().mul_(2), x)[1],
    "columns": lambda x: (x.to_sparse_csc().ccol_indices(), x.to_sparse_csc().row_indices()),
    "sum of columns": lambda x: x.sum(0, keepdim=True),
    "sampled_addmm": lambda x: torch.sparse.sampled_addmm(
        x, dense(x.device, 2, 2), dense(x.device, 2, 3)
    ),
}
PROGRAMS = {
    **{("COO", name): run for name, run in {**OF_BOTH, **OF_COO}.items()},
    **{("CSR", name): run for name, run in {**OF_BOTH, **OF_CSR}.items()},
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("program", PROGRAMS, ids=" ".join)
def test_an_operator_computes_what_the_cpu_computes(virtual, program, index):
    device, make = f"vgpu:{index}", MAKERS[program[0]]
    run = PROGRAMS[program]
    assert_same(run(make("cpu")), run(make(device)), device)


# -- gradients -------------------------------------------------------------------------------------

LOSSES = {
    "sparse.mm": lambda x, y: torch.sparse.mm(x, y),
    "matmul": lambda x, y: x @ y,
    "mv": lambda x, y: x @ y[:, 0],
    "sparse.addmm": lambda x, y: torch.sparse.addmm(dense(x.device, 2, 2), x, y),
    "to_dense": lambda x, _: x.to_dense(),
    "mul": lambda x, _: (x * 2).to_dense(),
    "mul of a dense": lambda x, _: (x * dense(x.device, 2, 3)).to_dense(),
    "to the CPU": lambda x, _: x.cpu().to_dense(),
    "another dtype": lambda x, _: x.double().to_dense(),
}
LOSSES_OF_COO = {
    "coalesce": lambda x, _: x.coalesce().values(),
    "product of two": lambda x, _: torch.sparse.mm(x, x.t()).to_dense(),
    "sum": lambda x, _: torch.sparse.sum(x),
    "transpose": lambda x, y: x.t() @ y[:2],
    "softmax": lambda x, _: torch.sparse.softmax(x, 1).to_dense(),
    "to_sparse_csr": lambda x, y: x.coalesce().to_sparse_csr() @ y,
}
GRADIENTS = {
    **{("COO", name): loss for name, loss in {**LOSSES, **LOSSES_OF_COO}.items()},
    **{("CSR", name): loss for name, loss in LOSSES.items() if name != "mv"},
}


@pytest.mark.parametrize("program", GRADIENTS, ids=" ".join)
def test_a_gradient_of_values_is_the_cpus(vgpu, program):
    def run(device):
        values = VALUES.to(device, copy=True).requires_grad_()
        factor = dense(device, 3, 2).requires_grad_()
        x = make_coo(device, values) if program[0] == "COO" else make_csr(device, values)
        GRADIENTS[program](x, factor).pow(2).sum().backward()
        return [y.grad for y in (values, factor) if y.grad is not None]

    assert_same(run("cpu"), run(vgpu), vgpu)


@pytest.mark.parametrize("layout", MAKERS)
def test_a_sparse_leaf_gets_a_gradient(vgpu, layout):
    def run(device):
        x = MAKERS[layout](device).requires_grad_()
        (x @ dense(device, 3, 2)).sum().backward()
        return x.grad

    assert_same(run("cpu"), run(vgpu), vgpu)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_embedding_trains_with_sparse_gradients(vgpu, name):
    def run(device):
        torch.manual_seed(0)
        net = nn.Embedding(5, 2, sparse=True).to(device)
        optimizer = OPTIMIZERS[name](net.parameters())
        for token in (1, 2):
            optimizer.zero_grad()
            net(torch.tensor([token, 3, 3], device=device)).pow(2).sum().backward()
            net(torch.tensor([token], device=device)).sum().backward()
            assert net.weight.grad.is_sparse
            optimizer.step()
        return net.weight.detach()

    assert_same(run("cpu"), run(vgpu), vgpu)


def test_a_sparse_gradient_moves_with_its_parameter(virtual, vgpu):
    net = nn.Embedding(5, 2, sparse=True)
    net(torch.tensor([1])).sum().backward()
    expected = net.weight.grad.clone()
    net.to(vgpu)
    assert_same(expected, net.weight.grad, vgpu)
    virtual.place(net, "gpu:0")
    assert_same(expected, net.weight.grad, "vgpu:0")
    assert net.cpu().weight.grad.is_cpu


# -- moves and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_moves_both_ways(virtual, layout):
    x = LAYOUTS[layout](torch.eye(2))
    there = virtual.to({"adjacency": x}, "gpu:1")["adjacency"]
    assert virtual.device_of(there) == gpu(1)
    assert virtual.to(there, "gpu:1") is there
    for y in (
        *(there, x.to("vgpu:1"), virtual.copy(x, "gpu:1"), virtual.copy(there), there.clone()),
        *virtual.prefetch([x], "gpu:1"),
    ):
        assert_same(x, y, "vgpu:1")
    assert_same(x, there.to("vgpu:0"), "vgpu:0")
    assert_same(x, virtual.to(there, "cpu"), "cpu")
    assert virtual.asarray(x, device="gpu:1").device == torch.device("vgpu:1")


def test_a_sparse_tensor_in_a_model_is_placed(virtual):
    net = nn.Linear(2, 2)
    net.register_buffer("adjacency", torch.eye(2).to_sparse())
    net.graph = torch.eye(2).to_sparse_csr()
    virtual.place(net, "gpu:1")
    assert set(virtual.placement(net).values()) == {gpu(1)}
    assert_same(torch.eye(2).to_sparse_csr(), net.graph, "vgpu:1")


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("is_checked", [False, True])
def test_a_compressed_tensor_is_made_on_a_virtual_gpu(vgpu, layout, is_checked):
    values = torch.ones(1, *[1] * (2 * (layout[0] == "b")))
    parts = (torch.tensor([0, 1]), torch.tensor([0]), values)
    make = getattr(torch, f"sparse_{layout}_tensor")
    expected = make(*parts, (1, 1))
    assert_same(expected, make(*parts, (1, 1), device=vgpu, check_invariants=is_checked), vgpu)
    with torch.device(vgpu):
        assert_same(expected, make(*parts, (1, 1), check_invariants=is_checked), vgpu)
    there = [x.to(vgpu) for x in parts]
    assert_same(expected, make(*there, (1, 1), check_invariants=is_checked), vgpu)


def test_a_coo_tensor_is_made_on_a_virtual_gpu(vgpu):
    expected = torch.sparse_coo_tensor(INDICES, VALUES, (2, 3), check_invariants=True)
    for make in (
        lambda: torch.sparse_coo_tensor(INDICES, VALUES, (2, 3), device=vgpu),
        lambda: torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], [1.0, 2, 3], (2, 3), device=vgpu),
        lambda: torch.sparse_coo_tensor(
            INDICES.to(vgpu), VALUES.to(vgpu), (2, 3), check_invariants=True
        ),
    ):
        assert_same(expected, make(), vgpu)
    assert torch.sparse_coo_tensor((2, 3), device=vgpu)._nnz() == 0


@pytest.mark.parametrize("layout", MAKERS)
def test_a_sparse_tensor_is_saved_and_loaded(vgpu, layout):
    x = MAKERS[layout]("cpu")
    file = io.BytesIO()
    torch.save(x.to(vgpu), file)
    for location in (None, "cpu", "vgpu:0"):
        file.seek(0)
        assert_same(x, torch.load(file, map_location=location), location or vgpu)
    assert_same(x, copy.deepcopy(x.to(vgpu)), vgpu)


@pytest.mark.parametrize("layout", MAKERS)
def test_parts_share_memory_with_their_tensor_and_count_once(virtual, vgpu, layout):
    before = virtual.memory("gpu:1").used
    values = torch.ones(3, device=vgpu)
    with_values = virtual.memory("gpu:1").used
    if layout == "COO":
        x = torch.sparse_coo_tensor(INDICES.to(vgpu), values, (2, 3), is_coalesced=True)
    else:
        rows, columns = (torch.tensor(y, device=vgpu) for y in ([0, 1, 3], [1, 0, 2]))
        x = torch.sparse_csr_tensor(rows, columns, values, (2, 3))
    assert virtual.memory("gpu:1").used == with_values + 48
    x.values().mul_(2)
    assert values.tolist() == [2, 2, 2]
    assert virtual.memory("gpu:1").used == with_values + 48
    del x, values
    assert virtual.memory("gpu:1").used <= before + 48


def test_a_change_of_the_layouts_of_a_parameter_is_refused(vgpu):
    x = make_csr(vgpu)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = torch.zeros(2, 3, device=vgpu)


# -- what CUDA refuses -----------------------------------------------------------------------------

MIXED = {
    "sparse.mm": lambda x, y: torch.sparse.mm(x, y),
    "mm": lambda x, y: x @ y,
    "mv": lambda x, y: x @ y[:, 0],
    "mul": lambda x, y: x * y.t(),
    "add": lambda x, y: y.t() + x,
    "addmm": lambda x, y: torch.sparse.addmm(torch.ones(2, 2, device=x.device), x, y),
    "sparse_mask": lambda x, y: y.t().sparse_mask(x.coalesce() if x.is_sparse else x),
    "index_select": lambda x, y: x.index_select(0, y[0].long()),
}


@pytest.mark.parametrize("layout", MAKERS)
@pytest.mark.parametrize("places", [("vgpu:1", "cpu"), ("cpu", "vgpu:1"), ("vgpu:1", "vgpu:0")])
@pytest.mark.parametrize("name", MIXED)
def test_operands_on_two_devices_are_refused(virtual, name, places, layout):
    x, y = MAKERS[layout](places[0]), torch.ones(3, 2, device=places[1])
    with pytest.raises(DeviceMismatchError, match="all tensors to be on the same device") as caught:
        MIXED[name](x, y)
    assert caught.value.attempted == f"run {name}"
    assert set(caught.value.devices) == {place.removeprefix("v") for place in places}
    with virtual.strict(), pytest.raises(DeviceMismatchError):
        MIXED[name](x, y)


def test_parts_on_two_devices_are_refused(vgpu):
    with pytest.raises(DeviceMismatchError, match=r"run sparse_coo_tensor.* operand 2 on cpu"):
        torch.sparse_coo_tensor(INDICES.to(vgpu), VALUES, (2, 3))
    rows, columns = (torch.tensor(y, device=vgpu) for y in ([0, 1, 3], [1, 0, 2]))
    with pytest.raises(DeviceMismatchError, match="operand 3 on cpu"):
        torch.sparse_csr_tensor(rows, columns, VALUES, (2, 3))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int64, "Long"), (torch.float16, "Half"), (torch.bfloat16, "BFloat16")],
)
def test_a_product_of_coo_that_cuda_lacks_is_refused_in_its_words(vgpu, dtype, name):
    words = re.escape(f"\"addmm_sparse_cuda\" not implemented for '{name}'")
    x, y = make_coo(vgpu).to(dtype), dense(vgpu, 3, 2).to(dtype)
    for multiply in (
        lambda: x @ y,
        lambda: torch.sparse.mm(x, y),
        lambda: x @ y[:, 0],
        lambda: y @ x,
    ):
        with pytest.raises(NotImplementedError, match=words):
            multiply()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_products_are_computed_in_half_precision(vgpu, dtype):
    x, y = make_csr(vgpu).to(dtype), dense(vgpu, 3, 2).to(dtype)
    expected = (x.float() @ y.float()).to(dtype)
    for found in (x @ y, torch.sparse.mm(x, y)):
        assert found.dtype is dtype
        assert torch.equal(found, expected)
    assert torch.sparse.mm(make_coo(vgpu).to(dtype), make_coo(vgpu).t().to(dtype)).dtype is dtype


def test_autocast_casts_sparse_operands(vgpu):
    factor = dense(vgpu, 3, 2).requires_grad_()
    with torch.autocast("vgpu", torch.float16):
        with pytest.raises(NotImplementedError, match="addmm_sparse_cuda"):
            torch.sparse.mm(make_coo(vgpu), factor)
        found = make_csr(vgpu) @ factor
        assert found.dtype is torch.float16
        found.sum().backward()
    assert factor.grad.dtype is torch.float32


def test_a_reduction_that_cuda_lacks_is_refused(vgpu):
    with pytest.raises(NotImplementedError, match="'SparseCsrCUDA' backend"):
        torch.sparse.mm(make_csr(vgpu), dense(vgpu, 3, 2), "sum")
