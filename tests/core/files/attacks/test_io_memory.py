"""Reading a file takes no more than four times the memory of the file, and time to match."""

import json

import pytest
from hostile_files import DATA, containers, described, entry, file_of, row, told
from processes import run_python

from d2ldev import CheckpointError

MEGABYTES = 12
# What fills a header, and what stands in its place in a list.
FILLERS = {
    "empty objects": "{},",
    "empty lists": "[],",
    "numbers": "0,",
    "short text": '"ab",',
    "objects": '{"a":{}},',
}
PROGRAM = """
    import sys
    from d2ldev import CheckpointError, get_backend

    def peak():
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    backend = get_backend("reference")
    before = peak()
    try:
        backend.load(FILE)
    except CheckpointError as error:
        show([peak() - before, error.problem])
    else:
        show([peak() - before, "read"])
"""


def taken(path):
    """Load a file in a process of its own; return how much memory that took, and what was said."""
    return run_python(PROGRAM.replace("FILE", repr(str(path))))[0]


def many(filler):
    return filler * (MEGABYTES * 2**20 // len(filler)) + "0"


def filled_description(filler):
    """Return a file whose description is of the format, but for what fills it."""
    header = told(containers=[row("list", [{"tensor": 0}, "FILLER"])], root={"at": 0})
    text = header["__metadata__"]["d2ldev.structure"].replace('"FILLER"', many(filler))
    header["__metadata__"] = described(text)
    return file_of(header, DATA)


@pytest.mark.parametrize("name", FILLERS)
@pytest.mark.parametrize("in_description", [False, True])
def test_a_header_full_of_values_takes_less_than_four_times_its_file(path, name, in_description):
    if in_description:
        data = filled_description(FILLERS[name])
    else:
        data = file_of(f'{{"x":[{many(FILLERS[name])}]}}'.encode())
    path.write_bytes(data)
    memory, problem = taken(path)
    assert memory < 4 * len(data)
    assert "more memory than four times the file" in problem


# What takes the most memory for a value of the JSON text, and how many of them are allowed.
ALLOWED = {
    "numbers": ("1.5", 275_000),
    "text": ('"ab"', 275_000),
    "lists": (row("list", []), 46_000),
    "sets": (row("set", [1]), 46_000),
    "dicts": (row("dict", [1], [2]), 30_500),
    "keys": (None, 137_000),
    "tensors": (None, 11_300),
}


def as_many_as_allowed(name):
    """Return the header of a file whose last tensor takes 32 MB."""
    (what, count), length = ALLOWED[name], 32_000_000
    rows, last, small = [], row("list", [{"tensor": 0}]), {}
    if name == "keys":
        last = row("dict", [{"tensor": 0}, *[1] * count], list(range(count + 1)))
    elif name == "tensors":
        small = {str(i): entry("U8", [1], (i, i + 1)) for i in range(count)}
        length -= count
    elif isinstance(what, dict):
        rows = [what] * count
    else:
        last["items"] += [json.loads(what)] * count
    header = told(containers=[*rows, last], root={"at": len(rows)})
    if name == "tensors":
        header = {"__metadata__": {}, **small}
    begin = len(small)
    return {**header, "x": entry("F32", [length // 4], (begin, begin + length // 4 * 4))}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_file_with_as_many_values_as_are_allowed_takes_less_than_four_times_its_size(path, name):
    header = as_many_as_allowed(name)
    whole = file_of(json.dumps(header, separators=(",", ":")).encode())
    with open(path, "wb") as file:
        file.write(whole)
        file.truncate(len(whole) + header["x"]["data_offsets"][1])
    memory, problem = taken(path)
    assert problem == "read"
    assert memory < 4 * path.stat().st_size


@pytest.mark.parametrize("name", ["text", "name", "metadata"])
def test_a_text_whose_characters_take_four_bytes_is_counted_as_such(path, name):
    """One wide character makes all characters of a text as wide in memory."""
    text = "a" * 40_000_000 + "\N{GRINNING FACE}"
    header = {
        "text": containers(row("list", [{"tensor": 0}, text])),
        "name": {text: entry()},
        "metadata": {"__metadata__": {"a": text}, "x": entry()},
    }
    path.write_bytes(file_of(header[name], DATA))
    memory, problem = taken(path)
    assert "more memory than four times the file" in problem
    assert memory < 2 * path.stat().st_size


def test_a_tensor_counts_for_what_a_framework_takes_for_it(reference, path):
    header = {str(i): entry("U8", [0], (0, 0)) for i in range(30_000)}
    path.write_bytes(file_of(header))
    with pytest.raises(CheckpointError, match=r"30000 tensors and .* more memory"):
        reference.load(path)


def test_a_tensor_that_is_an_array_too_is_refused(reference, path):
    header = containers(row("list", [{"tensor": 0}, {"array": 0}]))
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError, match="one tensor as an array, too"):
        reference.load(path)


def test_what_could_not_be_read_is_not_written(reference, path):
    with pytest.raises(CheckpointError, match=r"np\.asarray\(numbers\)"):
        reference.save({"x": list(range(1_000_000))}, path)
    assert list(path.parent.iterdir()) == []


def doubled(count, label="a"):
    """Return the rows of containers that share children, with 2**count values."""
    pairs = [row("dict", [{"at": i}, {"at": i}], [label, "b"]) for i in range(count)]
    return [row("dict", [{"tensor": 0}], [label]), *pairs]


@pytest.mark.parametrize("label", ["a" * 10_000, "a"], ids=len)
def test_names_that_are_long_or_many_are_refused(reference, path, label):
    path.write_bytes(file_of(containers(*doubled(18, label)), DATA))
    with pytest.raises(CheckpointError, match="letters"):
        reference.load_into(reference.mlp([2, 3]), path)


def test_the_parts_of_a_long_name_are_not_all_looked_at(reference, path):
    path.write_bytes(file_of({"a." * 500_000: entry()}, DATA))
    with pytest.raises(CheckpointError, match="has nothing under 'b'"):
        reference.load_into({"x": reference.zeros(1)}, path, only="b")


@pytest.mark.parametrize("read", ["load", "load_into"])
@pytest.mark.parametrize("name", ["n" * 1_000_000, "\ud800", "\x1b[2J\n  fix: rm"], ids=len)
def test_what_a_file_says_is_told_shortly_and_can_be_printed(reference, path, name, read):
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


def test_the_writer_that_a_file_names_is_told_shortly(reference, path):
    header = containers(row("dict", [{"tensor": 0}], ["x"]))
    text = header["__metadata__"]["d2ldev.structure"].replace(
        '"reference"', json.dumps("w" * 10**6)
    )
    header["__metadata__"] = described(text)
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError) as caught:
        reference.load_into({"y": reference.zeros(1)}, path)
    assert len(str(caught.value)) < 5000
