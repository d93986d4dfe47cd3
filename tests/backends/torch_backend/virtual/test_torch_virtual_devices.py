"""Virtual GPUs as devices of torch: which there are, what is refused, and ``torch.accelerator``."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch_versions import needs_torch

from d2ldev import gpu
from d2ldev.errors import (
    D2LDevWarning,
    DeviceUnavailableError,
    InvalidDeviceError,
    UnsupportedValueError,
)
from d2ldev.framework import CPU
from d2ldev.framework.testing import framework_of

# -- devices of a process --------------------------------------------------------------------------


def in_a_new_process(code, **environment):
    """Return what a program printed, in a process in which torch is not set up yet."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_there_are_as_many_as_were_asked_for(virtual):
    assert virtual.num_gpus() == torch.vgpu.device_count() == 2
    assert virtual.devices() == [CPU, gpu(0), gpu(1)]


def test_their_platform_is_virtual(virtual):
    assert [virtual.platform(device) for device in virtual.devices()] == [
        "cpu",
        "virtual",
        "virtual",
    ]


def test_torch_has_its_own_devices_for_them(virtual):
    assert virtual.native("gpu:1") == torch.device("vgpu", 1)
    assert virtual.device(torch.device("vgpu:1")) is gpu(1)
    assert virtual.device(torch.device("vgpu")) is gpu(0)


def test_nothing_else_pretends_to_be_there(virtual):
    hardware = in_a_new_process(
        "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    )
    assert [str(torch.cuda.is_available()), str(torch.cuda.device_count())] == hardware


def test_they_stand_in_the_hardwares_stead(virtual, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = type(framework_of(virtual))(virtual_gpus=2).devices
    assert (devices.count(), devices.platform(gpu(0))) == (2, "virtual")


def test_setting_them_up_twice_changes_nothing(virtual):
    x = torch.ones(2, device="vgpu:1")
    assert type(framework_of(virtual))(virtual_gpus=2).tensors.device_of(x + x) is gpu(1)


def test_more_than_eight_are_refused(virtual):
    with pytest.raises(DeviceUnavailableError, match="can make 8"):
        type(framework_of(virtual))(virtual_gpus=9)


def test_there_may_be_eight():
    code = (
        "from d2ldev import torch as d2l; x = d2l.ones(2, device='gpu:7').requires_grad_();"
        "(x * x).sum().backward(); print(d2l.num_gpus(), d2l.device_of(x.grad))"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="8") == ["8", "gpu:7"]


def test_without_them_nothing_of_them_is_imported_or_changed():
    code = (
        "import sys, torch; new = torch.UntypedStorage.__new__; from d2ldev import torch as d2l;"
        "d2l.ones(2); print(any('virtual' in name and 'torch' in name for name in sys.modules),"
        "torch._C._get_privateuse1_backend_name(), torch.UntypedStorage.__new__ is new)"
    )
    expected = ["False", "privateuseone", "True"]
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="0") == expected


def test_another_package_with_a_device_type_of_its_own_is_named():
    code = (
        "import torch, d2ldev; torch.utils.rename_privateuse1_backend('npu')\n"
        "try: d2ldev.get_backend('torch')\n"
        "except d2ldev.DeviceUnavailableError as error: print('npu' in error.problem)"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="2") == ["True"]


def test_a_process_ends_well_with_tensors_alive():
    code = (
        "from d2ldev import torch as d2l; x = d2l.ones((3, 3), device='gpu:1');"
        "kept = [x, x[1:], x.requires_grad_() @ x]; import torch; torch.kept = kept; print(1)"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="2") == ["1"]


def test_a_forked_process_computes_and_goes_backward():
    code = (
        "import os, torch; from d2ldev import torch as d2l; d2l.num_gpus()\n"
        "for device in ('cpu', 'gpu:1'):\n"
        "    x = d2l.ones(2, device=device).requires_grad_()\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        (x * x).sum().backward(); os._exit(int(x.grad.sum().item()))\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="2") == ["4", "4"]


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(2, device="vgpu:5"),
        lambda: torch.empty(2, device="vgpu:5"),
        lambda: torch.tensor([1.0], device="vgpu:5"),
        lambda: torch.ones(2).to("vgpu:5"),
        lambda: torch.ones(2, device="vgpu:0").to("vgpu:5"),
        lambda: torch.zeros_like(torch.ones(2), device="vgpu:5"),
        lambda: torch.nn.Linear(2, 2, device="vgpu:5"),
        lambda: torch.nn.Linear(2, 2).vgpu(5),
        lambda: torch.vgpu.synchronize(5),
        lambda: torch.vgpu.set_device(5),
    ],
)
def test_a_device_that_does_not_exist_is_refused(virtual, use):
    with pytest.raises(DeviceUnavailableError):
        use()


def test_a_device_without_an_index_is_the_first(virtual):
    made = [torch.ones(2, device="vgpu"), torch.ones(2).to("vgpu"), torch.ones(2).vgpu()]
    assert {x.device for x in made} == {torch.device("vgpu:0")}


