"""Tensors on a virtual GPU are tensors like any other, and never the CPU's; so is their memory."""

import copy
import gc
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_versions import needs_other_memory

from d2ldev.errors import DeviceUnavailableError, UnsupportedValueError

# -- tensors ---------------------------------------------------------------------------------------


def test_it_is_a_tensor_of_torch(vgpu):
    x = torch.ones(2, device=vgpu)
    assert type(x) is torch.Tensor
    assert (x.device, x.is_cpu, x.is_cuda) == (vgpu, False, False)


def test_every_dtype_goes_there_and_back(virtual, vgpu):
    for name in virtual.dtype_names:
        x = torch.tensor([0, 1, 1]).to(getattr(torch, name))
        y = x.to(vgpu)
        assert (y.device, y.dtype) == (vgpu, x.dtype)
        assert torch.equal(y.cpu().to(torch.complex64), x.to(torch.complex64))


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    permuted=st.randoms(use_true_random=False),
    step=st.integers(1, 3),
    function=st.sampled_from(
        [
            lambda x: x + x,
            lambda x: x.sum(),
            lambda x: x.clone(),
            lambda x: x.reshape(-1),
            lambda x: x.to(torch.float64),
            lambda x: torch.cat([x.flatten(), x.flatten()]),
            lambda x: x[..., None].expand(*x.shape, 3),
            lambda x: x.contiguous(),
            lambda x: torch.zeros_like(x),
            lambda x: x.cumsum(0) if x.dim() else x,
        ]
    ),
)
def test_shapes_strides_and_values_are_the_cpus(virtual, shape, permuted, step, function):
    order = list(range(len(shape)))
    permuted.shuffle(order)

    def view(x):
        return x.permute(order)[tuple(slice(None, None, step) for _ in order)]

    x = torch.arange(float(np.prod(shape))).reshape(shape)
    expected, y = function(view(x)), function(view(x.to("vgpu:1")))
    assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert y.device == torch.device("vgpu:1")
    assert torch.equal(y.cpu(), expected)


def test_views_are_of_one_memory(vgpu):
    x = torch.zeros(2, 3, device=vgpu)
    views = [x[1], x.T, x.view(6), x.unfold(1, 2, 1), x.diagonal(), x.unsqueeze(0), x.detach()]
    x.add_(1)
    assert {view.untyped_storage()._cdata for view in views} == {x.untyped_storage()._cdata}
    assert [view.min().item() for view in views] == [1] * len(views)
    assert all(view._base is x for view in views[:6])


def test_in_place_operators_return_their_operand(vgpu):
    x = torch.ones(2, 3, device=vgpu)
    address = x.data_ptr()
    assert x.add_(1) is x
    assert x.t_() is x
    assert torch.mul(x, 2, out=x) is x
    assert (x.shape, x.data_ptr()) == ((3, 2), address)
    assert x.to(vgpu) is x


def test_a_result_grows_to_what_it_holds(vgpu):
    values, indices = torch.empty(0, device=vgpu), torch.empty(0, dtype=torch.long, device=vgpu)
    torch.max(torch.tensor([[1.0, 3.0], [5.0, 4.0]], device=vgpu), 1, out=(values, indices))
    assert (values.tolist(), indices.tolist()) == ([3, 5], [1, 0])


def test_a_result_is_written_where_it_is_wanted(vgpu):
    x = torch.zeros(4, device=vgpu)
    torch.add(torch.ones(2, device=vgpu), 1, out=x[1:3])
    assert x.tolist() == [0, 2, 2, 0]


MATRIX = torch.tensor([[2.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 4.0]])

# They have a second result, which their caller did not name, and which grows.
WITH_MORE_RESULTS = {
    "inv": torch.linalg.inv,
    "solve": lambda x, out: torch.linalg.solve(x, x.T, out=out),
    "det": torch.linalg.det,
    "cholesky": torch.linalg.cholesky,
    "msort": torch.msort,
}


