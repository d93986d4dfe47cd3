"""``strict()`` on torch: what torch refuses is d2ldev's error, at the operation.

``plain`` are virtual GPUs that refuse as CUDA's do. Two more stand for hardware: torch's ``meta``
device, and fake tensors of CUDA.
"""

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from plain_refusals import refuse_plainly
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.overrides import TorchFunctionMode

from d2ldev.errors import DeviceMismatchError

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.fixture(autouse=True)
def _no_mode_is_left():
    yield
    assert stack() == []


@pytest.fixture
def hardware(torch_backend):
    """The backend as it is, on a machine with a GPU."""
    if not torch_backend.num_gpus():
        pytest.skip("needs a GPU of torch's; virtual ones stand for it")
    return torch_backend


@pytest.fixture
def plain(virtual, monkeypatch):
    """A backend with two virtual GPUs whose operators raise torch's own error."""
    refuse_plainly(monkeypatch)
    return virtual


def stack():
    """Return the modes of this thread, the lowest first."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def on_two(backend, *devices):
    """Return 2 x 2 tensors on devices."""
    return [backend.ones((2, 2), device=device) for device in devices]


# -- what is refused ------------------------------------------------------------------------------

OPERATIONS = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y),
    "matmul": lambda x, y: x @ y,
    "linear": functional.linear,
    "conv2d": lambda x, y: functional.conv2d(x[None, None], y[None, None]),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack((x.sum(), y.sum())),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "embedding": lambda x, y: functional.embedding(x.long(), y),
    "nll_loss": lambda x, y: functional.nll_loss(x, y[0].long()),
    "mse_loss": functional.mse_loss,
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "meshgrid": lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij"),
    "quantile": lambda x, y: torch.quantile(x, y[0] * 0),
    "_foreach_add": lambda x, y: torch._foreach_add([x, x], [x, y]),
    "add out": lambda x, y: torch.add(x, x, out=y),
    "add.Tensor": lambda x, y: torch.ops.aten.add.Tensor(x, y),
    "grad": lambda x, y: setattr(x, "grad", y),
    "getitem": lambda x, y: x[(y * 0).long()],
    "setitem": lambda x, y: x.__setitem__((x * 0).long(), y),
    "gru": lambda x, y: torch.nn.GRU(2, 2).to(y.device)(x),
    "layer_norm": lambda x, y: functional.layer_norm(x, (2,), y[0], y[0]),
}
ROUTES = [("gpu:0", "gpu:1"), ("cpu", "gpu:1"), ("gpu:1", "cpu")]
refused = pytest.mark.parametrize("name", OPERATIONS)
between = pytest.mark.parametrize("route", ROUTES, ids="-".join)


@refused
@between
def test_mixing_that_torch_refuses_is_an_error_of_the_operation(plain, name, route):
    _assert_refused(plain, name, route)


def _assert_refused(backend, name, route):
    if name == "getitem" and route[1] == "cpu":
        route = route[::-1]  # the host's tensors index all others
    x, y = on_two(backend, *route)
    with backend.strict():
        with pytest.raises(DeviceMismatchError) as caught:
            OPERATIONS[name](x, y)
        assert (x + x).shape == (2, 2)
    error = caught.value
    assert set(error.devices) == set(route)
    assert name.split()[0] in error.attempted
    assert ".to(" in error.fix
    assert type(error.__cause__) is RuntimeError


def test_virtual_gpus_that_are_as_they_were_refuse_the_same(virtual):
    x, y = on_two(virtual, "gpu:0", "gpu:1")
    for name, operation in OPERATIONS.items():
        with virtual.strict(), pytest.raises(DeviceMismatchError) as caught:
            operation(x, y)
        assert set(caught.value.devices) == {"gpu:0", "gpu:1"}, name


META = "add", "cat", "stack", "where", "nll_loss", "mse_loss", "meshgrid", "grad"


@pytest.mark.parametrize("name", META)
def test_the_meta_device_is_refused_as_a_gpu_is(meta, name):
    x, y = on_two(meta, "cpu", "gpu:0")
    with meta.strict():
        with pytest.raises(DeviceMismatchError) as caught:
            OPERATIONS[name](x, y)
        with pytest.raises(DeviceMismatchError, match="run linear"):
            torch.nn.Linear(2, 2)(y)
    assert set(caught.value.devices) == {"cpu", "gpu:0"}


FAKE = "add", "add_", "matmul", "linear", "embedding", "where", "_foreach_add", "add out"


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a mode of torch's asks CUDA for cuda:1")
@pytest.mark.parametrize("name", FAKE)
@pytest.mark.parametrize("route", [("cuda:0", "cuda:1"), ("cpu", "cuda:1")], ids="-".join)
def test_fake_tensors_of_cuda_are_refused_at_the_operation(torch_backend, name, route):
    with FakeTensorMode():
        x, y = (torch.ones(2, 2, device=device) for device in route)
        with torch_backend.strict(), pytest.raises(DeviceMismatchError) as caught:
            OPERATIONS[name](x, y)
    assert set(caught.value.devices) == {str(torch_backend.device(device)) for device in route}


def test_an_operand_of_a_class_of_its_own_is_looked_at(plain):
    class Own(torch.Tensor):
        pass

    x, y = on_two(plain, "gpu:0", "gpu:1")
    with plain.strict(), pytest.raises(DeviceMismatchError):
        x.as_subclass(Own) + y


DRAWN = {
    "rand": lambda place, generator: torch.rand(2, device=place, generator=generator),
    "normal_": lambda place, generator: torch.empty(2, device=place).normal_(generator=generator),
    "bernoulli": lambda place, generator: torch.bernoulli(
        torch.ones(2, device=place), generator=generator
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_generator_of_another_device_is_named(plain, name):
    with plain.strict(), pytest.raises(DeviceMismatchError) as caught:
        DRAWN[name]("vgpu:1", torch.Generator("cpu"))
    assert caught.value.devices == ("gpu:1", "cpu")
    assert "torch.Generator(backend.native('gpu:1'))" in caught.value.fix


# -- what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["cpu", "gpu:0"])
@pytest.mark.parametrize(
    "copies",
    [
        lambda x, y: x.copy_(y),
        lambda x, y: torch._foreach_copy_([x, x], [y, y]),
        lambda x, y: x.__setitem__(slice(0, 2), y),
        lambda x, y: x.__setitem__(0, y[0]),
        lambda x, y: pad_sequence([x, y]),
        lambda x, y: setattr(x, "data", y),
    ],
    ids=["copy_", "copies", "assignment", "of an element", "pad_sequence", "data"],
)
def test_operations_that_torch_defines_as_copies_are_allowed(plain, copies, source):
    x, y = on_two(plain, "gpu:1", source)
    with plain.strict():
        copies(x, y)


def test_numbers_and_indices_on_the_host_are_allowed(plain):
    x = plain.zeros(3, device="gpu:1")
    with plain.strict():
        results = [x + torch.tensor(2.0), x[torch.tensor([0, 2])], x.fill_(torch.tensor(1.0))]
    assert {str(plain.device_of(y)) for y in results} == {"gpu:1"}


def twice(loss, x):
    for _ in range(2):
        loss.backward(inputs=[x])


def pack(x, lengths):
    return pack_padded_sequence(x, lengths, batch_first=True)


# On one device, or with what may be of the host, and wrong in another way.
WRONG = {
    "shapes": lambda x: x @ torch.ones(5, 5, device=x.device),
    "shapes beside a number": lambda x: torch.where(x > 0, x.new_ones(5), torch.tensor(1.0)),
    "a number's dtype": lambda x: x.long().add_(torch.tensor(0.5)),
    "shapes of a copy": lambda x: x.copy_(torch.ones(5)),
    "shapes of copies": lambda x: torch._foreach_copy_([x], [torch.ones(5)]),
    "numbers of copies": lambda x: torch._foreach_copy_([x], [torch.ones(2, 2)] * 2),
    "shapes of an assignment": lambda x: x.__setitem__(0, torch.ones(5)),
    "shapes of values": lambda x: x.__setitem__(torch.tensor([0]), x.new_ones(5)),
    "lengths": lambda x: pack(x[None], torch.tensor([2, 2])),
    "places to split at": lambda x: torch.tensor_split(x, torch.tensor([[[1]]])),
    "lengths of targets": lambda x: functional.ctc_loss(
        x[:, None], x.new_zeros((1, 1)).long(), torch.tensor([3]), torch.tensor([4])
    ),
    "a leaf": lambda x: x.requires_grad_().add_(torch.tensor(1.0)),
    "a second pass": lambda x: twice(x.requires_grad_().exp().sum(), x),
    "no gradient": lambda x: x.sum().backward(torch.tensor(1.0)),
    "a host's product": lambda x: torch.ones(2, 2) @ torch.ones(3, 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_for_other_reasons_stay_torchs_own(plain, name):
    _assert_left_alone(plain, "gpu:1", name)


def _assert_left_alone(backend, device, name):
    errors = []
    for block in (contextlib.nullcontext(), backend.strict()):
        x = backend.ones((2, 2), device=device)
        with pytest.raises(Exception) as caught, block:  # noqa: PT011  # whatever it is
            WRONG[name](x)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])
    assert errors[1].__cause__ is None


class Failing(torch.nn.Module):
    """Raises an error in an operation of torch on what it is given."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __call__(self, *operands):
        return torch.overrides.handle_torch_function(self.raise_error, operands, *operands)

    def raise_error(self, *_operands):
        raise self.error


