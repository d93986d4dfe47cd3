"""Reading a file takes time and memory to match its size, and errors stay short."""

import json

import pytest
from hostile_files import DATA, containers, describe_header, entry, file_of, row

from d2ldev import CheckpointError


def test_a_tensor_that_is_an_array_too_is_refused(reference, path):
    header = containers(row("list", [{"tensor": 0}, {"array": 0}]))
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError, match="other tensors than it has"):
        reference.load(path)


def test_values_that_could_not_be_read_are_not_written(reference, path, monkeypatch):
    monkeypatch.setattr("d2ldev.files.format.container.MAX_HEADER", 10_000)
    with pytest.raises(CheckpointError, match="belong into arrays"):
        reference.save({"x": list(range(10_000))}, path)
    assert list(path.parent.iterdir()) == []


def double(count, label="a"):
    """Return the rows of containers that share children, with 2**count values."""
    pairs = [row("dict", [{"at": i}, {"at": i}], [label, "b"]) for i in range(count)]
    return [row("dict", [{"tensor": 0}], [label]), *pairs]


@pytest.mark.parametrize("label", ["a" * 10_000, "a"], ids=len)
def test_names_that_are_long_or_many_are_refused(reference, path, label):
    path.write_bytes(file_of(containers(*double(20, label)), DATA))
    with pytest.raises(CheckpointError, match="letters"):
        reference.load_into(reference.mlp([2, 3]), path)


def test_the_parts_of_a_long_name_are_not_all_looked_at(reference, path):
    path.write_bytes(file_of({"a." * 500_000: entry()}, DATA))
    with pytest.raises(CheckpointError, match="has nothing under 'b'"):
        reference.load_into({"x": reference.zeros(1)}, path, only="b")


@pytest.mark.parametrize("read", ["load", "load_into"])
@pytest.mark.parametrize("name", ["n" * 1_000_000, "\ud800", "\x1b[2J\n  fix: rm"], ids=len)
def test_an_error_shows_text_from_a_file_shortened_and_printable(reference, path, name, read):
    header = {"x": entry(), name: {**entry(), "dtype": "F33"}}
    if read == "load_into":
        header = containers(row("dict", [{"tensor": 0}], [name]))
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError) as caught:
        getattr(reference, read)(*[{"x": reference.zeros(1)}][: read == "load_into"], path)
    text = str(caught.value)
    assert len(text.encode()) < 5000
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


def test_the_writer_named_in_a_file_is_shown_shortened(reference, path):
    header = containers(row("dict", [{"tensor": 0}], ["x"]))
    text = header["__metadata__"]["d2ldev.structure"].replace(
        '"reference"', json.dumps("w" * 10**6)
    )
    header["__metadata__"] = describe_header(text)
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError) as caught:
        reference.load_into({"y": reference.zeros(1)}, path)
    assert len(str(caught.value)) < 5000
