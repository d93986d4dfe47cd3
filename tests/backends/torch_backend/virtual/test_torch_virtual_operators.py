"""Operators on a virtual GPU: the CPU's results bit for bit, and operands on different devices."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from d2ldev import DeviceMismatchError

# -- results ---------------------------------------------------------------------------------------


# Not to be compared, or refused: memory that nobody wrote, a kernel that CUDA lacks, and lengths
# that CUDA's kernels, too, want on the host.
EXPECTED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),
    *("sparse.mm reduce", "tensor_split"),
}


@pytest.fixture(scope="module")
def swept():
    """What a sweep over torch's operators found."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "operator_sweep.py"), "2"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["called", "mapped", "a row", "a column"])
def test_results_and_gradients_are_the_cpus(swept, how):
    found = swept[how]["different"]
    assert {name: what for name, what in found.items() if name not in EXPECTED} == {}


def test_hundreds_of_operators_were_compared(swept):
    assert swept["called"]["operators"] > 600
    assert swept["called"]["compared"] > 2000


def test_hundreds_of_operators_were_mapped_and_wrote_to_views(swept):
    assert swept["mapped"]["operators"] > 500
    assert min(swept["a row"]["operators"], swept["a column"]["operators"]) > 290


def test_what_only_the_cpu_computes_is_refused(swept):
    found = swept["only on the CPU"]
    assert found["computed"] == []
    assert len(found["refused"]) > 100


def test_what_only_cuda_computes_is_computed(swept):
    found = swept["only on CUDA"]
    assert found["wrong"] == {}
    assert len(found["computed"]) > 80


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda x: x @ x, "\"addmm_cuda\" not implemented for 'Long'"),
        (lambda x: torch.einsum("ij,jk->ik", x, x), "\"baddbmm_cuda\" not implemented for 'Long'"),
        (lambda x: x @ x[0], "\"addmv_impl_cuda\" not implemented for 'Long'"),
        (lambda x: x[0] @ x[0], "\"dot\" not implemented for 'Long'"),
        (lambda x: torch.addmm(x, x, x, out=x.clone()), '"addmm_cuda"'),
        (lambda x: functional.max_pool2d(x[None], 2), '"max_pool2d_with_indices_out_cuda_frame"'),
        (lambda x: functional.conv1d(x[None].int(), x[None].int()), "for 'Int'"),
        (lambda x: torch.histogram(x.float(), 3), "not implemented for 'Float'"),
    ],
)
def test_a_kernel_that_cuda_lacks_is_refused_in_its_words(place, compute, words):
    x = torch.arange(16, device=place).reshape(4, 4)
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        compute(x)
    compute(x.cpu())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_half_precision_in_a_fourier_transform_has_a_gradient(place):
    x = torch.randn(8, device=place).half().requires_grad_()
    found = torch.fft.fft(x)
    assert found.dtype is torch.complex32
    found.abs().sum().backward()
    assert (x.grad.dtype, x.grad.device) == (torch.float16, place)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_half_precision_in_a_fourier_transform_is_mapped(place):
    x = torch.randn(3, 8, device=place).half()
    found = torch.vmap(torch.fft.fft)(x)
    assert (found.dtype, found.device) == (torch.complex32, place)
    assert torch.equal(torch.view_as_real(found), torch.view_as_real(torch.fft.fft(x)))
    gradient = torch.vmap(torch.func.grad(lambda row: torch.fft.fft(row).abs().sum()))(x)
    assert gradient.dtype is torch.float16
    with pytest.raises(RuntimeError, match="Unsupported dtype Half"):  # as without virtual GPUs
        torch.vmap(torch.fft.fft)(x.cpu())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(
    ("operator", "make"),
    [
        (torch.fft.fft, lambda: torch.randn(8).half()),
        (lambda x, **out: torch.histc(x, 4, **out), lambda: torch.tensor([1, 2, 2, 3])),
        (lambda x, **out: torch.nansum(x, 0, **out), lambda: torch.tensor([1j, torch.nan])),
    ],
)
def test_what_only_cuda_computes_is_written_to_out(place, operator, make):
    x = make().to(place)
    expected = operator(x)
    for shape in (0, expected.shape):
        held = torch.empty(shape, dtype=expected.dtype, device=place)
        assert operator(x, out=held) is held
        assert held.tolist() == expected.tolist()
    with pytest.raises(DeviceMismatchError):
        operator(x, out=held.cpu())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a_narrow_operand_is_written_in_place(place):
    x = torch.tensor([1 + 1j, 2], dtype=torch.complex32, device=place)
    expected = x.to(torch.complex64).exp().to(torch.complex32)
    same, held = x.exp_(), torch.empty(0, dtype=torch.complex32, device=place)
    assert same is x
    assert (
        torch.exp(torch.tensor([1 + 1j, 2], dtype=torch.complex32, device=place), out=held) is held
    )
    assert torch.equal(torch.view_as_real(x.cpu()), torch.view_as_real(expected.cpu()))
    assert held.shape == (2,)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_an_operand_or_a_dtype_that_is_wide_makes_the_result_wide(place):
    narrow, wide = torch.ones(2, dtype=torch.complex32, device=place), torch.ones(2, device=place)
    assert torch.div(narrow, wide).dtype is torch.complex64
    assert torch.div(narrow, wide.sum()).dtype is torch.complex32
    assert torch.sum(wide.to(torch.complex64), dtype=torch.complex32).dtype is torch.complex32


