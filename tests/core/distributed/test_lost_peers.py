"""A process that is killed or stopped: the others end in bounded time, and say which one it was."""

import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest
from launched import together

import d2ldev
from d2ldev import Trainer
from d2ldev.distributed import join

TIMEOUT = 2
BOUND = 45  # seconds; without an end the processes would wait for 60
"""Seconds after a process is lost until all others have ended, on a machine that is busy."""
EPOCHS = 5

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = (np.arange(24) % 3).astype("int32")


class Telling:
    """Batches that tell when they are read, and may end the process."""

    def __init__(self, place, at=None, number=None, seconds=0):
        self.place, self.at, self.number, self.seconds = place, at, number, seconds
        self.epoch = -1

    def __iter__(self):
        self.epoch += 1
        for start in range(0, len(X), 7):
            if self.at == (self.epoch, start // 7):
                os.kill(os.getpid(), self.number)
            time.sleep(self.seconds)
            yield X[start : start + 7], Y[start : start + 7]


def train(path=None, data=None, val_data=None, epochs=EPOCHS, **options):
    backend = d2ldev.get_backend("reference")
    trainer = Trainer(epochs, backend=backend, callbacks=options.pop("callbacks", None))
    net = backend.mlp([4, 8, 3], seed=0)
    history = trainer.fit(
        net,
        Telling("train") if data is None else data,
        val_data or Telling("val"),
        loss="cross_entropy",
        optimizer="adam",
        checkpoint=path,
        resume=path is not None,
        **options,
    )
    named = backend.named_tensors(trainer.model)
    return {name: backend.to_numpy(x) for name, x in named.items()}, history


def end_rank(where, number):
    """Return what rank does in ``where``, which ends it by a signal."""

    def end(*_):
        os.kill(os.getpid(), number)

    if where == "training":
        return lambda path: train(path, Telling("train", (1, 1), number))
    if where == "evaluation":
        return lambda path: train(path, val_data=Telling("val", (1, 1), number))
    return lambda path: train(path, callbacks=lambda epoch, history: end())


def continue_process(processes, lost):
    """Let a stopped process be killed, as soon as the others have ended."""
    for rank, process in enumerate(processes):
        if rank != lost:
            os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    os.kill(processes[lost], signal.SIGKILL)


AT = {
    "training": r"was at (the gradients|batch \d of epoch 1)",
    "evaluation": r"was at (the end|batch \d) of the evaluation after epoch 1",
    "a callback": r"was at the checkpoint after epoch 0",
}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("where", ["training", "evaluation", "a callback"])
def test_the_other_processes_name_the_lost_one(tmp_path, where, number, lost):
    path = tmp_path / "run"

    def body(rank):
        return end_rank(where, number)(path) if rank == lost else train(path)

    ended = together(body, 3, timeout=TIMEOUT, during=lambda found: continue_process(found, lost))
    assert ended[lost].status == -signal.SIGKILL
    for rank in {0, 1, 2} - {lost}:
        assert (ended[rank].status, ended[rank].error) == (1, "PeerLostError"), ended[rank]
        assert f"rank {lost} on {socket.gethostname()} is lost" in ended[rank].text
        assert f"Rank {rank} on {socket.gethostname()} was at " in ended[rank].text
        assert re.search(AT[where], ended[rank].text), ended[rank].text
        assert ended[rank].seconds < BOUND
    state = d2ldev.get_backend("reference").load(path)  # it is whole
    assert state["run"]["epoch"] in (0, 1, 2)
    assert os.listdir(tmp_path) == ["run"]


def test_a_process_that_is_killed_after_the_run_does_not_matter():
    def body(rank):
        train()
        time.sleep(0.5 * (rank == 0))
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    first, second = together(body, timeout=TIMEOUT)
    assert (first.status, first.value) == (0, "done")
    assert second.status == -signal.SIGKILL


def test_a_stopped_process_that_goes_on_ends_like_the_others():
    def stop_for_a_while(processes):
        time.sleep(1)
        os.kill(processes[1], signal.SIGSTOP)
        os.waitid(os.P_PID, processes[0], os.WEXITED | os.WNOWAIT)
        os.kill(processes[1], signal.SIGCONT)

    def body(rank):
        return train(data=Telling("train", seconds=0.1))

    ended = together(body, 3, timeout=TIMEOUT, during=stop_for_a_while)
    assert [each.error for each in ended] == ["PeerLostError"] * 3
    assert all("it has given no sign for 2 s" in each.text for each in (ended[0], ended[2]))
    assert all(each.seconds < 2 * BOUND for each in ended)


def test_a_stopped_process_learns_that_it_is_lost_while_rank_0_goes_on():
    """Rank 0 has caught the error, and does not end."""

    def body(rank):
        if rank:
            return train(data=Telling("train", seconds=0.1))
        try:
            train(data=Telling("train", seconds=0.1))
        except d2ldev.PeerLostError:
            time.sleep(4)
        return "alone"

    def stop_for_a_while(processes):
        time.sleep(1)
        os.kill(processes[1], signal.SIGSTOP)
        time.sleep(TIMEOUT + 1.5)
        os.kill(processes[1], signal.SIGCONT)

    first, second = together(body, timeout=TIMEOUT, during=stop_for_a_while)
    assert first.value == "alone"
    assert second.error == "PeerLostError"
    assert "rank 1" in second.text
    assert second.seconds < first.seconds


def test_a_process_stopped_for_less_than_the_timeout_is_not_lost():
    def stop_for_a_while(processes):
        time.sleep(0.5)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.7)
            os.kill(process, signal.SIGCONT)

    def body(rank):
        return train(data=Telling("train", seconds=0.1))[1]

    ended = together(body, timeout=4, during=stop_for_a_while)
    assert [each.error for each in ended] == ["", ""], ended


