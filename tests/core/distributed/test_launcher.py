"""The command ``d2ldev launch``: what it shows, what it returns, and what it leaves behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from d2ldev_conformance.suite.parallel.launching import command
from launched import LIMIT, environment, launch_program, read_shown, write
from ports import free_port
from typer.testing import CliRunner

from d2ldev.cli.main import app
from d2ldev.distributed.launcher import Launch, Stops

SOON = 45  # seconds; a process that is not ended sleeps for 60
"""Seconds, on a machine that is busy; what would go on by itself goes on for a minute."""

TRAIN = """
import d2ldev, numpy as np
from d2ldev import ArrayLoader, Trainer, backend
X = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
y = (np.arange(23) % 3).astype("int32")
def train(path=None, epochs=4, callbacks=None, **options):
    trainer = Trainer(epochs, callbacks=callbacks)
    history = trainer.fit(
        backend.mlp([4, 8, 3], seed=rank), ArrayLoader(X, y, batch_size=5, shuffle=True),
        loss="cross_entropy", optimizer="adam", checkpoint=path, resume=path is not None, **options)
    named = backend.named_tensors(trainer.model)
    return {name: float(abs(backend.to_numpy(x)).sum()) for name, x in named.items()}, history
"""


@contextmanager
def run_program(code, folder, *options, **keywords):
    """Start a launch; yields its process, and ends it."""
    process = subprocess.Popen(
        command(*options, write(folder, code)),
        cwd=folder,
        **{
            "env": environment(),
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
            **keywords,
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(process, number):
    return [process.stdout.readline() for _ in range(number)]


def wait_until_gone(numbers):
    """Wait until processes have ended; those that are still there."""
    end = time.monotonic() + SOON
    left = set(numbers)
    while left and time.monotonic() < end:
        left = {number for number in left if is_there(number)}
        time.sleep(0.05)
    return left


def is_there(number):
    return state_of(number) not in ("", "Z")


def state_of(number):
    """Return the state of a process as ``ps`` has it; empty if there is none."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