def test_an_output_of_integers_is_written(place):
    x = torch.ones(1, 4, 4, device=place)
    values, indices = torch.empty(1, 2, 2, device=place), torch.empty(1, 2, 2, device=place).long()
    torch._C._nn.max_pool2d_with_indices(x, 2, out=(values, indices))
    assert indices.flatten().tolist() == [0, 2, 8, 10]


def test_operands_on_two_devices_are_refused_before_their_dtypes(place):
    x = torch.ones(2, 2, device=place).long()
    with pytest.raises(DeviceMismatchError):
        x @ x.cpu()


@pytest.mark.parametrize("is_sorted", [True, False])
def test_lengths_of_a_packed_sequence_stay_on_the_host(place, is_sorted):
    x = torch.randn(3, 4, 5, device=place)
    with pytest.raises(RuntimeError, match="'lengths' argument should be a 1D CPU int64 tensor"):
        nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([4, 3, 1], device=place), enforce_sorted=is_sorted, batch_first=True
        )
    packed = nn.utils.rnn.pack_padded_sequence(
        x, torch.tensor([4, 3, 1]), enforce_sorted=is_sorted, batch_first=True
    )
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert (packed.data.device, packed.batch_sizes.device.type) == (place, "cpu")
    assert (padded.device, lengths.device.type) == (place, "cpu")


# -- operands that share memory --------------------------------------------------------------------


