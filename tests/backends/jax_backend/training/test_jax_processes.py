"""Several processes: what they learn is what one learns, and all end when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import optax
import pytest
from d2ldev_conformance.suite.data import difference_of_runs
from d2ldev_jax import parallel
from d2ldev_jax.parallel import JaxParallel
from launched import run_processes
from several_gpus import flat_batches, train
from test_jax_parallel import Dense, Normalized, Own, Scaled

import d2ldev
from d2ldev import UnsupportedValueError, gpu

HERE = Path(__file__).parent
PATH = [HERE, HERE.parents[2] / "helpers"]
# XLA adds up the gradients of parts in another order.
DIGITS = 1e-4

PROGRAM = "import test_jax_processes; test_jax_processes.main()"


class Both(Dense):
    """A model whose second prediction XLA splits by another axis than the first."""

    def __call__(self, x):
        prediction = super().__call__(x)
        return prediction, prediction.T


def _of_both(both, y):
    prediction, transposed = both
    losses = optax.softmax_cross_entropy_with_integer_labels(prediction, y)
    return losses.mean() + transposed.mean()


def _accuracy(both, y):
    return (both[0].argmax(-1) == y).mean()


def _schedule(_model):
    return optax.adam(optax.cosine_decay_schedule(0.1, 10))


CASES = {
    "statistics and masks": (Normalized, flat_batches(), {"optimizer": "adam"}),
    "method": (Own, flat_batches(), {"lr": 0.1, "loss": None, "metrics": ()}),
    "fp16": (
        Dense,
        flat_batches(12, 4),
        {"lr": 0.1, "precision": "fp16", "accumulate_grad_batches": 2},
    ),
}
MORE = {
    "two predictions": (Both, flat_batches(12, 4), {"loss": _of_both, "metrics": [_accuracy]}),
    "optax": (Dense, flat_batches(), {"optimizer": _schedule, "fits": 2}),
    "numbers": (Scaled, [(x, 2.5, y) for x, y in flat_batches(7)], {"lr": 0.1}),
    "bf16": (Dense, flat_batches(), {"lr": 0.1, "precision": "bf16", "accumulate_grad_batches": 2}),
}
FEWER_DIGITS = {"bf16": 2e-3, "fp16": 1e-3}


def main():
    """Train in one of several processes, and then alone; print by how much that differs."""
    how, num_gpus, *names = sys.argv[1:]
    if "OWN_ADDRESS" in os.environ:
        jax.distributed.initialize(
            os.environ["OWN_ADDRESS"], int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        )
    if how == "in use":
        jax.devices()
    backend = d2ldev.get_backend("jax")
    found = {"devices": [str(each) for each in backend.devices()]}
    for name in names:
        make, data, options = {**CASES, **MORE}[name]
        options = {"loss": "cross_entropy", "metrics": ["accuracy"], **options}
        result = train(backend, make, _end_processes(data, how), int(num_gpus), **options)
        if os.environ["RANK"] == "0":
            jax.distributed.shutdown()  # or training alone is refused
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WORLD_SIZE", "1")
                patch.setenv("LOCAL_WORLD_SIZE", "1")
                expected = train(backend, make, data, int(num_gpus), **options)
            found[name] = difference_of_runs(result, expected)
    print(json.dumps(found))


@pytest.mark.parametrize(("numbers", "some", "none"), [([0, 2], 1, 0), ([1, 0], 0, 1)])
def test_jax_does_not_wait_for_the_gpus_of_a_process_without_any(monkeypatch, numbers, some, none):
    started = []
    monkeypatch.setattr(parallel, "atexit", SimpleNamespace(register=lambda *_: None))
    monkeypatch.setattr(parallel, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: started.append(True))
    group = SimpleNamespace(
        size=2, rank=0, local_rank=0, hosts=["a", "b"], gather=lambda label, value: numbers
    )
    room = JaxParallel(None, SimpleNamespace(count_cuda=lambda: numbers[0]))
    with pytest.raises(UnsupportedValueError, match="JAX needs one platform") as caught:
        room.join(group)
    hosts = group.hosts
    assert f"rank {none} on {hosts[none]} has no GPU" in caught.value.problem
    assert f"rank {some} on {hosts[some]} has {numbers[some]}" in caught.value.problem
    assert "JAX_PLATFORMS=cpu" in caught.value.fix
    assert started == []


@pytest.mark.parametrize(
    ("platform", "library"),
    [("cuda", "NCCL"), ("rocm", "RCCL"), ("tpu", ""), ("virtual", "")],
)
def test_the_library_between_gpus_is_xla_s(platform, library):
    devices = SimpleNamespace(platform=lambda device: platform, uuid=lambda device: f"its {device}")
    found = JaxParallel(None, devices).gpu_library(gpu(0))
    assert found == ((library, "its gpu:0") if library else ("", None))


def _end_processes(data, how):
    """Return batches, in which one of the processes gets a signal."""
    if not how.startswith("SIG") or os.environ["RANK"] != os.environ["LOST"]:
        return data
    return _Ended(data, getattr(signal, how))


class _Ended:
    def __init__(self, data, number):
        self._data, self._number = data, number

    def __iter__(self):
        yield self._data[0]
        os.kill(os.getpid(), self._number)
        yield from self._data[1:]


def _train(number, num_gpus, *names, how="", **options):
    environment = {"D2LDEV_VIRTUAL_GPUS": str(num_gpus), **options.pop("environment", {})}
    return run_processes(
        PROGRAM, how, num_gpus, *names, number=number, path=PATH, environment=environment, **options
    )


def _read_results(done):
    """Return what each process has printed."""
    assert [each.returncode for each in done] == [0] * len(done), done[-1].stderr
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


@pytest.fixture(scope="module")
def two():
    return _read_results(_train(2, 0, *CASES, timeout=30))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_like_one(two, name):
    assert two[0][name] < FEWER_DIGITS.get(name, DIGITS)


def test_a_process_has_its_own_devices_only():
    found = _read_results(_train(3, 1, "method", timeout=30))
    assert [each["devices"] for each in found] == [["cpu", "gpu:0"]] * 3
    assert found[0]["method"] < DIGITS


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "num_gpus"), [(2, 0), (2, 1), (3, 1), (4, 0)])
def test_any_number_of_processes_learns_like_one(number, num_gpus):
    found = _read_results(_train(number, num_gpus, *CASES, *MORE, timeout=60))
    off = {name: found[0][name] / FEWER_DIGITS.get(name, DIGITS) for name in {**CASES, **MORE}}
    assert max(off.values()) < 1, off


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_the_loss_of_the_process_with_the_service_of_jax_is_an_error_of_the_others(how):
    first, other = _train(2, 0, "method", how=how, lost=0, environment={"LOST": "0"})
    assert first.returncode == -signal.SIGKILL
    assert other.returncode == 1, other.stderr
    assert "PeerLostError: cannot train in 2 processes: rank 0 on " in other.stderr


def test_a_program_may_initialize_jax_itself():
    environment = {"OWN_ADDRESS": _free_address()}
    found = _read_results(_train(2, 0, "method", environment=environment, timeout=30))
    assert found[0]["method"] < DIGITS


ALONE = """
import os, sys
import jax
from flax import nnx
import d2ldev
del os.environ["WORLD_SIZE"]
jax.distributed.initialize(sys.argv[1], 2, int(os.environ.pop("RANK")))
backend = d2ldev.get_backend("jax")
assert backend.ones(2).sum() == 2  # tensors are each process's own
net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
batch = backend.ones((2, 3)), backend.ones((2, 2))
try:
    d2ldev.Trainer(1, num_gpus=0, backend=backend).fit(net, [batch])
