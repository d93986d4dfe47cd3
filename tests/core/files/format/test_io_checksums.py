"""Checksums are computed in a thread, whatever the sizes of the tensors, and never left out."""

import json
import threading
import zlib

import numpy as np
import pytest
from processes import run_python

from d2ldev import CheckpointError
from d2ldev.files.format.checksums import PIECE

# Of several pieces, of one that a thread is started for, and of few bytes; then in another order.
SIZES = (2 * PIECE + 5, 7, 0, PIECE, PIECE // 2, 3, PIECE + 1)

AT_THE_END = """
    import atexit
    import numpy as np
    import d2ldev

    backend = d2ldev.get_backend("reference")
    x = np.arange(1_000_000, dtype="float32")

    def save_and_load():
        backend.save({"x": x}, "run.safetensors")
        loaded = backend.load("run.safetensors")["x"]
        show(loaded.tobytes() == x.tobytes())

    atexit.register(save_and_load)
"""


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    return {f"w{i}": generator.integers(0, 256, n, "uint8") for i, n in enumerate(SIZES)}


def test_they_are_of_what_each_tensor_is_and_of_all_its_bytes(reference, path, arrays):
    reference.save(arrays, path)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    told = json.loads(header["__metadata__"]["d2ldev.structure"])["tensors"]
    expected = {
        name: f"{zlib.crc32(array, zlib.crc32(f'uint8[{array.size}]'.encode())):08x}"
        for name, array in arrays.items()
    }
    assert {name: checksum for name, _, checksum in told} == expected


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


def test_the_thread_ends_with_the_call(reference, path, arrays):
    before = threading.active_count()
    reference.save(arrays, path)
    assert threading.active_count() == before
    reference.load(path)
    assert threading.active_count() == before


def test_without_a_thread_they_are_computed_all_the_same(reference, path, arrays, monkeypatch):
    reference.save(arrays, path)
    whole = path.read_bytes()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reference.save(arrays, path)
    assert path.read_bytes() == whole
    assert reference.load(path)["w0"].tobytes() == arrays["w0"].tobytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged"):
        reference.load(path)


def test_files_are_written_and_read_while_python_exits(tmp_path):
    assert run_python(AT_THE_END, folder=tmp_path) == [True]


def test_arrays_own_their_memory(reference, path, arrays):
    reference.save(arrays, path)
    assert all(array.flags.owndata for array in reference.load(path).values())
