"""``strict()`` on torch: its own errors about mixed devices are recognised, and no others."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from d2ldev.errors import DeviceMismatchError

# As torch's source has them, and the devices that they name.
SENTENCES = [
    (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
        "cpu! (when checking argument for argument mat2 in method wrapper_CUDA_mm)",
        ("gpu:0", "cpu"),
    ),
    (
        "Expected all tensors to be on the same device, but got mat1 is on cuda:1, different from "
        "other tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
        ("gpu:1", "gpu:0"),
    ),
    (
        "Expected all tensors to be on the same device, but found at least two devices, xpu:1 and "
        "xpu:0!",
        ("gpu:1", "gpu:0"),
    ),
    (
        "grid_sampler(): expected input and grid to be on same device, but input is on cuda:0 and "
        "grid is on cpu",
        ("gpu:0", "cpu"),
    ),
    (
        "take(): self, index and out expected to be in the same device, but got self.device = "
        "cuda:0, index.device = cpu, and out.device = cuda:0",
        ("gpu:0", "cpu"),
    ),
    (
        "Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU (while checking "
        "arguments for addmm)",
        ("cpu", "gpu:0"),
    ),
    (
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the "
        "same",
        ("gpu:0", "cpu"),
    ),
    (
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the "
        "same or input should be a MKLDNN tensor and weight is a dense tensor",
        ("cpu", "gpu:0"),
    ),
    (
        "Input type (CUDAFloatType) and bias type (CPUFloatType) should be the same",
        ("gpu:0", "cpu"),
    ),
    (
        "Input and parameter tensors are not at the same device, found input tensor at cuda:0 and "
        "parameter tensor at cpu",
        ("gpu:0", "cpu"),
    ),
    (
        'Attempted to set the storage of a tensor on device "cuda:0" to a storage on different '
        'device "cpu".  This is no longer allowed; the devices must match.',
        ("gpu:0", "cpu"),
    ),
    (
        "Expected query, key, and value to have the same device type, but got query.device: cuda:0 "
        "key.device: cpu and value.device: cuda:0 instead.",
        ("gpu:0", "cpu"),
    ),
    (
        "indices should be either on cpu or on the same device as the indexed tensor (cuda:1)",
        ("cpu", "gpu:1"),
    ),
    (
        "Function MulBackward0 returned an invalid gradient at index 0 - expected device cuda:1 "
        "but got cpu",
        ("gpu:1", "cpu"),
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


@pytest.mark.parametrize(("words", "devices"), SENTENCES)
def test_a_sentence_about_mixed_devices_is_understood_and_kept(torch_backend, words, devices):
    with pytest.raises(DeviceMismatchError) as caught, torch_backend.strict():
        raise RuntimeError(words)
    error = caught.value
    assert error.devices == devices
    assert error.problem == f"its operands are on different devices, {', '.join(devices)}: {words}"
    target = next(device for device in devices if device != "cpu")
    assert error.fix == f"x = backend.to(x, '{target}') for each operand that is elsewhere"
    assert str(error.__cause__) == words


@pytest.mark.parametrize("words", OTHERS)
def test_what_is_not_about_mixed_devices_is_left_alone(torch_backend, words):
    error = RuntimeError(words)
    with pytest.raises(RuntimeError) as caught, torch_backend.strict():
        raise error
    assert caught.value is error


def test_an_error_of_another_type_is_left_alone(torch_backend):
    assert torch_backend.framework.strict.mismatch_in(ValueError(SENTENCES[0][0])) is None


def test_a_generator_of_another_device_is_named(torch_backend):
    words = "Expected a 'cuda' device type for generator but found 'cpu'"
    error = torch_backend.framework.strict.mismatch_in(RuntimeError(words))
    assert error.devices == ("gpu:0", "cpu")
    assert "torch.Generator(backend.native('gpu:0'))" in error.fix


class Stray(torch.autograd.Function):
    """A function whose gradient is on the CPU."""

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
    assert line in caught.value.attempted
    assert "StrayBackward" in caught.value.problem
    assert caught.value.devices == ("gpu:1", "cpu")


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: torch.meshgrid(x, y, indexing="ij"),
        lambda x, y: torch.quantile(x, y[:1] * 0),
        lambda x, y: setattr(x, "grad", y),
        lambda x, y: setattr(y, "grad", x.cpu()),
    ],
    ids=["meshgrid", "quantile", "grad", "the host's grad"],
)
def test_what_torch_refuses_without_naming_the_devices_is_a_mismatch(virtual, operation):
    x, y = (virtual.ones(3, device=device) for device in ("gpu:0", "gpu:1"))
    with pytest.raises(DeviceMismatchError) as caught, virtual.strict():
        operation(x, y)
    assert "lambda x, y: " in caught.value.attempted
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
