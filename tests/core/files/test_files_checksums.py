"""The checksum of each tensor: of all its bytes, by the algorithm that the file names."""

import json
import zlib

import numpy as np
import pytest
import xxhash
from hostile_files import file_of, with_each_bit_flipped

from d2ldev import CheckpointError
from d2ldev.files.format.checksums import PIECE

# Of several pieces, of one, and of few bytes; then in another order.
SIZES = (2 * PIECE + 5, 7, 0, PIECE, PIECE // 2, 3, PIECE + 1)

# What ``save`` wrote at version 1, of {"x": [1.0, 2.0, 3.0], "n": np.arange(4), "step": 7}.
VERSION_1 = (
    b'\xb0\x01\x00\x00\x00\x00\x00\x00{"__metadata__":{"d2ldev.structure":"{\\"version\\":1,'
    b'\\"backend\\":\\"reference\\",\\"root\\":{\\"at\\":0},\\"containers\\":[{\\"type\\":'
    b'\\"dict\\",\\"items\\":[{\\"tensor\\":0},{\\"array\\":1},7],\\"labels\\":[\\"x\\",\\"n\\",'
    b'\\"step\\"]}],\\"tensors\\":[[\\"x\\",\\"float32\\",\\"fd695267\\"],[\\"n\\",\\"int16\\",'
    b'\\"86169864\\"]]}","d2ldev.checksum":"f3ac829a"},"x":{"dtype":"F32","shape":[3],'
    b'"data_offsets":[0,12]},"n":{"dtype":"I16","shape":[4],"data_offsets":[12,20]}} '
    b"\x00\x00\x80?\x00\x00\x00@\x00\x00@@\x00\x00\x01\x00\x02\x00\x03\x00"
)


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    return {f"w{i}": generator.integers(0, 256, n, "uint8") for i, n in enumerate(SIZES)}


def parts_of(data):
    """Return the header of a file, its description, and the bytes of its tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, json.loads(header["__metadata__"]["d2ldev.structure"]), data[end:]


def test_they_are_of_what_each_tensor_is_and_of_all_its_bytes(reference, path, arrays):
    reference.save(arrays, path)
    _, told, _ = parts_of(path.read_bytes())
    expected = {
        name: xxhash.xxh3_64_hexdigest(f"uint8[{array.size}]".encode() + array.tobytes())
        for name, array in arrays.items()
    }
    assert told["checksums"] == "xxh3_64"
    assert {name: checksum for name, _, checksum in told["tensors"]} == expected


def test_a_file_of_version_1_is_read(reference, path):
    path.write_bytes(VERSION_1)
    loaded = reference.load(path)
    assert reference.to_numpy(loaded["x"]).tolist() == [1.0, 2.0, 3.0]
    assert loaded["n"].tolist() == [0, 1, 2, 3]
    assert loaded["step"] == 7


def test_every_bit_of_a_file_of_version_1_is_in_its_checksums(reference, path):
    for damaged in with_each_bit_flipped(VERSION_1, 20):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="checksum differs"):
            reference.load(path)


def test_a_checksum_is_none_of_another_algorithm(reference, path):
    header, told, data = parts_of(VERSION_1)
    text = json.dumps({**told, "version": 2, "checksums": "xxh3_64"})
    header["__metadata__"] = {
        "d2ldev.structure": text,
        "d2ldev.checksum": f"{zlib.crc32(text.encode()):08x}",
    }
    path.write_bytes(file_of(header, data))
    with pytest.raises(CheckpointError, match="'x' is damaged: the checksum differs"):
        reference.load(path)


def test_tensors_of_all_sizes_come_back(reference, path, arrays):
    reference.save(arrays, path)
    loaded = reference.load(path)
    assert {name: x.tobytes() for name, x in loaded.items()} == {
        name: x.tobytes() for name, x in arrays.items()
    }


@pytest.mark.parametrize("position", [0, PIECE - 1, PIECE, 2 * PIECE + 4], ids=str)
def test_damage_in_any_piece_of_a_tensor_is_found(reference, path, position):
    reference.save({"before": reference.ones(9), "x": np.zeros(SIZES[0], "uint8")}, path)
    begin = path.stat().st_size - SIZES[0]
    with open(path, "r+b") as file:
        file.seek(begin + position)
        file.write(b"\1")
    with pytest.raises(CheckpointError, match="'x' is damaged"):
        reference.load(path)


def test_what_a_damaged_file_is_loaded_into_stays_as_it_was(reference, path, arrays):
    reference.save(arrays, path)
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    into = {name: np.zeros_like(array) for name, array in arrays.items()}
    with pytest.raises(CheckpointError, match="is damaged"):
        reference.load_into(into, path)
    assert not any(array.any() for array in into.values())


def test_arrays_own_their_memory(reference, path, arrays):
    reference.save(arrays, path)
    assert all(array.flags.owndata for array in reference.load(path).values())
