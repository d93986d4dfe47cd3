"""MXNet's contexts: which device each stands for, and the cards that its wheels do not run on."""

import threading

import mxnet as mx
import numpy as np
import pytest
from d2ldev_mxnet import MXNetFramework, devices
from processes import run_python

from d2ldev import (
    Backend,
    DeviceInitializationWarning,
    DeviceUnavailableError,
    InvalidDeviceError,
    UnsupportedValueError,
    cpu,
    gpu,
)
from d2ldev.framework import Memory, nvml
from d2ldev.framework.testing import framework_of


@pytest.fixture
def two_cards(monkeypatch):
    """A backend whose MXNet was built for CUDA, with two cards, which are not really there."""
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    cards = [nvml.Card(name, None) for name in ("GPU-a", "GPU-b")]
    monkeypatch.setattr(nvml, "cards", lambda: cards)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Backend(MXNetFramework())


@pytest.mark.parametrize(
    "context", [mx.cpu(), mx.cpu(3), mx.cpu_pinned(1), mx.Context("cpu_shared")]
)
def test_every_context_of_the_host_is_the_cpu(hardware, context):
    assert hardware.device(context) is cpu()


@pytest.mark.parametrize(
    ("context", "device"),
    [
        (mx.cpu(0), cpu()),
        (mx.cpu(1), gpu(0)),
        (mx.cpu(2), gpu(1)),
        (mx.cpu(3), cpu()),
        (mx.cpu_pinned(1), cpu()),
    ],
)
def test_with_virtual_gpus_the_contexts_after_the_first_are_theirs(backend, context, device):
    assert backend.device(context) is device


def test_a_virtual_gpu_is_a_context_with_memory_of_its_own(backend):
    assert [backend.native(f"gpu:{i}") for i in (0, 1)] == [mx.cpu(1), mx.cpu(2)]
    assert backend.ones(2, device="gpu:1").ctx == mx.cpu(2)


def test_under_virtual_gpus_mxnet_s_gpu_is_the_one_that_stands_for_it(backend):
    assert backend.device(mx.gpu(1)) is gpu(1)
    assert backend.ones(2, device=mx.gpu(1)).ctx == mx.cpu(2)


def test_mxnet_s_gpu_is_the_gpu(hardware):
    assert hardware.device(mx.gpu(1)) is gpu(1)


def test_mxnet_s_gpu_of_a_negative_index_is_none(hardware):
    with pytest.raises(InvalidDeviceError):
        hardware.device(mx.gpu(-1))


def test_without_virtual_gpus_the_cpu_s_contexts_are_there_already(hardware):
    x = mx.np.ones((2,), ctx=mx.cpu(3))
    assert hardware.to(x, "cpu") is x


def test_eight_virtual_gpus_are_eight_places():
    backend = Backend(MXNetFramework(virtual_gpus=8))
    tensors = [backend.ones(1, device=device) for device in backend.devices()]
    assert [backend.device_of(x) for x in tensors] == [cpu(), *map(gpu, range(8))]


def test_the_same_scope_can_be_entered_in_itself(backend):
    with backend.on("gpu:1"), backend.on("gpu:1"):
        assert backend.default_device() is gpu(1)
    assert backend.default_device() is cpu()


def test_a_scope_is_mxnet_s_own_too(backend):
    with backend.on("gpu:0"):
        assert mx.np.ones((2,)).ctx == mx.cpu(1)


def test_a_scope_of_mxnet_s_is_the_default_device(backend):
    with mx.cpu(2):
        assert backend.default_device() is gpu(1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mx.nd.ones((2,), ctx=mx.cpu(1)),
        lambda: mx.nd.sparse.zeros("csr", (2, 2), ctx=mx.cpu(1)),
        lambda: mx.np.ones((2,), ctx=mx.cpu(1)),
    ],
    ids=["legacy", "sparse", "numpy"],
)
def test_every_array_of_mxnet_has_its_device(backend, make):
    assert backend.device_of(make()) is gpu(0)


@pytest.mark.parametrize(
    "value",
    [mx.sym.var("x"), mx.cpu(), mx, mx.gluon.Parameter("w")],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_is_not_an_array_has_no_device(backend, value):
    with pytest.raises(UnsupportedValueError):
        backend.device_of(value)


def test_many_threads_ask_at_once(backend):
    tensors = [backend.ones(1, device=device) for device in backend.devices()] * 50
    wrong = []

    def ask():
        wrong.extend(
            x for x in tensors for _ in range(10) if backend.device_of(x) != backend.device(x.ctx)
        )

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_wheel_without_cuda_has_no_gpu(two_cards, monkeypatch):
    monkeypatch.setattr(devices, "has_cuda", lambda: False)
    assert two_cards.num_gpus() == 0


def test_the_driver_s_cards_are_counted(two_cards):
    assert two_cards.num_gpus() == 2
    assert two_cards.devices() == [cpu(), gpu(0), gpu(1)]


def test_where_the_driver_cannot_be_asked_mxnet_counts_and_says_so(two_cards, monkeypatch):
    monkeypatch.setattr(nvml, "cards", lambda: None)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 3)
    nvml.warn_of_context.cache_clear()
    with pytest.warns(DeviceInitializationWarning, match="mxnet initialises CUDA to count"):
        assert two_cards.num_gpus() == 3
    nvml.warn_of_context.cache_clear()


