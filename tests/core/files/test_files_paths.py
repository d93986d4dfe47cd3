"""Whatever a path is, it is read, written, or an error of ours; nothing else is touched."""

import os
import subprocess
import sys
import time

import pytest
import safetensors

from d2ldev import CheckpointError, Trainer, UnsupportedValueError
from d2ldev.errors import D2LDevError


class Odd:
    def __fspath__(self):
        raise RuntimeError("odd")


def save(backend, path):
    backend.save(backend.ones(1), path)


def load(backend, path):
    backend.load(path)


def load_into(backend, path):
    backend.load_into(backend.zeros(1), path)


def train(backend, path):
    Trainer(0, backend=backend).fit(backend.mlp([2, 1]), [], checkpoint=path)


def resume(backend, path):
    Trainer(0, backend=backend).fit(backend.mlp([2, 1]), [], checkpoint=path, resume=True)


CALLS = (save, load, load_into, train, resume)


@pytest.fixture
def good(reference, tmp_path):
    """A file that nothing may change."""
    save(reference, tmp_path / "good.st")
    return tmp_path / "good.st"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "name",
    [
        *("n" * 300, "n/" * 3000 + "x", "a\0b", "", ".", "..", "folder", "folder/", "missing/x"),
        *("good.st/", "good.st/.", "good.st/..", "good.st/x", "good.st/../other", "pipe", "loop"),
        *("link/", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "~/x/y", Odd(), b"", 3),
    ],
    ids=lambda name: repr(name)[:20],
)
def test_a_path_of_no_file_is_an_error_of_ours(reference, tmp_path, good, call, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("good.st")
    before, names = good.read_bytes(), sorted(os.listdir(tmp_path))
    given = os.path.join(tmp_path, name) if isinstance(name, str) and name else name
    with pytest.raises(D2LDevError) as caught:
        call(reference, given)
    assert isinstance(caught.value, (CheckpointError, UnsupportedValueError))
    assert good.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.parametrize("call", CALLS)
def test_a_folder_that_may_not_be_entered_is_an_error_of_ours(
    reference, tmp_path, call, monkeypatch
):
    # A test may run as one who may enter every folder.
    stat = os.stat

    def refuse(path, *args, **options):
        if str(path).startswith(str(tmp_path / "locked")):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *args, **options)

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        call(reference, tmp_path / "locked" / "run.st")


@pytest.mark.parametrize("call", CALLS)
def test_an_error_about_an_undecodable_path_can_be_printed(reference, tmp_path, call):
    path = os.fsencode(tmp_path) + b"/\xff/x"
    with pytest.raises(CheckpointError) as caught:
        call(reference, path)
    assert b"\\udcff" in str(caught.value).encode()


def replace_at(call, backend, path, monkeypatch):
    """Replace a file by another one whenever the library opens it, so often."""
    opened, safe_open = [], safetensors.safe_open

    def open_another(*args, **options):
        if len(opened) < call:
            opened.append(path)
            backend.save(backend.full((len(opened) + 1,), 2.0), path)
        return safe_open(*args, **options)

    monkeypatch.setattr(safetensors, "safe_open", open_another)
    return opened


def test_a_file_that_is_replaced_while_it_is_opened_is_read_whole(reference, good, monkeypatch):
    opened = replace_at(3, reference, good, monkeypatch)
    assert reference.to_numpy(reference.load(good)).tolist() == [2] * 4
    assert len(opened) == 3


def test_a_file_that_is_replaced_each_time_is_an_error_that_says_so(reference, good, monkeypatch):
    replace_at(10**9, reference, good, monkeypatch)
    with pytest.raises(CheckpointError, match="others have replaced it 100 times"):
        reference.load(good)


WRITER = """
import sys
from d2ldev import get_backend

backend = get_backend("reference")
print("ready", flush=True)
number = 0
while True:
    number += 1
    backend.save({"x": backend.full((number % 7 + 1,), float(number)), "n": number}, sys.argv[1])
"""


def test_a_file_is_read_whole_while_another_process_saves_to_its_path(reference, good):
    reference.save({"x": reference.ones(2), "n": 1}, good)
    with subprocess.Popen([sys.executable, "-c", WRITER, good], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout.readline()
            seen, end = set(), time.monotonic() + 3
            while time.monotonic() < end:
                loaded = reference.load(good)
                n = loaded["n"]
                assert reference.to_numpy(loaded["x"]).tolist() == [n] * (n % 7 + 1)
                seen.add(n)
        finally:
            writer.kill()
    assert len(seen) > 10
