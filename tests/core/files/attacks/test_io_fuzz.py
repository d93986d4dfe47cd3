"""Whatever is done to a file, it is read or refused."""

import json

import numpy as np
import pytest
from hostile_files import KEY, describe_header, description_of, entry, file_of
from hypothesis import given, settings
from hypothesis import strategies as st

from d2ldev import CheckpointError, get_backend

REFERENCE = get_backend("reference")


def draw_nesting():
    x = REFERENCE.asarray([1.0, 2.0])
    return {
        "x": x,
        "tied": [x, (x, np.arange(3))],
        "n": [1, 2**70, float("inf"), 1j, b"ab", None, "text", np.float32(1)],
        ("a", 1): {3: (4, "b")},
        "y": REFERENCE.zeros((2, 0, 3), dtype="complex128"),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a valid file."""
    path = tmp_path_factory.mktemp("fuzz") / "whole.safetensors"
    REFERENCE.save(draw_nesting(), path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


def is_read_or_refused(path, data):
    path.write_bytes(data)
    errors = []
    for read in (lambda: REFERENCE.load(path), lambda: REFERENCE.load_into(draw_nesting(), path)):
        try:
            read()
        except CheckpointError as error:
            errors.append(str(error))
    assert all(text.startswith("cannot load ") and len(text) < 5000 for text in errors)


@settings(max_examples=400)
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=4)),
        min_size=1,
        max_size=3,
    )
)
def test_bytes_that_are_changed_dropped_or_put_in(whole, path, edits):
    data = bytearray(whole)
    for where, dropped, new in edits:
        start = int(where * len(data))
        data[start : start + dropped] = new
    is_read_or_refused(path, bytes(data))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        ["", "x", "tensor", "at", "dict", "tuple", "set", "model", "state", "float32", "F32", "U8"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["at", "tensor", "array", "int", "bytes", "scalar", "type", "items"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=5,
)


def places(value, found=None):
    """Yield every ``(container, key)`` in JSON."""
    found = [] if found is None else found
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            places(inner, found)
    return found


@settings(max_examples=600)
@given(
    edits=st.lists(
        st.tuples(st.booleans(), st.floats(0, 1, exclude_max=True), st.booleans(), ANYTHING),
        min_size=1,
        max_size=3,
    )
)
def test_json_that_is_changed_with_checksums_that_are_right(whole, path, edits):
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    metadata = header["__metadata__"]
    description = description_of(header)
    for in_description, where, is_dropped, new in edits:
        found = places(description if in_description else header)
        if not found:
            continue
        container, key = found[int(where * len(found))]
        if is_dropped:
            del container[key]
        else:
            container[key] = new
    text = json.dumps(description)
    if header.get("__metadata__") is metadata and KEY in metadata:
        metadata |= describe_header(text)
    is_read_or_refused(path, file_of(header, whole[8 + length :]))


TEXTS = ["\ud800", "\udfff" * 16, "x\udc80", "\x00", "é" * 16, "9" * 5000, "NaN", "\x1b[2J"]
OTHERS = [
    10**400,
    -(10**400),
    1e308,
    True,
    None,
    [[[[]]]],
    {"int": "\ud800"},
    {"scalar": ["\ud800", ""]},
]


@pytest.mark.parametrize("new", [*TEXTS, *OTHERS], ids=lambda new: ascii(new)[:20])
def test_hostile_values_in_each_place_of_a_header(whole, path, new):
    length = int.from_bytes(whole[:8], "little")
    text, data = whole[8 : 8 + length], whole[8 + length :]
    for in_description in (False, True):
        count = len(places(_parts(text)[in_description]))
        for number in range(count):
            header, description = parts = _parts(text)
            container, key = places(parts[in_description])[number]
            container[key] = new
            # The value, and then the key as well.
            for _ in range(1 + (isinstance(new, str) and isinstance(container, dict))):
                if in_description:
                    header["__metadata__"] |= describe_header(json.dumps(description))
                is_read_or_refused(path, file_of(header, data))
                if isinstance(container, dict):
                    container[f"{new}"] = container.pop(key, None)


def _parts(text):
    """Return the header and the description in it."""
    header = json.loads(text)
    return header, description_of(header)


@pytest.mark.parametrize(
    "text",
    [
        '{"backend": NaN}',
        '{"backend": Infinity}',
        '{"backend": "a", "backend": "a"}',
        '{"backend": 1e999}',
        '{"backend": ' + "9" * 5000 + "}",
        '{"backend": ' + "[" * 100_000,
        '{"backend": 4, "root": "\\ud800"}',
        '"\\ud800"',
        "\ud800",
        "",
        "null",
    ],
    ids=lambda text: ascii(text[:30]),
)
def test_a_description_that_is_not_our_json_is_refused(path, text):
    path.write_bytes(file_of({"__metadata__": describe_header(text), "x": entry()}, bytes(4)))
    for read in (lambda: REFERENCE.load(path), lambda: REFERENCE.load_into(draw_nesting(), path)):
        with pytest.raises(CheckpointError):
            read()


@settings(max_examples=100)
@given(data=st.binary(max_size=64), is_json=st.booleans())
def test_arbitrary_bytes_are_read_or_refused(path, data, is_json):
    is_read_or_refused(path, file_of(b"{" + data + b"}") if is_json else data)
