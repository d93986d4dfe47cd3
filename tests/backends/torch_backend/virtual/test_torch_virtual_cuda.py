"""Virtual GPUs that stand for CUDA devices: the questions of a program for CUDA, and answers."""

import copy
import io
import os
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from d2ldev_torch.virtual.as_cuda import is_on, stand_for_cuda
from torch import nn, zeros
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from d2ldev import (
    D2LDevWarning,
    DeviceMismatchError,
    DeviceUnavailableError,
    UnsupportedValueError,
    gpu,
)

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(scope="module", autouse=True)
def _as_cuda(virtual):
    with stand_for_cuda():
        yield


# -- devices ---------------------------------------------------------------------------------------


def test_torch_cuda_counts_them():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("ignore:torch.sparse.SparseTensor")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.ones(2, device="cuda"), FIRST),
        (lambda: torch.ones(2, device="cuda:1"), SECOND),
        (lambda: torch.ones(2, device=SECOND), SECOND),
        (lambda: torch.ones(2, device=torch.device("cuda", 1)), SECOND),
        (lambda: torch.tensor([1.0], device="cuda:1"), SECOND),
        (lambda: torch.as_tensor([1.0], device="cuda"), FIRST),
        (lambda: torch.ones(2).to("cuda:1"), SECOND),
        (lambda: torch.ones(2).to(SECOND, torch.float64), SECOND),
        (lambda: torch.ones(2).to(device="cuda:1", non_blocking=True), SECOND),
        (lambda: torch.ones(2).cuda(), FIRST),
        (lambda: torch.ones(2).cuda(1), SECOND),
        (lambda: torch.ones(2).cuda("cuda:1"), SECOND),
        (lambda: torch.ones(2).new_zeros(3, device="cuda:1"), SECOND),
        (lambda: torch.zeros_like(torch.ones(2), device="cuda:1"), SECOND),
        (lambda: torch.ones(2, device="cuda:1").new_tensor([2.0]), SECOND),
        (lambda: torch.fft.fftfreq(4, device="cuda:1"), SECOND),
        (lambda: torch.hann_window(4, device="cuda:1"), SECOND),
        (lambda: torch.ops.aten.zeros.default([2], device="cuda:1"), SECOND),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], device="cuda:1"), SECOND),
        (lambda: torch.ones(2).type(torch.cuda.FloatTensor), FIRST),
        (lambda: torch.ones(2, device="cuda:1").type("torch.cuda.DoubleTensor"), SECOND),
        (lambda: torch.cuda.FloatTensor([1.0, 2.0]), FIRST),
        (lambda: torch.cuda.sparse.FloatTensor(2, 2), FIRST),
        (lambda: torch.eye(2).to_sparse().to("cuda:1"), SECOND),
        (lambda: torch.eye(2).to_sparse().cuda(1) @ torch.ones(2, device="cuda:1"), SECOND),
        (lambda: torch.empty(2, device="cuda:1").fill_(1), SECOND),
        (lambda: nn.Linear(2, 2, device="cuda:1").weight, SECOND),
        (lambda: nn.Linear(2, 2).to("cuda:1").weight, SECOND),
        (lambda: nn.Linear(2, 2).to(SECOND).bias, SECOND),
        (lambda: nn.Linear(2, 2).cuda(1).weight, SECOND),
        (lambda: nn.BatchNorm1d(2).cuda().running_mean, FIRST),
        (lambda: nn.LSTM(2, 2).cuda()(torch.ones(1, 2, device="cuda"))[0], FIRST),
        (lambda: copy.deepcopy(torch.ones(2, device="cuda:1")), SECOND),
    ],
)
def test_a_device_is_taken_wherever_one_is_named(make, expected):
    x = make()
    assert x.device == expected
    assert x.device.type == "cuda"
    assert x.is_cuda
    assert not x.is_cpu
    assert x.get_device() == expected.index


