"""D2L 6.7.2.3, "Side Notes", on hardware: contexts, forks and memory. Skipped without a GPU.

Virtual GPUs share the CPU's memory and have no driver. The work of a driver is only seen on a card.

Each test that is about the first use of a framework runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.devices.queues import fill_queue

SECTION = "6.7.2.3"
SOURCE = "D2L"
pytestmark = pytest.mark.needs_real_gpu

MEBIBYTE = 2**20


def _run(program: str, backend) -> str:
    """Return what a program prints in a new process, where ``backend`` is the backend."""
    setup = f"import d2ldev; backend = d2ldev.get_backend({backend.name!r})\n"
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", setup + program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FORK = """
import os, signal
{before}
child = os.fork()
if child == 0:
    signal.alarm(60)  # a framework that hangs in the child leaves no process behind
    try:
        x = backend.ones((2, 2), device='gpu:0')
        os._exit(0 if float(backend.to_numpy(x @ x)[0, 0]) == 2.0 else 1)
    except BaseException as error:
        print(error, flush=True)
        os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@requirement("gpus.counting-makes-no-context", section=SECTION, source="PyTorch, multiprocessing")
@pytest.mark.starts_processes
def test_a_child_can_use_the_gpu_after_its_parent_counted_them(backend):
    """Count and list GPUs in a parent whose forked child can still use them.

    A CUDA context does not survive a fork, and data loaders fork.
    """
    before = "backend.num_gpus(); backend.try_gpu(); backend.try_all_gpus(); backend.devices()"
    assert _run(FORK.format(before=before), backend) == "0"


@requirement(
    "gpus.synchronizing-makes-no-context", section=SECTION, source="PyTorch, multiprocessing"
)
@pytest.mark.starts_processes
def test_a_child_can_use_the_gpu_after_its_parent_synchronized(backend):
    """Synchronize without queued work, so that a forked child can still use a GPU.

    Waiting for a device that was never used needs no context on it.
    """
    before = "backend.synchronize(); backend.is_idle(); backend.ones(3, device='cpu')"
    assert _run(FORK.format(before=before), backend) == "0"


@requirement("gpus.hidden-gpus-are-not-counted", section=SECTION, source="PyTorch, CUDA semantics")
@pytest.mark.starts_processes
def test_a_hidden_gpu_does_not_exist(backend, monkeypatch):
    """Count no GPU that ``CUDA_VISIBLE_DEVICES`` hides.

    Schedulers of clusters divide a machine's cards by this variable.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert _run("print(backend.num_gpus(), backend.try_gpu())", backend) == "0 cpu"


STRICT = """
import threading
def mix():
    try:
        backend.ones(2, device='cpu') + backend.ones(2, device='gpu:0')
    except d2ldev.DeviceMismatchError:
        print('refused')
mix()
thread = threading.Thread(target=mix); thread.start(); thread.join()
"""


@requirement("gpus.strict-variable", section="6.7.2.2", source="contract, Mixing devices")
@pytest.mark.starts_processes
def test_the_variable_is_in_force_in_every_thread(backend, monkeypatch):
    """Refuse mixed devices in every thread under ``D2LDEV_STRICT=1``.

    The variable is for a whole program, whose threads begin later.
    """
    monkeypatch.setenv("D2LDEV_STRICT", "1")
    assert _run(STRICT, backend).split() == ["refused"] * 2


@requirement("sync.queue-is-seen", section=SECTION, source="JAX, asynchronous dispatch")
def test_a_gpu_that_works_is_not_idle(backend):
    """Report a GPU with queued work as busy, and as idle after ``synchronize``.

    Every timing of GPU work rests on this answer.
    """
    # Without it ``sync.waits-for-queued-work`` would be skipped on hardware: "nothing is queued".
    work = fill_queue(backend, backend.gpu(0))
    assert not backend.is_idle("gpu:0")
    backend.synchronize("gpu:0")
    assert backend.is_idle("gpu:0")
    assert backend.device_of(work) is backend.gpu(0)


@requirement("memory.total", section=SECTION, source="contract")
def test_a_gpu_has_memory(backend):
    """Report the memory of a GPU as more than 256 MiB.

    A wrong unit would be off by a factor of 1024.
    """
    assert backend.memory("gpu:0").total > 256 * MEBIBYTE


@requirement("memory.follows-an-allocation", section=SECTION, source="contract")
def test_memory_follows_an_allocation(backend):
    """Count a new tensor in the used memory of its GPU, and in the peak.

    The book's readers look for the cause of a full GPU.
    """
    before = backend.memory("gpu:0").used
    x = backend.zeros((64 * MEBIBYTE,), dtype="int8", device="gpu:0")
    backend.synchronize("gpu:0")
    during = backend.memory("gpu:0")
    assert during.used - before >= 64 * MEBIBYTE
    del x
    assert backend.memory("gpu:0").used < during.used
    assert backend.memory("gpu:0").peak >= during.used


@requirement("memory.other-devices-are-not-counted", section=SECTION, source="contract")
def test_memory_of_a_gpu_ignores_the_cpu(backend):
    """Leave tensors of the CPU out of the used memory of a GPU.

    The number has to answer how much more fits on the card.
    """
    before = backend.memory("gpu:0").used
    x = backend.zeros((64 * MEBIBYTE,), dtype="int8", device="cpu")
    assert backend.memory("gpu:0").used == before
    assert backend.device_of(x) is backend.cpu()


@requirement("gpus.made-in-place", section=SECTION)
@pytest.mark.starts_processes
def test_a_tensor_of_a_gpu_takes_its_memory_once(backend):
    """Make a tensor on a GPU without a second allocation of its size.

    A detour by another tensor halves the size of what fits.
    """
    program = f"""
