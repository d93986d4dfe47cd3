"""PyTorch in several processes: what DDP is told, and the processes that ``fit`` starts."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from d2ldev_torch import TorchFramework, parallel
from d2ldev_torch.devices import TorchDevices
from d2ldev_torch.parallel import TorchParallel
from d2ldev_torch.training import replicated
from launched import environment, variables
from ports import free_port
from processes import extend_path, run_interpreter
from processes_program import NORMALIZED, RUNS, batches, mlp, normalize
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from d2ldev import PeerLostError, Schedule, Trainer, UnsupportedValueError, gpu
from d2ldev.distributed import spawning
from d2ldev.framework import Portion, TrainingSettings, bounds
from d2ldev.framework.testing import framework_of

# That of the module that a program imports.
FOLDERS = [Path(__file__).parent]
# Processes add up in another order, and in bfloat16 and float16 with few digits.
TOLERANCES = dict.fromkeys(
    ("bf16", "shared: bf16", "fp16 with a step left out", "fp16, accumulated"), 2e-3
)
TOLERANCE = 2e-6


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]
)
def together(request, tmp_path_factory):
    """What each of several processes has found in the runs of ``processes_program``."""
    number = request.param
    folder = tmp_path_factory.mktemp("together")
    program = Path(__file__).with_name("processes_program.py")
    kept = {name: value for name, value in os.environ.items() if "D2LDEV_" not in name}
    kept["OMP_NUM_THREADS"] = "1"
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, program, folder / "found"],
            env=kept | variables(rank, number, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * number, said
    assert said == [""] * number
    return [pickle.loads((folder / f"found{rank}").read_bytes()) for rank in range(number)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RUNS)
def test_several_processes_learn_like_one_process(together, name):
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


def test_a_batch_normalization_has_the_statistics_of_each_part_and_keeps_those_of_rank_0(together):
    net = normalize()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for batch in NORMALIZED:
            x, y = map(torch.as_tensor, batch)
            optimizer.zero_grad()
            losses.append(_losses_of_shards(net, x, y, len(together)))
            optimizer.step()
    for values, history in (found["batch_norm"] for found in together):
        for key, x in net.state_dict().items():
            np.testing.assert_allclose(values[key], x, rtol=TOLERANCE, atol=TOLERANCE, err_msg=key)
        curve = np.reshape(losses, (2, 2)).mean(1)
        np.testing.assert_allclose(history["loss"], curve, rtol=TOLERANCE)


def _losses_of_shards(net, x, y, number):
    """Compute gradients of the mean over a batch, in parts of which the first one's means stay."""
    total = 0.0
    for rank in range(number):
        part = slice(*bounds(len(x), rank, number))
        kept = {name: buffer.clone() for name, buffer in net.named_buffers()}
        loss = torch.nn.functional.cross_entropy(net(x[part]), y[part], reduction="sum") / len(x)
        loss.backward()
        total += loss.item()
        if rank:
            net.load_state_dict(kept, strict=False)
    return total


def test_each_process_has_masks_of_its_own(together):
    assert len(set(map(tuple, together[0]["masks"]))) == 12


def test_a_run_with_dropout_goes_on_within_an_epoch_with_the_same_numbers(together):
    for found in together:
        unbroken, resumed = found["resumed"]
        for key, x in unbroken.items():
            np.testing.assert_array_equal(resumed[key], x)


# -- other launchers, and a program that has started the engine itself ----------------------------

