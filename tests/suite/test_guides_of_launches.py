"""The commands of the guides about several processes run, on this machine."""

import re
import signal
import subprocess

import pytest
from ports import free_port
from shells import TIME, make_shell, on_loopback, read_blocks, read_commands, run


@pytest.fixture
def shell(tmp_path):
    return make_shell(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the losses of one process."""
    folder = tmp_path_factory.mktemp("one")
    (losses,) = run(["python train.py"], folder, make_shell(folder))
    assert len(losses) == 3
    return losses


def test_two_processes_on_one_machine_learn_what_one_learns(shell, tmp_path, expected):
    line, *_ = read_commands("several-machines.md", "d2ldev launch")
    losses = run([line], tmp_path, shell | {"D2LDEV_VIRTUAL_GPUS": "2"})
    assert losses == [pytest.approx(expected, rel=1e-4)] * 2


def test_a_program_trains_on_two_gpus(tmp_path):
    (line,) = read_blocks("several-gpus.md", "sh")
    given = make_shell(tmp_path, "several-gpus.md") | {"D2LDEV_VIRTUAL_GPUS": "2"}
    (losses,) = run([line], tmp_path, given)
    assert losses == sorted(losses, reverse=True)


def test_two_machines_learn_what_one_learns(shell, tmp_path, expected):
    _, *lines = read_commands("several-machines.md", "d2ldev launch")
    assert len(lines) == 2
    losses = run(map(on_loopback, lines), tmp_path, shell)
    assert losses == [pytest.approx(expected, rel=1e-4)] * 2


@pytest.mark.parametrize(("number", "nodes"), [(0, 2), (1, 1)])
def test_a_script_of_slurm_runs_with_two_tasks(shell, tmp_path, expected, number, nodes):
    script = read_blocks("slurm.md", "sh")[number]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    tasks, gpus = int(options["ntasks-per-node"]), int(options["gpus-per-node"])
    assert tasks in (1, gpus)  # a launcher for each node, or a task for each GPU
    port = free_port()
    given = {
        "SLURM_JOB_ID": str(10000 + port % 10000),  # the scripts take ports from 20000 on
        "SLURM_JOB_NODELIST": "node[03-04]",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(2 // nodes),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_GPUS_ON_NODE": str(2 // nodes),
        "D2LDEV_VIRTUAL_GPUS": str(2 // nodes),
    }
    losses = run([script], tmp_path, shell | given)
    assert losses == [pytest.approx(expected, rel=1e-4)] * 2


def test_a_launch_with_restarts_goes_on_after_a_lost_process(shell, tmp_path, expected):
    (line,) = read_commands("lost-processes.md", "d2ldev launch")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", line], cwd=tmp_path, env=shell, **options) as launch:
        try:
            errors = ""
            while not (found := re.search(r"rank 1 is process (\d+)", errors)):
                assert launch.poll() is None, errors
                errors += launch.stderr.readline()
            subprocess.run(["kill", f"-{signal.SIGKILL.value}", found[1]], check=True)
            output, rest = launch.communicate(timeout=TIME)
        finally:
            launch.kill()
    assert launch.returncode == 0, errors + rest
    assert "all are started again" in rest
    assert output.count(str(expected[0])[:6]) == 2


def test_the_measurements_of_the_guide_run(shell, tmp_path):
    one, all_ = read_commands("measure.md", "d2ldev bench")
    commands = [one.replace("torch", "reference") + " --small", all_]
    done = [
        subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=shell, capture_output=True, text=True
        )
        for command in commands
    ]
    assert [each.returncode for each in done] == [0, 0], done
    assert all("matmul: From which size on" in each.stdout for each in done)
