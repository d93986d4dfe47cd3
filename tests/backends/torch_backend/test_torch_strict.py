"""``strict()`` on hardware: torch's own words for mixed devices, of all kinds, are understood."""

import pytest
import torch
from d2ldev_torch.strict import mismatch_in
from torch.nn.utils.rnn import pad_sequence

from d2ldev.errors import DeviceMismatchError

# As torch's source has them; what they say is: operation, operands with their devices, the fix.
SENTENCES = [
    (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
        "cpu! (when checking argument for argument mat2 in method wrapper_CUDA_mm)",
        ("mm", "operand_0 on gpu:0, mat2 on cpu", "mat2 = backend.to(mat2, 'gpu:0')"),
    ),
    (
        "Expected all tensors to be on the same device, but got index is on cpu, different from "
        "other tensors on cuda:1 (when checking argument in method wrapper_CUDA__index_select)",
        ("index_select", "operand_1 on gpu:1, index on cpu", "index = backend.to(index, 'gpu:1')"),
    ),
    (
        "Expected all tensors to be on the same device, but got mat1 is on cuda:1, different from "
        "other tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
        ("addmm", "operand_1 on gpu:0, mat1 on gpu:1", "mat1 = backend.to(mat1, 'gpu:0')"),
    ),
    (
        "Expected all tensors to be on the same device, but found at least two devices, cpu and "
        "cuda:0! (when checking argument for argument tensors in method wrapper___cat)",
        ("cat", "tensors on gpu:0, operand_0 on cpu", "operand_0 = backend.to(operand_0, 'gpu:0')"),
    ),
    (
        "grid_sampler(): expected input and grid to be on same device, but input is on cuda:0 and "
        "grid is on cpu",
        ("grid_sampler", "input on gpu:0, grid on cpu", "grid = backend.to(grid, 'gpu:0')"),
    ),
    (
        "take(): self, index and out expected to be in the same device, but got self.device = "
        "cuda:0, index.device = cpu, and out.device = cuda:0",
        ("take", "self on gpu:0, out on gpu:0, index on cpu", "index = backend.to(index, 'gpu:0')"),
    ),
    (
        "Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU (while checking "
        "arguments for addmm)",
        ("addmm", "operand_0 on gpu:0, mat1 on cpu", "mat1 = backend.to(mat1, 'gpu:0')"),
    ),
    (
        "multi_dot(): all tensors must be on the same device but tensor 0 is on cuda:0 and tensor "
        "1 cpu",
        ("multi_dot", "operand_0 on gpu:0, operand_1 on cpu", "operand_1 = backend.to(operand_1, "),
    ),
]

# These do not name the operation: the expression that failed does.
NAMELESS = [
    (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
        "cpu!",
        "operand_0 on gpu:0, operand_1 on cpu",
    ),
    (
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the "
        "same",
        "input on gpu:0, weight on cpu",
    ),
    (
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the "
        "same or input should be a MKLDNN tensor and weight is a dense tensor",
        "weight on gpu:0, input on cpu",
    ),
    (
        "Input type (CUDAFloatType) and bias type (CPUFloatType) should be the same",
        "input on gpu:0, bias on cpu",
    ),
    (
        "Input and parameter tensors are not at the same device, found input tensor at cuda:0 and "
        "parameter tensor at cpu",
        "input on gpu:0, parameter on cpu",
    ),
    (
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
        "self on gpu:0, mask on cpu",
    ),
    (
        'Attempted to set the storage of a tensor on device "cuda:0" to a storage on different '
        'device "cpu".  This is no longer allowed; the devices must match.',
        "operand_0 on gpu:0, operand_1 on cpu",
    ),
    (
        "Expected query, key, and value to have the same device type, but got query.device: cuda:0 "
        "key.device: cpu and value.device: cuda:0 instead.",
        "query on gpu:0, value on gpu:0, key on cpu",
    ),
    (
        "Expected all tensors to be on the same device, but found at least two devices, xpu:1 and "
        "xpu:0!",
        "operand_0 on gpu:1, operand_1 on gpu:0",
    ),
]

OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "Input type (torch.FloatTensor) and weight type (torch.DoubleTensor) should be the same",
    "Input type (float) and bias type (c10::Half) should be the same",
    "hook 'f' has changed the type of value (was CUDABFloat16Type got torch.cuda.FloatTensor)",
    "CUDA error: device-side assert triggered",
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB",
    "Tensor on device cpu is not on the expected device meta!",
    "two devices",
]


@pytest.mark.parametrize(("words", "said"), SENTENCES)
def test_a_sentence_that_names_the_operation_is_understood(torch_backend, words, said):
    operation, operands, fix = said
    with pytest.raises(DeviceMismatchError) as caught, torch_backend.strict():
        raise RuntimeError(words)
    error = caught.value
    assert error.attempted == f"run {operation}"
    assert error.problem.endswith(f": {operands}")
    assert fix in error.fix
    assert str(error.__cause__) == words


@pytest.mark.parametrize(("words", "operands"), NAMELESS)
def test_a_sentence_that_names_no_operation_is_understood(torch_backend, words, operands):
    with pytest.raises(DeviceMismatchError) as caught, torch_backend.strict():
        raise RuntimeError(words)
    assert caught.value.problem.endswith(f": {operands}")