FIT = """
import atexit, contextlib, gc, glob, json, os, sys
import torch
from processes_program import batches, mlp
from d2ldev import Trainer

@atexit.register  # called last
def tell_threads():
    names = []
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            names.append(open(path).read())
    with open(os.environ["RANK"] + ".threads", "w") as file:
        json.dump(names, file)

gc.disable()
if "engine" in sys.argv:
    torch.distributed.init_process_group("gloo")
net = mlp()
Trainer(2, backend="torch").fit(net, batches(), loss="cross_entropy", optimizer="adam", lr=0.02)
found = {name: x.tolist() for name, x in net.state_dict().items()}
size = torch.ones(1)
torch.distributed.all_reduce(size)
with open(os.environ["RANK"], "w") as file:
    json.dump([found, size.item()], file)
if "engine" in sys.argv:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("argument", ["", pytest.param("engine", marks=pytest.mark.nightly)])
def test_torchrun_needs_no_launcher_of_ours(tmp_path, argument):
    (tmp_path / "train.py").write_text(FIT)
    run = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    run += ["--log-dir", "logs", "train.py", argument]
    given = environment(PYTHONPATH=extend_path(FOLDERS), OMP_NUM_THREADS="1")
    run_interpreter(*run, cwd=tmp_path, env=given)
    net = mlp()
    fit = Trainer(2, backend="torch").fit
    fit(net, batches(), loss="cross_entropy", optimizer="adam", lr=0.02)
    for rank in range(2):
        found, size = json.loads((tmp_path / str(rank)).read_text())
        assert size == 2  # the engine is there as before
        for name, x in net.state_dict().items():
            np.testing.assert_allclose(found[name], x, rtol=TOLERANCE, atol=TOLERANCE)
        # A thread of gloo that still has a tensor when Python ends would abort the process.
        # https://github.com/pytorch/pytorch/issues/190489
        threads = json.loads((tmp_path / f"{rank}.threads").read_text())
        assert not [name for name in threads if "gloo" in name]


@contextmanager
def start(*arguments, **options):
    """Have torch's engine in the block."""
    torch.distributed.init_process_group(*arguments, **options)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_an_engine_between_processes_that_no_launcher_has_named_is_refused(torch_backend):
    with start("fake", rank=0, world_size=2, store=FakeStore()):
        with pytest.raises(
            UnsupportedValueError, match="RANK and WORLD_SIZE are not set"
        ) as caught:
            Trainer(1, backend=torch_backend).fit(mlp(), batches(), loss="cross_entropy")
        assert torch.distributed.is_initialized()
    assert "torchrun's variables" in caught.value.fix


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3), (0, 1)])
def test_an_engine_of_other_ranks_than_the_launcher_s_is_refused(torch_backend, rank, size):
    group = SimpleNamespace(rank=0, size=2)
    with (
        start("fake", rank=rank, world_size=size, store=FakeStore()),
        pytest.raises(UnsupportedValueError, match=f"has rank {rank} of {size} here.*rank 0 of 2"),
    ):
        framework_of(torch_backend).parallel.join(group)


def test_an_engine_of_this_process_alone_is_left_as_it_is(torch_backend):
    with start("fake", rank=0, world_size=1, store=FakeStore()):
        Trainer(1, backend=torch_backend).fit(mlp(), batches(), loss="cross_entropy")
        assert torch.distributed.is_initialized()


def test_an_engine_for_gpus_alone_is_refused_on_the_cpu(torch_backend):
    group = SimpleNamespace(rank=0, size=2)
    learner = framework_of(torch_backend).parallel.learner_of_group
    with (
        start("cuda:fake", rank=0, world_size=2, store=FakeStore()),
        pytest.raises(UnsupportedValueError, match="cuda:fake, which lacks the CPU") as caught,
    ):
        learner(mlp(), TrainingSettings(), group)
    assert "num_gpus=1" in caught.value.fix


# -- which engine, by the GPUs that there are -----------------------------------------------------