def test_the_current_device_is_always_the_first(virtual):
    torch.vgpu.set_device(0)
    with pytest.raises(DeviceUnavailableError, match="current"):
        torch.vgpu.set_device("vgpu:1")
    assert torch.vgpu.current_device() == 0


def test_the_default_device_may_be_virtual(vgpu):
    with torch.device("vgpu:1"):
        made = [torch.ones(2), torch.tensor(1), torch.randn(2), torch.nn.Linear(2, 2).weight]
    assert {x.device for x in made} == {vgpu}
    assert torch.ones(2).is_cpu


def test_the_backends_scope_is_torchs_default(virtual, vgpu):
    with virtual.on("gpu:1"):
        assert torch.ones(2).device == virtual.ones(2).device == vgpu
        assert virtual.default_device() is gpu(1)


@pytest.mark.parametrize("spec", [None, 0, "vgpu:1"])
def test_everything_is_computed_when_a_call_returns(virtual, spec):
    torch.vgpu.synchronize(spec)
    virtual.synchronize()
    assert virtual.is_idle("gpu:1")


def test_what_torch_asks_the_module_of_a_device_is_answered(virtual):
    assert torch.vgpu.is_available()
    assert torch.vgpu.is_initialized()
    assert torch.get_device_module("vgpu") is torch.vgpu
    assert torch.equal(torch.vgpu.get_rng_state(), torch.get_rng_state())


def test_the_random_state_is_forked(virtual):
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[1], device_type="vgpu"):
        torch.randn(3, device="vgpu:1")
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_numbers_are_the_same_on_every_device(virtual):
    drawn = [virtual.randn((3,), seed=1, device=device).tolist() for device in virtual.devices()]
    assert drawn == drawn[:1] * 3


def test_dlpack_within_torch_keeps_a_tensor_where_it_is(virtual, vgpu):
    x = torch.ones(2, device=vgpu)
    y = virtual.from_dlpack(x)
    assert (y.device, y.data_ptr()) == (vgpu, x.data_ptr())


def test_dlpack_does_not_take_a_tensor_that_needs_a_gradient(virtual, vgpu):
    with pytest.raises(UnsupportedValueError, match="gradient"):
        virtual.from_dlpack(torch.ones(2, device=vgpu, requires_grad=True))


def test_values_are_copied_to_numpy(virtual, vgpu):
    x = torch.ones(2, device=vgpu)
    array = virtual.to_numpy(x)
    array[0] = 5
    assert x.tolist() == [1, 1]


def test_the_default_compiler_raises_and_the_eager_one_runs():
    code = (
        "import torch; from d2ldev import torch as d2l; x = d2l.ones(2, device='gpu:1')\n"
        "try: torch.compile(lambda x: x * 2)(x)\n"
        "except Exception as error: print('vgpu' in str(error))\n"
        "print(torch.compile(lambda x: x * 2, backend='eager')(x).device)"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="2") == ["True", "vgpu:1"]


@pytest.mark.parametrize(
    "layer",
    [
        "nn.GroupNorm(2, 4), (2, 4, 4)",
        "nn.TransformerEncoderLayer(4, 2, 8), (2, 4, 4)",
    ],
)
def test_a_compiler_that_writes_no_code_looks_at_every_layer(layer):
    code = (
        "import torch; from torch import nn; from d2ldev import torch as d2l; d2l.num_gpus()\n"
        f"net, shape = {layer}; net.to('vgpu:1')\n"
        "y = torch.compile(net, backend='eager')(torch.ones(shape, device='vgpu:1'))\n"
        "print((y[0] if isinstance(y, tuple) else y).device)"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="2") == ["vgpu:1"]


def test_a_torch_that_is_too_old_for_them_is_named():
    code = (
        "import d2ldev, importlib.metadata as metadata, sys\n"
        "version = metadata.version\n"
        "metadata.version = lambda name: '2.9.1+cu128' if name == 'torch' else version(name)\n"
        "from d2ldev_torch import TorchFramework\n"
        "print(TorchFramework.max_virtual_gpus, 'torch' in sys.modules)\n"
        "try: d2ldev.get_backend('torch')\n"
        "except d2ldev.DeviceUnavailableError as error:\n"
        "    print('torch 2.9.1+cu128' in error.problem, 'torch 2.10 added' in error.problem)"
    )
    assert in_a_new_process(code, D2LDEV_VIRTUAL_GPUS="2") == ["0", "False", "True", "True"]


# -- torch.accelerator -----------------------------------------------------------------------------


def test_it_names_and_counts_them(virtual):
    assert torch.accelerator.current_accelerator() == torch.device("vgpu")
    assert (torch.accelerator.is_available(), torch.accelerator.device_count()) == (True, 2)


def test_its_current_device_is_always_the_first(virtual):
    torch.accelerator.set_device_index(0)
    torch.accelerator.set_device_index(-1)
    with pytest.raises(DeviceUnavailableError, match="current"):
        torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == 0


CONTEXTS = pytest.mark.parametrize(
    "context",
    [lambda i: torch.accelerator.device_index(i), lambda i: torch.vgpu.device(i)],
    ids=["accelerator", "module"],
)


