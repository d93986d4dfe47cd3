"""Two machines, as two network namespaces with addresses of their own and a cable between them."""

import os
import subprocess

import numpy as np
import pytest
from launched import command, environment, shown, written

LIMIT = 240
"""Seconds after which a launch that has not ended fails the test: four processes share cores."""
ADDRESSES = ("192.168.77.1", "192.168.77.2")
"""Larger than 127.0.1.1: of two addresses gloo lets the smaller one listen."""
PORT = 29500
"""Where the process with rank 0 listens."""
# On its own machine the name of the first one is a loopback address, as Debian's installer has it.
_HOSTS = ("127.0.1.1 first", f"{ADDRESSES[0]} first")
# What ``ip netns exec`` runs has mounts of its own.
_WITH_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'


def ip(*arguments):
    """Run the command ``ip``; its status and what was wrong."""
    done = subprocess.run(
        ["ip", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr.strip()


@pytest.fixture
def machines():
    """The names of two namespaces, which have ``ADDRESSES``."""
    names = [f"d2ldev-{os.getpid()}-{i}" for i in (0, 1)]
    cables = [f"d2l{os.getpid()}{end}"[:15] for end in "ab"]
    try:
        made = []
        for name in names:
            made += [("netns", "add", name), ("-n", name, "link", "set", "lo", "up")]
        made.append(("link", "add", cables[0], "type", "veth", "peer", "name", cables[1]))
        for i, (name, cable) in enumerate(zip(names, cables, strict=True)):
            made += [
                ("link", "set", cable, "netns", name),
                ("-n", name, "link", "set", cable, "name", "cable"),
                ("-n", name, "address", "add", f"{ADDRESSES[i]}/24", "dev", "cable"),
                ("-n", name, "link", "set", "cable", "up"),
            ]
        for arguments in made:
            try:
                status, problem = ip(*arguments)
            except FileNotFoundError:
                status, problem = 1, "there is no command ip"
            if status:
                pytest.skip(f"no namespace can be made here: {problem}")
        yield names
    finally:
        for name in names:
            if os.path.exists(f"/run/netns/{name}"):
                ip("netns", "delete", name)


def launched_on(machine, rank, program, *options, variables=None, hosts=None):
    """Launch a program on one of the machines.

    Args:
        machine: the name of its namespace.
        rank: its number.
        program: the path.
        options: of the launch.
        variables: more of them.
        hosts: a folder for files of hosts, with which the first machine is called by its name; None
            calls it by its address.
    """
    host = ADDRESSES[0] if hosts is None else "first"
    nodes = ["--nodes", 2, "--node-rank", rank, "--address", f"{host}:{PORT}"]
    launch = command(*nodes, *options, program)
    if hosts is not None:
        path = os.path.join(hosts, f"hosts{rank}")
        with open(path, "w") as file:
            print("127.0.0.1 localhost", _HOSTS[rank], sep="\n", file=file)
        launch = ["sh", "-c", _WITH_HOSTS, path, *launch]
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, *launch],
        env=environment(**(variables or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


_TRAIN = """
import warnings
warnings.simplefilter("ignore")
import numpy as np
from d2ldev import ArrayLoader, Trainer, backend
X = np.random.default_rng(0).normal(size=(23, 4)).astype("float32")
y = (np.arange(23) % 3).astype("int32")
trainer = Trainer(3, num_gpus=0, gradient_clip_val=0.5)
net, data = backend.mlp([4, 8, 3], seed=rank), ArrayLoader(X, y, batch_size=5)
history = trainer.fit(net, data, loss="cross_entropy", optimizer="adam", lr=0.05)
values = [backend.to_numpy(x).tolist() for x in backend.named_tensors(trainer.model).values()]
show((values, history))
"""


def assert_two_machines_learn_what_one_process_learns(name, machines, folder, processes):
    """Check a framework's own engine between two machines.

    Args:
        name: of the framework.
        machines: the fixture.
        folder: for the program.
        processes: how many each machine has.
    """
    program = written(folder, _TRAIN)
    variables = {"D2LDEV_BACKEND": name, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    launches = [
        launched_on(
            *(machine, rank, program, "--processes", processes), variables=variables, hosts=folder
        )
        for rank, machine in enumerate(machines)
    ]
    found = {}
    try:
        for launch in launches:
            output, errors = launch.communicate(timeout=LIMIT)
            assert launch.returncode == 0, errors
            found |= shown(output)
    finally:
        for launch in launches:
            launch.terminate()  # which ends its processes, too
            launch.communicate()
    alone = subprocess.run(
        command(program),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    (((expected, curves),),) = shown(alone.stdout).values()
    assert sorted(found) == list(range(2 * processes))
    for ((values, history),) in found.values():
        assert len(values) == len(expected)
        for value, wanted in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
        assert list(history) == list(curves)
        np.testing.assert_allclose(history["loss"], curves["loss"], rtol=1e-4)
