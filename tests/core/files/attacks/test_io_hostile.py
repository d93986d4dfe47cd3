"""A file that is not what it should be is an error that says so, and takes no memory."""

import os
import sys

import pytest
from hostile_files import (
    DAMAGED,
    DATA,
    DESCRIPTION,
    FORMAT,
    containers,
    deep,
    entry,
    file_of,
    layouts,
    row,
    tell,
    with_each_bit_flipped,
)

from d2ldev import CheckpointError


@pytest.mark.parametrize("name", FORMAT)
def test_a_file_against_the_format_is_an_error_with_its_reason(reference, path, name):
    data, problem = FORMAT[name]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=problem):
        reference.load(path)
    with pytest.raises(CheckpointError, match=problem):
        reference.load_into({"x": reference.zeros(1)}, path)


@pytest.mark.parametrize("name", DESCRIPTION)
def test_an_invalid_description_is_an_error_with_its_reason(reference, path, name):
    header, problem = DESCRIPTION[name]
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError, match=problem):
        reference.load(path)


def test_the_files_that_the_tests_damage_can_be_read(reference, path):
    path.write_bytes(file_of(tell(), DATA))
    assert reference.to_numpy(reference.load(path)).tolist() == [0]
    path.write_bytes(file_of({"x": entry()}, DATA))
    assert list(reference.load(path)) == ["x"]
    path.write_bytes(file_of(containers(*deep(200)), DATA))
    assert isinstance(reference.load(path), list)
    path.write_bytes(file_of(layouts("0.weight", [1], [0], [1]), DATA))
    assert list(reference.load(path)) == ["x"]


def test_a_file_of_a_terabyte_without_a_header_is_not_read(reference, path):
    with open(path, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=DAMAGED):
        reference.load(path)


def test_every_bit_of_the_data_is_in_its_checksum(reference, path):
    reference.save({"x": reference.ones(2), "y": reference.ones(1, dtype="int8")}, path)
    for damaged in with_each_bit_flipped(path.read_bytes(), 9):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="checksum differs"):
            reference.load(path)


def test_a_file_that_was_cut_anywhere_is_an_error(reference, path):
    reference.save({"x": reference.ones(2)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            reference.load(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"reference", b"Reference"), (b'"x":{', b'"y":{'), (b"F32", b"I32"), (b"[1]", b"[ ]")],
)
def test_a_header_that_was_changed_is_an_error(reference, path, old, new):
    whole = file_of(tell(), DATA)
    path.write_bytes(whole.replace(old, new))
    assert path.read_bytes() != whole
    with pytest.raises(CheckpointError, match="its header is damaged: the checksum differs"):
        reference.load(path)


@pytest.mark.parametrize("place", ["", "missing", "file/x", "pipe", "/dev/zero"])
def test_a_path_without_a_file_is_an_error(reference, tmp_path, place):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="cannot load "):
        reference.load(tmp_path / place)


def test_a_class_that_is_named_is_not_imported(reference, path):
    header = containers(row("namedtuple", [{"tensor": 0}], ["x"], **{"class": "this.Point"}))
    path.write_bytes(file_of(header, DATA))
    assert type(reference.load(path)) is tuple
    assert "this" not in sys.modules


@pytest.mark.parametrize("name", ["../x", "/etc/x", "__class__", "a.b", ""])
def test_a_name_is_only_a_key(reference, path, name):
    path.write_bytes(file_of({name: entry()}, DATA))
    assert list(reference.load(path)) == [name]
    assert list(path.parent.iterdir()) == [path]


def test_containers_that_share_without_end_have_no_names(reference, path):
    rows = [row("dict", [{"tensor": 0}], ["x"])]
    rows += [row("dict", [{"at": i}, {"at": i}], ["a", "b"]) for i in range(60)]
    path.write_bytes(file_of(containers(*rows), DATA))
    with pytest.raises(CheckpointError):
        reference.load_into(reference.mlp([2, 3]), path)
