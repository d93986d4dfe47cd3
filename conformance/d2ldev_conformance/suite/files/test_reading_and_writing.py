"""D2L 6.6, "File I/O": what is saved comes back, wherever it was and wherever it is wanted.

Days of training are in a file. It has to come back as it was, on any device, or as an error that
changes nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from d2ldev import CheckpointError, DeviceUnavailableError, UnsupportedValueError
from d2ldev.framework import Inventory
from d2ldev.framework.testing import framework_of
from d2ldev.settings import VIRTUAL_GPUS
from d2ldev_conformance.provision import (
    composites,
    loops,
    models_with_permutations,
    samples,
)
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import (
    assert_same,
    assert_saved,
    fail_if_called,
    flip_bits,
    needs_float32,
    numbers,
    read_saved_values,
)
from d2ldev_conformance.suite.devices.queues import becomes_idle
from d2ldev_conformance.suite.memory import Held

SECTION = "6.6"
SOURCE = "contract, Files"


@pytest.fixture
def path(tmp_path):
    """A path where no file is yet, in a folder of its own."""
    return tmp_path / "saved.safetensors"


@requirement("io.keeps-every-dtype", section=SECTION, source="safetensors, format")
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4)], ids=str)
def test_a_tensor_comes_back_bit_for_bit(backend, path, dtype, shape):
    """Load a tensor of each dtype and shape with the same bytes."""
    data = numbers(dtype, shape)
    backend.save(backend.asarray(data, dtype=dtype), path)
    loaded = backend.load(path)
    assert backend.dtype_of(loaded) == dtype
    assert_same(backend.to_numpy(loaded), data)


_GRID = np.arange(12, dtype="float32").reshape(3, 4)
_ARRAYS = {
    "big-endian": np.arange(5, dtype=">i4"),
    "big-endian, complex": np.array(1 + 2j, ">c16"),
    "transposed": _GRID.T,
    "reversed": _GRID[::-1, ::-2],
    "broadcast": np.broadcast_to(np.float32(2), (3, 4)),
    "unaligned": np.frombuffer(b"." + _GRID.tobytes(), "float32", offset=1),
    "empty, reversed": np.zeros((3, 0), ">f8")[::-1],
    "long": np.arange(3, dtype=np.longlong),
}


@requirement("io.keeps-arrays", section=SECTION, source="NumPy, arrays")
@pytest.mark.parametrize("array", _ARRAYS)
def test_an_array_comes_back_equal_whatever_its_memory_looks_like(backend, path, array):
    """Save a NumPy array by its values, in whatever order its bytes and axes are.

    Files of other fields, such as FITS, are big-endian.
    """
    x = _ARRAYS[array]
    backend.save({"x": x, "tensor": backend.ones(2)}, path)
    loaded = backend.load(path)["x"]
    assert (loaded.dtype.name, loaded.shape) == (x.dtype.name, x.shape)
    assert loaded.tolist() == x.tolist()
    target = backend.load_into({"x": np.zeros_like(x), "tensor": backend.zeros(2)}, path)
    assert target["x"].tolist() == x.tolist()


_NO_NUMBERS = {
    "text": np.array(["a", "bc"]),
    "bytes": np.array([b"a"]),
    "objects": np.array([1, None], object),
    "records": np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "wide floats": np.zeros(2, np.longdouble),
    "a mask": np.ma.array([1, 2], mask=[0, 1]),
    "a subclass": _GRID.view(np.recarray),
}


@requirement("io.refuses-what-no-file-can-hold", section=SECTION)
@pytest.mark.parametrize("array", _NO_NUMBERS)
def test_an_array_that_no_file_holds_whole_is_refused_by_its_path(backend, path, array):
    """Refuse a NumPy array that is more than numbers, with its path.

    A mask or a unit would be lost without a sign.
    """
    with pytest.raises(UnsupportedValueError, match=r"data\.x"):
        backend.save({"data": {"x": _NO_NUMBERS[array]}}, path)
    assert list(path.parent.iterdir()) == []
    backend.save({"data": {"x": np.zeros(2)}}, path)
    with pytest.raises(UnsupportedValueError, match=r"data\.x"):
        backend.load_into({"data": {"x": _NO_NUMBERS[array]}}, path)


@requirement("io.keeps-nestings", section=SECTION)
def test_a_nesting_comes_back_as_it_was(backend, path):
    """Load dicts, lists, tuples, numbers and None as they were saved."""
    weight = backend.rand((3, 3), seed=0)
    backend.save({"layers": [(weight, None), {7: weight}], "lr": 0.1, "done": True}, path)
    loaded = backend.load(path)
    ((tied, nothing), by_number), lr, done = loaded.values()
    assert list(loaded) == ["layers", "lr", "done"]
    assert (nothing, list(by_number), lr, done) == (None, [7], 0.1, True)
    assert_same(backend.to_numpy(tied), backend.to_numpy(weight))


@requirement("io.keeps-what-is-no-tensor", section=SECTION)
def test_a_container_keeps_its_values_that_are_not_tensors(backend, path, composite):
    """Load values beside the tensors of a framework's containers, such as counts.

    An optimizer that restarts its count of steps makes other steps.
    """
    make, tell = composites(backend)[composite]
    first, second = make(0), make(1)
    expected = tell(first)
    assert tell(second) != expected
    backend.save([first], path)
    (loaded,) = backend.load_into([second], path)
    assert tell(loaded) == expected


@requirement("io.keeps-ties", section=SECTION)
def test_a_tensor_in_two_places_is_one_tensor_after_loading(backend, path):
    """Load a tensor that was in two places as one tensor."""
    weight = backend.rand((3, 3), seed=0)
    backend.save({"encoder": weight, "decoder": [weight]}, path)
    loaded = backend.load(path)
    assert loaded["encoder"] is loaded["decoder"][0]


@requirement("io.loads-to-the-device", section=SECTION)
def test_tensors_are_loaded_to_the_device_that_is_given(backend, path, place, dtype):
    """Load tensors to the given device, with dtype and values."""
    data = numbers(dtype)
    backend.save([backend.asarray(data, dtype=dtype), None], path)
    loaded = backend.load(path, device=place)[0]
    assert backend.device_of(loaded) is place
    assert_same(backend.to_numpy(loaded), data)


@requirement("io.loads-by-no-detour", section=SECTION)
def test_loading_makes_each_tensor_once_where_it_is_wanted(backend, path, place, monkeypatch):
    """Make each loaded tensor once, on the given device.

    A detour by the CPU's tensors needs the memory twice.
    """
    backend.save([backend.ones(3), backend.zeros(2, dtype="int32")], path)
    made, adopt = [], framework_of(backend).files.adopt

    def record(array, dtype, native):
        made.append(backend.device(native))
        return adopt(array, dtype, native)

    monkeypatch.setattr(framework_of(backend).files, "adopt", record)
    monkeypatch.setattr(framework_of(backend).tensors, "transfer", fail_if_called)
    backend.load(path, device=place)
    assert made == [place, place]


@requirement("io.loads-into-new-memory", section=SECTION)
def test_what_is_loaded_has_memory_of_its_own(backend, path, place):
    """Share no memory between what is loaded, what was saved, the file, and another ``load``.

    A file that is mapped into memory would change with the model.
    """
    arrays = {"table": numbers("float32", (64, 64)), "scalar": np.float32(2)}
    obj = {name: backend.asarray(x, device=place) for name, x in arrays.items()}
    backend.save(obj, path)
    first, second = backend.load(path, place), backend.load(path, place)
    Held(backend, obj).check_apart(first)
    held = Held(backend, first)
    held.check_apart(second)
    held.check_apart(backend.load(path, place))


@requirement("io.device-must-exist", section=SECTION)
def test_a_device_that_does_not_exist_is_refused_before_the_file_is_looked_for(
    backend, path, missing
):
    """Refuse a device that does not exist before the file is looked for.

    Reading takes minutes.
    """
    with pytest.raises(DeviceUnavailableError):
        backend.load(path, device=missing)


@requirement("io.device-by-position", section=SECTION, source="contract")
def test_the_device_may_be_given_by_position(backend, path, place):
    """Accept the device as the second argument of ``load``.

    ``to``, ``copy`` and ``place`` take it there, too.
    """
    backend.save(backend.ones(2), path)
    assert backend.device_of(backend.load(path, str(place))) is place


@requirement("io.from-any-device-to-the-cpu", section=SECTION)
def test_tensors_saved_on_any_device_load_to_the_cpu(backend, path, place):
    """Load tensors that were saved on any device to the CPU by default.

    The machine that loads may have no such device.
    """
    x = backend.arange(6, device=place)
    backend.save({"x": x}, path)
    loaded = backend.load(path)["x"]
    assert backend.device_of(loaded) is backend.cpu()
    assert_same(backend.to_numpy(loaded), backend.to_numpy(x))


PROGRAM = """
import sys
import d2ldev
import numpy as np