@pytest.fixture
def joined(monkeypatch):
    """Joins a group of two, with a fake engine: its names, as torch is told them."""
    told = []
    monkeypatch.setattr(parallel.distributed, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(parallel.atexit, "register", lambda *_: None)

    def begin(engines, **_):
        told.append(engines)

    monkeypatch.setattr(parallel.distributed, "init_process_group", begin)

    def join(framework, gathered):
        group = SimpleNamespace(
            rank=0,
            size=2,
            timeout=1,
            addresses=["127.0.0.1:1", "127.0.0.1:2"],
            gather=lambda label, value: gathered(value),
        )
        framework.parallel.join(group)
        return told[-1]

    return join


def alike(value):
    return [value, value]


def with_module(kind, number, virtual_gpus=None):
    """Return a framework with an accelerator that may be counted, and asked nothing else."""
    framework = TorchFramework(virtual_gpus)
    module = SimpleNamespace(device_count=lambda: number)
    framework.devices = TorchDevices(kind, kind, module)
    framework.parallel = TorchParallel(framework, framework.devices)
    return framework


@pytest.fixture
def compiled(monkeypatch):
    """A build of torch that has every engine, as the wheels for CUDA have NCCL."""
    monkeypatch.setattr(parallel.distributed, "is_backend_available", lambda name: True)


@pytest.mark.parametrize(
    ("kind", "number", "virtual_gpus", "engines"),
    [
        ("cuda", 0, None, "gloo"),
        ("cuda", 1, None, "cpu:gloo,cuda:nccl"),
        ("cuda", 1, 0, "gloo"),
        ("xpu", 0, None, "gloo"),
        ("xpu", 2, None, "cpu:gloo,xpu:xccl"),
        ("mps", 1, None, "gloo"),
    ],
)
def test_an_engine_for_gpus_is_begun_where_there_is_a_gpu(
    joined, compiled, kind, number, virtual_gpus, engines
):
    assert joined(with_module(kind, number, virtual_gpus), alike) == engines


def test_a_build_without_an_engine_for_gpus_trains_on_the_cpu(joined, monkeypatch):
    monkeypatch.setattr(parallel.distributed, "is_backend_available", lambda name: name == "gloo")
    assert joined(with_module("cuda", 2), alike) == "gloo"


@pytest.mark.parametrize(("number", "others"), [(1, ""), (0, "nccl"), (1, "xccl")])
def test_all_begin_the_same_engine_where_some_have_no_gpu(joined, compiled, number, others):
    framework = with_module("cuda", number)
    assert joined(framework, lambda value: [value, others]) == "cpu:gloo"


def test_virtual_gpus_need_no_engine_of_the_others(joined, compiled, virtual):
    assert joined(framework_of(virtual), lambda value: [value, ""]) == "gloo"


# fsdp adds an engine to torch's list. torch then finds no default one, where the engines are named.
QUIET = """
import torch.distributed.fsdp
from d2ldev import Trainer, backend
from processes_program import batches, mlp
Trainer(max_epochs=1, num_gpus="auto").fit(mlp(), batches(), loss="cross_entropy")
print(backend.num_gpus(), torch.distributed.get_world_size())
"""


@pytest.mark.parametrize("number", [0, 1])
def test_a_launch_ends_without_a_warning_of_torch(tmp_path, number):
    (tmp_path / "program.py").write_text(QUIET)
    wanted = {"D2LDEV_VIRTUAL_GPUS": str(number), "D2LDEV_BACKEND": "torch"}
    found = environment(PYTHONPATH=extend_path(FOLDERS), **wanted)
    launch = ("-m", "d2ldev", "launch", "--processes", "2", tmp_path / "program.py")
    done = run_interpreter(*launch, env=found)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert sorted(lines) == [f"[rank {rank}] {number} 2" for rank in (0, 1)]
    assert "Warning" not in done.stderr


def test_a_gpu_that_torch_cannot_use_is_named(joined, compiled, monkeypatch):
    def fail(engines, **_):
        raise ValueError("no GPUs found!")

    monkeypatch.setattr(parallel.distributed, "init_process_group", fail)
    with pytest.raises(UnsupportedValueError, match="cuda:nccl: no GPUs found!") as caught:
        joined(with_module("cuda", 1), alike)
    assert "D2LDEV_VIRTUAL_GPUS=0" in caught.value.fix


@pytest.mark.parametrize(
    ("kind", "engines", "library"),
    [
        ("cuda", "cpu:gloo,cuda:nccl", "NCCL"),
        # Some of the processes have no GPU.
        ("cuda", "cpu:gloo", "NCCL"),
        # As a program has begun it.
        ("cuda", "cpu:gloo,cuda:gloo,xpu:gloo", ""),
        ("cuda", "cuda:nccl", "NCCL"),
        ("xpu", "cpu:gloo,xpu:xccl", "XCCL"),
        ("vgpu", "cpu:gloo,vgpu:gloo", ""),
    ],
)
def test_the_library_between_gpus_is_the_one_that_was_begun(monkeypatch, kind, engines, library):
    monkeypatch.setattr(parallel.distributed, "get_backend_config", lambda: engines)
    monkeypatch.setattr(TorchDevices, "uuid", lambda devices, device: f"its {device}")
    found = with_module(kind, 1).parallel.gpu_library(gpu(0))
    assert found == ((library, "its gpu:0") if library else ("", None))


@pytest.mark.parametrize(
    ("kind", "uuid", "name"),
    [
        ("cuda", "8932-f937", "GPU-8932-f937"),
        ("cuda", "0000-0000", None),
        ("xpu", "8932-f937", None),
    ],
)
def test_the_name_of_a_gpu_is_the_driver_s(kind, uuid, name):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(uuid=uuid)

    devices = TorchDevices(kind, kind, SimpleNamespace(get_device_properties=properties))
    assert devices.uuid(gpu(1)) == name
    assert asked == ([1] if kind == "cuda" else [])


def test_the_loss_that_lbfgs_searches_with_is_added_up_on_its_device(virtual, monkeypatch):
    devices = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: devices.append(x.device))
    net = virtual.place(mlp(), "gpu:1")
    settings = TrainingSettings(
        loss="mse", optimizer=torch.optim.LBFGS(net.parameters(), max_iter=1)
    )
    x = virtual.ones((2, 3), device="gpu:1")
    with start("gloo", rank=0, world_size=1, store=torch.distributed.HashStore()):
        group = SimpleNamespace(rank=0, size=1)
        learner = framework_of(virtual).parallel.learner_of_group(net, settings, group)
        learner.portion = Portion(2, 2)
        learner.step((x,), x)
    # The CPU may have no engine.
    assert devices == [x.device]