@pytest.mark.parametrize("whole", [False, True], ids=["a part", "the whole"])
@pytest.mark.parametrize("name", WITH_MORE_RESULTS)
def test_a_result_that_fits_stays_in_its_memory(vgpu, name, whole):
    function = WITH_MORE_RESULTS[name]
    expected = function(MATRIX, out=torch.empty_like(function(MATRIX, out=torch.empty(0))))
    buffer = torch.zeros(2, *expected.shape, device=vgpu)
    out = torch.zeros(expected.shape, device=vgpu) if whole else buffer[1]
    place = out.data_ptr(), out.stride()
    assert function(MATRIX.to(vgpu), out=out) is out
    assert torch.equal(out.cpu(), expected)
    assert (out.data_ptr(), out.stride()) == place
    assert buffer[0].count_nonzero() == 0
    assert whole or torch.equal(buffer[1].cpu(), expected)


@pytest.mark.parametrize("shape", [(0,), (3, 2)], ids=["grows", "fits"])
def test_a_lazy_conjugate_that_is_written_is_the_conjugate(vgpu, shape):
    matrix = torch.tensor([[2, 1j], [1, 3]])
    factors = torch.linalg.lu_factor(matrix)
    right = torch.tensor([[1.0, 2j], [0, 1j], [1j, 1]])
    options = {"left": False, "adjoint": True}
    expected = torch.linalg.lu_solve(*factors, right, **options)
    out = torch.zeros(shape, dtype=expected.dtype, device=vgpu)
    moved = [x.to(vgpu) for x in (*factors, right)]
    assert torch.equal(torch.linalg.lu_solve(*moved, **options, out=out).cpu(), expected)


def test_a_result_with_gaps_grows(vgpu):
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32)

    def solve(device):
        outs = tuple(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)
        x = torch.tensor([[1.0, 2], [0, 1], [1, 1]], device=device)
        torch.linalg.lstsq(x, x + 1, driver="gels", out=outs)
        return outs[0].cpu(), outs[0].stride()

    (made, strides), (expected, expected_strides) = solve(vgpu), solve("cpu")
    assert torch.equal(made, expected)
    assert strides == expected_strides


def test_a_result_grows_within_the_memory_that_it_is_a_part_of(vgpu):
    buffer = torch.zeros(5, device=vgpu)
    torch.add(torch.ones(3, device=vgpu), 1, out=buffer[1:1])
    assert buffer.tolist() == [0, 2, 2, 2, 0]


@pytest.mark.parametrize("size", [0, 2], ids=["grow", "fit"])
def test_results_are_written_to_the_tensors_of_a_list(vgpu, size):
    buffer = torch.zeros(2, 3, device=vgpu)
    out = [buffer[0, :size], torch.zeros(size, device=vgpu)]
    torch.split_with_sizes_copy(torch.arange(4.0, device=vgpu), [2, 2], out=out)
    assert [x.tolist() for x in out] == [[0, 1], [2, 3]]
    assert buffer.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_tensor_that_has_its_size_stays_as_it_is(vgpu):
    buffer = torch.zeros(3, 2, device=vgpu)
    column = buffer[:, 1].resize_(3)
    column += 1
    assert column.stride() == (2,)
    assert buffer.tolist() == [[0, 1]] * 3


def test_a_tensor_is_given_another_order_of_memory(vgpu):
    x = torch.zeros(2, 3, 4, 4, device=vgpu).resize_(2, 3, 4, 4, memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_is_resized_with_its_values(vgpu):
    x = torch.arange(4.0, device=vgpu)
    x.resize_(2)
    assert x.tolist() == [0, 1]
    x.resize_(3, 3)
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]


def test_a_tensor_takes_the_memory_of_another(vgpu):
    x, y = torch.ones(3, device=vgpu), torch.zeros(5, device=vgpu)
    x.set_(y)
    assert (x.shape, x.data_ptr()) == ((5,), y.data_ptr())
    assert x.set_().shape == (0,)
    assert x.device == vgpu


