"""torch's tensors: its defaults left alone, autograd, layouts, and the dtypes that NumPy lacks."""

import json
import subprocess
import sys
import weakref
from pathlib import Path

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch
from installs import find_extras
from peer_rows import peer_rows
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from d2ldev import (
    DeviceLog,
    OutOfDeviceMemoryError,
    PackageNotInstalledError,
    UnsupportedValueError,
    cpu,
    gpu,
)
from d2ldev.framework.testing import framework_of

FLOATS = ("float16", "bfloat16", "float32", "float64")
TOO_MUCH = 1 << 50

MAKE = {
    "zeros": lambda backend, **arguments: backend.zeros((2, 3), **arguments),
    "ones": lambda backend, **arguments: backend.ones((2, 3), **arguments),
    "full": lambda backend, **arguments: backend.full((2, 3), 4.0, **arguments),
    "arange": lambda backend, **arguments: backend.arange(3, **arguments),
    "rand": lambda backend, **arguments: backend.rand((2, 3), **arguments),
    "randn": lambda backend, **arguments: backend.randn((2, 3), **arguments),
    "asarray": lambda backend, **arguments: backend.asarray([1.0, 2.0], **arguments),
}

# -- making ----------------------------------------------------------------------------------------


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


@pytest.fixture
def other_default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def default_on_meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_torch_s_default_device_is_not_followed(torch_backend, make, default_on_meta):
    assert make(torch_backend).is_cpu


def test_torch_s_default_device_is_left_as_it_was(torch_backend, make, default_on_meta):
    make(torch_backend, device="cpu")
    assert torch.get_default_device() == torch.device("meta")


def test_on_the_cpu_torch_itself_makes_tensors_there(torch_backend, default_on_meta):
    with torch_backend.on(cpu()):
        assert torch.ones(1).is_cpu
    assert torch.ones(1).is_meta


def test_a_scope_is_torch_s_own_default_too(meta):
    with meta.on("gpu"):
        assert torch.ones(1).is_meta
    assert torch.ones(1).is_cpu


@pytest.mark.parametrize("name", ["zeros", "ones", "rand", "randn", "asarray"])
def test_torch_s_default_dtype_is_followed(torch_backend, name, other_default_dtype):
    assert MAKE[name](torch_backend).dtype is torch.float64


def test_torch_s_default_dtype_is_left_as_it_was(torch_backend, make, other_default_dtype):
    make(torch_backend, dtype="float32")
    assert torch.get_default_dtype() is torch.float64


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("draw", ["rand", "randn"])
def test_random_numbers_have_every_floating_dtype(torch_backend, draw, name):
    assert MAKE[draw](torch_backend, dtype=name).dtype is getattr(torch, name)


def test_an_alias_of_torch_s_dtype_is_the_same(torch_backend):
    assert torch_backend.zeros(2, dtype=torch.half).dtype is torch.float16