def test_tensors_elsewhere_are_not_on_cuda():
    assert not torch.ones(2).is_cuda
    assert torch.ones(2, device="meta").device.type == "meta"
    assert torch.ones(2, device="vgpu:1").device == SECOND


def test_a_cuda_device_keeps_its_type():
    device = torch.device("cuda")
    assert (device.type, device.index) == ("cuda", None)
    assert torch.device("cuda", 1) == SECOND


def test_a_missing_device_is_named_as_the_program_names_it():
    with pytest.raises(DeviceUnavailableError, match=r"use cuda:5") as error:
        torch.ones(2, device="cuda:5")
    assert "cuda:0" in error.value.fix


def test_types_are_those_of_cuda():
    x = torch.ones(2, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor"
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.LongTensor)
    assert not isinstance(torch.ones(2), torch.cuda.FloatTensor)
    assert nn.Linear(2, 2).type(torch.cuda.DoubleTensor).weight.type() == "torch.cuda.DoubleTensor"


@pytest.mark.filterwarnings("ignore:Sparse")
def test_types_of_sparse_tensors_are_those_of_cuda():
    indices, values = torch.zeros(2, 1, dtype=torch.int64), torch.ones(1)
    x = torch.cuda.sparse.FloatTensor(indices.to(SECOND), values.to(SECOND), (2, 2))
    assert (x.device, x.type()) == (SECOND, "torch.cuda.sparse.FloatTensor")
    assert x.to_dense().tolist() == [[1, 0], [0, 0]]
    assert isinstance(x, torch.cuda.sparse.FloatTensor)
    assert not isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(values.to(SECOND), torch.cuda.sparse.FloatTensor)


def test_mixed_devices_are_refused():
    with pytest.raises(DeviceMismatchError):
        torch.ones(2, device="cuda") + torch.ones(2)
    with pytest.raises(DeviceMismatchError):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")


def test_the_default_device():
    torch.set_default_device("cuda:1")
    try:
        assert torch.ones(2).device == SECOND
        assert torch.get_default_device() == SECOND
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.device == FIRST
    assert torch.ones(2).is_cpu


def test_the_default_tensor_type():
    torch.set_default_tensor_type(torch.cuda.DoubleTensor)
    try:
        assert torch.ones(2).type() == "torch.cuda.DoubleTensor"
    finally:
        torch.set_default_device(None)
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.ones(2).type() == "torch.FloatTensor"


def test_the_current_device():
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        made = [torch.ones(2, device="cuda"), torch.ones(2).cuda(), torch.ones(2).to("cuda")]
        assert [x.device for x in made] == [SECOND] * 3
        assert nn.Linear(2, 2).to("cuda").weight.device == SECOND
        assert torch.Generator("cuda").device == SECOND
        with torch.cuda.device_of(torch.ones(2, device="cuda:0")):
            assert torch.cuda.current_device() == 0
    torch.cuda.set_device(1)
    try:
        assert torch.ones(2, device="cuda").device == SECOND
    finally:
        torch.cuda.set_device("cuda:0")
    assert torch.ones(2, device="cuda").device == FIRST
    with torch.cuda.device(-1):
        assert torch.cuda.current_device() == 0
    with pytest.raises(DeviceUnavailableError):
        torch.cuda.set_device(2)


def test_torch_s_accelerator_is_cuda():
    assert torch.accelerator.current_accelerator().type == "cuda"
    torch.accelerator.synchronize(FIRST)
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == torch.cuda.current_device() == 1
        torch.accelerator.set_device_index(0)
        assert torch.ones(2, device="cuda").device == FIRST
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(DeviceUnavailableError, match="cuda:2"):
        torch.accelerator.set_device_index(2)


def test_d2ldev_knows_them(virtual):
    x = torch.ones(2, device="cuda:1")
    assert virtual.device_of(x) is gpu(1)
    assert virtual.to(torch.ones(2), "gpu:1").device == SECOND
    assert virtual.to(x, "cpu").is_cpu
    with virtual.strict():
        assert x.device == SECOND
        with pytest.raises(DeviceMismatchError):
            x + torch.ones(2)