@CONTEXTS
@pytest.mark.parametrize("index", [0, None])
def test_a_context_of_the_first_one_is_entered_and_left(virtual, context, index):
    with context(index):
        assert torch.empty(1, device="vgpu").device.index == 0


def test_a_context_of_another_one_is_refused(virtual):
    with (
        pytest.raises(DeviceUnavailableError, match="device='vgpu:1'"),
        torch.accelerator.device_index(1),
    ):
        torch.empty(1, device="vgpu")


@CONTEXTS
def test_a_context_of_one_that_is_not_there_is_refused(virtual, context):
    with pytest.raises(DeviceUnavailableError, match="2 virtual GPUs"), context(5):
        torch.empty(1, device="vgpu")


def test_a_context_that_torch_s_own_code_enters_changes_what_it_asks_for_alone(virtual):
    with torch.vgpu.device(1):
        assert torch.vgpu.current_device() == 1
        assert torch.empty(1, device="vgpu").device.index == 0
    storage = torch.ones(2).untyped_storage().to(device="vgpu:1")
    assert storage.device == torch.device("vgpu:1")


def test_everything_is_computed_when_it_is_asked_to_wait(virtual):
    torch.accelerator.synchronize()
    torch.accelerator.synchronize("vgpu:1")
    with pytest.raises(DeviceUnavailableError):
        torch.accelerator.synchronize(5)


def test_emptying_the_missing_cache_is_a_no_op(virtual):
    x = torch.ones(1000, device="vgpu:1")
    torch.accelerator.empty_cache()
    assert x.sum().item() == 1000


@needs_torch(2, 12, "has no torch.accelerator.empty_host_cache")
def test_emptying_the_missing_cache_of_pinned_memory_is_a_no_op(virtual):
    x = torch.ones(1000, device="vgpu:1")
    torch.accelerator.empty_host_cache()
    assert x.sum().item() == 1000


@pytest.mark.parametrize("name", ["memory_stats", "get_memory_info", "reset_peak_memory_stats"])
def test_functions_about_an_allocator_are_errors_of_torch(virtual, name):
    with pytest.raises(RuntimeError, match="not a DeviceAllocator"):
        getattr(torch.accelerator, name)(1)


def test_data_parallel_ends_in_an_error_as_on_every_accelerator_but_cuda(virtual, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # CUDA's GPUs would go first
    net = torch.nn.DataParallel(torch.nn.Linear(3, 2).to("vgpu:0"), device_ids=[0, 1])
    with pytest.raises((AttributeError, RuntimeError)):
        net(torch.ones(4, 3, device="vgpu:0"))


@pytest.mark.parametrize("text", ["cuda:1", "xpu:1", "mps:1", "vgpu:1"])
def test_the_device_of_a_gpu_is_the_virtual_one_that_stands_for_it(virtual, text):
    assert virtual.device(torch.device(text)) is gpu(1)
    assert virtual.ones(2, device=torch.device(text)).device == torch.device("vgpu:1")


def test_another_type_of_device_is_none(virtual):
    with pytest.raises(InvalidDeviceError):
        virtual.device(torch.device("meta"))
    for text in ("vgpu:x", "vgpu:", "meta"):
        with pytest.raises(InvalidDeviceError):
            virtual.device(text)


def test_the_memory_that_a_virtual_gpu_has_from_the_host_is_no_tensor_there(virtual):
    x = virtual.ones(12347, device="gpu:0")
    assert [live.device for live in virtual.live_tensors() if live.shape == x.shape] == [gpu(0)]


def test_a_tensor_without_memory_is_not_a_live_tensor(virtual):
    kept = [torch.nn.LazyLinear(3), torch.empty(4567, device="meta")]
    assert kept[1].shape not in [live.shape for live in virtual.live_tensors()]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_is_live_with_the_bytes_of_its_parts(virtual, convert):
    x = getattr(torch.eye(123), convert)()
    indices = {"to_sparse": 2 * 123}.get(convert, 123 + 124)
    found = [live.nbytes for live in virtual.live_tensors() if live.shape == x.shape]
    assert 8 * indices + 4 * 123 in found


# -- calls for CUDA --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manual_seed", "manual_seed_all"])
def test_seeding_cuda_says_how_to_seed_a_virtual_gpu(virtual, name):
    with pytest.warns(D2LDevWarning, match=r"seeds no virtual GPU. fix: torch.manual_seed"):
        getattr(torch.cuda, name)(3)


def test_seeding_all_devices_does_not_warn(virtual):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(3)


def test_autocast_of_cuda_says_how_to_cast_on_a_virtual_gpu(virtual, vgpu):
    x = torch.ones(2, 2, device=vgpu)
    words = r"torch.autocast\('vgpu', ...\)"
    with pytest.warns(D2LDevWarning, match=words), torch.autocast("cuda", dtype=torch.float16):
        assert (x @ x).dtype == torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("vgpu", dtype=torch.float16), torch.autocast("cuda", enabled=False):
            assert (x @ x).dtype == torch.float16


def test_autocast_takes_its_arguments_by_position(virtual):
    with torch.autocast("cpu", torch.bfloat16, True, False):
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_cache_enabled()
