"""PyTorch in several processes: what DDP is told, and the processes that ``fit`` starts."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import searched
from processes_program import RUNS, batches, mlp

from d2ldev import Trainer
from d2ldev.errors import PeerLostError, UnsupportedValueError

PROCESSES = 3
# Processes add up in another order, and in bfloat16 and float16 with few digits.
TOLERANCES = {"bf16": 2e-3, "fp16 with a step left out": 2e-3, "fp16, accumulated": 2e-3}
TOLERANCE = 2e-6


def _variables(**more):
    kept = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    return {**kept, "PYTHONPATH": searched(()), "OMP_NUM_THREADS": "1", **more}


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What each of three processes has found in the runs of ``processes_program``."""
    folder = tmp_path_factory.mktemp("together")
    program = Path(__file__).with_name("processes_program.py")
    common = {"WORLD_SIZE": str(PROCESSES), "LOCAL_WORLD_SIZE": str(PROCESSES)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, program, folder / "found"],
            env=_variables(**common, RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, said
    assert said == [""] * PROCESSES
    return [pickle.loads((folder / f"found{rank}").read_bytes()) for rank in range(PROCESSES)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_learn_what_one_learns(together, name):
    values, history = RUNS[name]()
    tolerance = TOLERANCES.get(name, TOLERANCE)
    for found in together:
        assert list(found[name][0]) == list(values)
        for key, x in values.items():
            np.testing.assert_allclose(found[name][0][key], x, rtol=tolerance, atol=tolerance)
        for key, curve in history.items():
            np.testing.assert_allclose(found[name][1][key], curve, rtol=tolerance, atol=tolerance)


def test_all_processes_end_with_the_same_parameters(together):
    for name in RUNS:
        for found in together[1:]:
            for key, x in together[0][name][0].items():
                assert np.array_equal(found[name][0][key], x), (name, key)


def test_running_means_are_those_of_the_part_of_rank_0(together):
    values, history = zip(*(found["batch_norm"] for found in together), strict=True)
    for found in values[1:]:
        for key, x in values[0].items():
            assert np.array_equal(found[key], x), key
    assert history[1:] == history[:1] * (PROCESSES - 1)


# -- processes that fit starts --------------------------------------------------------------------


class OwnError(Exception):
    pass


class Losses:
    """Losses that end the process of rank 1 in one way or another."""

    @staticmethod
    def raising(prediction, y):
        if os.environ.get("RANK") == "1":
            raise OwnError("of rank 1")
        return torch.nn.functional.cross_entropy(prediction, y)

    @staticmethod
    def killed(prediction, y):
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(prediction, y)


def _children():
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for task in tasks for pid in task.read_text().split()]
    # That which keeps account for multiprocessing lives as long as this process.
    return [pid for pid in pids if b"resource_tracker" not in _command(pid)]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("loss", "error"), [(Losses.raising, OwnError), (Losses.killed, PeerLostError)]
)
def test_an_error_in_a_process_comes_back_and_none_is_left(virtual, loss, error):
    before = _children()
    with pytest.raises(error, match="rank 1"):
        Trainer(1, 2, backend=virtual).fit(mlp(), batches(), loss=loss)
    assert _children() == before


def test_what_cannot_be_sent_to_another_process_is_refused(virtual):
    with pytest.raises(UnsupportedValueError, match="d2ldev launch --processes 2") as caught:
        Trainer(1, 2, backend=virtual).fit(mlp(), batches(), loss=lambda prediction, y: None)
    assert "lambda" in caught.value.problem


def test_an_optimizer_of_the_user_s_has_the_state_of_the_run(virtual):
    def fit(number):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        trainer = Trainer(2, number, backend=virtual)
        trainer.fit(net, batches(), loss="cross_entropy", optimizer=optimizer)
        assert {x.device for x in net.parameters()} == {torch.device("vgpu:0")}
        return [optimizer.state[x]["momentum_buffer"].cpu() for x in net.parameters()]

    for x, y in zip(fit(2), fit(1), strict=True):
        torch.testing.assert_close(x, y)


def test_a_model_with_lazy_modules_comes_back_built(virtual):
    def fit(number):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 3))
        Trainer(1, number, backend=virtual).fit(net, batches(), loss="cross_entropy")
        return net[0].weight.detach().cpu()

    torch.testing.assert_close(fit(2), fit(1))


UNGUARDED = """
import torch
from d2ldev import Trainer
net = torch.nn.Linear(3, 1)
Trainer(1, 2).fit(net, [(torch.ones(2, 3), torch.ones(2, 1))])
"""


def test_a_program_that_is_not_guarded_is_told_what_to_do(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, program],
        env=_variables(D2LDEV_BACKEND="torch", D2LDEV_VIRTUAL_GPUS="2"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "is not guarded by if __name__ == '__main__'" in done.stderr
    assert "fix: " in done.stderr


GUARDED = """
import os, pathlib, sys, time
import torch
from d2ldev import Trainer

class Steps:
    def on_step_end(self, step, loss):
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(0.05)

if __name__ == "__main__":
    net = torch.nn.Linear(3, 1)
    batches = [(torch.ones(2, 3), torch.ones(2, 1))] * 1000
    try:
        Trainer(100, 2, callback=Steps()).fit(net, batches)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_no_process_and_no_file_is_left_when_the_first_one_is_ended(tmp_path, number):
    for name in ("begun", "temporary"):
        (tmp_path / name).mkdir()
    program = tmp_path / "train.py"
    program.write_text(GUARDED)
    process = subprocess.Popen(
        [sys.executable, program, tmp_path / "begun"],
        env=_variables(
            D2LDEV_BACKEND="torch", D2LDEV_VIRTUAL_GPUS="2", TMPDIR=str(tmp_path / "temporary")
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        _wait_until(lambda: len(list((tmp_path / "begun").iterdir())) == 2)
        pids = [path.read_text() for path in (tmp_path / "begun").iterdir()]
        # A terminal sends Ctrl-C to all processes.
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        said = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    _wait_until(lambda: not any(b"spawn" in _command(pid) for pid in pids))
    _wait_until(lambda: not list((tmp_path / "temporary").glob("d2ldev-*")))
    assert said == ("interrupted\n" if number == signal.SIGINT else "")


def _wait_until(is_true, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