OTHER_ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory"),
    NotImplementedError("Could not run 'aten::add' with arguments from the 'CUDA' backend"),
    ValueError("Expected all tensors to be on the same device"),
    RecursionError("maximum recursion depth exceeded"),
    *([torch.AcceleratorError("CUDA error")] if hasattr(torch, "AcceleratorError") else []),
]


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_another_kind_is_left_alone(plain, error):
    with plain.strict(), pytest.raises(type(error)) as caught:
        Failing(error)(*on_two(plain, "gpu:0", "gpu:1"))
    assert caught.value is error


def test_an_error_of_another_kind_is_a_mismatch_otherwise(plain):
    with plain.strict(), pytest.raises(DeviceMismatchError):
        Failing(RuntimeError("no"))(*on_two(plain, "gpu:0", "gpu:1"))


# -- backward passes ------------------------------------------------------------------------------


class Mixing(torch.autograd.Function):
    """A function whose backward pass multiplies with a tensor of the CPU."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.ones(2, 2)


class Stray(torch.autograd.Function):
    """A function whose gradient is on the CPU."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.cpu()


def _hook(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * torch.ones(2, 2))
    return y


BACKWARD = {
    "backward": lambda loss, x: loss.backward(),
    "autograd.backward": lambda loss, x: torch.autograd.backward([loss]),
    "autograd.grad": lambda loss, x: torch.autograd.grad(loss, x),
}
backward = pytest.mark.parametrize("goes_backward", BACKWARD.values(), ids=BACKWARD)


