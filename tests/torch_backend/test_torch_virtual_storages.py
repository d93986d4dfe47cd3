"""Memory on a virtual GPU: copied deeply, pickled, saved, loaded, counted; never a crash."""

import copy
import gc
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError


def trained(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()
    return net, optimizer


def saved(obj, **how):
    file = io.BytesIO()
    torch.save(obj, file, **how)
    file.seek(0)
    return file


@pytest.mark.parametrize("device", ["vgpu", "vgpu:0", "vgpu:1"])
def test_a_storage_is_made_on_a_virtual_gpu(virtual, device):
    storage = torch.UntypedStorage(8, device=device)
    assert storage.device == torch.empty(1, device=device).device
    assert storage.nbytes() == 8


def test_a_storage_keeps_the_bytes_it_is_made_of(vgpu):
    storage = torch.UntypedStorage([1, 2, 3], device=vgpu)
    assert (storage.device, storage.tolist()) == (vgpu, [1, 2, 3])


def test_a_storage_on_a_virtual_gpu_that_does_not_exist_is_not_made(virtual):
    with pytest.raises(DeviceUnavailableError):
        torch.UntypedStorage(8, device="vgpu:5")


def test_a_storage_is_read_written_and_moved(vgpu):
    storage = torch.UntypedStorage(4, device="vgpu:1").fill_(7)
    assert storage.tolist() == storage.cpu().tolist() == [7] * 4
    assert storage.clone().device == vgpu
    assert storage.to(device="vgpu:0").device == torch.device("vgpu:0")


def test_a_storage_on_the_cpu_is_what_it_was(virtual):
    assert torch.UntypedStorage(8).device == torch.UntypedStorage([1]).device == torch.device("cpu")
    assert torch.UntypedStorage(device="meta").device == torch.device("meta")


def test_a_storage_does_not_grow(vgpu):
    with pytest.raises(NotImplementedError):
        torch.ones(2, device=vgpu).untyped_storage().resize_(100)


def test_a_deep_copy_is_on_the_same_device(vgpu):
    x = torch.arange(4.0, device=vgpu)
    y = copy.deepcopy(x)
    assert (y.device, y.tolist()) == (vgpu, [0, 1, 2, 3])
    assert y.data_ptr() != x.data_ptr()


def test_deep_copies_share_what_was_shared(vgpu):
    x = torch.ones(4, device=vgpu)
    y, tail = copy.deepcopy([x, x[1:]])
    y.zero_()
    assert tail.tolist() == [0, 0, 0]


def test_a_model_and_its_optimizer_are_copied_deeply(vgpu):
    net, optimizer = copy.deepcopy(trained(vgpu))
    state = [x for kept in optimizer.state.values() for x in kept.values() if x.dim()]
    assert {x.device for x in [*net.parameters(), *net.buffers(), *state]} == {vgpu}
    assert optimizer.param_groups[0]["params"][0] is net[0].weight


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling_keeps_the_device(vgpu, protocol):
    net, _ = trained(vgpu)
    x, other = pickle.loads(pickle.dumps([torch.arange(4.0, device=vgpu)[1:], net], protocol))
    assert (x.device, x.tolist()) == (vgpu, [1, 2, 3])
    assert isinstance(other[0].weight, nn.Parameter)
    assert torch.equal(other[0].weight, net[0].weight)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", [None, "cpu", "vgpu:0", "vgpu:1"])
def test_a_saved_state_is_loaded_where_it_was_or_where_it_is_wanted(vgpu, zipped, where):
    net, optimizer = trained(vgpu)
    file = saved([net.state_dict(), optimizer.state_dict()], _use_new_zipfile_serialization=zipped)
    state, kept = torch.load(file, map_location=where)
    assert {x.device for x in state.values()} == {torch.device(where or vgpu)}
    assert torch.equal(state["0.weight"].cpu(), net[0].weight.detach().cpu())
    assert torch.equal(
        kept["state"][0]["exp_avg"].cpu(), optimizer.state[net[0].weight]["exp_avg"].cpu()
    )


def test_what_was_saved_on_the_cpu_is_loaded_on_a_virtual_gpu(vgpu):
    assert torch.load(saved(torch.ones(3)), map_location="vgpu:1").device == vgpu


def test_a_place_that_does_not_exist_loads_nothing(virtual):
    with pytest.raises(RuntimeError, match="device_count"):
        torch.load(saved(torch.ones(3)), map_location="vgpu:5")


@pytest.mark.parametrize("source", ["cpu", "vgpu:0"])
def test_a_state_is_loaded_into_a_model_where_the_model_is(vgpu, source):
    net, _ = trained(vgpu)
    other, _ = trained(source)
    net.load_state_dict(other.state_dict())
    assert net[0].weight.device == vgpu
    assert torch.equal(net[0].weight.cpu(), other[0].weight.cpu())


def test_memory_is_not_shared_with_other_processes(vgpu):
    x = torch.ones(3, device=vgpu)
    assert not x.is_shared()
    with pytest.raises(UnsupportedValueError, match="belongs to this process"):
        x.share_memory_()


@pytest.mark.parametrize("strategy", sorted(torch.multiprocessing.get_all_sharing_strategies()))
def test_a_tensor_is_not_sent_to_another_process(vgpu, monkeypatch, strategy):
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: strategy)
    with pytest.raises(RuntimeError, match="only available on CPU"):
        ForkingPickler.dumps(torch.ones(2, device=vgpu))


def test_memory_is_counted_once_and_given_back(virtual):
    gc.collect()
    before = virtual.memory("gpu:1").used
    x = torch.ones(1000, device="vgpu:1")
    views = [x[10:], x.reshape(10, 100), x.detach(), x.view(4, 250)]
    held = virtual.memory("gpu:1").used
    del x
    held_by_views = virtual.memory("gpu:1").used
    del views
    after = virtual.memory("gpu:1").used
    assert [held - before, held_by_views - before, after - before] == [4000, 4000, 0]


def test_the_most_memory_is_remembered(virtual):
    before = virtual.memory("gpu:1").used
    torch.ones(100_000, device="vgpu:1")
    memory = virtual.memory("gpu:1")
    assert memory.used == before
    assert memory.peak >= before + 400_000
    assert memory.total is None


def test_memory_is_counted_by_device(virtual):
    before = virtual.memory("gpu:0").used
    x = torch.ones(1000, device="vgpu:1")
    assert virtual.memory("gpu:0").used == before
    y = x.to("vgpu:0")
    assert virtual.memory("gpu:0").used - before == y.nbytes == 4000


def test_a_trained_model_gives_its_memory_back(virtual, vgpu):
    gc.collect()
    before = virtual.memory("gpu:1").used
    kept = trained(vgpu)
    held = virtual.memory("gpu:1").used
    del kept
    gc.collect()
    assert held > before
    assert virtual.memory("gpu:1").used == before