ORDER = [5, 4, 3, 2, 1, 0]
OVERLAPPING = {
    "copy_": lambda x, _: x[1:].copy_(x[:-1]),
    "setitem": lambda x, _: x.__setitem__(slice(1, None), x[:-1]),
    "add_": lambda x, _: x[1:].add_(x[:-1]),
    "add": lambda x, _: torch.add(x[:-1], 1, out=x[1:]),
    "gather": lambda x, order: torch.gather(x, 0, order, out=x),
    "index_copy_": lambda x, order: x.index_copy_(0, order, x),
    "cat": lambda x, _: torch.cat([x[:2], x[2:]], out=x),
    "_foreach_add_": lambda x, _: torch._foreach_add_([x[1:]], [x[:-1]]),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_is_read_and_written_at_once_is_refused_as_on_the_cpu(vgpu, name):
    x = torch.arange(6.0, device=vgpu)
    with pytest.raises(RuntimeError, match="unsupported operation: some elements"):
        OVERLAPPING[name](x, torch.tensor(ORDER, device=vgpu))
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_one_tensor_may_be_read_and_written(vgpu):
    x = torch.arange(6.0, device=vgpu)
    assert x.add_(x) is x
    assert torch.mul(x[:3], 2, out=x[3:]).tolist() == [0, 4, 8]
    assert x.tolist() == [0, 2, 4, 0, 4, 8]


# -- operands on different devices -----------------------------------------------------------------


OTHERS = ["cpu", "vgpu:0"]

OPERATIONS = {
    "add": lambda x, y: x + y,
    "mm": lambda x, y: x @ y,
    "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "equal": lambda x, y: torch.equal(x, y),
    "gather": lambda x, y: x.gather(0, y.long()),
    "add_": lambda x, y: x.add_(y),
    "mse_loss": lambda x, y: functional.mse_loss(x, y),
    "addmm": lambda x, y: nn.Linear(3, 3, device=y.device)(x),
    "convolution": lambda x, y: functional.conv2d(x[None, None], y[None, None]),
    "lstm": lambda x, y: nn.LSTM(3, 3, device=y.device)(x),
    "embedding": lambda x, y: functional.embedding(y.long(), x),
    "index_put_": lambda x, y: x.index_put_((x[0].long(),), y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0),
    "native_batch_norm": lambda x, y: functional.batch_norm(x, y[0], y[1]),
    "native_layer_norm": lambda x, y: functional.layer_norm(x, (3,), y[0]),
    "scaled_dot_product_attention": lambda x, y: functional.scaled_dot_product_attention(x, x, y),
    "_foreach_add": lambda x, y: torch._foreach_add([x], [y]),
    "set_": lambda x, y: x.set_(y),
    "linalg_solve": lambda x, y: torch.linalg.solve(x, y),
}


@pytest.fixture
def x(vgpu):
    return torch.ones(3, 3, device=vgpu)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.parametrize("other", OTHERS)
def test_an_operation_that_mixes_devices_raises(x, name, other):
    with pytest.raises(DeviceMismatchError) as caught:
        OPERATIONS[name](x, torch.ones(3, 3, device=other))
    place = other.replace("vgpu", "gpu")
    assert name.removesuffix("_") in caught.value.attempted
    assert set(caught.value.devices) == {"gpu:1", place}
    assert " = x.to(y.device)" in caught.value.fix


@pytest.mark.parametrize("name", ["add", "mm", "cat", "convolution", "lstm", "add_"])
@pytest.mark.parametrize("other", OTHERS)
def test_whichever_comes_first(x, name, other):
    with pytest.raises(DeviceMismatchError):
        OPERATIONS[name](torch.ones(3, 3, device=other), x)


def test_the_error_names_each_operand_and_the_fix(x):
    with pytest.raises(DeviceMismatchError) as caught:
        torch.mm(x, torch.ones(3, 3))
    assert str(caught.value) == (
        "cannot run mm: Expected all tensors to be on the same device, but found "
        "operand 1 on gpu:1, operand 2 on cpu\n"
        "  devices: gpu:1, cpu\n"
        "  fix: x = x.to(y.device), where x is operand 2 of mm, and y operand 1"
    )


def test_the_error_leaves_out_what_cuda_takes_from_the_host(x):
    index, number = torch.tensor([0]), torch.tensor(2.0)
    with pytest.raises(DeviceMismatchError) as caught:
        torch.index_put(x, (index,), torch.ones(3))
    assert caught.value.problem.endswith("operand 1 on gpu:1, operand 3 on cpu")
    with pytest.raises(DeviceMismatchError) as caught:
        torch.add(x, x, out=torch.ones(3, 3))
    assert caught.value.fix == "out = out.to(y.device), where y is operand 1 of add"
    with pytest.raises(DeviceMismatchError) as caught:
        torch.where(x > 0, number, torch.ones(3, 3))
    assert caught.value.problem.endswith("operand 1 on gpu:1, operand 3 on cpu")


def test_a_result_is_not_written_to_another_device(x):
    with pytest.raises(DeviceMismatchError):
        torch.add(x, 1, out=torch.empty(3, 3))


def test_it_raises_in_a_backward_pass(vgpu):
    class Stray(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient + torch.ones(3)

    x = torch.ones(3, device=vgpu, requires_grad=True)
    with pytest.raises(DeviceMismatchError):
        Stray.apply(x).sum().backward()


def test_numbers_on_the_host_are_not_operands(x, vgpu):
    number = torch.tensor(2.0)
    results = [x + number, number * x, x + 2, torch.where(x > 0, number, 0.0), x.clamp(max=number)]
    assert [y.device for y in results] == [vgpu] * 5


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.tensor(1.0).add_(x[0, 0]),
        lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
        lambda x: functional.embedding(torch.tensor(1), x),
        lambda x: torch.ones(3) + x[0, 0],
    ],
    ids=["written to", "a piece", "an index", "a number of the virtual GPU"],
)
def test_numbers_of_the_host_stand_for_numbers_only(x, operation):
    with pytest.raises(DeviceMismatchError):
        operation(x)


def test_indices_may_be_on_the_host(x, vgpu):
    rows = torch.tensor([0, 2])
    x[rows] = 0.0
    assert x[rows].device == vgpu
    assert x.sum(1).tolist() == [0, 3, 0]
    assert x[torch.tensor([True, False, True])].shape == (2, 3)


def test_indices_on_a_virtual_gpu_do_not_index_the_hosts_tensors(vgpu):
    with pytest.raises(DeviceMismatchError):
        torch.ones(3)[torch.tensor([0], device=vgpu)]