def test_virtual_gpus_replace_the_cards(two_cards):
    assert Backend(MXNetFramework(virtual_gpus=1)).num_gpus() == 1


def test_hardware_that_fails_to_start_is_a_warning_with_the_reason(two_cards, monkeypatch):
    def fail():
        raise DeviceUnavailableError("count", "error 999", "restart")

    monkeypatch.setattr(nvml, "cards", fail)
    with pytest.warns(DeviceInitializationWarning, match="999"):
        assert two_cards.num_gpus() == 0


def test_a_card_without_kernels_is_one_clear_error(two_cards):
    # This MXNet has no GPU at all, and fails as one does that has no kernels for a card.
    with pytest.raises(DeviceUnavailableError) as caught:
        two_cards.ones(2, device="gpu:1")
    message = str(caught.value)
    assert all(text in message for text in ("gpu:1", "8.6", "Hopper", "D2LDEV_BACKEND"))
    assert isinstance(caught.value.__cause__, mx.base.MXNetError)


def test_a_card_that_works_is_tried_once(two_cards, monkeypatch):
    tried = []
    monkeypatch.setattr(
        devices.mx.nd, "ones", lambda shape, ctx: tried.append(ctx) or mx.nd.zeros(shape)
    )
    devices.check_card.cache_clear()
    assert [two_cards.native(mx.gpu(1)) for _ in range(3)] == [mx.gpu(1)] * 3
    devices.check_card.cache_clear()
    assert tried == [mx.gpu(1)]


def test_mxnet_cannot_say_a_virtual_gpu_s_memory(backend):
    assert backend.memory("gpu:1") == Memory(None, None, None)


def test_no_card_is_used_to_empty_its_cache(two_cards, monkeypatch):
    tried = []
    monkeypatch.setattr(devices, "check_card", tried.append)
    two_cards.empty_cache()
    assert tried == []


def test_a_card_s_memory_is_its_size(two_cards, monkeypatch):
    monkeypatch.setattr(devices, "check_card", lambda device: None)
    monkeypatch.setattr(mx.context, "gpu_memory_info", lambda index: (1000, 4000 + index))
    assert two_cards.memory("gpu:1") == Memory(None, None, 4001)


def test_a_device_is_idle_after_waiting(backend):
    x = backend.rand((512, 512), device="gpu:0")
    for _ in range(8):
        x = mx.np.dot(x, x) / 512
    assert backend.is_idle("gpu:0")
    np.testing.assert_array_equal(backend.to_numpy(x).shape, (512, 512))


def test_synchronize_raises_errors_of_earlier_calls(backend):
    x = mx.np.array([1.0, 0.0])
    mx.np.linalg.cholesky(mx.np.array([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(mx.base.MXNetError):
        backend.synchronize()
    backend.synchronize()
    assert backend.to_numpy(x).tolist() == [1.0, 0.0]


def test_a_sparse_array_is_a_live_tensor(backend):
    x = mx.nd.ones((3, 12347)).tostype("csr")
    found = [live.kind for live in backend.live_tensors("cpu") if live.shape == x.shape]
    assert found == ["CSRNDArray"]


def test_the_suite_looks_for_leaks_of_a_test_whose_steps_are_still_computed():
    # In a process of its own, which MXNet would end if the environment moved in memory meanwhile.
    code = """
        import tempfile
        from pathlib import Path
        import d2ldev
        from d2ldev_conformance.leaks import children_use, environment, files
        backend = d2ldev.get_backend("mxnet")
        learner = backend.learner(backend.mlp([8, 64, 64, 4]), loss="mse")
        with tempfile.TemporaryDirectory() as folder, children_use(Path(folder)):
            for i in range(2000):
                size = 2 + i % 50  # for a new size MXNet looks for a kernel
                learner.step((backend.ones((size, 8)),), backend.ones((size, 4)))
                with files([], Path(folder)), environment([]):
                    pass
        backend.synchronize()
        show("alive")
    """
    assert run_python(code, hide=()) == ["alive"]


@pytest.mark.parametrize(("override", "found"), [(None, "high"), ("1", "high"), ("0", "highest")])
def test_on_a_card_convolutions_are_cudnn_s_unless_a_variable_says_float32(
    two_cards, monkeypatch, override, found
):
    if override is None:
        monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    else:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    backend = Backend(MXNetFramework())
    assert backend.matmul_precision() == found
    assert ("multiply in float32" in framework_of(backend).cannot) is (found == "high")
    with backend.matmul_precision("high"):
        assert backend.matmul_precision() == found


def test_on_a_card_float32_is_refused_with_what_switches_it_on(two_cards, monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    with pytest.raises(UnsupportedValueError, match="NVIDIA_TF32_OVERRIDE=0 is set before"):
        Backend(MXNetFramework()).matmul_precision("highest")


def test_on_virtual_gpus_everything_is_float32(two_cards):
    with Backend(MXNetFramework(virtual_gpus=1)).matmul_precision("highest") as found:
        assert found == "highest"