def test_lazily_conjugated_values_are_computed_with(vgpu):
    host = torch.tensor([1 + 2j, 3 - 1j])
    x = host.to(vgpu).conj()
    assert x.is_conj()
    assert x.imag.is_neg()
    for result, expected in (
        (x, host.conj()),
        (x.imag, host.conj().imag),
        (x @ x, host.conj() @ host.conj()),
    ):
        assert torch.equal(result.cpu(), expected)
    assert torch.equal(copy.deepcopy(x).cpu(), host.conj())


def test_it_says_where_it_is(vgpu):
    assert repr(torch.ones(2, device=vgpu)) == "tensor([1., 1.], device='vgpu:1')"
    assert repr(torch.empty(0, device=vgpu)) == "tensor([], device='vgpu:1')"


def test_single_numbers_are_read(vgpu):
    x = torch.tensor(2.5, device=vgpu)
    assert (x.item(), float(x), f"{x:.2f}", bool(x)) == (2.5, 2.5, "2.50", True)
    assert torch.arange(3, device=vgpu).tolist() == [0, 1, 2]
    assert "abc"[torch.tensor(1, device=vgpu)] == "b"


@pytest.mark.parametrize(
    "export",
    [
        lambda x: x.numpy(),
        np.asarray,
        np.from_dlpack,
        lambda x: x.__array_interface__,
        lambda x: x.__cuda_array_interface__,
        torch.from_dlpack,
    ],
    ids=["numpy", "asarray", "from_dlpack", "array interface", "CUDA's", "torch's"],
)
def test_it_is_never_taken_for_the_cpus(vgpu, export):
    refusals = (TypeError, ValueError, RuntimeError, AttributeError, BufferError)
    with pytest.raises(refusals):
        export(torch.ones(2, device=vgpu))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.ones(2, device=d),
        lambda d: torch.tensor([1.0, 2.0], device=d),
        lambda d: torch.as_tensor(np.ones(2), device=d),
        lambda d: torch.arange(3, device=d),
        lambda d: torch.ones(2).to(d),
        lambda d: torch.zeros_like(torch.ones(2), device=d),
        lambda d: torch.ones(2, device=d).new_tensor([1.0]),
        lambda d: torch.ones(2, device=d).new(3),
        lambda d: torch.ones(2, device=d).new(),
        lambda d: torch.ones(2, device=d).new([1.0]),
        lambda d: torch.ones(2, device=d).new(size=(2, 3)),
        lambda d: torch.ones(2, device=d).new(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).new_full((2,), 3.0),
        lambda d: torch.ones(2, device=d).new_empty(2),
        lambda d: torch.ones(2, device=d).new_empty_strided((2,), (1,)),
        lambda d: torch.rand_like(torch.ones(2, device=d)),
        lambda d: torch.Tensor(torch.ones(2, device=d)),
        lambda d: type(torch.ones(2, device=d))(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).type(torch.float64),
        lambda d: torch.ones(2, device=d).type("torch.vgpu.DoubleTensor"),
        lambda d: torch.ones(2, dtype=torch.int64).type_as(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d).new_zeros(2),
        lambda d: torch.randperm(3, device=d),
        lambda d: torch.ones(3, device=d)[[0, 1]],
        lambda d: torch.ones(2).type("torch.vgpu.DoubleTensor").to(d),
        lambda d: torch.nn.Linear(2, 2, device=d).weight,
        lambda d: torch.linspace(0, 1, 3, device=d),
        lambda d: torch.nn.functional.one_hot(torch.arange(3, device=d)),
    ],
)
def test_every_way_to_make_a_tensor_makes_it_there(place, make):
    assert make(place).device == place


