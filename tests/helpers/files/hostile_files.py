"""Files that are not what ``save`` writes, made byte by byte."""

import json
import pickle

import xxhash

DATA = bytes(4)
NO_SUM = "0" * 16
KEY = "d2ldev.structure"


def file_of(header, data=b"", length=None):
    """Return the bytes of a safetensors file: its header as it is given, or as JSON.

    A description whose checksum is ``NO_SUM`` gets the right one.
    """
    if not isinstance(header, bytes):
        text = _metadata(header).get(KEY)
        if isinstance(text, str) and f" {NO_SUM} " in text:
            text = text.replace(NO_SUM, sum_of(header, text.partition(f" {NO_SUM} ")[2]), 1)
            header = {**header, "__metadata__": {**_metadata(header), KEY: text}}
        header = json.dumps(header, separators=(",", ":")).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def _metadata(header):
    found = header.get("__metadata__")
    return found if isinstance(found, dict) else {}


def sum_of(header, structure):
    """Return the checksum of the names, dtypes and shapes of a header, and of its structure."""
    tensors = [
        [name, what.get("dtype"), what.get("shape")] if isinstance(what, dict) else what
        for name, what in sorted(header.items())
        if name != "__metadata__"
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps([5, tensors, structure]).encode())


def describe_header(text, version=5):
    """Return the metadata of a description."""
    return {KEY: f"{version} {NO_SUM} {text}"}


def description_of(header):
    """Return the description in a header."""
    return json.loads(header["__metadata__"][KEY].split(" ", 2)[2])


