"""The checksum of each tensor: of what it is, and of all its bytes."""

import json

import numpy as np
import pytest
import xxhash

from d2ldev import CheckpointError
from d2ldev.files.format.checksums import PIECE

# Of several pieces, of one, and of few bytes; then in another order.
SIZES = (2 * PIECE + 5, 7, 0, PIECE, PIECE // 2, 3, PIECE + 1)


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    return {f"w{i}": generator.integers(0, 256, n, "uint8") for i, n in enumerate(SIZES)}


def test_they_are_of_what_each_tensor_is_and_of_all_its_bytes(reference, path, arrays):
    reference.save(arrays, path)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    told = json.loads(header["__metadata__"]["d2ldev.structure"])
    expected = {
        name: xxhash.xxh3_64_hexdigest(f"uint8[{array.size}]".encode() + array.tobytes())
        for name, array in arrays.items()
    }
    assert told["checksums"] == "xxh3_64"
    assert {name: checksum for name, _, checksum in told["tensors"]} == expected


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