# -- processes that fit starts --------------------------------------------------------------------


@pytest.mark.usefixtures("copied_processes")
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


def test_an_optimizer_of_narrow_parameters_begins_with_the_digits_of_the_first(
    torch_backend, monkeypatch
):
    def build(filled):
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.NAdam([weight])
        optimizer.state[weight] = {
            "step": torch.tensor(4.0),
            "mu_product": torch.tensor(filled),
            "exp_avg": torch.ones_like(weight),
            "exp_avg_sq": torch.ones_like(weight),
        }
        return weight, optimizer

    sent = []

    def broadcast(state):
        sent.append(pickle.dumps(state))
        state[:] = pickle.loads(sent[0])

    monkeypatch.setattr(replicated.distributed, "broadcast_object_list", broadcast)
    pair = [build(0.0912143), build(0.5)]
    for rank, (_, optimizer) in enumerate(pair):
        monkeypatch.setattr(replicated.distributed, "get_rank", lambda rank=rank: rank)
        replicated.begin_as_the_first(framework_of(torch_backend), optimizer)
    first, other = (optimizer.state[weight]["mu_product"] for weight, optimizer in pair)
    assert other.dtype == torch.float32
    assert other == first


class Share(torch.nn.Module):
    """The share of right labels, with the public methods and the attribute of torchmetrics."""

    def __init__(self, *, sync_on_compute=True):
        super().__init__()
        self.sync_on_compute = sync_on_compute
        self.register_buffer("counts", torch.zeros(2))

    def reset(self):
        self.counts.zero_()

    def update(self, preds, target):
        right = (preds.argmax(1) == target).float()
        self.counts += torch.stack([right.sum(), torch.ones_like(right).sum()])

    def compute(self):
        counts = self.counts.clone()
        if self.sync_on_compute and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        return counts[0] / counts[1]


class Around:
    """A metric of a user with another one inside."""

    def __init__(self, inner):
        self.inner = inner
        self.compute, self.reset = inner.compute, inner.reset

    def update(self, prediction, y):
        self.inner.update(prediction.cpu(), y.cpu())