def test_a_list_of_tensors_becomes_one(torch_backend):
    assert torch_backend.asarray([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]


def test_tensors_are_made_without_gradients(torch_backend, make):
    assert not make(torch_backend).requires_grad


def test_a_size_that_no_address_reaches_is_out_of_memory(torch_backend):
    with pytest.raises(OutOfDeviceMemoryError):
        torch_backend.zeros((1 << 40, 1 << 40))


def test_too_large_a_copy_is_out_of_memory(torch_backend):
    with pytest.raises(OutOfDeviceMemoryError):
        torch_backend.copy(torch.ones(1).expand(TOO_MUCH))


def test_without_a_seed_numbers_come_from_torch_s_random_state(torch_backend):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ours = torch_backend.rand(3)
        torch.manual_seed(3)
        assert torch.equal(ours, torch.rand(3))


# -- moving and copying ----------------------------------------------------------------------------


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


def test_a_nested_tensor_is_split_by_rows(ledger):
    rows = [torch.full((n, 2), float(n)) for n in (2, 1, 3)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for batch in ({"x": x}, {"x": x, "y": torch.ones(3)}):
        first, second = ledger.split(batch, ["gpu:0", "gpu:1"])
        parts = [part["x"].cpu().unbind() for part in (first, second)]
        assert [[each.tolist() for each in part] for part in parts] == [
            [each.tolist() for each in rows[:2]],
            [rows[2].tolist()],
        ]
        assert [ledger.device_of(part["x"]) for part in (first, second)] == [gpu(0), gpu(1)]
    with pytest.raises(UnsupportedValueError, match="x has 3, y has 2"):
        ledger.split({"x": x, "y": torch.ones(2)}, ["gpu:0", "gpu:1"])


def test_a_packed_sequence_is_not_split(ledger):
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    with pytest.raises(UnsupportedValueError, match="PackedSequence at x consists of several"):
        ledger.split({"x": packed}, ["gpu:0", "gpu:1"])


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


def test_a_tensor_without_memory_has_no_device(torch_backend):
    with pytest.raises(UnsupportedValueError, match="the tensor is on meta"):
        torch_backend.device_of(torch.ones(1, device="meta"))


def test_a_tensor_subclass_is_a_tensor(torch_backend):
    class Labelled(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Labelled)
    assert torch_backend.to(x, "cpu") is x
    assert type(torch_backend.copy(x)) is Labelled


# -- NumPy -----------------------------------------------------------------------------------------


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def test_a_list_takes_every_dtype(torch_backend):
    for name in torch_backend.dtype_names:
        x = torch_backend.asarray([0, 1, 1], dtype=name)
        assert x.dtype is getattr(torch, name)
        # float8_e8m0fnu has no zero: torch gives its least number.
        torch.testing.assert_close(x, torch.tensor([0, 1, 1]).to(x.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_data_of_a_dtype_that_numpy_lacks_converts(torch_backend, name):
    x = torch_backend.asarray(np.array([1.5, -2], numpy_dtype(name)), dtype="float32")
    assert x.dtype is torch.float32
    assert x.tolist() == [1.5, -2]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "use",
    [
        lambda backend, x, path: backend.to_numpy(x),
        lambda backend, x, path: backend.save({"x": x}, path),
        lambda backend, x, path: backend.load(path),
    ],
    ids=["to_numpy", "save", "load"],
)
def test_a_dtype_that_numpy_lacks_needs_ml_dtypes(torch_backend, path, monkeypatch, name, use):
    x = torch.ones(2).to(getattr(torch, name))
    torch_backend.save({"x": x}, path)
    before = path.read_bytes()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(PackageNotInstalledError, match=f"cannot hold {name} in NumPy") as caught:
        use(torch_backend, x, path)
    assert find_extras(caught.value.fix) == ["files"]
    assert path.read_bytes() == before


def test_moving_and_computing_in_bfloat16_needs_no_ml_dtypes(torch_backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    device = torch_backend.try_gpu()
    x = torch_backend.to(torch_backend.asarray([1.5, 2], dtype="bfloat16"), device)
    assert torch_backend.copy(x + x, device).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("name", "bits", "number"),
    [
        ("float32", "uint32", 0x7FC0_1234),
        ("float64", "uint64", 0x7FF8_0000_0000_1234),
        ("float16", "uint16", 0x7E12),
        ("bfloat16", "uint16", 0x7FC3),
    ],
)
def test_the_payload_of_nan_survives(torch_backend, name, bits, number):
    array = np.array([number], bits).view(numpy_dtype(name))
    assert torch_backend.to_numpy(torch_backend.asarray(array)).view(bits)[0] == number


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(6.0)[::-1],
        np.arange(6.0)[::2],
        np.broadcast_to(np.float32(2), (2, 2)),
        np.arange(6, dtype=">i4"),
        np.array(3.5),
        np.zeros((0, 3), np.float32),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(4).astype(ml_dtypes.bfloat16)[::-1],
        np.array(2, ml_dtypes.bfloat16),
    ],
    ids=[
        *("transposed", "negative stride", "every second", "broadcast", "big-endian"),
        *("0-dim", "no elements", "column-major", "bfloat16 reversed", "bfloat16 0-dim"),
    ],
)
def test_any_layout_of_numpy_is_taken(torch_backend, array):
    x = torch_backend.asarray(array)
    assert tuple(x.shape) == array.shape
    assert torch_backend.to_numpy(x).tolist() == array.tolist()


def test_a_read_only_array_is_copied_without_a_warning(torch_backend):
    array = np.arange(3)
    array.flags.writeable = False
    x = torch_backend.asarray(array)
    x[0] = 7
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_result_of_to_numpy_belongs_to_the_caller(torch_backend, name):
    x = torch_backend.zeros(2, dtype=name)
    array = torch_backend.to_numpy(x)
    array[0] = 1
    assert array.flags.writeable
    assert torch_backend.to_numpy(x).tolist() == [0, 0]


def test_a_conjugated_tensor_gives_its_values(torch_backend):
    x = torch.tensor([1 + 2j]).conj()
    assert x.is_conj()
    assert torch_backend.to_numpy(x).tolist() == [1 - 2j]


def test_a_tensor_with_a_pending_minus_gives_its_values(torch_backend):
    x = torch.tensor([1 + 2j]).conj().imag
    assert x.is_neg()
    assert torch_backend.to_numpy(x).tolist() == [-2]


def test_a_sparse_tensor_gives_a_dense_array(torch_backend):
    x = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    assert torch_backend.to_numpy(x).tolist() == [[0, 2], [0, 0]]


def test_a_tensor_that_needs_gradients_gives_its_values(torch_backend):
    x = torch.ones(2, requires_grad=True)
    assert torch_backend.to_numpy(x * 2).tolist() == [2, 2]
    assert x.requires_grad


def test_a_tensor_without_memory_gives_no_values(torch_backend):
    with pytest.raises(TypeError, match="the tensor is on meta"):
        torch_backend.to_numpy(torch.ones(1, device="meta"))


def test_an_expanded_tensor_gives_memory_of_its_own_for_each_number(torch_backend):
    array = torch_backend.to_numpy(torch.ones(1).expand(3))
    array[0] = 5
    assert array.tolist() == [5, 1, 1]


def test_a_list_of_arrays_is_taken_without_torch_s_warning_that_it_is_slow(torch_backend):
    x = torch_backend.asarray([np.ones(2, np.float32), np.zeros(2, np.float32)])
    assert x.tolist() == [[1, 1], [0, 0]]


# -- DLPack ----------------------------------------------------------------------------------------


def test_from_dlpack_refuses_read_only_memory(torch_backend):
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(TypeError, match=r"(?i)read-?only"):
        torch_backend.from_dlpack(array)


@pytest.mark.parametrize(
    "array",
    [np.arange(3.0)[::-1], array_api_strict.flip(array_api_strict.arange(3))],
    ids=["numpy", "array-api-strict"],
)
def test_from_dlpack_refuses_negative_strides_for_which_torch_would_abort(torch_backend, array):
    with pytest.raises(TypeError, match="negative strides"):
        torch_backend.from_dlpack(array)


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 2)), np.array(3), np.array([True, False])],
    ids=["transposed", "no elements", "0-dim", "bool"],
)
def test_from_dlpack_takes_any_other_layout(torch_backend, array):
    x = torch_backend.from_dlpack(array)
    assert (tuple(x.shape), x.tolist()) == (array.shape, array.tolist())


