"""Several processes: MXNet's parameter servers between them."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import process_runs
import pytest
from d2ldev_mxnet import servers
from launched import alive, environment, find_survivors, variables
from ports import free_port
from processes import extend_path
from several_gpus import TOLERANCE

from d2ldev import Trainer, UnsupportedValueError

pytestmark = pytest.mark.usefixtures("set_np")
nightly = pytest.mark.nightly

LIMIT = 120
TIMEOUT = 3
SOON = 60  # of seconds: much longer than the timeout, for a machine with other work
Ended = namedtuple("Ended", "status errors seconds")

# Both processes come to the middle of the run before a signal comes to one of them.
LONG = """
import os
import numpy as np
from d2ldev import Trainer, get_backend

class Batches:
    def __iter__(self):
        for number in range(100000):
            if number == 20:
                with open(f"{folder}/{rank}", "w") as file:
                    file.write(str(os.getpid()))
            yield np.ones((4, 3), "float32"), np.ones((4, 1), "float32")

folder, rank = os.environ["FOLDER"], os.environ["RANK"]
backend = get_backend("mxnet")
Trainer(1, num_gpus=0, backend=backend).fit(backend.mlp([3, 1]), Batches())
"""

# At the end of an epoch all get the running statistics of rank 0, which has a batch more.
FEWER = """
import os
from process_runs import BATCHES, mx, normalize
from d2ldev import Trainer, get_backend

mx.npx.set_np()
backend, full = get_backend("mxnet"), BATCHES[0]
data = [full, full] if os.environ["RANK"] == "1" else [full, full, full]
Trainer(1, num_gpus=0, backend=backend).fit(normalize(), data, loss="cross_entropy")
"""


def start(command, size, **more):
    """Start processes of one launch; them, and the port by which their servers are known."""
    port = free_port()
    common = {
        "PYTHONPATH": extend_path([Path(__file__).parent, Path(__file__).parents[3] / "helpers"]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "D2LDEV_PEER_TIMEOUT": str(TIMEOUT),
        **more,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment(**variables(rank, size, port, **common)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    return processes, port


def end_processes(processes):
    """Wait for processes; how each ended."""
    begin = time.monotonic()
    found = []
    try:
        for process in processes:
            errors = process.communicate(timeout=LIMIT)[1]
            found.append(Ended(process.returncode, errors, time.monotonic() - begin))
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()
    return found


def run_cases(cases, folder, size, num_gpus):
    """Make runs in several processes; what each process has found, by rank."""
    program = [process_runs.__file__, str(folder), str(num_gpus), *cases]
    processes, port = start(program, size, D2LDEV_VIRTUAL_GPUS=str(num_gpus))
    for each in end_processes(processes):
        assert (each.status, each.errors) == (0, ""), each.errors
    assert not find_survivors(port)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes with a virtual GPU finds."""
    cases = {**process_runs.CASES, **process_runs.OTHERS}
    return run_cases(cases, tmp_path_factory.mktemp("two"), 2, num_gpus=1)


def assert_same_as_one(run, case, num_gpus):
    (values, history), (expected, curves) = run, process_runs.run(case, num_gpus)
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, wanted, **TOLERANCE)
    assert list(history) == list(curves)
    for name, curve in curves.items():
        np.testing.assert_allclose(history[name], curve, **TOLERANCE)


def assert_same(first, other):
    assert first[1] == other[1]
    for value, other_value in zip(first[0], other[0], strict=True):
        np.testing.assert_array_equal(value, other_value)


@pytest.mark.parametrize("case", process_runs.CASES)
def test_two_processes_learn_like_one(two, case):
    assert_same_as_one(two[0][case], case, 0)


@pytest.mark.parametrize("case", process_runs.CASES)
def test_two_processes_end_with_the_same(two, case):
    assert_same(two[0][case], two[1][case])


def test_all_end_with_the_running_statistics_of_the_first(two):
    x, _ = process_runs.BATCHES[1]
    for found in two:
        values, _ = found["normalized"]
        np.testing.assert_allclose(values[2], x[:3].mean(0), rtol=1e-5)
        np.testing.assert_allclose(values[3], x[:3].var(0), rtol=1e-4)