x = backend.ones(1, device='gpu:0'); backend.synchronize()
before = backend.memory('gpu:0')
x = backend.zeros(({64 * MEBIBYTE},), dtype='int8', device='gpu:0'); backend.synchronize()
print(backend.memory('gpu:0').peak - before.used < {96 * MEBIBYTE})
"""
    assert _run(program, backend) == "True"


@requirement("memory.a-copy-is-freed", section=SECTION, source="contract")
def test_the_memory_of_a_copy_is_free_while_its_source_lives(backend):
    """Free the memory of a deleted copy while its source is alive.

    A cache of copies would fill a GPU in each epoch.
    """
    x = backend.zeros((64 * MEBIBYTE,), dtype="int8", device="cpu")
    before = backend.memory("gpu:0").used
    moved = backend.to(x, "gpu:0")
    backend.synchronize("gpu:0")
    assert backend.memory("gpu:0").used - before >= 64 * MEBIBYTE
    del moved
    assert backend.memory("gpu:0").used - before < 64 * MEBIBYTE
    assert backend.device_of(x) is backend.cpu()


# It takes all of the GPU's memory, and leaves none for other programs.
@pytest.mark.nightly
@requirement(
    "gpus.a-copy-that-does-not-fit", section=SECTION, source="contract, Containers and errors"
)
@pytest.mark.starts_processes
def test_a_copy_for_which_the_memory_is_too_small_is_refused(backend):
    """Refuse ``to``, ``copy`` and ``rand`` on a full GPU, and work again afterwards.

    Users catch this error to try a smaller batch.
    """
    program = f"""
x = backend.zeros(({512 * MEBIBYTE},), dtype='int8', device='cpu')
held = []
for size in ({8192 * MEBIBYTE}, {1024 * MEBIBYTE}, {256 * MEBIBYTE}):
    for _ in range(128):
        try:
            held.append(backend.zeros((size,), dtype='int8', device='gpu:0'))
            backend.synchronize()
        except d2ldev.OutOfDeviceMemoryError:
            break
calls = dict(
    to=lambda: backend.to(x, 'gpu:0'),
    copy=lambda: backend.copy(held[0]),
    rand=lambda: backend.rand(({128 * MEBIBYTE},), device='gpu:0'),
)
refused = []
for name, call in calls.items():
    try:
        call()
    except d2ldev.OutOfDeviceMemoryError:
        refused.append(name)
held.clear()
print(*refused, int(backend.to_numpy(backend.to(x, 'gpu:0')).max()))
"""
    assert _run(program, backend) == "to copy rand 0"


@requirement("gpus.large-copies", section=SECTION, source="PyTorch, CUDA semantics")
def test_a_large_copy_is_complete_when_it_is_read(backend):
    """Return each value of a large tensor that moves from a GPU to the CPU.

    A copy that is read before it has ended holds old memory.
    """
    x = backend.arange(2**24, dtype="int32", device="gpu:0")
    back = backend.to_numpy(backend.to(x, "cpu"))
    assert back[0] == 0
    assert back[-1] == 2**24 - 1
    assert (back[1:] > back[:-1]).all()


@requirement("gpus.device-of-is-native", section=SECTION, source="contract")
def test_the_frameworks_own_device_names_are_accepted(backend):
    """Read the ``device`` of a tensor on a GPU as this GPU.

    Programs pass ``x.device`` on.
    """
    x = backend.ones(1, device="gpu:0")
    assert backend.device(getattr(x, "device", backend.native("gpu:0"))) is backend.gpu(0)