@pytest.mark.parametrize("words", OTHERS)
def test_what_is_not_about_mixed_devices_is_left_alone(torch_backend, words):
    error = RuntimeError(words)
    with pytest.raises(RuntimeError) as caught, torch_backend.strict():
        raise error
    assert caught.value is error


def test_an_error_of_another_type_is_left_alone():
    assert mismatch_in(ValueError(SENTENCES[0][0])) is None


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x, y: x + y, "add"),
        (lambda x, y: x @ y, "matmul"),
        (lambda x, y: torch.maximum(x, y), "torch.maximum(x, y)"),
    ],
)
def test_an_operation_without_a_name_is_the_expression_that_failed(operation, name):
    with pytest.raises((RuntimeError, TypeError)) as plain:
        operation(torch.ones(2), torch.ones(3, 4, 5))
    error = RuntimeError(NAMELESS[0][0]).with_traceback(plain.value.__traceback__)
    assert mismatch_in(error).attempted == f"run {name}"


@pytest.mark.parametrize("place", ["cpu", "gpu:1"])
def test_indices_on_another_device_are_named(place):
    words = "indices should be either on cpu or on the same device as the indexed tensor ({})"
    error = mismatch_in(RuntimeError(words.format(place.replace("gpu", "cuda"))))
    assert error.fix == f"indices = backend.to(indices, '{place}')"
    assert error.devices == (place,)


def test_a_generator_of_another_device_is_named():
    error = mismatch_in(RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'"))
    assert error.devices == ("gpu:0", "cpu")
    assert "torch.Generator(backend.native('gpu:0'))" in error.fix


def goes_backward_through(hook, x):
    y = x.requires_grad_() * 2
    y.register_hook(hook)
    y.sum().backward()


class Stray(torch.autograd.Function):
    """Its gradient is on the CPU."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.cpu()


@pytest.mark.parametrize(
    ("goes_backward", "line"),
    [
        (lambda loss, x: loss.backward(), "loss.backward()"),
        (lambda loss, x: torch.autograd.grad(loss, x), "torch.autograd.grad(loss, x)"),
    ],
    ids=["backward", "grad"],
)
def test_a_backward_pass_is_named_by_the_users_line(virtual, vgpu, goes_backward, line):
    x = torch.ones(3, device=vgpu, requires_grad=True)
    with pytest.raises(DeviceMismatchError) as caught, virtual.strict():
        goes_backward(Stray.apply(x).sum(), x)
    error = caught.value
    assert error.attempted == f"run {line}"
    assert error.problem.startswith("the gradient that StrayBackward returned for its input 0")
    assert (error.fix, error.devices) == (
        "gradient = backend.to(gradient, 'gpu:1')",
        ("gpu:1", "cpu"),
    )


def test_a_gradient_that_is_handed_over_is_named_by_its_place(virtual, vgpu):
    x = torch.ones(3, device=vgpu, requires_grad=True)
    with (
        pytest.raises(DeviceMismatchError, match="at index 0 is on gpu:0") as caught,
        virtual.strict(),
    ):
        x.backward(torch.ones(3, device="vgpu:0"))
    assert 'x.backward(torch.ones(3, device="vgpu:0"))' in caught.value.attempted


def test_an_operation_inside_torch_is_named_by_the_users_line(virtual, vgpu):
    x = torch.ones(3, device=vgpu)
    with pytest.raises(DeviceMismatchError) as caught, virtual.strict():
        torch.meshgrid(x, x.cpu())
    assert caught.value.attempted == "run torch.meshgrid(x, x.cpu())"


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: torch.meshgrid(x, y, indexing="ij"),
        lambda x, y: torch.quantile(x, y[:1] * 0),
        lambda x, y: setattr(x, "grad", y),
        lambda x, y: setattr(y, "grad", x.cpu()),
        lambda x, y: goes_backward_through(lambda gradient: gradient.cpu(), x),
    ],
    ids=["meshgrid", "quantile", "grad", "the host's grad", "a hook"],
)
def test_what_torch_refuses_without_naming_the_devices_is_a_mismatch(virtual, operation):
    x, y = (virtual.ones(3, device=device) for device in ("gpu:0", "gpu:1"))
    with pytest.raises(DeviceMismatchError) as caught, virtual.strict():
        operation(x, y)
    assert "backend.to(" in caught.value.fix


@pytest.mark.parametrize("source", ["cpu", "gpu:0"])
@pytest.mark.parametrize(
    "copies",
    [
        lambda x, y: x.copy_(y),
        lambda x, y: x.__setitem__(slice(0, 3), y),
        lambda x, y: x.__setitem__(0, y[0]),
        lambda x, y: pad_sequence([x, y]),
        lambda x, y: setattr(x, "data", y),
    ],
    ids=["copy_", "assignment", "of an element", "pad_sequence", "data"],
)
def test_what_torch_defines_as_a_copy_is_no_error(virtual, copies, source):
    x, y = virtual.zeros(3, device="gpu:1"), virtual.ones(3, device=source)
    with virtual.strict():
        copies(x, y)


def test_numbers_and_indices_of_the_host_are_no_error(virtual):
    x = virtual.zeros(3, device="gpu:1")
    with virtual.strict():
        results = [x + torch.tensor(2.0), x[torch.tensor([0, 2])], x.fill_(torch.tensor(1.0))]
    assert {str(virtual.device_of(y)) for y in results} == {"gpu:1"}
