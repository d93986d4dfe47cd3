"""The checksum of each tensor: of all its bytes, by the algorithm that the file names."""

import json

import numpy as np
import pytest
import xxhash
from hostile_files import description_of

from d2ldev import CheckpointError

PIECE = 1 << 20
# Of several pieces, of one, and of few bytes; then in another order.
SIZES = (2 * PIECE + 5, 7, 0, PIECE, PIECE // 2, 3, PIECE + 1)


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    return {f"w{i}": generator.integers(0, 256, n, "uint8") for i, n in enumerate(SIZES)}


def parts_of(data):
    """Return the header of a file, its description, and the bytes of its tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return header, description_of(header), data[end:]


def test_a_checksum_covers_dtype_shape_and_all_bytes_of_a_tensor(reference, path, arrays):
    reference.save(arrays, path)
    _, told, _ = parts_of(path.read_bytes())
    expected = {
        name: xxhash.xxh3_64_hexdigest(f"uint8[{array.size}]".encode() + array.tobytes())
        for name, array in arrays.items()
    }
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


def test_a_damaged_file_does_not_change_the_target_of_load_into(reference, path, arrays):
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


def test_arrays_can_be_written_to(reference, path, arrays):
    reference.save(arrays, path)
    assert all(array.flags.writeable for array in reference.load(path).values())