functions = pytest.mark.parametrize("function", [Mixing.apply, _hook], ids=["function", "hook"])


@backward
@functions
def test_an_operation_in_a_backward_pass_is_refused(plain, goes_backward, function):
    _assert_refused_backward(plain, "gpu:1", goes_backward, function)


# A thread of torch's own runs the backward pass on a GPU.
ON_HARDWARE = {
    "operations": (
        OPERATIONS,
        """
for name in tests.OPERATIONS:
    for route in (("cpu", "gpu:0"), ("gpu:0", "cpu")):
        tests._assert_refused(backend, name, route)
    show(name)
""",
    ),
    "backward passes": (
        BACKWARD,
        """
for name, goes_backward in tests.BACKWARD.items():
    for function in (tests.Mixing.apply, tests._hook):
        tests._assert_refused_backward(backend, "gpu:0", goes_backward, function)
    show(name)
""",
    ),
    "other errors": (
        WRONG,
        """
for name in tests.WRONG:
    tests._assert_left_alone(backend, "gpu:0", name)
    show(name)
""",
    ),
}


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(("names", "program"), ON_HARDWARE.values(), ids=ON_HARDWARE)
def test_on_hardware_strict_refuses_the_same(names, program):
    # In a process that has never had virtual GPUs: beside them torch computes no gradients there.
    code = "import d2ldev, test_torch_strict as tests\nbackend = d2ldev.get_backend('torch')"
    shown = run_python(code + program, hide=(), path=[HELPERS, Path(__file__).parent])
    assert shown == [*names]


def _assert_refused_backward(backend, device, goes_backward, function):
    x = backend.ones((2, 2), device=device).requires_grad_()
    with backend.strict():
        loss = function(x).sum()
        with pytest.raises(DeviceMismatchError, match="run mul: "):
            goes_backward(loss, x)


