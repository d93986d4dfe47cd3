"""``to`` and ``copy`` of torch's tensors: autograd, modes, and the tensors torch has more of."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from d2ldev import UnsupportedValueError, cpu, gpu


@pytest.mark.parametrize(
    "there", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu:0"), cpu()], ids=repr
)
@pytest.mark.parametrize("made", ["cpu", "cpu:0"])
def test_every_spelling_of_the_cpu_is_where_the_tensor_is(torch_backend, made, there):
    x = torch.ones(2, device=made)
    assert torch_backend.to(x, there) is x


def test_a_tensor_that_moves_is_copied_once(ledger):
    x = torch.ones(2)
    y = ledger.to(x, "cuda:1")
    assert ledger.device_of(y) is gpu(1)
    assert len(ledger.copied) == 1


def test_a_tensor_on_a_device_of_torch_itself_is_there(meta):
    x = meta.to(torch.ones(2), "gpu")
    assert x.device == torch.device("meta")
    assert meta.to(x, torch.device("meta")) is x


def test_gradients_flow_through_a_move(ledger):
    x = torch.ones(2, requires_grad=True)
    (ledger.to(x, gpu()) * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_gradients_flow_through_a_copy(torch_backend):
    x = torch.ones(2, requires_grad=True)
    (torch_backend.copy(x) * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_without_gradients_a_move_records_nothing(ledger):
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        y = ledger.to(x, gpu())
        assert not torch.is_grad_enabled()
    assert not y.requires_grad


def test_in_inference_mode_a_tensor_that_is_there_is_itself(torch_backend):
    with torch.inference_mode():
        x = torch.ones(2)
        assert torch_backend.to(x, "cpu") is x


def test_in_inference_mode_a_copy_is_made(torch_backend):
    with torch.inference_mode():
        x = torch.ones(2)
        y = torch_backend.copy(x)
    assert y.data_ptr() != x.data_ptr()


def test_an_expanded_tensor_s_copy_has_memory_for_each_number(torch_backend):
    y = torch_backend.copy(torch.ones(1).expand(3))
    y[0] = 5
    assert y.tolist() == [5, 1, 1]


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2, 3).T,
        torch.arange(6)[::2],
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.ones(2, dtype=torch.float8_e5m2),
    ],
    ids=["conjugated", "pending minus", "transposed", "strided", "empty", "0-dim", "float8"],
)
def test_a_copy_has_the_values_and_the_dtype_in_new_memory(torch_backend, x):
    y = torch_backend.copy(x)
    assert (y.dtype, y.shape, y.tolist()) == (x.dtype, x.shape, x.tolist())
    assert y.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_a_sparse_tensor_is_copied_as_one(torch_backend):
    x = torch.eye(2).to_sparse()
    y = torch_backend.copy(x)
    assert y.is_sparse
    assert y.values().data_ptr() != x.values().data_ptr()


def test_the_memory_format_survives_a_move(ledger):
    x = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
    y = ledger.to(x, gpu())
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_a_parameter_in_a_batch_moves_with_the_path_back(ledger):
    w = nn.Parameter(torch.ones(2))
    moved = ledger.to({"w": [w]}, gpu())
    moved["w"][0].sum().backward()
    assert ledger.device_of(moved["w"][0]) is gpu()
    assert w.grad.tolist() == [1, 1]


def test_a_packed_sequence_moves_but_for_the_sizes_that_torch_wants_on_the_host(ledger):
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = ledger.to([packed], gpu())[0]
    assert type(moved) is PackedSequence
    assert ledger.device_of(moved.data) is gpu()
    assert ledger.device_of(moved.sorted_indices) is gpu()
    assert ledger.device_of(moved.batch_sizes) is cpu()


def test_a_packed_sequence_that_is_there_is_itself(torch_backend):
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert torch_backend.to(packed, "cpu") is packed


def test_a_packed_sequence_runs_through_a_recurrent_layer_after_the_move(ledger):
    packed = ledger.to(pack_sequence([torch.ones(2, 1)]), gpu())
    assert nn.GRU(1, 4)(packed)[0].data.shape == (2, 4)


def test_a_copied_packed_sequence_shares_no_memory(torch_backend):
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    copied = torch_backend.copy(packed)
    assert copied.data.data_ptr() != packed.data.data_ptr()
    assert copied.batch_sizes.data_ptr() != packed.batch_sizes.data_ptr()


def test_a_structure_that_torch_returns_stays_one(ledger):
    result = torch.ones(2, 2).max(dim=0)
    moved = ledger.to(result, gpu())
    assert type(moved) is torch.return_types.max
    assert ledger.device_of(moved.indices) is gpu()


def test_a_size_in_a_batch_stays_itself(ledger):
    batch = {"shape": torch.Size([2, 3]), "x": torch.ones(2, 3)}
    assert ledger.to(batch, gpu())["shape"] is batch["shape"]


def test_a_model_in_a_batch_is_refused_and_place_is_named(torch_backend):
    with pytest.raises(UnsupportedValueError, match=r"(?s)at 1 is.*backend\.place"):
        torch_backend.copy([torch.ones(1), nn.Linear(1, 1)])


def test_a_tensor_without_memory_has_no_device(torch_backend):
    with pytest.raises(UnsupportedValueError, match="the tensor is on meta"):
        torch_backend.device_of(torch.ones(1, device="meta"))


def test_a_tensor_subclass_is_a_tensor(torch_backend):
    class Labelled(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Labelled)
    assert torch_backend.to(x, "cpu") is x
    assert type(torch_backend.copy(x)) is Labelled


def test_threads_move_their_own_models(ledger):
    start = threading.Barrier(4)
    models = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))) for _ in range(4)]
    before = [model(torch.ones(1, 3)).tolist() for model in models]

    def work(model):
        start.wait()
        ledger.place(model, gpu(1))
        return ledger.to(model(torch.ones(1, 3)), gpu()).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, models)) == before
    assert set(ledger.placement(models).values()) == {gpu(1)}
