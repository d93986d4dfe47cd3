"""A path holds the old file or the new one, whatever happens to who writes."""

import errno
import fcntl
import os
import re
import stat
import threading

import pytest
import safetensors
from processes import run_python

from d2ldev import CheckpointError, UnsupportedValueError

KILLED = """
    import os, random, signal, time
    import d2ldev

    backend = d2ldev.get_backend("reference")
    folder = os.getcwd()
    path = os.path.join(folder, "run.safetensors")
    contents = {}
    for step in (1, 2):
        obj = {"step": step, "x": backend.full((20_000 * step,), float(step)), "y": [step] * 99}
        backend.save(obj, path)
        contents[open(path, "rb").read()] = obj
    assert len(contents) == 2

    rng = random.Random(0)
    met, torn = set(), 0
    for _ in range(400):
        child = os.fork()
        if not child:
            while True:
                for obj in contents.values():
                    backend.save(obj, path)
        time.sleep(rng.uniform(0, 0.012))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += len(os.listdir(folder)) > 1
        found = open(path, "rb").read()
        assert found in contents, len(found)
        assert backend.load(path)["step"] == contents[found]["step"]
        met.add(found)
    backend.save(1, path)
    assert os.listdir(folder) == ["run.safetensors"]
    show(len(met))
    show(torn)
"""


@pytest.fixture
def saved(reference, path):
    """The bytes of a file that is there."""
    reference.save({"a": reference.ones(3)}, path)
    return path.read_bytes()


def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    met, caught_writing = run_python(KILLED, folder=tmp_path)
    assert met == 2
    assert caught_writing >= 20


TERMINATED = """
    import os, random, signal, time
    import d2ldev

    backend = d2ldev.get_backend("reference")
    rng = random.Random(0)
    left = 0
    path = os.path.abspath("run.safetensors")
    x = backend.zeros(40_000)
    backend.save(x, path)
    for _ in range(100):
        child = os.fork()
        if not child:
            while True:
                backend.save(x, path)
        time.sleep(rng.uniform(0, 0.012))
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        left += sum(name.endswith("-partial") for name in os.listdir())
        assert len(os.listdir()) <= 2, os.listdir()
    backend.save(1, os.path.abspath("another.safetensors"))
    show(sorted(os.listdir()))
    show(left)
"""


def test_the_next_save_removes_files_of_a_terminated_writer(tmp_path):
    found, left = run_python(TERMINATED, folder=tmp_path)
    assert found == ["another.safetensors", "run.safetensors"]
    assert left >= 5


def test_a_partial_file_is_named_for_its_process(reference, path, monkeypatch):
    names = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (names.append(a), replace(a, b)))
    reference.save(1, path)
    (name,) = names
    pattern = rf".*/\.saved\.safetensors\.{os.getpid()}\.[0-9a-f]{{16}}\.d2ldev-partial/new"
    assert re.fullmatch(pattern, name)


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_save_returns(
    reference, path, monkeypatch
):
    calls = []

    def record_call(name, call):
        def record(*given):
            kind = stat.S_IFMT(os.fstat(given[0]).st_mode) if name == "fsync" else None
            calls.append(
                {None: name, stat.S_IFREG: "fsync file", stat.S_IFDIR: "fsync folder"}[kind]
            )
            return call(*given)

        monkeypatch.setattr(os, name, record)

    for name in ("fsync", "replace"):
        record_call(name, getattr(os, name))
    reference.save({"a": reference.ones(3)}, path)
    reference.save({"a": reference.zeros(3)}, path)
    one = ["fsync file", "replace", "fsync folder"]
    assert calls == one * 2


@pytest.mark.parametrize("name", ["saved.safetensors", "another.safetensors"])
def test_files_of_a_dead_writer_are_removed_by_the_next_one(reference, path, name):
    abandoned = path.with_name(f".{name}.99999.0123456789abcdee.d2ldev-partial")
    abandoned.mkdir()
    (abandoned / ".tmpAbCd").write_bytes(b"half")
    reference.save(1, path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "name",
    [
        ".saved.safetensors.0123456789abcdef.partial",
        ".saved.safetensors.mine.0123456789abcdef.d2ldev-partial",
        ".saved.safetensors.1.mine.d2ldev-partial",
        "saved.safetensors.1.0123456789abcdef.d2ldev-partial",
        ".1.0123456789abcdef.d2ldev-partial",
        ".saved.safetensors.1.0123456789abcdef.d2ldev-partial.txt",
        "a.d2ldev-partial",
        ".saved.safetensors.1.0123456789abcdef.d2ldev-partial",
    ],
)
def test_files_of_others_stay(reference, path, name):
    path.with_name(name).write_bytes(b"mine")
    reference.save(1, path)
    assert path.with_name(name).read_bytes() == b"mine"