@pytest.mark.usefixtures("copied_processes")
def test_a_metric_that_combines_the_processes_itself_gets_its_shard(virtual):
    metrics = {
        "right": "accuracy",
        "itself": Share(),
        "whole": Share(sync_on_compute=False),
        "around": Around(Share(sync_on_compute=False)),
    }
    trainer = Trainer(2, 2, backend=virtual)
    data = batches((8, 5, 1, *[4] * 14))  # more batches than wait for one exchange
    history = trainer.fit(mlp(), data, data[:16], loss="cross_entropy", lr=0.1, metrics=metrics)
    for prefix in ("", "val_"):
        for name in ("itself", "whole", "around"):
            right = history[f"{prefix}right"]
            np.testing.assert_allclose(history[f"{prefix}{name}"], right, rtol=TOLERANCE)


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize(
    ("metric", "sizes", "problem"),
    [
        (Around(Share()), (8,), "in its attributes combines"),
        (Share(), (1, 1), "rank 1 had no example"),
    ],
    ids=["one inside", "without an example"],
)
def test_a_metric_that_would_combine_other_examples_is_refused(virtual, metric, sizes, problem):
    options = {"loss": "cross_entropy", "metrics": {"share": metric}}
    with pytest.raises(UnsupportedValueError, match=problem) as error:
        Trainer(1, 2, backend=virtual).fit(mlp(), batches(sizes), **options)
    assert "sync_on_compute=False" in error.value.fix


def test_validate_refuses_a_metric_that_combines_the_processes(virtual, monkeypatch):
    for name, value in variables(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    metrics = [Share(sync_on_compute=False)]
    numbers = Trainer(1, backend=virtual).validate(
        mlp(), batches((8,)), loss="cross_entropy", metrics=metrics
    )
    assert list(numbers) == ["loss", "Share"]
    with pytest.raises(UnsupportedValueError, match="all data in each process"):
        Trainer(1, backend=virtual).validate(
            mlp(), batches((8,)), loss="cross_entropy", metrics=[Share()]
        )


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_a_batch_normalization_of_the_whole_batch_is_that_of_one_gpu(virtual, precision):
    def fit(number):
        net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(normalize())
        trainer = Trainer(2, number, backend=virtual, batch_norm="global", precision=precision)
        history = trainer.fit(net, batches((8, 7)), batches((8,)), loss="cross_entropy", lr=0.1)
        return {name: x.detach().cpu().numpy() for name, x in net.state_dict().items()}, history

    (values, history), (expected, curves) = fit(2), fit(1)
    tolerance = TOLERANCES.get(precision, TOLERANCE)
    for name, x in expected.items():
        np.testing.assert_allclose(values[name], x, rtol=tolerance, atol=tolerance, err_msg=name)
    for name, curve in curves.items():
        np.testing.assert_allclose(history[name], curve, rtol=tolerance)


def test_processes_on_virtual_gpus_print_nothing(virtual, capfd, monkeypatch):
    # New ones, as those of a user are.
    monkeypatch.setattr(spawning, "START_METHOD", "spawn")
    Trainer(1, 2, backend=virtual).fit(mlp(), batches(), loss="cross_entropy")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("copied_processes")
def test_a_model_with_lazy_modules_comes_back_built(virtual):
    def fit(number):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 3))
        Trainer(1, number, backend=virtual).fit(net, batches(), loss="cross_entropy")
        return net[0].weight.detach().cpu()

    torch.testing.assert_close(fit(2), fit(1))


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_schedule_steps_on_two_gpus_as_on_one_and_torch_warns_of_nothing(virtual, per, capfd):
    def fit(number):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        trainer = Trainer(3, number, backend=virtual, callbacks=Schedule(schedule, per))
        history = trainer.fit(net, batches(), loss="cross_entropy", optimizer=optimizer)
        return history["loss"], schedule.last_epoch, optimizer.param_groups[0]["lr"]

    (losses, *counted), (expected, *counted_on_one) = fit(2), fit(1)
    assert capfd.readouterr().err == ""
    assert counted == counted_on_one
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)


TOLD = []
"""The number of this process, once a dataset in it was told an epoch; copies have it, too."""


