"""Two machines: what they learn, and what ends when one cannot be reached."""

import time

from d2ldev_conformance.machines import ADDRESSES, PORT, ip, launch_on, of_machine
from d2ldev_conformance.suite.parallel.launching import command
from launched import LIMIT, environment, read_shown, write

TRAIN = """
import d2ldev, numpy as np
from d2ldev import ArrayLoader, Trainer, backend
X = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
y = (np.arange(23) % 3).astype("int32")
def train(epochs=3, callbacks=None):
    trainer = Trainer(epochs, callbacks=callbacks)
    history = trainer.fit(
        backend.mlp([4, 8, 3], seed=rank), ArrayLoader(X, y, batch_size=5), loss="cross_entropy")
    named = backend.named_tensors(trainer.model)
    return {name: float(abs(backend.to_numpy(x)).sum()) for name, x in named.items()}, history
"""
TIMEOUT = 2
SOON = 30
"""Seconds, on a machine that is busy."""


def begin_on_both(machines, program, *options, hosts=None):
    """Launch a program on both machines."""
    return [
        launch_on(
            name, rank, command(*of_machine(rank, hosts), *options, program), environment(), hosts
        )
        for rank, name in enumerate(machines)
    ]


def test_all_hosts_are_reachable_if_the_first_name_is_a_loopback_address(machines, tmp_path):
    code = "from d2ldev import backend; show(backend.join_group().addresses)"
    program = write(tmp_path, code)
    processes = begin_on_both(machines, program, "--processes", 2, hosts=tmp_path)
    found = {}
    for process in processes:
        output, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, errors
        found |= read_shown(output)
    for rank in range(4):
        (addresses,) = found[rank]
        hosts = [address.rpartition(":")[0] for address in addresses]
        assert hosts == [ADDRESSES[0], ADDRESSES[0], ADDRESSES[1], ADDRESSES[1]]


def test_a_cable_that_is_pulled_ends_both_sides(machines, tmp_path):
    code = TRAIN + 'train(10_000, callbacks=lambda epoch, history: epoch == 1 and show("begun"))'
    program = write(tmp_path, code)
    processes = begin_on_both(machines, program, "--timeout", TIMEOUT)
    assert all("begun" in process.stdout.readline() for process in processes)
    assert ip("-n", machines[1], "link", "set", "cable", "down") == (0, "")
    begin = time.monotonic()
    for rank, process in enumerate(processes):
        _, errors = process.communicate(timeout=LIMIT)
        assert process.returncode == 1
        assert f"PeerLostError: cannot train in 2 processes: rank {1 - rank} on" in errors
        assert f"Rank {rank} on" in errors
    assert time.monotonic() - begin < SOON


def test_a_machine_that_does_not_answer_ends_the_other(machines, tmp_path):
    code = TRAIN + "from d2ldev.distributed import join; join.PATIENCE = 1; train()"
    program = write(tmp_path, code)
    ip("-n", machines[0], "link", "set", "cable", "down")
    processes = begin_on_both(machines, program, "--timeout", 1)
    errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert f"PeerLostError: cannot meet 2 processes at {ADDRESSES[0]}:{PORT}" in errors[0]
    assert "these have not come: 1" in errors[0]
    assert "rank 0 does not answer" in errors[1]