def test_files_that_another_process_writes_stay(reference, path):
    partial = path.with_name(".saved.safetensors.1.0123456789abcdef.d2ldev-partial")
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    reference.save(1, path)
    assert partial.exists()
    os.close(descriptor)
    reference.save(1, path)
    assert not partial.exists()


def test_a_link_of_that_name_is_not_followed(reference, path, tmp_path):
    (tmp_path / "precious").write_bytes(b"mine")
    partial = path.with_name(".saved.safetensors.1.0123456789abcdef.d2ldev-partial")
    partial.symlink_to(tmp_path / "precious")
    reference.save(1, path)
    assert (tmp_path / "precious").read_bytes() == b"mine"
    assert partial.is_symlink()


def test_threads_that_write_one_file_leave_one_of_their_files(reference, path):
    errors = []

    def write(number):
        try:
            for _ in range(20):
                reference.save([number] * 100, path)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert reference.load(path) in [[number] * 100 for number in range(4)]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    reference, path, saved, monkeypatch, error
):
    def fail_midway(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise error

    monkeypatch.setattr(safetensors, "serialize_file", fail_midway)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        reference.save({"b": reference.zeros(5)}, path)
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]


def test_a_limit_on_the_size_of_files_is_an_error_with_its_reason(tmp_path):
    run_python(
        """
        import os, resource
        import d2ldev
        backend = d2ldev.get_backend("reference")
        path = os.path.abspath("x.safetensors")
        backend.save(1, path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            backend.save(backend.zeros(100_000), path)
        except d2ldev.CheckpointError as error:
            assert "File too large" in str(error), error
        else:
            raise AssertionError("it was saved")
        assert backend.load(path) == 1
        assert os.listdir() == ["x.safetensors"]
        """,
        folder=tmp_path,
    )


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("", errno.EISDIR),
        ("missing/x", errno.ENOENT),
        ("file/x", errno.ENOTDIR),
        ("loop", errno.ELOOP),
        ("n" * 300, errno.ENAMETOOLONG),
        ("pipe", errno.EINVAL),
        ("/dev/null", errno.EINVAL),
        ("/proc/x", errno.ENOENT),
    ],
)
def test_a_place_where_no_file_can_be_is_an_error_with_its_reason(reference, tmp_path, place, code):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="cannot save to ") as caught:
        reference.save(1, tmp_path / place)
    assert caught.value.__cause__.errno == code
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("mode", [0o600, 0o444, 0o755, 0o666])
def test_the_permissions_of_the_old_file_are_kept(reference, path, saved, mode):
    path.chmod(mode)
    reference.save(1, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_permissions_of_any_other(reference, path, tmp_path):
    reference.save(1, path)
    (tmp_path / "any").write_text("")
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_link_stays_one_and_its_file_is_replaced(reference, path, saved, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = folder / "link"
    link.symlink_to(path)
    reference.save(1, link)
    assert link.is_symlink()
    assert reference.load(path) == 1
    assert list(folder.iterdir()) == [link]


def test_a_long_name_can_be_saved_to(reference, tmp_path):
    path = tmp_path / ("\N{SNOWMAN}" * 85)
    reference.save(1, path)
    assert reference.load(path) == 1


@pytest.mark.parametrize("path", [None, 3, "", "a\0b", b""])
@pytest.mark.parametrize("verb", ["save", "load", "load_into"])
def test_an_invalid_path_is_refused(reference, verb, path):
    given = (path,) if verb == "load" else (1, path)
    with pytest.raises(
        UnsupportedValueError, match=rf"not the path of a file\n.*backend\.{verb}\("
    ):
        getattr(reference, verb)(*given)