except d2ldev.UnsupportedValueError as error:
    print(error)
"""


def test_jax_between_processes_that_no_launcher_has_named_is_refused():
    # Two processes that use one GPU would each take most of its memory.
    done = run_processes(ALONE, _free_address(), environment={"JAX_PLATFORMS": "cpu"})
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    assert all("RANK and WORLD_SIZE are not set" in each.stdout for each in done)


def test_a_program_that_has_initialized_jax_itself_ends_with_the_error_of_the_group():
    environment = {"OWN_ADDRESS": _free_address(), "LOST": "1"}
    other, lost = _train(2, 0, "method", how="SIGKILL", lost=1, environment=environment)
    assert lost.returncode == -signal.SIGKILL
    assert other.returncode == 1, other.stderr
    assert "PeerLostError: cannot train in 2 processes: rank 1 on " in other.stderr


def _free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_devices_that_jax_has_looked_for_before_are_refused():
    done = _train(2, 0, how="in use")
    assert [each.returncode for each in done] == [1, 1]
    assert "`from d2ldev import jax`" in done[0].stderr + done[1].stderr


# The sleep is in the place of what JAX waits for at exit: what it computes with a stopped process.
AT_EXIT = """
import atexit, sys, time
from types import SimpleNamespace
from d2ldev import PeerLostError
from d2ldev_jax.parallel import end_in_time_if_failed

def check():
    if sys.argv[1] == "failed":
        raise PeerLostError("train", "rank 1 is lost", "start it again")

atexit.register(time.sleep, float(sys.argv[2]))
atexit.register(end_in_time_if_failed, SimpleNamespace(check=check, timeout=float(sys.argv[3])))
"""


@pytest.mark.parametrize(
    ("group", "seconds", "timeout", "status"),
    [("failed", 60, 0.5, 1), ("failed", 0, 30, 0), ("whole", 1, 0.5, 0)],
)
def test_the_exit_of_a_process_that_lost_another_is_bounded(group, seconds, timeout, status):
    command = [sys.executable, "-c", AT_EXIT, group, str(seconds), str(timeout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
    assert (done.returncode, done.stderr) == (status, "")