def test_memory_that_was_taken_over_outlives_its_owner(torch_backend):
    array = np.arange(1000)
    x = torch_backend.from_dlpack(array)
    released = weakref.ref(array)
    del array
    assert released() is not None
    assert x[999] == 999


def test_memory_that_was_refused_is_given_back(torch_backend):
    array = np.arange(3.0)
    references = sys.getrefcount(array)
    with pytest.raises(TypeError):
        torch_backend.from_dlpack(array[::-1])
    assert sys.getrefcount(array) == references


def test_from_dlpack_refuses_a_tensor_that_needs_gradients(torch_backend):
    with pytest.raises(TypeError, match="cannot take over the memory of") as caught:
        torch_backend.from_dlpack(torch.ones(2, requires_grad=True))
    assert isinstance(caught.value.__cause__, BufferError)


# -- logs ------------------------------------------------------------------------------------------


def test_a_kept_loss_has_no_graph_and_leaves_the_users_its_own(torch_backend):
    loss = (torch.ones(4, requires_grad=True) * 2).sum()
    kept = framework_of(torch_backend).tensors.detach(loss)
    assert kept.grad_fn is None
    assert kept.data_ptr() == loss.data_ptr()
    loss.backward()


def test_a_kept_number_of_a_large_tensor_does_not_keep_the_rest(torch_backend):
    kept = framework_of(torch_backend).tensors.detach(torch.ones(1000)[0])
    assert kept.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("before", [{}, {"loss": 1.0}, {"loss": torch.tensor(1.0)}], ids=str)
def test_a_scalar_without_bytes_is_refused_also_as_the_first_of_a_log(torch_backend, before):
    log = DeviceLog(torch_backend)
    log.add(**before)
    with pytest.raises(UnsupportedValueError, match="cannot log loss: the tensor is on meta"):
        log.add(loss=torch.tensor(1.0, device="meta"))
    assert log.flush().get("loss", []) == [1.0] * len(before)