def test_parts_of_the_same_size_have_the_same_masks(two):
    ((weight,), _) = two[0]["dropped"]
    np.testing.assert_array_equal(weight[0] != 0, weight[1] != 0)
    assert not weight.all()


def test_three_processes_learn_like_one(tmp_path):
    cases = ["adamw", "branches", "branches, accumulated"]
    found = run_cases(cases, tmp_path, 3, num_gpus=0)
    for case in cases:
        assert_same_as_one(found[0][case], case, 0)
        assert_same(found[0][case], found[1][case])
        assert_same(found[0][case], found[2][case])


@nightly
@pytest.mark.parametrize(("size", "num_gpus"), [(3, 1), (4, 0)])
def test_any_number_of_processes_learns_like_one(tmp_path, size, num_gpus):
    first, *others = run_cases(process_runs.CASES, tmp_path, size, num_gpus)
    for case in process_runs.CASES:
        assert_same_as_one(first[case], case, 0)
        for other in others:
            assert_same(first[case], other[case])


def begin_run(folder):
    """Start two processes, and wait until both train."""
    processes, port = start(["-c", LONG], 2, FOLDER=str(folder))
    deadline = time.monotonic() + LIMIT
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes, port


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_process_ends_the_other_and_mxnets_servers(tmp_path, number):
    processes, port = begin_run(tmp_path)
    lost = int(number == signal.SIGSTOP)  # once with the servers, and once beside them
    processes[lost].send_signal(number)
    (other,) = end_processes([processes[1 - lost]])
    processes[lost].kill()
    end_processes([processes[lost]])
    assert other.status == 1
    assert f"PeerLostError: cannot train in 2 processes: rank {lost} on " in other.errors
    assert other.seconds < SOON
    assert not find_survivors(port)


def test_a_lost_server_ends_all(tmp_path):
    processes, port = begin_run(tmp_path)
    (*_, server) = sorted({*alive(port)} - {process.pid for process in processes})
    os.kill(server, signal.SIGKILL)
    for each in end_processes(processes):
        assert each.status == 1
        assert "rank 0 on " in each.errors
        assert "is lost: MXNet's server has ended with status -9" in each.errors
        assert each.seconds < SOON
    assert not find_survivors(port)


@nightly
def test_batches_that_end_early_end_both_where_there_are_running_statistics():
    processes, port = start(["-c", FEWER], 2)
    for each in end_processes(processes):
        assert each.status == 1, each.errors
        assert "UnsupportedValueError: cannot train in 2 processes" in each.errors
        assert "batch 2 of epoch 0" in each.errors
    assert not find_survivors(port)


def test_variables_of_another_launch_of_mxnet_are_refused(monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv("DMLC_PS_ROOT_URI", "10.0.0.1")
    group = namedtuple("Group", "size")(2)
    with pytest.raises(UnsupportedValueError, match="unset DMLC_ROLE DMLC_PS_ROOT_URI: "):
        servers.Servers(group)


def fit_one(backend):
    return Trainer(1, num_gpus=0, backend=backend).fit(
        backend.mlp([3, 1]), [(np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))]
    )


@pytest.mark.parametrize("number", ["2", "two"])
def test_a_worker_that_may_be_one_of_several_is_refused(backend, monkeypatch, number):
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv("DMLC_NUM_WORKER", number)
    with pytest.raises(
        UnsupportedValueError, match=r"by DMLC_NUM_WORKER this .* RANK and"
    ) as caught:
        fit_one(backend)
    assert "or leave DMLC_NUM_WORKER out, for a model" in caught.value.fix


@pytest.mark.parametrize(
    ("role", "number"),
    [("worker", "1"), ("worker", ""), (None, "2")],
    ids=["one", "empty", "no worker"],
)
def test_a_worker_of_its_own_trains(backend, monkeypatch, role, number):
    if role:
        monkeypatch.setenv("DMLC_ROLE", role)
    monkeypatch.setenv("DMLC_NUM_WORKER", number)
    assert len(fit_one(backend)["loss"]) == 1
