"""The commands of the guides, as a shell runs them, with small stand-ins for a cluster's own."""

import ast
import os
import re
import shlex
import subprocess
import sys

import pytest
from pages import ROOT, write_files
from ports import free_port
from processes import extend_path

GUIDES = ROOT / "docs" / "guides"
FOR_ANY = (
    *("several-gpus.md", "gpu-memory.md"),
    *(
        pytest.param(page, marks=pytest.mark.nightly)
        for page in ("one-gpu.md", "split-batches.md", "measure.md")
    ),
)
"""The guides whose programs run on every framework."""
TIME = 120

# It runs two tasks, on as many nodes as there are, all on this machine.
SRUN = """#!/bin/sh
while case "$1" in --*) true ;; *) false ;; esac; do shift; done
tasks=""
for task in 0 1; do
    SLURM_PROCID=$task SLURM_NODEID=$((task / SLURM_NTASKS_PER_NODE)) \\
        SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" &
    tasks="$tasks $!"
done
status=0
for task in $tasks; do wait "$task" || status=1; done
exit $status
"""
SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames node[03-04]" ] && printf '127.0.0.1\\nnode04\\n'
"""


def read_blocks(page, language):
    """Return the text of the blocks of a language in a guide."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def read_commands(page, start):
    """Return the commands of a guide's shell blocks that begin with a word, each on one line."""
    lines = "".join(read_blocks(page, "sh")).replace("\\\n", "").splitlines()
    return [line for line in lines if line.startswith(start)]


def make_shell(folder, page="several-machines.md", backend="reference"):
    """Write a guide's files and the commands into a folder; return the variables for ``start``."""
    write_files(GUIDES / page, folder, backend)
    python = shlex.quote(sys.executable)
    commands = {
        "python": f'#!/bin/sh\nexec {python} "$@"\n',
        "d2ldev": f'#!/bin/sh\nexec {python} -m d2ldev "$@"\n',
        "torchrun": f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
        "scontrol": SCONTROL,
    }
    programs = folder / "bin"
    programs.mkdir()
    for name, text in commands.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    found = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    found["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
    found |= {"PYTHONPATH": extend_path([]), "D2LDEV_BACKEND": backend}
    return found | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}


def on_loopback(command):
    """Return a command of one of two machines with four GPUs, for one process on this machine."""
    command = re.sub(r"--(processes|nproc-per-node) 4\b", r"--\1 1", command)
    return re.sub(r"[\w.-]+:29500", "127.0.0.1:$TEST_PORT", command)


def run(commands, folder, variables):
    """Run commands at the same time, each in a shell; return the losses that each process showed.

    Args:
        commands: the text for each shell.
        folder: the working folder.
        variables: of the environment.
    """
    variables = variables | {"TEST_PORT": str(free_port())}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shells = [
        subprocess.Popen(["bash", "-e", "-c", command], cwd=folder, env=variables, **options)
        for command in commands
    ]
    try:
        ended = [(shell, *shell.communicate(timeout=TIME)) for shell in shells]
    finally:
        for shell in shells:
            shell.kill()
            shell.wait()
    losses = []
    for shell, output, errors in ended:
        assert shell.returncode == 0, output + errors
        shown = re.findall(r"\[\d[\d.e, -]*\]", output)  # two processes may write one line
        losses += [ast.literal_eval(text) for text in shown]
    return losses
