"""The torch backend as it is, and with places other than the CPU."""

import pytest
from torch_places import LedgerBackend, MetaBackend

import d2ldev


@pytest.fixture(scope="session", autouse=True)
def _compiler_s_folder(tmp_path_factory):
    """torch's compiler, which some optimizers import, makes a folder named in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiler")))
        yield


@pytest.fixture(scope="session")
def torch_backend():
    return d2ldev.get_backend("torch")


@pytest.fixture
def ledger():
    """A torch backend with two GPUs that keep values."""
    return LedgerBackend()


@pytest.fixture
def meta():
    """A torch backend whose GPU is torch's own ``meta`` device, without values."""
    return MetaBackend()