name, path = sys.argv[1:]
backend = d2ldev.get_backend(name)
x = backend.load(path)["x"]
print(backend.num_gpus(), backend.device_of(x), backend.to_numpy(x).tolist())
"""


@requirement("io.from-a-gpu-without-one", section=SECTION)
@pytest.mark.starts_processes
@pytest.mark.needs_gpus(1)
def test_tensors_saved_on_a_gpu_load_in_a_process_without_one(backend, path):
    """Load a file from a GPU in a process without a GPU.

    Models are trained on servers, and used on laptops.
    """
    backend.save({"x": backend.arange(4, device="gpu:0")}, path)
    without = {VIRTUAL_GPUS: "0", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PROGRAM, backend.name, path],
        env=os.environ | without,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 cpu [0, 1, 2, 3]\n"


@requirement("io.a-failing-save-keeps-the-file", section=SECTION)
@pytest.mark.parametrize("problem", [OSError, MemoryError])
def test_a_failed_save_leaves_only_the_old_file(backend, path, problem, monkeypatch):
    """Keep the old file whole if a save fails, and leave no other file.

    A full disk must not cost the last checkpoint.
    """
    backend.save(backend.ones(3), path)
    before, borrow, borrowed = path.read_bytes(), framework_of(backend).files.borrow, []

    def fail_at_the_second(x):
        borrowed.append(x)
        if len(borrowed) > 1:
            raise problem("nothing left")
        return borrow(x)

    monkeypatch.setattr(framework_of(backend).files, "borrow", fail_at_the_second)
    with pytest.raises((CheckpointError, MemoryError)):
        backend.save([backend.zeros(2), backend.zeros(4)], path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@requirement("io.refuses-what-no-file-can-hold", section=SECTION)
def test_a_value_that_no_file_can_hold_is_refused_by_its_path_and_nothing_is_written(backend, path):
    """Refuse an object that no file can hold by its path, and write nothing.

    Half of a nesting would load without a sign.
    """
    with pytest.raises(UnsupportedValueError, match=r"layers\.1"):
        backend.save({"layers": [backend.ones(3), object()]}, path)
    assert list(path.parent.iterdir()) == []


_BROKEN = {
    "empty": lambda data: data[:0],
    "truncated": lambda data: data[:-1],
    "in its header": lambda data: data[:40],
    "damaged": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "foreign": lambda data: b"PK\3\4" + data,
    "a header without end": lambda data: b"\xff" * 7 + b"\x7f" + data[8:],
}


@requirement("io.refuses-broken-files", section=SECTION)
@pytest.mark.parametrize("broken", _BROKEN)
def test_a_broken_file_is_a_checkpoint_error(backend, path, broken):
    """Refuse a file that is cut, damaged or of another format.

    Damaged weights train on, and worse.
    """
    backend.save(backend.ones(3), path)
    data = _BROKEN[broken](path.read_bytes())
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        backend.load(path)


@requirement("io.finds-two-flipped-bits", section=SECTION)
@pytest.mark.parametrize("bit", range(8))
def test_a_damaged_key_of_the_file_does_not_hide_damaged_numbers(backend, path, bit):
    """Find damaged numbers also if a key of the file's header is damaged.

    A checksum under a damaged key would be taken for missing.
    """
    backend.save({"x": backend.ones(3)}, path)
    whole = path.read_bytes()
    keys = [found.start() + 1 for found in re.finditer(b'"d2ldev', whole)]
    assert keys
    for position in keys:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            backend.load(path)


class Pair(NamedTuple):
    first: object
    second: object


@requirement("io.makes-no-class", section=SECTION, source="Python, pickle")
def test_a_namedtuple_is_a_tuple_and_fills_one_of_the_caller_by_its_fields(backend, path, place):
    """Make no class of the file, and fill an object of the caller by its fields.

    Unpickling runs code of the file's author.
    """
    backend.save([Pair(backend.ones(3), "text")], path)
    (loaded,) = backend.load(path, place)
    assert type(loaded) is tuple
    assert loaded[1] == "text"
    (filled,) = backend.load_into([Pair(backend.zeros(3, device=place), "")], path)
    assert type(filled) is Pair
    assert filled.second == "text"
    assert backend.to_numpy(filled.first).tolist() == [1, 1, 1]


@requirement("io.refuses-a-missing-file", section=SECTION)
def test_a_file_that_is_not_there_is_a_checkpoint_error(backend, path):
    """Report a missing file as a ``CheckpointError``.

    A caller catches one class for all problems of files.
    """
    with pytest.raises(CheckpointError):
        backend.load(path)


@requirement("io.leaves-nothing-recorded", section=SECTION, source="contract, Lazy frameworks")
def test_what_is_loaded_is_computed_without_a_wait(backend, path, place):
    """Compute what ``load`` returns and ``load_into`` changes, although nobody waits for it.

    What is only recorded keeps the bytes of the file in memory.
    """
    obj = {"net": backend.mlp([2, 3], device=place), "x": backend.ones(3, device=place)}
    backend.save(obj, path)
    backend.synchronize()
    loaded = backend.load(path, device=place)
    assert becomes_idle(backend, place)
    into = backend.load_into(obj, path)
    assert becomes_idle(backend, place)
    del loaded, into


@requirement("io.load-into-brings-every-value", section=SECTION)
def test_load_into_brings_every_value(backend, path, place, sample, monkeypatch):
    """Bring each value of a file into a model, an optimizer or a nesting."""
    obj = samples(backend)[sample](backend.cpu())
    saved = {name: flip_bits(value) for name, value in read_saved_values(backend, obj).items()}
    borrow = framework_of(backend).files.borrow
    # Other numbers than the builder gives to the next object.
    with monkeypatch.context() as patch:
        patch.setattr(framework_of(backend).files, "borrow", lambda x: flip_bits(borrow(x)))
        backend.save(obj, path)
    loaded = backend.load_into(samples(backend)[sample](place), path)
    assert_saved(backend, loaded, saved)


@requirement("io.training-goes-on", section=SECTION)
def test_a_loop_goes_on_as_if_it_had_not_been_interrupted(backend, path, loop):
    """Continue a loop written by hand from a file, bit for bit.

    A restored half of the state shows only in the results.

    Begin a loop by hand on the last device, and continue on the first that adds in its order.
    """
    begin, go_on = loops(backend)[loop]
    device = backend.devices()[-1]
    first = next(each for each in backend.devices() if each.kind == device.kind)
    whole = begin(1, device)
    go_on(device, **whole)
    backend.save(whole, path)
    go_on(device, **whole)
    resumed = backend.load_into(begin(2, first), path)
    go_on(first, **resumed)
    expected, found = (read_saved_values(backend, each["net"]) for each in (whole, resumed))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_same(found[name], value)


@requirement("io.load-into-takes-every-name", section=SECTION)
def test_load_into_takes_a_tensor_of_its_own_for_each_name_of_a_tied_one(backend, place, sample):
    """Take a value for each name of a tied tensor, and copy it.

    Other programs write tied weights twice, and may go on with what they have given.
    """
    obj = samples(backend)[sample](place)
    before = read_saved_values(backend, obj)
    copies = {name: backend.copy(x) for name, x in backend.named_tensors(obj).items()}
    held = Held(backend, copies)
    loaded = backend.load_into(obj, copies)
    assert_saved(backend, loaded, before)
    held.check_apart(loaded)


@requirement("io.load-into-takes-every-name", section=SECTION)
def test_load_into_takes_the_values_of_a_model_under_each_of_its_names(backend, place):
    """Take the values of one model under each of its names, and copy them from NumPy's arrays.

    A model may stand in two places of a nesting.
    """
    net = backend.mlp([2, 1], device=place)
    values = {name: flip_bits(x) for name, x in read_saved_values(backend, net).items()}
    given = {f"{outer}.{name}": x.copy() for outer in "ab" for name, x in values.items()}
    loaded = backend.load_into({"a": net, "b": net}, given)
    for x in given.values():
        x[...] = 0
    assert_saved(backend, loaded["a"], values)
    assert_saved(backend, loaded["b"], values)


@requirement("io.load-into-refuses-what-does-not-fit", section=SECTION)
@pytest.mark.parametrize(
    "changed", [{"other": 1}, {None: np.ones(7, "float32")}, {None: [1.0]}, {None: None}], ids=str
)
def test_load_into_refuses_tensors_by_name_that_do_not_fit(backend, changed):
    """Refuse tensors by name that do not fit, name them, and change nothing.

    A broadcast bias would load without a sign.
    """
    net = backend.mlp([2, 1])
    before, named = read_saved_values(backend, net), dict(backend.named_tensors(net))
    first, last = next(iter(named)), list(named)[-1]
    named[first] = np.zeros(before[first].shape, "float32")
    named.update({name or last: value for name, value in changed.items()})
    with pytest.raises((CheckpointError, UnsupportedValueError)) as caught:
        backend.load_into(net, named)
    assert next(name or last for name in changed) in str(caught.value)
    assert_saved(backend, net, before)


@requirement("io.load-into-stays-in-place", section=SECTION)
def test_load_into_leaves_everything_on_its_device(backend, path, place, sample):
    """Leave each tensor on its device in ``load_into``.

    The file knows nothing of the present machine.
    """
    make = samples(backend)[sample]
    backend.save(make(backend.cpu()), path)
    loaded = backend.load_into(make(place), path)
    assert set(backend.placement(loaded).values()) == {place}


@requirement("io.load-into-separates-what-is-two", section=SECTION)
def test_one_tensor_in_two_places_is_two_afterwards_if_the_file_has_two(backend, path, place):
    """Make two tensors of a shared one if the file has two values.

    A model and its average begin as one, and differ later.
    """
    saved = {"net": [backend.ones(3)], "average": [backend.zeros(3)]}
    backend.save(saved, path)
    x = backend.copy(backend.ones(3), place)
    loaded = backend.load_into({"net": [x], "average": [x]}, path)
    for name in saved:
        assert_same(backend.to_numpy(loaded[name][0]), backend.to_numpy(saved[name][0]))
    assert set(backend.placement(loaded).values()) == {place}


@requirement("io.load-into-refuses-what-does-not-fit", section=SECTION)
@pytest.mark.parametrize("sizes", [[3, 5, 1], [3, 4, 4, 1], [4, 3, 1]], ids=str)
def test_load_into_refuses_other_layers_and_changes_nothing(backend, path, sizes):
    """Refuse a file of other layers, and change nothing.

    Each misfit is named at once, so one correction is enough.
    """
    backend.save(backend.mlp([3, 4, 1], seed=1), path)
    net = backend.mlp(sizes, seed=2)
    before = read_saved_values(backend, net)
    with pytest.raises(CheckpointError):
        backend.load_into(net, path)
    assert_saved(backend, net, before)


@requirement("io.load-into-refuses-other-names", section=SECTION)
@pytest.mark.parametrize("name", ["weights", "bias"])
def test_load_into_refuses_other_names(backend, path, name):
    """Refuse a file whose names are others.

    A model that keeps its random weights looks loaded.
    """
    backend.save({"weight": backend.ones(3)}, path)
    with pytest.raises(CheckpointError):
        backend.load_into({name: backend.zeros(3)}, path)


@requirement("io.load-into-names-the-nearest", section=SECTION)
def test_the_error_of_a_missing_name_suggests_the_nearest_one(backend, path):
    """Suggest the nearest name for one that is missing.

    Most misfits are a letter or a prefix.
    """
    backend.save({"weight": backend.ones(3), "bias": backend.ones(2)}, path)
    with pytest.raises(CheckpointError, match="weigth may be weight"):
        backend.load_into({"weigth": backend.zeros(3), "bias": backend.zeros(2)}, path)


@requirement("io.load-into-reads-what-matches", section=SECTION)
def test_load_into_with_strict_false_reads_matches_and_lists_the_rest(backend, path, place):
    """Read with ``strict=False`` what matches, and list the rest.

    Fine-tuning replaces the last layer.
    """
    backend.save({"body": {"w": backend.ones(3)}, "head": backend.ones(2), "n": 7}, path)
    x, y = backend.zeros(3, device=place), backend.zeros(4, device=place)
    loaded = backend.load_into({"body": {"w": x}, "new head": y, "n": 0}, path, strict=False)
    assert loaded.matched == ["body.w"]
    assert (loaded.missing, loaded.unexpected) == (["new head"], ["head"])
    assert backend.to_numpy(loaded.value["body"]["w"]).tolist() == [1, 1, 1]
    assert loaded.value["new head"] is y
    assert loaded.value["n"] == 7
    assert set(backend.placement(loaded.value).values()) == {place}


@requirement("io.load-into-refuses-other-dtypes", section=SECTION)
def test_load_into_refuses_another_dtype(backend, path):
    """Refuse a tensor of another dtype.

    A cast loses digits without a sign.
    """
    backend.save([backend.ones(3, dtype="float32")], path)
    with pytest.raises(CheckpointError):
        backend.load_into([backend.zeros(3, dtype="int32")], path)


@requirement("io.layouts-are-known", section=SECTION)
@needs_float32
def test_the_layers_of_an_mlp_are_known_to_every_framework(backend, path, place):
    """Know the layout of the weights of an ``mlp`` in the framework.

    Files go from one framework to another, which may transpose weights.
    """
    net = backend.mlp([4, 4, 4], activation="tanh", device=place, seed=3)
    backend.save(net, path)
    by_role = _read_by_role(backend, net, path)
    x = numbers("float32", (5, 4)) / 7
    hidden = np.tanh(x @ by_role["0.weight"].T + by_role["0.bias"])
    wanted = hidden @ by_role["1.weight"].T + by_role["1.bias"]
    found = backend.to_numpy(net(backend.asarray(x, device=place)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@requirement("io.unknown-layers-have-no-layout", section=SECTION)
def test_layers_that_something_unknown_stands_between_are_not_taken_for_those_of_an_mlp(
    backend, path, permuted
):
    """Know no layout of dense layers if a layer between them changes the order of the columns.

    Another framework's ``mlp`` would take the weights, and compute something else.
    """
    net = models_with_permutations(backend)[permuted](backend.cpu())
    backend.save(net, path)
    assert _read_by_role(backend, net, path) == {}


def _read_by_role(backend, net, path):
    """Return what is in the file of a model in the canonical form, by the roles of the tensors."""
    layouts = Inventory(framework_of(backend), net, "test", is_saved=True).find_layouts() or {}
    stored = backend.load(path)
    return {
        layout.role: layout.canonical(backend.to_numpy(stored[name]))
        for name, layout in layouts.items()
    }