@backward
def test_a_gradient_that_a_function_leaves_on_another_device_is_torchs_own_error(
    plain, goes_backward
):
    errors = []
    for block in (contextlib.nullcontext(), plain.strict()):
        x = plain.ones((2, 2), device="gpu:1").requires_grad_()
        with pytest.raises(RuntimeError) as caught, block:
            goes_backward(Stray.apply(x).sum(), x)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1]) is RuntimeError
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize(
    "goes_backward",
    [
        lambda y, x, gradient: y.backward(gradient),
        lambda y, x, gradient: torch.autograd.backward([y], [gradient]),
        lambda y, x, gradient: torch.autograd.grad(y, x, gradient),
    ],
    ids=BACKWARD,
)
def test_a_gradient_on_another_device_is_refused(plain, goes_backward):
    x, gradient = on_two(plain, "gpu:1", "gpu:0")
    x.requires_grad_()
    with plain.strict():
        y = x * 2
        with pytest.raises(DeviceMismatchError, match="run backward: ") as caught:
            goes_backward(y, x, gradient)
    assert caught.value.devices == ("gpu:1", "gpu:0")


def test_a_backward_pass_outside_of_blocks_is_left_alone(plain):
    entered, leave = threading.Event(), threading.Event()

    def in_a_block():
        with plain.strict():
            entered.set()
            assert leave.wait(60)

    x = plain.ones((2, 2), device="gpu:1").requires_grad_()
    with ThreadPoolExecutor(1) as pool:
        block = pool.submit(in_a_block)
        assert entered.wait(60)
        with pytest.raises(RuntimeError) as caught:
            Mixing.apply(x).sum().backward()
        leave.set()
        block.result()
    assert type(caught.value) is RuntimeError


# -- modes ----------------------------------------------------------------------------------------


class Own(TorchFunctionMode):
    """A mode of the user's, which counts."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def enter(block):
    """Enter a block in a generator, which may end at any time."""

    def generate():
        with block:
            yield

    generator = generate()
    next(generator)
    return generator


def test_blocks_in_blocks_have_one_mode(plain):
    with plain.strict(), plain.strict():
        assert len(stack()) == 1


def test_without_a_block_there_is_no_mode(plain):
    with pytest.raises(ZeroDivisionError), plain.strict():
        1 / 0  # noqa: B018
    assert stack() == []


in_any_order = pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)


@in_any_order
def test_blocks_and_modes_of_the_users_end_in_any_order(plain, order):
    own = Own()
    blocks = [enter(block) for block in (plain.strict(), own, plain.strict())]
    for number in order:
        blocks[number].close()
        blocks[number] = None
        is_strict = any((blocks[0], blocks[2]))
        assert (own in stack(), len(stack())) == (bool(blocks[1]), is_strict + bool(blocks[1]))
        assert _refuses(plain) == is_strict


@in_any_order
def test_blocks_and_blocks_of_devices_end_in_any_order(plain, order):
    blocks = [enter(block) for block in (plain.on("gpu:1"), plain.strict(), plain.on("gpu:0"))]
    for number in order:
        blocks[number].close()
        blocks[number] = None
        place = "vgpu:0" if blocks[2] else "vgpu:1" if blocks[0] else "cpu"
        assert str(torch.ones(1).device) == place
        assert _refuses(plain) == bool(blocks[1])


def _refuses(backend):
    """Return whether an operation that mixes devices raises d2ldev's error."""
    x, y = on_two(backend, "gpu:0", "gpu:1")
    with pytest.raises(RuntimeError) as caught:
        x + y
    return isinstance(caught.value, DeviceMismatchError)


def test_a_default_device_from_before_the_block_can_be_changed_in_it(plain):
    try:
        torch.set_default_device("vgpu:1")
        with plain.strict():
            assert _refuses(plain)
            torch.set_default_device("vgpu:0")
            assert _refuses(plain)
        assert str(torch.ones(1).device) == "vgpu:0"
    finally:
        torch.set_default_device(None)


def test_a_default_device_of_the_users_is_left_alone(plain):
    try:
        with plain.strict():
            torch.set_default_device("vgpu:1")
            with pytest.raises(DeviceMismatchError):
                torch.ones(2) + torch.ones(2, device="cpu")
        assert str(torch.ones(1).device) == "vgpu:1"
    finally:
        torch.set_default_device(None)