def with_each_bit_flipped(data, count):
    """Yield the bytes with one bit flipped, for each bit of the last ``count`` bytes."""
    for position in range(len(data) - count, len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            yield damaged


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    """Return what a header says of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def tell(version=5, **parts):
    """Return a header whose description has one tensor 'x', and the values given."""
    description = {
        "backend": "reference",
        "root": {"tensor": 0},
        "containers": [],
        "tensors": [["x", "float32", None]],
    }
    description.update(parts)
    return {"__metadata__": describe_header(json.dumps(description), version), "x": entry()}


def row(kind, items, labels=None, **parts):
    """Return a container in a description."""
    return {"type": kind, "items": items, **({} if labels is None else {"labels": labels}), **parts}


def share_key():
    """Return the rows of a key of 2**60 values."""
    pairs = [row("tuple", [{"at": i}, {"at": i}]) for i in range(60)]
    return [row("tuple", []), *pairs, row("dict", [{"tensor": 0}], [{"at": 60}])]


def long_key(count):
    """Return the rows of a key whose hash takes a while, each time it is computed."""
    labels = [{"at": 0}] * count
    return [
        row("tuple", list(range(count))),
        row("dict", [{"tensor": 0}, *range(1, count)], labels),
    ]


def deep(depth):
    return [row("list", [{"tensor": 0}]), *(row("list", [{"at": i}]) for i in range(depth))]


def containers(*rows):
    return tell(containers=list(rows), root={"at": len(rows) - 1})


def leaf(node):
    return tell(containers=[row("list", [{"tensor": 0}, node])], root={"at": 0})


def layouts(*layout):
    return containers(row("model", [{"tensor": 0}], ["x"], layouts={"x": list(layout)}))


DAMAGED = "it is not a safetensors file, or is damaged"

FORMAT = {
    "empty": (b"", DAMAGED),
    "shorter than a length": (b"abc", DAMAGED),
    "a length alone": ((100).to_bytes(8, "little"), DAMAGED),
    "a length of 2**60": (file_of(b"{}", length=2**60), DAMAGED),
    "a length of 2**64 - 1": (file_of(b"{}", length=2**64 - 1), DAMAGED),
    "a length of 90 million": (file_of(b"{}", length=90_000_000), DAMAGED),
    "a pickle": (pickle.dumps({"a": [1] * 100}), DAMAGED),
    "text": (b"epoch,loss\n0,1.5\n", DAMAGED),
    "no JSON object": (file_of(b"[]"), DAMAGED),
    "an empty header": (file_of(b""), DAMAGED),
    "half of a header": (file_of(b'{"x": '), DAMAGED),
    "no UTF-8": (file_of(b'{"\xff": 1}'), DAMAGED),
    "a name twice": (file_of(b'{"x": 1, "x": 1}'), DAMAGED),
    "NaN": (file_of(b'{"x": NaN}'), DAMAGED),
    "nested without end": (file_of(b'{"x": ' + b"[" * 200_000), DAMAGED),
    "an integer without end": (file_of(b'{"x": ' + b"9" * 10_000 + b"}"), DAMAGED),
    "metadata that is none": (file_of({"__metadata__": {"a": 1}}), DAMAGED),
    "a tensor that is none": (file_of({"x": 1}), DAMAGED),
    "half a byte": (file_of({"x": entry("F4", (3,), (0, 2))}, bytes(2)), DAMAGED),
    "half a surrogate pair": (file_of({"\ud800": entry()}, DATA), DAMAGED),
    "a dtype that nobody knows": (file_of({"x": entry("F33")}, DATA), DAMAGED),
    "a dtype that is no text": (file_of({"x": entry(["F32"])}, DATA), DAMAGED),
    "a negative size": (file_of({"x": entry(shape=(-1,))}, DATA), DAMAGED),
    "a size that is not an integer": (file_of({"x": entry(shape=(1.0,))}, DATA), DAMAGED),
    "a size that is a boolean": (file_of({"x": entry(shape=(True,))}, DATA), DAMAGED),
    "a shape that overflows": (file_of({"x": entry(shape=(2**32,) * 2)}, DATA), DAMAGED),
    "a shape that overflows to 0": (
        file_of({"x": entry(shape=(0, *(2**62,) * 20), offsets=(0, 0))}),
        "no array|do not fit",
    ),
    "too many dimensions": (file_of({"x": entry(shape=(1,) * 65)}, DATA), "no array|do not fit"),
    "negative offsets": (file_of({"x": entry(offsets=(-4, 0))}, DATA), DAMAGED),
    "one offset": (file_of({"x": entry(offsets=(0,))}, DATA), DAMAGED),
    "offsets the wrong way": (file_of({"x": entry(offsets=(4, 0))}, DATA), DAMAGED),
    "offsets beyond the end": (
        file_of({"x": entry(shape=(2**40,), offsets=(0, 2**42))}, DATA),
        DAMAGED,
    ),
    "a hole": (file_of({"x": entry(offsets=(4, 8))}, DATA * 2), DAMAGED),
    "an overlap": (
        file_of({"x": entry(), "y": entry(offsets=(0, 4))}, DATA),
        DAMAGED,
    ),
    "a tail": (file_of({"x": entry()}, DATA * 2), DAMAGED),
    "data that is missing": (file_of({"x": entry()}, DATA[1:]), DAMAGED),
}

SURROGATE = tell()
SURROGATE["__metadata__"][KEY] = "5 \ud800"

DESCRIPTION = {
    "a checksum that is no Unicode": (SURROGATE, DAMAGED),
    "a higher version": (tell(version=6), "of version '6', and this d2ldev reads 5"),
    "a version that is none": (tell(version="x"), "of version 'x', and this"),
    "an entry too few": (tell(containers=None), "cannot be read: TypeError"),
    "another dtype": (tell(tensors=[["x", "float64", None]]), "stored as F32"),
    "a dtype of objects": (
        tell(tensors=[["x", "object", None]]),
        "is of object, which reference has not",
    ),
    "an attribute for a dtype": (
        tell(tensors=[["x", "float8_finfo", None]]),
        "of float8_finfo, which",
    ),
    "a tensor that is not there": (tell(tensors=[["y", "float32", None]]), "which is missing"),
    "a tensor too few": (tell(tensors=[], root=1), "other tensors than it has"),
    "a number that is not a tensor's": (tell(root={"tensor": 1}), "lacks a reference"),
    "a negative number": (tell(root={"tensor": -1}), "lacks a reference"),
    "a number that is none": (tell(root={"tensor": True}), "lacks a reference"),
    "a tensor that is unused": (tell(root=1), "other tensors than it has"),
    "a checksum that is wrong": (tell(tensors=[["x", "float32", "0" * 8]]), "checksum differs"),
    "a cycle": (containers(row("list", [{"tensor": 0}, {"at": 0}])), "lacks a reference"),
    "a reference ahead": (
        containers(row("list", [{"at": 1}]), row("list", [{"tensor": 0}])),
        "lacks a reference",
    ),
    "a node of two keys": (leaf({"tensor": 0, "at": 0}), "cannot be read: ValueError"),
    "a list for a node": (leaf([1]), "lacks a value"),
    "a node that nobody knows": (leaf({"call": "os.system"}), "lacks what is known: call"),
    "a float that is none": (leaf({"float": "1"}), "lacks a number"),
    "a complex number of three": (leaf({"complex": [1.0, 1.0, 1.0]}), "cannot be read"),
    "bytes that are none": (leaf({"bytes": "%"}), "cannot be read"),
    "an integer that is none": (leaf({"int": "x"}), "cannot be read"),
    "a scalar of too many bytes": (leaf({"scalar": ["int8", "0000"]}), "cannot be read"),
    "a scalar of objects": (leaf({"scalar": ["object", "00" * 8]}), "lacks a dtype"),
    "a type that nobody knows": (containers(row("Popen", [{"tensor": 0}], ["x"])), "cannot be"),
    "settings that are none": (
        containers(row("model", [{"tensor": 0}], ["x"], settings=["x"])),
        "cannot be read: TypeError",
    ),
    "a length that is none": (
        containers(row("deque", [{"tensor": 0}], maxlen=2**70)),
        "cannot be read",
    ),
    "labels that are missing": (containers(row("dict", [{"tensor": 0}], [])), "as many keys"),
    "a key twice in a row": (
        containers(row("dict", [{"tensor": 0}, 1], ["x", "x"])),
        "lacks as many keys",
    ),
    "a key that has no hash": (
        containers(row("list", []), row("dict", [{"tensor": 0}], [{"at": 0}])),
        "keys are not all",
    ),
    "a key without end": (containers(*share_key()), "keys are not all"),
    "a long key": (containers(*long_key(33)), "keys are not all"),
    "a long key in many places": (containers(*long_key(30_000)), "keys are not all"),
    "a large key": (
        containers(row("dict", [{"tensor": 0}], [{"int": hex(2**63)}])),
        "keys are not all",
    ),
    "depth without end": (containers(*deep(5000)), "nested deeper than"),
    "layouts that are none": (layouts("0.weight", 1, 1, 1), "cannot be read: TypeError"),
    "a layout of letters": (layouts("0.weight", "a", "0", "1"), "cannot be read: ValueError"),
}
