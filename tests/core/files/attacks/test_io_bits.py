"""One flipped bit in a file, or two, wherever they are, are found."""

import itertools
import os

import numpy as np
import pytest
from hostile_files import DATA, KEY, entry, file_of, tell

from d2ldev import CheckpointError

# A name that JSON escapes, and so few bytes that all pairs can be tried.
SMALL = {"\u00e9": np.ones(1, "int8")}


class Flipping:
    """A file that was saved, in which bits are flipped and flipped back."""

    def __init__(self, backend, path):
        self.backend, self.path = backend, path
        self.whole = path.read_bytes()
        self.header = range(8 * (8 + int.from_bytes(self.whole[:8], "little")))
        self.data = range(self.header.stop, 8 * len(self.whole))

    def places(self, text):
        """Return the bits of a text that is once in the file."""
        assert self.whole.count(text) == 1
        begin = self.whole.index(text)
        return range(8 * begin, 8 * (begin + len(text)))

    def find_unnoticed(self, flips):
        """Return which of the flips do not keep the file from being loaded."""
        found = []
        with open(self.path, "r+b", buffering=0) as file:
            for flip in flips:
                self._flip(file, flip)
                try:
                    self.backend.load(self.path)
                    found.append(flip)
                except CheckpointError:
                    pass
                self._flip(file, flip)
        return found

    def _flip(self, file, bits):
        for bit in bits:
            (byte,) = os.pread(file.fileno(), 1, bit // 8)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


@pytest.fixture
def small(reference, path):
    reference.save(SMALL, path)
    return Flipping(reference, path)


def test_every_bit_of_a_file_is_found(small):
    every = itertools.chain(small.header, small.data)
    assert small.find_unnoticed((bit,) for bit in every) == []


def test_every_bit_of_the_header_with_one_of_the_data_is_found(small):
    assert small.find_unnoticed(itertools.product(small.header, small.data)) == []


def test_a_file_with_a_key_that_is_damaged_twice_is_not_that_of_another_program(small):
    key = small.places(f'"{KEY}"'.encode())
    assert small.find_unnoticed(itertools.combinations(key, 2)) == []


@pytest.mark.nightly
def test_every_two_bits_of_the_header_are_found(small):
    assert small.find_unnoticed(itertools.combinations(small.header, 2)) == []


@pytest.mark.nightly
def test_every_bit_of_the_header_of_a_run_with_every_bit_of_its_last_tensor_is_found(
    reference, path
):
    x, y = np.arange(3, dtype="float32"), np.ones(1, "float32")
    reference.save({"parts": {"model": [x, y]}, "history": [0.5] * 9, "step": 3}, path)
    run = Flipping(reference, path)
    assert run.find_unnoticed(itertools.product(run.header, run.data[-32:])) == []


@pytest.mark.parametrize("keys", [{"d2ldev_structuRe"}, {KEY, "d2ldev_structuRe"}])
def test_a_file_with_nearly_the_key_is_damaged(reference, path, keys):
    header = tell()
    header["__metadata__"] = dict.fromkeys(keys, header["__metadata__"][KEY])
    path.write_bytes(file_of(header, DATA))
    with pytest.raises(CheckpointError, match="another key for it"):
        reference.load(path)


def test_a_file_of_another_program_has_none_of_the_keys_and_is_read(reference, path):
    header = {"x": entry(), "__metadata__": {"format": "pt", "structure": "none"}}
    path.write_bytes(file_of(header, DATA))
    assert list(reference.load(path)) == ["x"]