def test_what_a_program_imports_before_sees_them():
    assert zeros(2, device="cuda:1").device == SECOND


def test_torch_knows_nothing_of_it():
    x = torch.ones(2, device="cuda")
    assert not hasattr(x, "__cuda_array_interface__")
    assert repr(x).endswith("device='vgpu:0')")


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, np.asarray])
def test_torch_s_errors_name_cuda_devices(convert):
    with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor to numpy"):
        convert(torch.ones(2, device="cuda:1"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_errors_of_d2ldev_name_the_gpu():
    x = torch.ones(2, device="cuda:1")
    for attempt in (
        lambda: torch.quantize_per_tensor(x, 0.1, 1, torch.qint8),
        lambda: torch.UntypedStorage._new_shared(3, device="vgpu:1"),
    ):
        with pytest.raises(UnsupportedValueError, match=" gpu:1"):
            attempt()


def test_a_native_device_is_taken_but_is_none_of_cuda(virtual):
    x = torch.ones(2, device=virtual.native("gpu:1"))
    assert x.device == SECOND
    assert virtual.device_of(x) == virtual.device(virtual.native("gpu:1")) == virtual.device(SECOND)


# -- what no mode of this thread sees --------------------------------------------------------------


def test_other_threads_see_them():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda:1").device))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SECOND] * 2


def test_backward_passes_see_them():
    found = []

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.full((2,), 3.0, device="cuda:1")

        @staticmethod
        def backward(ctx, gradient):
            found.append(gradient.device)
            return gradient * torch.full((2,), 3.0, device="cuda:1")

    x = torch.ones(2, device="cuda:1", requires_grad=True)
    x.register_hook(lambda gradient: gradient + torch.ones(2, device="cuda:1"))
    Times.apply(x).sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]
    assert found == [SECOND]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_compute_again_on_them(use_reentrant):
    x = torch.ones(2, device="cuda:1", requires_grad=True)

    def run(x):
        return functional.dropout(x * torch.full((2,), 3.0, device=x.device), 0.5).sum()

    value = checkpoint(run, x, use_reentrant=use_reentrant)
    value.backward()
    assert x.grad.sum() == value


@pytest.mark.parametrize("number", [0, 1])
def test_loaders_pin_for_them(number):
    data = DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True, num_workers=number)
    batches = [x.cuda(non_blocking=True) for x in data]
    assert torch.cat(batches).tolist() == [0, 1, 2, 3]
    assert batches[0].is_cuda


def test_memory_is_pinned_by_each_call():
    assert torch.empty(3, pin_memory=True).is_cpu
    assert torch.ones(3).pin_memory().tolist() == [1, 1, 1]


def test_a_call_past_all_modes_is_refused():
    with torch._C.DisableTorchFunction(), pytest.raises(UnsupportedValueError, match="vgpu:0"):
        torch.ones(2, device="cuda")


def test_compiled_functions_run_as_they_are():
    def run(x):
        return x + torch.ones(2, device="cuda")

    with pytest.warns(D2LDevWarning, match="torch.compile"):
        assert torch.compile(run) is run
    with pytest.warns(D2LDevWarning, match="torch.compile"):
        assert torch.compile(mode="reduce-overhead")(run) is run


# -- automatic mixed precision ---------------------------------------------------------------------