def test_all_that_were_stopped_together_go_on():
    """As with a laptop that sleeps, or a machine that is moved."""

    def stop_for_a_while(processes):
        time.sleep(0.5)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        time.sleep(2.5)
        for process in processes:
            os.kill(process, signal.SIGCONT)

    def body(rank):
        return train(data=Telling("train", seconds=0.1), epochs=3)[1]

    ended = together(body, timeout=1, during=stop_for_a_while)
    assert [each.error for each in ended] == ["", ""], ended


def test_a_process_whose_engine_never_returns_is_ended():
    """With the error on its standard error, and exit status 1."""

    def body(rank):
        if rank:
            return end_rank("a callback", signal.SIGKILL)(None)
        return train(callbacks=lambda epoch, history: time.sleep(60))

    first, _ = together(body, timeout=TIMEOUT)
    assert first.status == 1
    assert "PeerLostError: cannot train in 2 processes: rank 1 on" in first.text
    assert first.seconds < BOUND


def test_a_process_is_ended_though_its_output_is_not_read():
    def body(rank):
        if rank:
            return end_rank("a callback", signal.SIGKILL)(None)
        os.dup2(os.pipe()[1], 1)
        return train(callbacks=lambda epoch, history: sys.stdout.write("x" * 10_000_000))

    first, _ = together(body, timeout=TIMEOUT)
    assert first.status == 1
    assert "PeerLostError" in first.text
    assert first.seconds < BOUND


def test_a_copy_of_a_process_holds_no_connection_and_cannot_train():
    """As the process of a loader, which may live longer than who has started it."""

    def body(rank):
        train()
        if rank == 0:
            return train(epochs=20, data=Telling("train", seconds=0.1))
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(50)
            try:
                train()
            except d2ldev.PeerLostError as error:
                os.write(2, str(error).encode())
            signal.pause()
        time.sleep(0.5)
        return os.kill(os.getpid(), signal.SIGKILL)

    first, second = together(body, timeout=60)
    assert first.error == "PeerLostError"
    assert "rank 1" in first.text
    assert first.seconds < 45  # long before the copy ends, and before the timeout
    assert "made by a fork" in second.text


def test_a_process_that_gives_up_ends_the_work_of_all():
    """As a thread does it that has seen the end of an engine."""

    def body(rank):
        group = d2ldev.get_backend("reference").join_group()
        with group.work():
            if rank == 1:
                thread = threading.Thread(target=group.give_up, args=("its server has ended",))
                thread.start()
                thread.join()
                group.check()
            return group.gather("what rank 1 does not come to")

    for each in together(body, 3, timeout=30):
        assert each.error == "PeerLostError"
        assert "rank 1 on" in each.text
        assert "is lost: its server has ended. Rank" in each.text
        assert each.seconds < BOUND


def test_nothing_is_left_of_a_group_that_was_left():
    def body(rank):
        before = set(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else set()
        threads = threading.active_count()
        train()
        assert threading.active_count() == threads + 1
        join.find_group().leave()
        for _ in range(100):
            if threading.active_count() == threads:
                break
            time.sleep(0.05)
        after = set(os.listdir("/proc/self/fd")) if before else before
        with pytest.raises(d2ldev.PeerLostError, match="it has left the others"):
            train()
        return threading.active_count() - threads, len(after) - len(before)

    ended = together(body)
    assert [each.value for each in ended] == [(0, 0)] * 2, ended


@pytest.mark.parametrize(("seconds", "is_lost"), [(1, False), (5, True)])
def test_code_that_keeps_all_threads_waiting_is_lost_only_after_the_timeout(seconds, is_lost):
    """As an extension that holds Python's lock: no sign can be given then."""

    def hold(epoch, history):
        if epoch == 1 and os.environ["RANK"] == "1":
            ctypes.PyDLL(None).sleep(seconds)

    ended = together(lambda rank: train(callbacks=hold)[1], timeout=3)
    assert [each.error for each in ended] == ["PeerLostError" if is_lost else ""] * 2, ended