def test_a_gradient_is_where_its_tensor_is(vgpu):
    x = torch.ones(3, device=vgpu, requires_grad=True)
    with pytest.raises(RuntimeError, match="device"):
        x.grad = torch.ones(3)


def test_what_copies_may_copy(x, vgpu):
    host = torch.arange(9.0).reshape(3, 3)
    x.copy_(host)
    x[0] = torch.ones(3)
    back = torch.empty(3, 3).copy_(x)
    other = torch.empty(3, 3, device="vgpu:0").copy_(x)
    assert back.tolist() == other.tolist() == [[1, 1, 1], [3, 4, 5], [6, 7, 8]]
    assert (x.device, other.device) == (vgpu, torch.device("vgpu:0"))
    torch._foreach_copy_([x, back, other], [host, x.t(), x])
    assert x.tolist() == back.t().tolist() == other.tolist() == host.tolist()


def test_in_a_strict_block_it_is_the_same_error(virtual, x):
    with virtual.strict(), pytest.raises(DeviceMismatchError) as caught:
        x + torch.ones(3, 3)
    assert caught.value.__cause__ is None


# -- batch normalization of several parts, whose kernels are not the CPU's -------------------------


def _normalize_shards(parts, gradients, weight, bias, running):
    """Return results and gradients as ``SyncBatchNorm`` computes them, here in one process."""
    stats = [torch.batch_norm_stats(part, 1e-5) for part in parts]
    means, invstds = map(torch.stack, zip(*stats, strict=True))
    counts = torch.tensor([part[:, 0].numel() for part in parts], device=weight.device)
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], means, invstds, *running, 0.1, 1e-5, counts.to(running[0].dtype)
    )
    results = [torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5) for x in parts]
    pairs = list(zip(gradients, parts, strict=True))
    sums = [
        torch.batch_norm_backward_reduce(g, x, mean, invstd, weight, True, True, True)
        for g, x in pairs
    ]
    *totals, of_weight, of_bias = (sum(each) for each in zip(*sums, strict=True))
    of_inputs = [
        torch.batch_norm_backward_elemt(g, x, mean, invstd, weight, *totals, counts)
        for g, x in pairs
    ]
    return torch.cat(results), torch.cat(of_inputs), of_weight, of_bias


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 0.02)]
)
def test_parts_of_a_batch_are_normalized_as_the_whole(virtual, dtype, tolerance):
    torch.manual_seed(0)
    x, gradient = torch.randn(7, 3, 4, dtype=dtype), torch.randn(7, 3, 4, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias, *running = (torch.rand(3, dtype=wide) + i for i in range(4))
    there = [each.clone().to("vgpu:1") for each in (weight, bias, *running)]
    found = _normalize_shards(
        x.to("vgpu:1").split([4, 3]), gradient.to("vgpu:1").split([4, 3]), *there[:2], there[2:]
    )
    operands = [each.to(wide).requires_grad_() for each in (x, weight, bias)]
    result = functional.batch_norm(operands[0], *running, *operands[1:], training=True)
    expected = (result, *torch.autograd.grad(result, operands, gradient.to(wide)))
    for one, other in zip((*found, *there[2:]), (*expected, *running), strict=True):
        torch.testing.assert_close(one.cpu().to(wide), other, rtol=tolerance, atol=tolerance)


# -- histograms of integers, which the CPU does not compute ----------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("limits", [{}, {"min": 0, "max": 7}, {"min": 2, "max": 5}])
def test_integers_are_counted_as_floats_are(virtual, dtype, limits):
    x = torch.tensor([[7, 0, 2], [2, 3, 7]], dtype=dtype)
    expected = torch.histc(x.double(), bins=8, **limits)
    found = torch.histc(x.to("vgpu:1"), bins=8, **limits)
    assert (found.device, found.dtype) == (torch.device("vgpu:1"), dtype)
    assert found.tolist() == expected.tolist()
    assert torch.histc(x.double().to("vgpu:1"), bins=8, **limits).tolist() == expected.tolist()


def test_odd_histograms_of_integers_are_those_of_floats(virtual):
    same = torch.full((3,), 4, device="vgpu:0")
    assert torch.histc(same, bins=4).tolist() == torch.histc(same.cpu().double(), bins=4).tolist()
    assert torch.histc(same[:0], bins=2).tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="max must be larger than min"):
        torch.histc(same, bins=2, min=3, max=1)
    with pytest.raises(RuntimeError, match="bins must be > 0"):
        torch.histc(same, bins=0)