def test_autocast():
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda"):
        assert (x @ x).dtype == torch.float16
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            with torch.autocast(device_type="cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
            assert (x @ x).dtype == torch.bfloat16
        assert (x @ x).dtype == torch.float16
        assert torch.get_autocast_gpu_dtype() == torch.float16
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast():
        assert (x @ x).dtype == torch.float16
    assert not torch.is_autocast_enabled()
    assert (x @ x).dtype == torch.float32


def test_autocast_of_functions():
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x = torch.ones(2, device="cuda", dtype=torch.float16, requires_grad=True)
    with torch.autocast("cuda"):
        y = Square.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_a_scaler():
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    assert scaler.is_enabled()
    before = model.weight.detach().clone()
    for last in (torch.inf, 1.0):
        with torch.autocast("cuda"):
            loss = model(torch.full((2, 4), last, device="cuda")).sum()
        assert loss.dtype == torch.float16 or last == 1.0
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before) == (last != 1.0)
    assert scaler.get_scale() == 64.0


# -- random numbers --------------------------------------------------------------------------------


def test_seeds():
    for seed in (torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.manual_seed):
        seed(3)
        first = torch.randn(3, device="cuda")
        seed(3)
        assert torch.equal(torch.randn(3, device="cuda"), first)
    assert torch.cuda.initial_seed() == 3


def test_the_state_of_random_numbers():
    state, states = torch.cuda.get_rng_state("cuda:1"), torch.cuda.get_rng_state_all()
    first = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state, device="cuda:1")
    assert torch.equal(torch.randn(3, device="cuda"), first)
    torch.cuda.set_rng_state_all(states)
    with torch.random.fork_rng(devices=[0, 1]):
        assert torch.equal(torch.randn(3, device="cuda"), first)
    assert torch.equal(torch.randn(3, device="cuda"), first)


def test_generators():
    generator = torch.Generator("cuda:1").manual_seed(3)
    assert generator.device == SECOND
    assert torch.randn(3, device="cuda:1", generator=generator).device == SECOND
    with pytest.raises(DeviceMismatchError):
        torch.randn(3, device="cuda:0", generator=generator)
    assert len(torch.cuda.default_generators) == 2


# -- streams, properties and memory ----------------------------------------------------------------


def test_streams_and_events():
    torch.cuda.synchronize()
    torch.cuda.synchronize("cuda:1")
    stream, start, end = torch.cuda.Stream("cuda:1"), torch.cuda.Event(True), torch.cuda.Event(True)
    stream.wait_stream(torch.cuda.current_stream())
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(2, device="cuda")
    x.record_stream(stream)
    end.record(torch.cuda.current_stream("cuda:0"))
    end.synchronize()
    stream.synchronize()
    assert stream.query()
    assert start.elapsed_time(end) > 0
    assert stream.device == SECOND
    with pytest.raises(RuntimeError, match="recorded"):
        torch.cuda.Event(True).elapsed_time(end)


def test_properties():
    properties = torch.cuda.get_device_properties("cuda:1")
    assert properties.name == torch.cuda.get_device_name(1) == "d2ldev virtual GPU 1"
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
    assert torch.cuda.is_bf16_supported()
    with pytest.raises(DeviceUnavailableError):
        torch.cuda.get_device_properties(2)