class Told(torch.utils.data.Dataset):
    """Examples with the number of the epoch, and whether a copy of the process reads them."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch
        TOLD.append(os.getpid())

    def __getitem__(self, number):
        is_copy = os.getppid() in TOLD
        return torch.zeros(3), torch.tensor([self.epoch, is_copy], dtype=torch.float32)

    def __len__(self):
        return 4


def mean_epoch(prediction, y):
    return y[:, 0].mean()


def share_of_copies(prediction, y):
    return y[:, 1].mean()


@pytest.mark.usefixtures("copied_processes")
@pytest.mark.parametrize(
    ("method", "persistent"),
    [(None, True), *(pytest.param(x, False, marks=pytest.mark.nightly) for x in (None, "spawn"))],
)
def test_the_workers_of_two_gpus_start_as_those_of_one(virtual, method, persistent):
    options = {"persistent_workers": persistent, "multiprocessing_context": method}
    loader = DataLoader(Told(), 2, num_workers=1, **options)
    next(iter(loader))  # workers that persist, and cannot be pickled
    metrics = [mean_epoch, share_of_copies]
    trainer = Trainer(2, 2, backend=virtual)
    history = trainer.fit(torch.nn.Linear(3, 2), loader, loader, metrics=metrics)
    is_copy = (method or multiprocessing.get_start_method()) == "fork"
    assert history["mean_epoch"] == history["val_mean_epoch"] == [0, 1]
    assert history["share_of_copies"] == history["val_share_of_copies"] == [is_copy] * 2


class KillsRankOne:
    def on_step_end(self, step, loss):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("copied_processes")
def test_a_killed_process_is_named_although_its_workers_live_on(virtual):
    loader = DataLoader(Told(), 2, num_workers=1, persistent_workers=True)
    trainer = Trainer(100, 2, backend=virtual, callbacks=KillsRankOne())
    with pytest.raises(PeerLostError, match="the process of rank 1 ended with status -9"):
        trainer.fit(torch.nn.Linear(3, 2), loader)


SESSION = """
import torch
from processes_program import batches, mlp
import d2ldev
from d2ldev import Trainer

class Own(torch.nn.Sequential):
    pass

def loss_of(net):
    return Trainer(2, 2, backend="torch").fit(net, batches(), loss="cross_entropy")["loss"]

print(loss_of(mlp()))
try:
    loss_of(Own(mlp()))
except d2ldev.UnsupportedValueError as error:
    print(error)
"""


@pytest.mark.nightly
def test_a_model_of_a_session_is_refused_and_one_of_a_module_is_trained_there(virtual, tmp_path):
    given = environment(PYTHONPATH=extend_path(FOLDERS), D2LDEV_VIRTUAL_GPUS="2")
    done = run_interpreter("-", input=SESSION, cwd=tmp_path, env=given)
    loss, refusal, fix = done.stdout.splitlines()
    history = Trainer(2, 1, backend=virtual).fit(mlp(), batches(), loss="cross_entropy")
    np.testing.assert_allclose(json.loads(loss), history["loss"], rtol=TOLERANCE)
    assert "Own is of this session, which no other process can import" in refusal
    assert "d2ldev launch --processes 2 train.py" in fix


# -- batch normalization ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "statistics", "fix"),
    [
        (torch.nn.BatchNorm1d, "local", "convert_sync_batchnorm"),
        (torch.nn.SyncBatchNorm, "global", "torch.nn.BatchNorm2d"),
    ],
)
def test_a_layer_says_which_statistics_it_uses_and_what_changes_them(
    virtual, layer, statistics, fix
):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), layer(4))
    (found,) = framework_of(virtual).parallel.batch_norms(net)
    assert (found.name, found.statistics) == (f"{layer.__name__} 1", statistics)
    assert fix in found.fix


def test_a_layer_of_one_s_own_that_keeps_statistics_is_named(virtual):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3))

    net = torch.nn.Sequential(Own(), torch.nn.InstanceNorm2d(3, track_running_stats=True))
    (found,) = framework_of(virtual).parallel.batch_norms(net)
    assert (found.name, found.statistics) == ("Own 0", "local")