def calls_in(run):
    """How many functions of Python and of C a function calls."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def test_a_number_that_is_logged_costs_few_calls(torch_backend):
    """A list costs one for each, and the calls are what a log costs beside it."""
    losses = [torch.tensor(float(number)) for number in range(200)]
    log = DeviceLog(torch_backend, "cpu")
    log.add(loss=losses[0])
    added = calls_in(lambda: [log.add(loss=loss) for loss in losses])
    assert added <= 13 * len(losses)
    assert calls_in(log.flush) <= 2 * len(losses)


def test_what_has_nothing_to_do_costs_few_calls(torch_backend):
    """A list of another class costs two calls more than a list; ``placement`` walks once."""

    class Rows(list):
        pass

    x, net = torch.ones(4, 2), torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))

    def calls(run):
        run()  # what is asked for the first time is remembered
        return calls_in(run) - calls_in(lambda: None)

    rows, plain = Rows([x, x]), [x, x]
    in_a_list = calls(lambda: torch_backend.to(plain, "cpu"))
    assert in_a_list <= 13
    assert calls(lambda: torch_backend.to(rows, "cpu")) <= in_a_list + 2
    assert calls(lambda: torch_backend.place(x, "cpu")) <= 35  # nine of them for the context
    # Three of them ask whether a tensor is ragged.
    assert calls(lambda: torch_backend.split((x, x), ["cpu"])) <= 75
    of_a_place = calls(lambda: torch_backend.place(net, "cpu"))
    assert calls(lambda: torch_backend.placement(net)) <= of_a_place


def test_a_move_and_a_copy_of_one_tensor_cost_few_calls_beside_torch_s_own(meta):
    """Of Python: the backend, where and what the tensor is, the rule for errors, torch's room."""
    x, device = torch.ones(4), gpu(0)
    moved = meta.to(x, device)
    assert meta.device_of(moved) is device
    of_the_counting = calls_in(lambda: None)
    assert calls_in(lambda: meta.to(x, device)) - of_the_counting <= 7
    assert calls_in(lambda: meta.copy(moved)) - of_the_counting <= 7


def test_a_norm_is_one_operation(torch_backend):
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            operations.append(str(operation))
            return operation(*args, **(kwargs or {}))

    operations, x = [], torch.tensor([3.0, 4.0])
    with Counting():
        norm = framework_of(torch_backend).tensors.norm(x)
    assert norm == 5
    assert operations == ["aten.linalg_vector_norm.default"]


# -- what the benchmark compares -------------------------------------------------------------------

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from measure import Comparison
from rows import torch_rows

def seen(value):
    if isinstance(value, torch.nn.Module):
        return sorted(value.state_dict())
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if isinstance(value, list):
        return [seen(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else str(value)

# Those of ``strict()`` time one statement inside of a block and outside of it.
rows = [row for row in torch_rows() if isinstance(row, Comparison) and row.theirs != row.ours]
rows = [row for row in rows if row.theirs]
print(json.dumps([
    [f'{row.ours} | {row.theirs}', *(seen(eval(text, dict(row.names)))
    for text in (row.ours, row.theirs))]
    for row in rows
]))
"""


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_there_are_rows_for_the_handle_and_for_the_backend_and_for_what_calls_cost(results):
    owners = {name.partition(".")[0] for name, _, _ in results}
    assert owners == {"backend", "d2l", "handle", "room"}


def test_both_sides_of_every_row_give_the_same(results):
    differing = [name for name, ours, theirs in results if ours != theirs]
    assert differing == []


def test_the_results_that_are_kept_name_what_they_were_measured_on():
    kept = json.loads((BENCHMARKS / "results" / "overhead-torch-cpu.json").read_text())
    assert kept["versions"]["torch"]
    assert all(row["value"] > 0 for row in kept["results"])


def test_both_sides_of_every_row_of_the_peers_give_the_same():
    rows = peer_rows("torch")
    assert len(rows) > 10
    assert [row for row in rows if row[2] != row[3]] == []


@pytest.mark.parametrize(
    ("number", "dtype", "wide"),
    [
        (70000.0, torch.float16, "float32"),
        (70000, torch.float16, "float32"),
        (1e300, torch.complex64, "complex128"),
        (300, torch.uint8, "int32"),
        (0.5, torch.int32, "float32"),
        (2, torch.bool, "int32"),
    ],
)
def test_a_number_that_does_not_fit_is_given_a_dtype_of_its_kind(
    torch_backend, number, dtype, wide
):
    with pytest.raises(UnsupportedValueError) as caught:
        torch_backend.full((1,), number, like=torch.ones(1, dtype=dtype))
    assert caught.value.fix == f"dtype='{wide}'"
    torch_backend.full((1,), number, dtype=wide)