def test_memory():
    before = torch.cuda.memory_allocated(1)
    torch.cuda.reset_peak_memory_stats(1)
    x = torch.ones(1000, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == before + 4000
    assert torch.cuda.memory_stats(1)["allocated_bytes.all.current"] == before + 4000
    del x
    assert torch.cuda.memory_allocated(1) == before
    assert torch.cuda.max_memory_allocated(1) == before + 4000
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(1)
    assert 0 < free <= total == torch.cuda.get_device_properties(1).total_memory


def test_each_other_function_of_torch_cuda_is_refused_by_name():
    for name in ("utilization", "memory_snapshot", "graph_pool_handle", "cudart"):
        with pytest.raises(UnsupportedValueError, match=f"torch.cuda.{name}"):
            getattr(torch.cuda, name)()


# -- files -----------------------------------------------------------------------------------------


def test_files_are_those_of_cuda():
    file = io.BytesIO()
    torch.save({"x": torch.ones(2, device="cuda:1")}, file)
    assert b"cuda:1" in file.getvalue()
    assert b"vgpu" not in file.getvalue()
    for place, expected in (
        (None, SECOND),
        ("cpu", torch.device("cpu")),
        ("cuda", FIRST),
        (FIRST, FIRST),
        ({"cuda:1": "cuda:0"}, FIRST),
        (lambda storage, _location: storage.cuda(0), FIRST),
    ):
        file.seek(0)
        assert torch.load(file, map_location=place)["x"].device == expected


def test_a_file_of_a_missing_device():
    file = io.BytesIO()
    torch.save(torch.ones(2, device="cuda:1"), file)
    changed = io.BytesIO(file.getvalue().replace(b"cuda:1", b"cuda:7"))
    with pytest.raises(DeviceUnavailableError, match="cuda:7"):
        torch.load(changed)


# -- on and off ------------------------------------------------------------------------------------

_PROGRAM = """
import os, sys, threading
import torch
from torch.amp import autocast_mode
from torch.utils._device import DeviceContext
before = {name: getattr(torch.cuda, name) for name in torch.cuda.__all__}
import d2ldev
from d2ldev import backend
d2ldev.virtual_gpus(2)
backend.num_gpus()
from d2ldev_torch.virtual.as_cuda import is_on, stand_for_cuda
x = torch.ones(2, device="vgpu:1")
owners = (
    torch, torch.Tensor, torch.UntypedStorage, DeviceContext, threading.Thread, torch.cuda,
    torch._C, torch.accelerator, torch.nested, autocast_mode, autocast_mode.autocast,
)
kept = [dict(vars(owner)) for owner in owners]
for _ in range(2):
    for owner, attributes in zip(owners, kept):
        changed = [name for name, value in attributes.items() if vars(owner)[name] is not value]
        assert not changed, (owner, changed)
    assert not x.untyped_storage().is_cuda
    assert not is_on() and not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert not x.is_cuda and x.device.type == "vgpu" and x.type() == "torch.vgpu.FloatTensor"
    assert len(torch.overrides._get_current_function_mode_stack()) == 0
    with stand_for_cuda(), stand_for_cuda():
        assert is_on() and torch.cuda.is_available() and x.is_cuda
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device(1)
try:
    torch.ones(2, device="cuda")
except Exception as error:
    assert not isinstance(error, d2ldev.D2LDevError), error
else:
    raise AssertionError
"""

_UNCHANGED = """
import torch
assert torch.cuda.is_available(), "not available"
model = torch.nn.Linear(2, 1).to("cuda")
x = torch.ones(4, 2, device="cuda:1").cuda()
optimizer = torch.optim.Adam(model.parameters())
model(x).sum().backward()
optimizer.step()
assert next(model.parameters()).device == torch.device("cuda:0")
"""


def _run(program, **variables):
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "D2LDEV_BACKEND": "torch", **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_off_nothing_pretends():
    _run(_PROGRAM)


def test_a_program_for_cuda_runs_after_one_line():
    assert not _run(f"import d2ldev; d2ldev.virtual_gpus(2, as_cuda=True){_UNCHANGED}")


def test_the_variable_asks_for_it():
    first = "from d2ldev import backend; backend.num_gpus()"
    variables = {"D2LDEV_VIRTUAL_GPUS": "2", "D2LDEV_VIRTUAL_CUDA": "1"}
    assert not _run(first + _UNCHANGED, **variables)


def test_it_comes_before_the_first_use():
    program = """
import d2ldev
from d2ldev import backend
d2ldev.virtual_gpus(2)
backend.num_gpus()
d2ldev.virtual_gpus(2)
try:
    d2ldev.virtual_gpus(2, as_cuda=True)
except d2ldev.DeviceUnavailableError as error:
    assert "as_cuda=True" in error.fix and "D2LDEV_VIRTUAL_CUDA=1" in error.fix, error
else:
    raise AssertionError
"""
    _run(program)


def test_it_is_on_here():
    assert is_on()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cuda.manual_seed(1)