# Each tells its number and that of a process that it has started, and waits.
WAITING = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, flush=True)
"""


def test_each_process_gets_its_rank(tmp_path):
    code = """
    names = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"]
    show([os.environ[name] for name in names])
    show([sys.argv[1:], sys.stdin.read(), "PORT" in os.environ, os.environ["OMP_NUM_THREADS"]])
    """
    given = environment(PORT="80")
    given.pop("OMP_NUM_THREADS", None)
    arguments = ["--processes", "3", "-x", "a b", "--", ""]
    found = launch_program(code, tmp_path, "--processes", 2, arguments=arguments, env=given)
    assert found.status == 0
    assert found.values[0][0] == ["2", "0", "2", "0", "127.0.0.1"]
    assert found.values[1][0] == ["2", "1", "2", "1", "127.0.0.1"]
    assert found.values[0][1] == [arguments, "", False, "1"]
    assert "rank 1 is process" in found.errors


def test_a_module_may_be_launched(tmp_path):
    write(tmp_path, "show(sys.argv[1:])", "mine.py")
    done = subprocess.run(
        command("--processes", 2, "-m", "mine", "-m", "--help"),
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert read_shown(done.stdout) == {0: [["-m", "--help"]], 1: [["-m", "--help"]]}, done.stderr


def test_lines_are_whole_and_have_a_rank_before_them(tmp_path):
    code = r"""
    for i in range(2000):
        sys.stdout.write(f"{rank} {i} " + "x" * 50 + "\n")
        sys.stderr.write(f"{rank} {i} error\n")
    sys.stdout.buffer.write(b"bar 1\rbar 2\r\n\xff\x00\xfe binary\n\n")
    sys.stdout.buffer.write(b"y" * 3_000_000 + b"\nno end")
    """
    done = subprocess.run(
        command("--processes", 3, write(tmp_path, code)),
        env=environment(),
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    for rank in range(3):
        prefix = b"[rank %d] " % rank
        found = [each for each in done.stdout.split(b"\n") if each.startswith(prefix)]
        found = [each.removeprefix(prefix) for each in found]
        assert found[:2000] == [b"%d %d " % (rank, i) + b"x" * 50 for i in range(2000)]
        assert found[2000:2003] == [b"bar 2", b"\xff\x00\xfe binary", b""]
        assert b"".join(found[2003:-1]) == b"y" * 3_000_000
        assert found[-1] == b"no end"
        errors = [each for each in done.stderr.split(b"\n") if each.startswith(prefix)]
        assert errors == [prefix + b"%d %d error" % (rank, i) for i in range(2000)]
    assert not [each for each in done.stdout.split(b"\n")[:-1] if not each.startswith(b"[rank ")]


def test_a_program_that_prints_much_is_shown_whole(tmp_path):
    code = 'for _ in range(100): sys.stdout.write(("z" * 99 + "\\n") * 10_000)'
    with run_program(code, tmp_path, text=False, stderr=subprocess.DEVNULL) as process:
        number = 0
        while data := process.stdout.read(1 << 20):
            number += data.count(b"\n")
        assert process.wait(SOON) == 0
    assert number == 1_000_000


@pytest.mark.parametrize("stream", ["2>&-", "| head -1", ">/dev/full"])
def test_a_program_does_not_wait_for_a_reader_of_its_output(tmp_path, stream):
    code = """
    for _ in range(20_000): print("line after line")
    open(f"done {rank}", "w").close()
    """
    line = " ".join([*command("--processes", 2), write(tmp_path, code), stream])
    subprocess.run(
        line,
        shell=True,
        env=environment(),
        cwd=tmp_path,
        timeout=LIMIT,
        capture_output=True,
        check=False,
    )
    assert {"done 0", "done 1"} <= {*os.listdir(tmp_path)}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7 if rank == 1 else 0)", 7),
        ("time.sleep(1 - rank); sys.exit(3 + rank)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)", 137),
        ("os.abort() if rank == 0 else time.sleep(60)", 134),
        # The others fail because of the first, and nearly as soon.
        (TRAIN + "train(callbacks=lambda e, h: rank == 1 and os.kill(os.getpid(), 9))", 137),
        (TRAIN + "train(callbacks=lambda e, h: rank == 0 and os.kill(os.getpid(), 9))", 137),
    ],
)
def test_the_status_is_that_of_the_first_that_failed(tmp_path, code, status):
    begin = time.monotonic()
    found = launch_program(code, tmp_path, "--processes", 2)
    assert found.status == status, found.errors
    assert time.monotonic() - begin < SOON


def test_a_program_that_does_not_exist_is_an_error_in_one_line(tmp_path):
    done = subprocess.run(
        command("--processes", 2, "no.py"),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert "can't open file" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nodes", "2"], "--address host:29500"),
        (["--nodes", "2", "--node-rank", "2", "--address", "a:1"], "numbered from 0"),
        (["--address", "host"], "'host' is not an address"),
        (["--address", "host:0"], "not an address"),
        (["--address", ":29500"], "not an address"),
        (["--address", "host:" + "9" * 5000], "not an address"),
        (["--processes", "0"], "--processes"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--restarts", "-1"], "--restarts"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, text):
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["launch", *options, "no.py"])
    assert found.exit_code == 2
    assert text in found.output


def test_a_timeout_of_the_environment_that_makes_no_sense_is_refused():
    found = CliRunner(env={"D2LDEV_PEER_TIMEOUT": "soon"}).invoke(app, ["launch", "no.py"])
    assert found.exit_code == 2
    assert "D2LDEV_PEER_TIMEOUT=60" in found.output


def test_a_process_that_hangs_after_another_one_failed_is_ended(tmp_path):
    code = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 1: sys.exit(3)
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(60)
    """
    begin = time.monotonic()
    found = launch_program(code, tmp_path, "--processes", 2)
    assert found.status == 3
    assert time.monotonic() - begin < 2 * SOON
    assert not wait_until_gone(map(int, found.output.split()[2:]))


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_ended_leaves_nothing_behind(tmp_path, number, is_stopped):
    with run_program(WAITING + "time.sleep(60)", tmp_path, "--processes", 2) as process:
        found = [int(each) for line in lines(process, 2) for each in line.split()[2:]]
        assert len(found) == 4
        if is_stopped:
            os.kill(found[0], signal.SIGSTOP)
        process.send_signal(number)
        status = process.wait(SOON)
        assert status == (-9 if number == signal.SIGKILL else 128 + number)
        assert not wait_until_gone(found)


def test_children_of_a_killed_process_are_ended_too(tmp_path):
    code = WAITING + "os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)"
    found = launch_program(code, tmp_path, "--processes", 2)
    assert found.status == 137
    numbers = [int(each) for line in found.output.splitlines() for each in line.split()[2:]]
    assert not wait_until_gone(numbers)


# The process with rank LOST ends or stops itself, for the first time only.
LOST = (
    TRAIN
    + """
def end(epoch, history):
    if rank == LOST and epoch == 2 and not os.path.exists("lost"):
        open("lost", "w").close()
        os.kill(os.getpid(), signal.HOW)
show(train("run.safetensors", callbacks=end))
"""
)


def lose(rank, how="SIGKILL"):
    """Return a program of which one process is lost, once."""
    return LOST.replace("LOST", str(rank)).replace("HOW", how)


