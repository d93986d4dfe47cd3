"""The torch backend as it is, and with places other than the CPU that need no GPU.

- ``ledger``: two GPUs that are a list of storages. Tensors that are copied there still compute, so
  that values, gradients and training can be followed. The device of a tensor is looked up by the
  memory that it has now, so that a parameter with other memory is where that memory is.
- ``meta``: torch's own ``meta`` device as the one GPU: another ``torch.device`` to torch as well,
  with its own errors and creation calls, but without values.
- ``virtual``: two virtual GPUs.
"""

import pytest
import torch
from d2ldev_conformance.suite.parallel.copies import copy_processes
from d2ldev_torch import TorchFramework
from d2ldev_torch.devices import TorchDevices
from d2ldev_torch.files import TorchFiles
from d2ldev_torch.models import TorchModels
from d2ldev_torch.tensors import TorchTensors
from d2ldev_torch.training import TorchTraining

import d2ldev
from d2ldev import Backend, gpu
from d2ldev.framework import CPU
from d2ldev.framework.testing import framework_of


class CountedDevices(TorchDevices):
    """Devices that are there without a driver: they have a type and a number."""

    def __init__(self, name, number):
        super().__init__(name, name, torch.cpu)
        self.number = number
        self.synchronized = []
        self.streams = None

    def count(self):
        return self.number

    def current(self):
        return 0

    def synchronize(self, device):
        if device is not CPU:
            self.synchronized.append(device.index)

    def is_idle(self, device):
        return device is CPU or device.index in self.synchronized


class LedgerTensors(TorchTensors):
    """Two GPUs whose memory is a list of the CPU's storages."""

    def __init__(self, devices):
        super().__init__(devices)
        # The storages are kept, so that no address is given to another one.
        self.ledger = {}
        self.copied = []
        self.before_copy = lambda number: None

    def device_of(self, x):
        super().device_of(x)
        return self.ledger.get(storage_of(x)._cdata, (None, CPU))[1]

    def is_on(self, x, device):
        return self.device_of(x) is device

    def transfer(self, xs, native, *, copy):
        return [self.copy(x, native) for x in xs]

    def copy(self, x, native):
        self.before_copy(len(self.copied))
        self.copied.append(x)
        new = x.to("cpu", copy=True)
        if native.type != "cpu":
            storage = storage_of(new)
            self.ledger[storage._cdata] = storage, gpu(native.index)
        return new


class MetaTensors(TorchTensors):
    """One GPU, which is torch's ``meta`` device."""

    def random(self, distribution, shape, seed, dtype, native):
        # The meta device has no generator, as it has no numbers.
        seed = None if native.type == "meta" else seed
        return super().random(distribution, shape, seed, dtype, native)


class MetaModels(TorchModels):
    """Models that move to torch's ``meta`` device."""

    def find_refill(self, x):
        def swap(new):
            # torch gives a CPU parameter a GPU's memory, but not the meta device's: here the two
            # tensors change places instead, and whoever holds the parameter holds it still.
            if torch.nn.parameter.is_lazy(x):
                moved = torch.nn.UninitializedParameter(x.requires_grad, new.device)
            else:
                moved = torch.nn.Parameter(new.detach(), x.requires_grad)
            with torch._C.DisableTorchFunctionSubclass():
                torch.utils.swap_tensors(x, moved)

        return swap if super().find_refill(x) else None


def storage_of(x):
    # A parameter that is not initialised refuses the question, but has a storage.
    with torch._C.DisableTorchFunctionSubclass():
        return x.untyped_storage()


def backend_with(devices, tensors, models=TorchModels):
    """Return a backend with other devices."""
    framework = TorchFramework()
    framework.devices = devices
    framework.tensors = tensors(framework.devices)
    framework.models = models(framework.devices, framework.tensors)
    framework.files = TorchFiles(framework.tensors, framework.state.kinds)
    framework.training = TorchTraining(framework, devices)
    return Backend(framework)


@pytest.fixture(scope="session", autouse=True)
def _compiler_s_folder(tmp_path_factory):
    """torch's compiler, which some optimizers import, makes a folder named in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiler")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_virtual_gpus_by_name():
    """The handle's backend is the hardware's; ``virtual`` is made past the registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("D2LDEV_VIRTUAL_GPUS", raising=False)
        yield


@pytest.fixture(scope="session")
def torch_backend():
    return d2ldev.get_backend("torch")


@pytest.fixture(scope="session")
def virtual():
    """A torch backend with two virtual GPUs."""
    return Backend(TorchFramework(virtual_gpus=2))


@pytest.fixture(scope="module")
def copied_processes(virtual, _for_leaks):
    """Lets ``fit`` of ``virtual`` start copies of one process; see ``copy_processes``."""
    with copy_processes("torch", framework_of(virtual).virtual_gpus):
        yield


@pytest.fixture(params=["vgpu:0", "vgpu:1"])
def place(virtual, request):
    """Each virtual GPU, by torch's name."""
    return torch.device(request.param)


@pytest.fixture
def vgpu(virtual):
    """The second virtual GPU, which torch's hooks for backends in Python know nothing of."""
    return torch.device("vgpu:1")


@pytest.fixture
def devices():
    """The devices of ``ledger``: two GPUs, and no driver."""
    return CountedDevices("cuda", 2)


@pytest.fixture
def ledger(devices):
    """A torch backend with two GPUs that keep values."""
    return backend_with(devices, LedgerTensors)


@pytest.fixture
def copies(ledger):
    """The tensors of ``ledger``, which note each copy in ``copied``."""
    return framework_of(ledger).tensors


@pytest.fixture
def meta():
    """A torch backend whose GPU is torch's own ``meta`` device, without values."""
    return backend_with(CountedDevices("meta", 1), MetaTensors, MetaModels)