def test_new_of_a_tensor_is_that_tensor_by_another_name(vgpu):
    x = torch.ones(2, 3, device=vgpu).t()
    made = x.new(x)
    assert (made.data_ptr(), made.stride()) == (x.data_ptr(), x.stride())
    with pytest.raises(TypeError, match="device=cpu"):
        x.new(torch.ones(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_made_like_it_elsewhere_is_elsewhere(vgpu, device):
    x = torch.ones(2, device=vgpu)
    made = [torch.zeros_like(x, device=device), x.new_ones(2, device=device), x.to(device)]
    assert {y.device for y in made} == {torch.device(device)}


def test_random_numbers_are_the_cpus(vgpu):
    draw = (
        lambda device: torch.randn(5, device=device),
        lambda device: torch.randint(9, (5,), device=device),
        lambda device: torch.randperm(5, device=device),
        lambda device: torch.empty(5, device=device).exponential_(),
        lambda device: torch.nn.functional.dropout(torch.ones(9, device=device), 0.3),
        lambda device: torch.bernoulli(torch.full((5,), 0.5, device=device)),
        lambda device: torch.multinomial(torch.ones(5, device=device), 3),
    )
    torch.manual_seed(0)
    expected = [one("cpu") for one in draw]
    torch.manual_seed(0)
    drawn = [one(vgpu) for one in draw]
    assert all(torch.equal(x.cpu(), y) for x, y in zip(drawn, expected, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x[None].to_mkldnn(),
        lambda x: torch.empty(2, dtype=torch.bits8, device=x.device),
    ],
    ids=["quantized", "mkldnn", "bits"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_numbers_in_plain_memory_are_refused(vgpu, make):
    with pytest.raises(UnsupportedValueError, match="no quantized tensors"):
        make(torch.ones(2, device=vgpu))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_held(vgpu):
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    x = torch.nested.nested_tensor(parts, device=vgpu)
    assert x.device == vgpu
    assert torch.equal(
        x.to_padded_tensor(-1).cpu(), torch.nested.nested_tensor(parts).to_padded_tensor(-1)
    )


# -- memory: copied deeply, pickled, saved, loaded, counted ----------------------------------------


def train(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()
    return net, optimizer


def save(obj, **how):
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


@needs_other_memory
def test_a_storage_changes_its_size_for_all_that_have_it(vgpu):
    x = torch.arange(4, dtype=torch.uint8, device=vgpu)
    view = x[1:]
    x.untyped_storage().resize_(6)
    assert x.untyped_storage().tolist()[:4] == [0, 1, 2, 3]
    view[0] = 7
    assert x.tolist() == [0, 7, 2, 3]
    x.untyped_storage().resize_(0)
    assert (x.untyped_storage().nbytes(), view.untyped_storage().nbytes()) == (0, 0)


def test_a_storage_on_a_virtual_gpu_that_does_not_exist_is_not_made(virtual):
    with pytest.raises(DeviceUnavailableError):
        torch.UntypedStorage(8, device="vgpu:5")


def test_a_storage_is_read_written_and_moved(vgpu):
    storage = torch.UntypedStorage(4, device="vgpu:1").fill_(7)
    assert storage.tolist() == storage.cpu().tolist() == [7] * 4
    assert storage.clone().device == vgpu
    assert storage.to(device="vgpu:0").device == torch.device("vgpu:0")


def test_a_storage_on_the_cpu_is_unchanged(virtual):
    assert torch.UntypedStorage(8).device == torch.UntypedStorage([1]).device == torch.device("cpu")
    assert torch.UntypedStorage(device="meta").device == torch.device("meta")


def test_a_deep_copy_is_on_the_same_device(vgpu):
    x = torch.arange(4.0, device=vgpu)
    y = copy.deepcopy(x)
    assert (y.device, y.tolist()) == (vgpu, [0, 1, 2, 3])
    assert y.data_ptr() != x.data_ptr()


def test_deep_copies_keep_shared_objects_shared(vgpu):
    x = torch.ones(4, device=vgpu)
    y, tail = copy.deepcopy([x, x[1:]])
    y.zero_()
    assert tail.tolist() == [0, 0, 0]


def test_a_model_and_its_optimizer_are_copied_deeply(vgpu):
    net, optimizer = copy.deepcopy(train(vgpu))
    state = [x for kept in optimizer.state.values() for x in kept.values() if x.dim()]
    assert {x.device for x in [*net.parameters(), *net.buffers(), *state]} == {vgpu}
    assert optimizer.param_groups[0]["params"][0] is net[0].weight


def test_a_pickle_is_read_in_a_block(virtual, vgpu):
    with virtual.on("gpu:0"):
        x = pickle.loads(pickle.dumps(torch.ones(2, device=vgpu)))
        y = pickle.loads(pickle.dumps(torch.ones(2, device="cpu")))
    assert x.device == vgpu
    assert y.device.type == "cpu"  # as PyTorch does in a block for a real device


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling_keeps_the_device(vgpu, protocol):
    net, _ = train(vgpu)
    x, other = pickle.loads(pickle.dumps([torch.arange(4.0, device=vgpu)[1:], net], protocol))
    assert (x.device, x.tolist()) == (vgpu, [1, 2, 3])
    assert isinstance(other[0].weight, nn.Parameter)
    assert torch.equal(other[0].weight, net[0].weight)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", [None, "cpu", "vgpu:0", "vgpu:1"])
def test_a_saved_state_is_loaded_where_it_was_or_where_it_is_wanted(vgpu, zipped, where):
    net, optimizer = train(vgpu)
    file = save([net.state_dict(), optimizer.state_dict()], _use_new_zipfile_serialization=zipped)
    state, kept = torch.load(file, map_location=where)
    assert {x.device for x in state.values()} == {torch.device(where or vgpu)}
    assert torch.equal(state["0.weight"].cpu(), net[0].weight.detach().cpu())
    assert torch.equal(
        kept["state"][0]["exp_avg"].cpu(), optimizer.state[net[0].weight]["exp_avg"].cpu()
    )


def test_tensors_saved_on_the_cpu_load_on_a_virtual_gpu(vgpu):
    assert torch.load(save(torch.ones(3)), map_location="vgpu:1").device == vgpu


def test_a_place_that_does_not_exist_loads_nothing(virtual):
    with pytest.raises(RuntimeError, match="device_count"):
        torch.load(save(torch.ones(3)), map_location="vgpu:5")


@pytest.mark.parametrize("source", ["cpu", "vgpu:0"])
def test_a_state_is_loaded_into_a_model_where_the_model_is(vgpu, source):
    net, _ = train(vgpu)
    other, _ = train(source)
    net.load_state_dict(other.state_dict())
    assert net[0].weight.device == vgpu
    assert torch.equal(net[0].weight.cpu(), other[0].weight.cpu())


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


def test_memory_is_counted_by_device(virtual):
    before = virtual.memory("gpu:0").used
    x = torch.ones(1000, device="vgpu:1")
    assert virtual.memory("gpu:0").used == before
    y = x.to("vgpu:0")
    assert virtual.memory("gpu:0").used - before == y.nbytes == 4000


def test_a_trained_model_gives_its_memory_back(virtual, vgpu):
    gc.collect()
    before = virtual.memory("gpu:1").used
    kept = train(vgpu)
    held = virtual.memory("gpu:1").used
    del kept
    gc.collect()
    assert held > before
    assert virtual.memory("gpu:1").used == before


@pytest.mark.parametrize(
    "device", [1, "cuda:1", torch.device("cuda:1"), "vgpu:1"], ids=["index", "text", "cuda", "own"]
)
def test_cuda_means_the_virtual_gpu_of_that_index(virtual, vgpu, device):
    x = torch.ones(2).cuda(device)
    assert (x.device, x.cuda(device) is x) == (vgpu, True)


def test_cuda_without_an_index_means_the_first_virtual_gpu(virtual):
    layer = torch.nn.Linear(2, 1).cuda()
    assert layer.weight.device == torch.ones(2).cuda().device == torch.device("vgpu:0")


def test_cuda_does_not_take_the_cpu_for_a_gpu(virtual):
    with pytest.raises(RuntimeError, match="Invalid device"):
        torch.ones(2).cuda("cpu")