def test_a_run_that_fails_again_and_again_ends(tmp_path):
    code = 'open("begun", "a").write("x"); sys.exit(5)'
    found = launch_program(code, tmp_path, "--restarts", 2)
    assert found.status == 5
    assert (tmp_path / "begun").read_text() == "xxx"


# -- stopped processes ----------------------------------------------------------------------------


@pytest.fixture
def child():
    """A process that waits, and can be stopped."""
    # In a group of its own: the kernel stops no process of a group whose starter has ended.
    process = subprocess.Popen(["sleep", "60"], process_group=0)
    yield process
    process.kill()
    process.wait()


def send(process, number, state):
    """Send a signal to a process, and wait until it is in a state of ``ps``."""
    process.send_signal(number)
    end = time.monotonic() + SOON
    while state_of(process.pid) != state and time.monotonic() < end:
        time.sleep(0.01)
    assert state_of(process.pid) == state


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_process_may_be_stopped_for_some_time(child, number):
    stops = Stops(longest=8.0)
    assert stops.too_long({3: child.pid}, 1.0) == {}
    send(child, number, "T")
    assert [stops.too_long({3: child.pid}, now) for now in (4.0, 8.0, 12.0)] == [{}, {}, {}]
    assert stops.too_long({3: child.pid}, 12.1) == {3: number}


def test_the_time_of_a_stopped_process_restarts_when_it_goes_on(child):
    stops = Stops(longest=8.0)
    send(child, signal.SIGSTOP, "T")
    assert [stops.too_long({0: child.pid}, now) for now in (1.0, 5.0, 9.0)] == [{}, {}, {}]
    send(child, signal.SIGCONT, "S")
    assert stops.too_long({0: child.pid}, 9.1) == {}
    send(child, signal.SIGSTOP, "T")
    assert [stops.too_long({0: child.pid}, now) for now in (9.2, 13.0, 17.0)] == [{}, {}, {}]
    assert stops.too_long({0: child.pid}, 17.3) == {0: signal.SIGSTOP}


def test_processes_stopped_with_the_launcher_may_go_on(child):
    stops = Stops(longest=8.0)
    send(child, signal.SIGSTOP, "T")
    # For 60 seconds nobody has looked.
    assert [stops.too_long({0: child.pid}, now) for now in (1.0, 61.0, 65.0, 69.0)] == [{}] * 4
    assert stops.too_long({0: child.pid}, 69.1) == {0: signal.SIGSTOP}


def test_a_process_that_has_ended_is_not_stopped(child):
    stops = Stops(longest=8.0)
    send(child, signal.SIGKILL, "Z")
    assert [stops.too_long({0: child.pid}, now) for now in (1.0, 5.0, 9.0, 9.1)] == [{}] * 4


@pytest.mark.parametrize(("nodes", "seconds"), [(1, math.inf), (2, 7.0)])
def test_a_machine_alone_may_be_paused(nodes, seconds):
    assert Launch(["train.py"], 2, nodes=nodes, timeout=2.0).longest_stop() == seconds


def two_launchers(code, folder, *options):
    """Run a program with a launcher for each of two machines; how these have ended."""
    address = f"127.0.0.1:{free_port()}"
    program = write(folder, code)
    found = {}

    def run(node_rank):
        nodes = ["--nodes", 2, "--node-rank", node_rank, "--address", address, *options]
        found[node_rank] = subprocess.run(
            command(*nodes, program),
            env=environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def test_two_launchers_are_two_machines(tmp_path):
    code = TRAIN + "show([os.environ['LOCAL_RANK'], train()])"
    first, second = two_launchers(code, tmp_path, "--processes", 2)
    values = {**read_shown(first.stdout), **read_shown(second.stdout)}
    assert [values[rank][0][0] for rank in range(4)] == ["0", "1", "0", "1"]
    assert all(values[rank][0][1] == values[0][0][1] for rank in range(4))


@pytest.mark.parametrize(("rank", "how"), [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGSTOP")], ids=str)
def test_two_launchers_start_a_run_again_on_both_machines(tmp_path, rank, how):
    found = two_launchers(lose(rank, how), tmp_path, "--restarts", 1, "--timeout", 2)
    assert [each.returncode for each in found] == [0, 0], found
    assert all("all are started again, 0 left" in each.stderr for each in found)
    expected = launch_program(TRAIN + "show(train())", tmp_path).values[0][0]
    for rank, each in enumerate(found):
        ((sums, history),) = read_shown(each.stdout)[rank]
        assert sums == pytest.approx(expected[0], rel=1e-4)
        np.testing.assert_allclose(history["loss"], expected[1]["loss"], rtol=1e-5)


def test_the_launcher_imports_no_framework():
    code = "import sys, d2ldev.cli.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "d2ldev.distributed.launcher" in imported
    assert not imported & {"torch", "jax", "tensorflow", "mxnet", "array_api_strict"}