def test_a_mode_of_the_users_sees_every_operation(plain):
    own = Own()
    x = plain.ones((2, 2), device="gpu:1")
    with own, plain.strict():
        x + x
    with plain.strict(), own:
        x + x
    assert own.count == 2


def test_a_task_outside_of_the_block_gets_torchs_own_error(plain):
    x, y = on_two(plain, "gpu:0", "gpu:1")

    async def outside(entered, leave):
        await entered.wait()
        with pytest.raises(RuntimeError) as caught:
            x + y
        leave.set()
        return type(caught.value)

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(outside(entered, leave))
        with plain.strict():
            entered.set()
            await leave.wait()
            assert len(stack()) == 1
        return await task

    assert asyncio.run(main()) is RuntimeError


def test_a_block_that_another_thread_has_left_is_gone_with_the_next(plain):
    generator = enter(plain.strict())
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    x, y = on_two(plain, "gpu:0", "gpu:1")
    with pytest.raises(RuntimeError) as caught:
        x + y
    assert type(caught.value) is RuntimeError
    with plain.strict():
        pass
    assert stack() == []


def test_a_step_of_an_optimizer_is_looked_at(plain):
    net = torch.nn.Linear(2, 2).to("vgpu:1")
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, foreach=True)
    x = plain.ones((2, 2), device="gpu:1")
    net(x).sum().backward()
    optimizer.step()
    state = optimizer.state[net.weight]
    state["momentum_buffer"] = state["momentum_buffer"].to("vgpu:0")
    with plain.strict(), pytest.raises(DeviceMismatchError):
        optimizer.step()


def test_a_function_is_compiled_in_a_block_as_one_program(plain):
    programs = []

    def compile_nothing(program, _inputs):
        programs.append(program)
        return program.forward

    torch.compiler.reset()
    double = torch.compile(lambda x: x * 2 + 1, backend=compile_nothing, fullgraph=True)
    try:
        for _ in range(2):
            with plain.strict():
                assert double(torch.ones(2)).tolist() == [3, 3]
        double(torch.ones(2))
        assert len(programs) == 2  # in blocks, and outside of them
    finally:
        torch.compiler.reset()


# -- the process ----------------------------------------------------------------------------------

THREADS = """
import threading, pytest, torch, d2ldev, plain_refusals
from concurrent.futures import ThreadPoolExecutor
plain_refusals.refuse_plainly(pytest.MonkeyPatch())
backend = d2ldev.get_backend("torch")
found = []

def mix():
    try:
        torch.ones(2, device="vgpu:0") + torch.ones(2, device="vgpu:1")
    except RuntimeError as error:
        found.append(type(error).__name__)

class Thread(threading.Thread):
    def run(self):
        mix()

mix()
for thread in (threading.Thread(target=mix), Thread(), threading.Timer(0, mix)):
    thread.start()
    thread.join()
with ThreadPoolExecutor(1) as pool:
    pool.submit(mix).result()
print(*found)
"""


def run(*arguments, **environment):
    """Run Python in a process with two virtual GPUs that refuse as CUDA's do."""
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "D2LDEV_VIRTUAL_GPUS": "2", "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=variables, timeout=300
    )


@pytest.mark.parametrize(
    ("value", "expected"), [("1", "DeviceMismatchError"), ("0", "RuntimeError")]
)
def test_the_variable_is_in_force_in_threads_that_are_started(value, expected):
    done = run("-c", THREADS, D2LDEV_STRICT=value)
    assert done.stdout.split() == [expected] * 5, done.stderr


def test_the_suite_passes_where_gpus_refuse_as_cuda_does(tmp_path):
    suites = "strict", "devices.test_scopes_that_end_elsewhere"
    suite = "-m", "pytest", "-q", "--pyargs", *(f"d2ldev_conformance.suite.{x}" for x in suites)
    # pytest-benchmark would make a folder in the working one.
    settings = "-p", "no:cacheprovider", "-p", "no:benchmark", f"--basetemp={tmp_path / 'suite'}"
    done = run(*suite, *settings, "-p", "plain_refusals", "--d2ldev-backend", "torch")
    assert done.returncode == 0, done.stdout
