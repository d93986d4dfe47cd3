"""Files and folders of other programs: ``load`` and ``load_into`` say whose they are."""

import io
import pickle
import random
import zipfile

import numpy as np
import pytest

from d2ldev import CheckpointError
from d2ldev.files.format.other_programs import recognise


def write_file(write, *arguments, **named):
    file = io.BytesIO()
    write(file, *arguments, **named)
    return file.getvalue()


def archive(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        for name in names:
            members.writestr(name, b"x" * 100)
    return file.getvalue()


TABLE = b"\0" * 300 + bytes.fromhex("57fb808b247547db")
FILES = {
    "net.pt": (archive("net/data.pkl", "net/byteorder", "net/data/0"), "torch.save"),
    "net.pth": (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2),
        "torch.save",
    ),
    "script.pt": (archive("net/data/0", "net/data.pkl", "net/constants.pkl"), "TorchScript"),
    "x.npy": (write_file(np.save, np.ones(3)), "NumPy"),
    "x.npz": (write_file(np.savez, x=np.ones(3)), "NumPy"),
    "packed.npz": (write_file(np.savez_compressed, x=np.ones(3)), "NumPy"),
    "net.h5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 100, "HDF5"),
    "net.keras": (archive("metadata.json", "config.json", "model.weights.h5"), "Keras"),
    "net.params": (b"\x12\1" + b"\0" * 14 + b"\2" + b"\0" * 99, "MXNet"),
    "state.msgpack": (b"\x81\xa6params\x82\xa1k\xc0\xa1b\xc0", "flax.serialization"),
    "ck-1.index": (TABLE, "TensorFlow"),
    "checkpoint": (b'model_checkpoint_path: "ck-1"\n', "TensorFlow"),
    **{
        f"p{protocol}.pkl": (pickle.dumps({"x": [1.0, 2.0]}, protocol), "pickle")
        for protocol in range(2, 6)
    },
}
FOLDERS = {
    "saved": (["saved_model.pb", "fingerprint.pb"], "SavedModel"),
    "orbax": (["_METADATA", "manifest.ocdbt"], "Orbax"),
    "managed": (["9/default/_METADATA", "10/default/_METADATA"], "Orbax"),
    "one step": (["_CHECKPOINT_METADATA", "default/_METADATA"], "Orbax"),
    "parts": ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
    "tensorflow": (["checkpoint", "ck-1.index", "ck-1.data-00000-of-00001"], "TensorFlow"),
}


def make_folder(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize("call", ["load", "load_into"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognised_by_its_bytes(reference, tmp_path, name, call):
    data, whose = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        reference.load(path) if call == "load" else reference.load_into(reference.ones(1), path)
    assert whose in caught.value.problem
    assert "new.safetensors" in caught.value.fix
    assert name in caught.value.attempted


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_recognised_by_its_files(reference, tmp_path, name):
    names, whose = FOLDERS[name]
    with pytest.raises(CheckpointError) as caught:
        reference.load(make_folder(tmp_path / name, names))
    assert whose in caught.value.problem


def test_the_newest_step_of_a_manager_is_named(tmp_path):
    folder = make_folder(tmp_path / "managed", FOLDERS["managed"][0])
    assert repr(str(folder / "10" / "default")) in recognise(str(folder)).line


@pytest.mark.parametrize("name", ["ck-1", "ck-1.data-00000-of-00001"])
def test_a_checkpoint_of_tensorflow_is_known_by_its_index(tmp_path, name):
    make_folder(tmp_path, FOLDERS["tensorflow"][0])
    assert "TensorFlow" in recognise(str(tmp_path / name)).what


@pytest.mark.parametrize(
    "data", [b"", b"PK\3\4", archive("a.txt"), b"\x80", b"hello", b"\x89PNG\r\n\x1a\n" * 9]
)
def test_an_unknown_file_is_not_recognised(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    assert recognise(str(tmp_path / "file")) is None


def test_an_empty_folder_and_a_missing_file_are_recognised_as_nothing(tmp_path):
    assert recognise(str(tmp_path)) is None
    assert recognise(str(tmp_path / "missing")) is None
    assert recognise("\0") is None


@pytest.mark.parametrize("length", [0x112, 0x280, 0x580])
def test_a_damaged_file_of_ours_is_not_taken_for_another_programs(reference, tmp_path, length):
    """The lengths of these headers begin as MXNet's files and pickles do."""
    path = tmp_path / "file"
    path.write_bytes(length.to_bytes(8, "little") + b"{" + b" " * 4 * length)
    with pytest.raises(CheckpointError, match="it is not a safetensors file, or is damaged"):
        reference.load(path)


def test_hostile_files_raise_only_our_errors(reference, tmp_path):
    numbers, path = random.Random(0), tmp_path / "file"
    for data, _ in FILES.values():
        for _ in range(20):
            hostile = bytearray(data[: numbers.randrange(len(data) + 1)] + numbers.randbytes(9))
            hostile[numbers.randrange(len(hostile))] ^= 255
            path.write_bytes(hostile)
            with pytest.raises(CheckpointError):
                reference.load(path)
