"""Files for other programs, files of other programs, and tensors on the devices that are wanted."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from hostile_files import entry, file_of
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from d2ldev import (
    CheckpointError,
    UnsupportedValueError,
    get_backend,
)
from d2ldev.files.format.container import NAMES, numpy_dtype

DTYPES = get_backend("reference").dtype_names
ODD_BYTES = bytes(range(240, 256)) * 3


def odd(dtype):
    """Return values, some of them NaN with a payload, infinite, or not normal."""
    if dtype == "bool":
        return np.array([True, False, True])
    return np.frombuffer(ODD_BYTES, dtype).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)], ids=str)
def test_a_tensor_of_every_dtype_and_shape_comes_back_bit_by_bit(reference, path, dtype, shape):
    count = int(np.prod(shape))
    array = np.resize(odd(dtype), count).reshape(shape) if count else np.zeros(shape, dtype)
    reference.save({"x": reference.asarray(array)}, path)
    loaded = reference.load(path)["x"]
    assert reference.dtype_of(loaded) == dtype
    assert loaded.shape == shape
    assert reference.to_numpy(loaded).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "dtype",
    [
        *("bfloat16", "float16", "complex64", "complex128", "float8_e3m4", "float8_e4m3fn"),
        *("float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    ],
)
def test_an_array_of_a_dtype_that_numpy_or_the_format_lacks_comes_back(reference, path, dtype):
    array = np.frombuffer(ODD_BYTES, numpy_dtype(dtype)).copy()
    reference.save([array], path)
    (loaded,) = reference.load(path)
    assert loaded.dtype == array.dtype
    assert loaded.tobytes() == array.tobytes()


def test_an_array_that_comes_back_can_be_written_to(reference, path):
    reference.save([np.ones(2), reference.ones(2)], path)
    array, x = reference.load(path)
    array[0] = 5
    assert array.tolist() == [5, 1]
    assert reference.to_numpy(x).tolist() == [1, 1]


def test_another_program_reads_the_tensors_by_their_names(reference, path):
    nesting = {
        "net": [{"w": reference.asarray([[1.0, 2.0]])}],
        "steps": np.arange(3),
        "half": np.ones(1, ml_dtypes.bfloat16),
        "complex": np.array([1 + 2j]),
        "narrow complex": np.array([1 + 2j], "complex64"),
        "epoch": 3,
    }
    reference.save(nesting, path)
    found = load_file(path)
    assert sorted(found) == ["complex", "half", "narrow complex", "net.0.w", "steps"]
    assert found["net.0.w"].tolist() == [[1, 2]]
    assert found["steps"].tolist() == [0, 1, 2]
    assert found["half"].dtype == ml_dtypes.bfloat16
    assert found["narrow complex"].tolist() == [1 + 2j]
    # The real and the imaginary part: the format has no such dtype.
    assert found["complex"].tolist() == [[1, 2]]


def test_tensors_are_aligned_in_the_file(reference, path):
    reference.save([np.ones(3, "int8"), np.ones(3), np.ones(3, "int16"), np.ones(3, "f4")], path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    assert length % 8 == 0
    del header["__metadata__"]
    for what in header.values():
        assert what["data_offsets"][0] % numpy_dtype(NAMES[what["dtype"]]).itemsize == 0


def test_the_file_of_another_program_is_a_dict_from_names_to_tensors(reference, path):
    save_file(
        {"b": np.ones(2, "float32"), "a.w": np.arange(4).reshape(2, 2)},
        path,
        metadata={"format": "pt"},
    )
    loaded = reference.load(path, device="gpu:1")
    assert sorted(loaded) == ["a.w", "b"]
    assert reference.to_numpy(loaded["a.w"]).tolist() == [[0, 1], [2, 3]]
    assert {str(reference.device_of(x)) for x in loaded.values()} == {"gpu:1"}


def test_complex_numbers_of_another_program_are_read(reference, path):
    save_file({"z": np.array([1 + 2j, -3j], "complex64")}, path)
    loaded = reference.load(path)["z"]
    assert reference.dtype_of(loaded) == "complex64"
    assert reference.to_numpy(loaded).tolist() == [1 + 2j, -3j]


PACKED = {
    "F4": ([4], 2, "float4_e2m1fn"),
    "F6_E2M3": ([2, 2], 3, "float6_e2m3fn"),
    "F6_E3M2": ([4], 3, "float6_e3m2fn"),
}


@pytest.mark.parametrize("tag", PACKED)
def test_a_file_with_numbers_below_a_byte_is_read_but_for_them(reference, path, tag):
    shape, size, name = PACKED[tag]
    header = {"x": entry("U8", [1], (0, 1)), "packed": entry(tag, shape, (1, 1 + size))}
    path.write_bytes(file_of(header, bytes([7]) + bytes(size)))
    loaded = reference.load_into({"x": reference.zeros(1, dtype="uint8")}, path, strict=False)
    assert reference.to_numpy(loaded.value["x"]).tolist() == [7]
    assert loaded.unexpected == ["packed"]
    with pytest.raises(CheckpointError, match=f"its tensor 'packed' is of {tag}, which"):
        reference.load(path)
    packed = np.zeros(shape, getattr(ml_dtypes, name))
    with pytest.raises(UnsupportedValueError, match=f"at packed: its dtype is {name}"):
        reference.load_into({"packed": packed}, path, strict=False)


def test_every_dtype_of_the_format_is_known(path):
    path.write_bytes(file_of({"x": entry("C128", [1], (0, 16))}, bytes(16)))
    with pytest.raises(SafetensorError) as told:
        load_file(path)
    known = re.findall(r"`(\w+)`", str(told.value).partition("expected one of")[2])
    assert {"F32"} <= set(known) <= {*NAMES, *PACKED}


@pytest.mark.parametrize("padding", [b" " * 7, b"\r \t\n"])
def test_a_header_may_end_with_white_space(reference, path, padding):
    header = json.dumps({"x": entry()}).encode() + padding
    path.write_bytes(file_of(header, bytes(4)))
    assert list(load_file(path)) == list(reference.load(path)) == ["x"]


@pytest.mark.parametrize("first", [b"x", b"\xef\xbb\xbf"])
def test_a_header_begins_with_a_brace(reference, path, first):
    path.write_bytes(file_of(first + json.dumps({"x": entry()}).encode(), bytes(4)))
    with pytest.raises(CheckpointError, match="is damaged"):
        reference.load(path)


def test_one_nesting_gives_the_same_bytes(reference, path):
    nesting = {"y": reference.ones(2), "x": [np.ones(3, "int8"), reference.zeros(2)], "n": 1}
    reference.save(nesting, path)
    first = path.read_bytes()
    for _ in range(20):
        reference.save(nesting, path)
        assert path.read_bytes() == first


def test_the_header_is_padded_with_blanks(reference, path):
    reference.save({"x": reference.ones(1)}, path)
    whole = path.read_bytes()
    header = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    assert header[:1] == b"{"
    assert header.rstrip(b" ")[-1:] == b"}"


def test_the_file_of_another_program_without_tensors_is_an_empty_dict(reference, path):
    path.write_bytes(file_of({}))
    assert reference.load(path) == {}


def test_a_dtype_that_the_framework_lacks_is_refused_with_those_that_it_has(reference, path):
    save_file({"x": np.ones(2, ml_dtypes.bfloat16)}, path)
    with pytest.raises(
        CheckpointError, match="'x' is of bfloat16, which reference does not have"
    ) as told:
        reference.load(path)
    assert "float32" in told.value.fix


def test_tensors_are_the_callers_own(reference, path):
    reference.save([reference.ones(2)] * 2, path)
    first, again = reference.load(path), reference.load(path)
    first[0][0] = 7.0
    assert reference.to_numpy(first[1]).tolist() == [7, 1]
    assert reference.to_numpy(again[0]).tolist() == [1, 1]


def test_what_the_tool_of_another_program_reads_goes_into_a_model(reference, tmp_path):
    net, other = (reference.mlp([3, 2], seed=seed) for seed in (0, 1))
    named = {name: reference.to_numpy(x) for name, x in reference.named_tensors(net).items()}
    np.savez(tmp_path / "net.npz", **named)
    with pytest.raises(CheckpointError, match=r"numpy\.load"):
        reference.load_into(other, tmp_path / "net.npz")
    with np.load(tmp_path / "net.npz") as read:
        other = reference.load_into(other, read)
    for name, x in reference.named_tensors(other).items():
        assert reference.to_numpy(x).tolist() == named[name].tolist()
