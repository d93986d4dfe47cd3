"""The torch backend as it is, and with places other than the CPU."""

import pytest
import torch
from d2ldev_torch.backend import TorchBackend
from torch_places import LedgerBackend, MetaBackend

import d2ldev


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
    return TorchBackend(virtual_gpus=2)


@pytest.fixture(params=["vgpu:0", "vgpu:1"])
def place(virtual, request):
    """Each virtual GPU, by torch's name."""
    return torch.device(request.param)


@pytest.fixture
def vgpu(virtual):
    """The second virtual GPU, which torch's hooks for backends in Python know nothing of."""
    return torch.device("vgpu:1")


@pytest.fixture
def ledger():
    """A torch backend with two GPUs that keep values."""
    return LedgerBackend()


@pytest.fixture
def meta():
    """A torch backend whose GPU is torch's own ``meta`` device, without values."""
    return MetaBackend()
