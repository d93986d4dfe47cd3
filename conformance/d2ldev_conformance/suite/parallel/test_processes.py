"""D2L 13.6: several processes train one model, learn what one learns, and end together.

Several processes are for speed. The numbers have to stay those of one process, and all processes
have to end together.

Two processes on this machine start as ``d2ldev launch`` starts them, and train one model after the
other. Their parameters are compared with those that this process learns alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2ldev import (
    ArrayLoader,
    Backend,
    Broadcast,
    EarlyStopping,
    EpochMetric,
    PeerLostError,
    Trainer,
    UnsupportedValueError,
    WeightedLoss,
    backend_of,
)
from d2ldev.contract.abilities import require
from d2ldev.framework.testing import framework_of
from d2ldev_conformance.provision import (
    list_provided,
    models_with_tables,
    networks_with_batch_norm,
)
from d2ldev_conformance.requirement import requirement
from d2ldev_conformance.suite.data import (
    assert_same,
    assert_same_run,
    assert_same_statistics,
    make_normal_batches,
    make_repeated_tokens,
    needs_float32,
    read_saved_values,
)
from d2ldev_conformance.suite.parallel.launching import command, require_processes, run_launch
from d2ldev_conformance.suite.training.test_metrics import Errors
from d2ldev_conformance.suite.training.test_stopping import AfterStep, HookError, RaisingAfterStep

SECTION = "13.6"
pytestmark = pytest.mark.starts_processes
SOURCE = "contract, Several processes"
EPOCHS = 3
TIMEOUT = 5
SOON = TIMEOUT + 20
"""Seconds until all have ended after one was lost, or began to read other batches.

The launcher gives the others 5 seconds to end by themselves; the rest is for a busy machine.
"""

PROGRAM = """
import json, os, pathlib, sys
import d2ldev
from d2ldev_conformance.suite.parallel import test_processes

name, folder, cases = sys.argv[1:]
rank = int(os.environ["RANK"])
backend = d2ldev.get_backend(name)
for case, options in json.loads(cases).items():
    run = test_processes.train(backend, folder, rank=rank, **options)
    test_processes.keep(pathlib.Path(folder), case, run)
test_processes.take_one_gpu(backend, pathlib.Path(folder))
"""

FAILING = """
import json, os, pathlib, sys
import d2ldev
from d2ldev_conformance.suite.parallel import test_processes

name, folder, cases = sys.argv[1:]
folder, rank = pathlib.Path(folder), int(os.environ["RANK"])
for case, options in json.loads(cases).items():
    test_processes.fail(d2ldev.get_backend(name), folder, case, rank=rank, **options)
"""

BESIDE_A_GPU = """
import json, os, pathlib, sys
import d2ldev
from d2ldev_conformance.suite.parallel import test_processes

name, folder, _ = sys.argv[1:]
folder, rank = pathlib.Path(folder), os.environ["RANK"]
backend = d2ldev.get_backend(name)
test_processes.keep(folder, "cpu", test_processes.train(backend, folder, num_gpus=0))
try:
    test_processes.train(backend, folder, num_gpus=1)
    text = ""
except d2ldev.UnsupportedValueError as error:
    text = str(error)
(folder / f"gpu-{rank}.txt").write_text(text)
"""

CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "validates": True},
    "momentum": {"optimizer": "momentum", "validates": True},
    "adam": {"optimizer": "adam", "validates": True},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "small": {"examples": 6},  # the last batch has one example
    "weighted": {"weights": [1, 3, 0.5, 2, 1]},
    "half weighted": {"weights": [0, 0, 0, 1, 2]},
    "unweighted": {"weights": [0, 0, 0, 0, 0]},
    "without some labels": {"left_out": [0, 1, 3], "validates": True},
    "accumulated without labels": {"left_out": [0, 1, 3], "accumulate_grad_batches": 3},
    "sharded without labels": {"left_out": [0, 1, 3], "is_sharded": True},
    "seeded": {"is_seeded_by_rank": True},
    "shuffled": {"is_shuffled": True},
    "sharded": {"is_shuffled": True, "is_sharded": True},
    "shuffled by rank": {"is_shuffled": True, "is_seeded_by_rank": True},
    "sharded by rank": {"is_shuffled": True, "is_seeded_by_rank": True, "is_sharded": True},
    "begun": {"epochs": 1, "optimizer": "adam", "checkpoint": "begun"},
    "resumed": {"optimizer": "adam", "checkpoint": "alone", "resume": True},
    "measured": {"measures": True, "validates": True, "examples": 11},
    "stopped": {"stopping": [0, 1], "at": 4},
    "stopped by one": {"stopping": [1], "at": 4},
    "stopped early": {"patience": 2, "lr": 0.0, "epochs": 6},
}
# Of these the loss is one of the user's, which tells its weight.
WEIGHING: dict[str, dict[str, Any]] = {
    "weighing": {"is_weighing": True},
    "weighing and accumulated": {"is_weighing": True, "accumulate_grad_batches": 2},
}
# Of these the labels are a list, where the framework can split one.
LISTED: dict[str, dict[str, Any]] = {
    "listed": {"is_listed": True},
    "listed and small": {"is_listed": True, "examples": 6},
}
# Of a network with batch normalization: each process normalizes its shard, or the whole batch.
NORMALIZED: dict[str, dict[str, Any]] = {
    "normalized": {"has_equal_halves": False},
    "with equal halves": {"has_equal_halves": True, "lr": 0.0},
}
# The optimizers of a model with a table.
TABLES = ("sgd", "adam", "adagrad")


def _arrays(examples):
    """Return examples of three classes."""
    inputs = np.linspace(-1, 1, 3 * examples, dtype="float32").reshape(examples, 3)[:, ::-1]
    return inputs**3, (np.arange(examples) % 3).astype("int32")


def _loader(examples, is_shuffled, seed=0, left_out=()):
    x, y = _arrays(examples)
    y[[*left_out]] = -100
    return ArrayLoader(x, y, batch_size=5, shuffle=is_shuffled, seed=seed)


def _take_weighted(prediction, y):
    """Return squares, each with the weight in the second column of the target."""
    rows = range(y.shape[0])
    squares = [(prediction[i, 0] - y[i, 0]) ** 2 * y[i, 1] for i in rows]
    return WeightedLoss(sum(squares), sum(y[i, 1] for i in rows))


class Logits(Errors):
    """The greatest logit of the labels of an epoch."""

    def compute(self):
        """Return the greatest logit."""
        return _take_greatest(*map(np.concatenate, zip(*self.found, strict=True)))

    def update(self, prediction, y):
        """Keep the logits and the labels of a batch."""
        read = backend_of(prediction).to_numpy
        self.found.append((read(prediction), read(y)))


def _take_greatest(prediction, y):
    return prediction[np.arange(len(y)), y].max() * len(y)


_MEASURES = {"accuracy": "accuracy", "own": Logits(), "whole": EpochMetric(_take_greatest)}


class Batches(ArrayLoader):
    """Batches, which two processes cannot share evenly.

    Args:
        examples: how many there are.
        weights: of the first batch, which is the only one then.
        left_out: the numbers of the examples of each batch that have no label.
        ended: ``(epoch, batch, signal)`` at which the process gets a signal.
        is_shuffled, seed: see ``ArrayLoader``.
        is_told: whether the process tells when it begins an epoch.
        is_listed: whether the labels are a list, beside what is the same for all processes.
        is_weighing: whether the target has a column of weights.
    """

    def __init__(
        self,
        examples,
        weights,
        left_out,
        ended,
        is_shuffled,
        seed,
        is_told=False,
        is_listed=False,
        is_weighing=False,
    ):
        self._is_listed, self._is_weighing = is_listed, is_weighing
        super().__init__(*_arrays(examples), batch_size=5, shuffle=is_shuffled, seed=seed)
        self._weights, self._ended, self._is_told = weights, ended, is_told
        self._left_out = left_out

    def __iter__(self):
        epoch = self.state_dict()["epoch"]
        if self._is_told:
            _tell_the_time()
        for number, (x, y) in enumerate(super().__iter__()):
            if self._ended is not None and self._ended[:2] == [epoch, number]:
                _tell_the_time()
                os.kill(os.getpid(), self._ended[2])
            if self._left_out:
                y = y.copy()
                y[[i for i in self._left_out if i < len(y)]] = -100
            if self._is_listed:
                marked = Broadcast([1, np.arange(3, dtype="int32")])
                yield {"x": x, "y": {"labels": y.tolist(), "marked": marked}}
            elif self._is_weighing:
                yield x, np.stack([y, np.arange(len(y)) // 2], 1).astype("float32")
            elif self._weights is None:
                yield x, y
            elif number == 0:
                yield {"x": x, "y": y, "sample_weight": np.array(self._weights, "float32")}


class TrainerOfLists(Trainer):
    """Makes tensors of the labels in a list."""

    def prepare_batch(self, batch):
        """Return ``(x, y)``."""
        if not isinstance(batch, dict) or not isinstance(batch["y"], dict):
            return super().prepare_batch(batch)
        number, shift = self.backend.to(batch["y"]["marked"].value, "cpu")
        more = int(self.backend.to_numpy(shift)[0])
        labels = [label * number + more for label in batch["y"]["labels"]]
        return super().prepare_batch((batch["x"], np.array(labels, "int32")))


def _tell_the_time() -> None:
    sys.stderr.write(f"time {time.time()}\n")
    sys.stderr.flush()


def train(
    backend: Backend,
    folder: Any,
    *,
    num_gpus: int,
    rank: int = 0,
    epochs: int = EPOCHS,
    examples: int = 14,
    weights: Any = None,
    left_out: Any = (),
    ended: Any = None,
    other_examples: int | None = None,
    is_shuffled: bool = False,
    is_seeded_by_rank: bool = False,
    is_sharded: bool = False,
    is_listed: bool = False,
    is_weighing: bool = False,
    normalized_network: str | None = None,
    has_equal_halves: bool = False,
    table: str | None = None,
    validates: bool = False,
    measures: bool = False,
    checkpoint: str | None = None,
    gradient_clip_val: float = 0,
    accumulate_grad_batches: int = 1,
    stopping: Sequence[int] = (),
    at: int = -1,
    patience: int | None = None,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Train a small model; return its parameters and the history.

    Args:
        backend: the backend.
        folder: of the checkpoint.
        rank: of this process.
        ended: see ``Batches``; of rank 1.
        other_examples: how many examples rank 1 has.
        is_seeded_by_rank: whether the processes begin with different models and orders.
        is_sharded: whether each process reads its part only.
        is_weighing: whether the loss is a ``WeightedLoss``.
        normalized_network: the name of a network with batch normalization, which is trained with
            other data.
        has_equal_halves: whether both halves of these batches have the same examples.
        measures: whether it also measures the logits of a whole epoch.
        table: the name of a model with a table, which is trained with tokens that repeat.
        stopping: the ranks whose callback stops the run.
        at: after which step it does.
        patience: of an ``EarlyStopping``; None for no such callback.
        others: of ``Trainer`` and ``fit``.
    """
    seed = rank if is_seeded_by_rank else 0
    backend.seed(seed)
    if table is not None:
        net = models_with_tables(backend)[table](backend.cpu())
    elif normalized_network is None:
        net = backend.mlp([3, 8, 3], seed=seed)
    else:
        net = networks_with_batch_norm(backend)[normalized_network](backend.cpu())
    callbacks: list[Any] = [AfterStep(at if rank in stopping else -1)]
    if patience is not None:
        callbacks.append(EarlyStopping("loss", patience=patience))
    given = {
        "backend": backend,
        "accumulate_grad_batches": accumulate_grad_batches,
        "callbacks": callbacks,
    }
    trainer = TrainerOfLists(epochs, num_gpus, gradient_clip_val, **given)
    length = other_examples if rank and other_examples else examples
    is_told = rank == 1 and other_examples is not None
    ended = ended if rank else None
    data: Any = Batches(
        length, weights, left_out, ended, is_shuffled, seed, is_told, is_listed, is_weighing
    )
    if is_sharded:
        data = trainer.shard_data(_loader(examples, is_shuffled, seed, left_out))
    if normalized_network is not None:
        data = make_normal_batches(has_equal_halves=has_equal_halves)
    if table is not None:
        _, data = make_repeated_tokens()
    history = trainer.fit(
        net,
        data,
        _loader(7, is_shuffled=False) if validates else None,
        loss=_take_weighted if is_weighing else "mse" if table else "cross_entropy",
        metrics=_MEASURES if measures else [] if is_weighing or table else ["accuracy"],
        checkpoint=None if checkpoint is None else f"{folder}/{checkpoint}.safetensors",
        **{"lr": 0.02, **options},
    )
    return read_saved_values(backend, trainer.model), history


def fail(
    backend: Backend, folder: Path, case: str, *, rank: int, num_gpus: int, failing: int
) -> None:
    """Train, with an error in the callback of one process; keep what each has then."""
    callback = RaisingAfterStep(FAILED_AT if rank == failing else -1)
    backend.seed(0)
    net = backend.mlp([3, 8, 3], seed=0)
    trainer = Trainer(EPOCHS, num_gpus, backend=backend, callbacks=callback)
    raised = ""
    try:
        trainer.fit(net, _loader(14, is_shuffled=False), loss="cross_entropy", lr=0.02)
    except (HookError, PeerLostError) as error:
        raised = type(error).__name__
    found: dict[str, Any] = {"raised": raised, "steps": len(callback.steps)}
    keep(folder, case, (read_saved_values(backend, trainer.model), found))


def keep(folder: Path, case: str, run: Any) -> None:
    """Keep in files what this process of a launch has learned."""
    values, history = run
    rank = os.environ["RANK"]
    np.savez(folder / f"{case}-{rank}.npz", **values)
    (folder / f"{case}-{rank}.json").write_text(json.dumps(history))


def take_one_gpu(backend: Backend, folder: Path) -> None:
    """Keep what processes are told whose GPUs are one, where their library needs one for each."""
    with pytest.MonkeyPatch.context() as patch:
        told = "NCCL", "GPU-0123"
        patch.setattr(framework_of(backend).parallel, "gpu_library", lambda _: told)
        device = Trainer(1, min(backend.num_gpus(), 1), backend=backend).device
        net, text = backend.place(backend.mlp([3, 3]), device), ""
        try:
            backend.learner(net, group=backend.join_group())
        except UnsupportedValueError as error:
            text = str(error)
    (folder / f"one-gpu-{os.environ['RANK']}.txt").write_text(text)


def read_learned(folder: Path, case: str, rank: int = 0) -> tuple[dict[str, Any], Any]:
    """Return the parameters and the history that a process of a launch has kept."""
    with np.load(folder / f"{case}-{rank}.npz") as values:
        return dict(values), json.loads((folder / f"{case}-{rank}.json").read_text())


def _launch(backend, folder, cases, program=PROGRAM, **others):
    """Train in two processes; how that ended, and how many seconds after rank 1 told the time."""
    path = folder / "program.py"
    path.write_text(program)
    launch = command("--processes", 2, "--timeout", TIMEOUT, path)
    done = run_launch(backend, [*launch, backend.name, str(folder), json.dumps(cases)], **others)
    now, told = time.time(), re.findall(r"^\[rank 1\] time (\S+)$", done.stderr, re.MULTILINE)
    return done, now - float(told[-1]) if told else None


@pytest.fixture(scope="module")
def num_gpus(backend, tmp_path_factory):
    """How many GPUs each process has.

    This process trains first: an error of another process arrives as text only.
    """
    require_processes(backend, 2)
    train(backend, tmp_path_factory.mktemp("one"), epochs=1, num_gpus=0)
    platforms = {backend.platform(device) for device in backend.devices()[1:]}
    if platforms - {"virtual"} and backend.num_gpus() < 2:
        pytest.skip("needs a GPU for each of two processes")
    return min(backend.num_gpus(), 1)


class _Runs:
    """What two processes have learned, and what one learns."""

    def __init__(self, backend, folder, num_gpus):
        self._backend, self.folder, self._num_gpus = backend, folder, num_gpus
        self._alone = {}
        self.done = None
        """How the launch has ended."""

    def together(self, case, rank=0):
        assert self.done.returncode == 0, self.done.stderr
        return read_learned(self.folder, case, rank)

    def alone(self, **options):
        """Train in this process: once for the same options, unless a file has a part in it."""
        asked = json.dumps(options)
        if asked not in self._alone or "checkpoint" in options:
            run = train(self._backend, self.folder, num_gpus=self._num_gpus, **options)
            self._alone[asked] = run
        return self._alone[asked]


_LISTS = "split sequences over processes"
_OWN_LOSSES = "train with a loss of your own"


def _name_case(item):
    """Return the name of the case that a test of this file looks at."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    names = ("normalized_network", "table", "case", "optimizer")
    return " ".join(str(given[name]) for name in names if name in given)


@pytest.fixture(scope="module")
def runs(backend, num_gpus, request, tmp_path_factory):
    """Both, for those of ``CASES`` that a test of this run looks at.

    One launch for all: the processes take longer to import a framework than to train.
    """
    folder = tmp_path_factory.mktemp("processes")
    found = _Runs(backend, folder, num_gpus)
    asked = {_name_case(item) for item in request.session.items if item.path == request.path}
    if "resumed" in asked:
        found.alone(epochs=1, optimizer="adam", checkpoint="alone")
    cases = {case: {"num_gpus": num_gpus, **options} for case, options in CASES.items()}
    if _OWN_LOSSES not in framework_of(backend).cannot:
        cases |= {case: {"num_gpus": num_gpus, **options} for case, options in WEIGHING.items()}
    if _LISTS not in framework_of(backend).cannot:
        cases |= {case: {"num_gpus": num_gpus, **options} for case, options in LISTED.items()}
    for name in list_provided(backend, networks_with_batch_norm):
        normalized = {"num_gpus": num_gpus, "normalized_network": name}
        cases |= {f"{name} {case}": {**normalized, **NORMALIZED[case]} for case in NORMALIZED}
    for name in list_provided(backend, models_with_tables):
        options = {"num_gpus": num_gpus, "table": name}
        cases |= {
            f"{name} {optimizer}": {**options, "optimizer": optimizer} for optimizer in TABLES
        }
    found.done, _ = _launch(backend, folder, {case: cases[case] for case in cases if case in asked})
    return found


@requirement("processes.learn-what-one-learns", section=SECTION, source="D2L")
@needs_float32
@pytest.mark.parametrize("case", ["sgd", "momentum", "adam", "shuffled"])
def test_two_processes_learn_and_measure_like_one_process(runs, case):
    """Train and measure in two processes what one process does."""
    alone = runs.alone(**CASES[case])
    for rank in (0, 1):
        assert_same_run(runs.together(case, rank), alone)


@requirement("processes.read-their-part-only", section=SECTION)
@pytest.mark.parametrize("case", ["sharded"])
def test_processes_that_read_their_shard_only_learn_the_same(runs, case):
    """Train the same if each process reads its own part of the data.

    Data of a cluster is too large to be read by all.
    """
    assert_same_run(runs.together(case), runs.alone(is_shuffled=True))


@requirement(
    "processes.split-sequences", section=SECTION, source="contract, What of a batch is split"
)
@pytest.mark.parametrize("case", LISTED)
def test_lists_of_a_batch_are_split_and_broadcast_values_are_not(backend, runs, case):
    """Split lists of a batch over processes, and share ``Broadcast`` values."""
    require(framework_of(backend), _LISTS, "split a list over 2 processes")
    assert_same_run(runs.together(case), runs.alone(**LISTED[case]))


@requirement("processes.measure-whole-epochs", section=SECTION, source="contract, Metrics")
@needs_float32
@pytest.mark.parametrize("case", ["measured"])
def test_a_metric_has_the_examples_of_all_processes(runs, case):
    """Give a metric the predictions of all processes, in their order.

    A process may have no example of a batch.
    """
    alone = runs.alone(**CASES[case])
    for rank in (0, 1):
        _, history = runs.together(case, rank)
        assert_same_run(runs.together(case, rank), alone)
        assert history["own"] == history["whole"]


@requirement("processes.change-the-parameters", section=SECTION)
@pytest.mark.parametrize("case", ["adam"])
def test_two_processes_learn(runs, case):
    """Reduce the loss in two processes.

    Two models that both stay as they are agree, too.
    """
    history = runs.together(case)[1]
    assert history["loss"][-1] < history["loss"][0]


@requirement("processes.end-with-the-same", section=SECTION)
@pytest.mark.parametrize("case", CASES)
def test_all_processes_have_the_same_parameters_and_history(runs, case):
    """End with the same parameters and history in all processes, bit for bit.

    Models that drift apart spoil the next run.
    """
    (values, history), (other_values, other_history) = (runs.together(case, i) for i in (0, 1))
    assert history == other_history
    for name, value in values.items():
        assert_same(value, other_values[name])


@requirement("processes.end-with-the-same", section=SECTION)
@pytest.mark.parametrize("case", ["normalized"])
def test_all_processes_have_the_same_running_statistics(runs, normalized_network, case):
    """End with the same running statistics in all processes, bit for bit.

    Each process may normalize its own shard.
    """
    found = [runs.together(f"{normalized_network} {case}", rank)[0] for rank in (0, 1)]
    for name, value in found[0].items():
        assert_same(value, found[1][name])


@requirement("processes.keep-running-statistics", section=SECTION)
@pytest.mark.parametrize("case", ["with equal halves"])
def test_the_model_has_the_running_statistics_of_two_processes(
    backend, runs, normalized_network, case
):
    """Give the model the running statistics of a training in two processes.

    An engine may train a copy of the model. Here both shards of a batch have the same examples.
    """
    alone, _ = runs.alone(normalized_network=normalized_network, **NORMALIZED[case])
    backend.seed(0)
    net = networks_with_batch_norm(backend)[normalized_network](backend.cpu())
    start = read_saved_values(backend, net)
    for rank in (0, 1):
        found, _ = runs.together(f"{normalized_network} {case}", rank)
        assert_same_statistics(found, alone, start)


@requirement("processes.add-up-repeated-rows", section=SECTION)
@pytest.mark.parametrize("optimizer", TABLES)
def test_a_token_that_repeats_in_all_processes_has_one_gradient(runs, table, optimizer):
    """Take the rows of a token that repeats, in one process or in several, for one gradient."""
    alone = runs.alone(table=table, optimizer=optimizer)
    assert_same_run(runs.together(f"{table} {optimizer}"), alone)


@requirement("processes.begin-with-the-first", section=SECTION)
@pytest.mark.parametrize("case", ["seeded"])
def test_all_processes_begin_with_the_model_of_the_first(runs, case):
    """Begin in all processes with the model of the first.

    Each process may have another seed.
    """
    assert_same_run(runs.together(case), runs.alone())


@requirement("processes.shuffle-as-the-first", section=SECTION)
@pytest.mark.parametrize("case", ["shuffled by rank", "sharded by rank"])
def test_all_processes_read_in_the_order_of_the_first(runs, case):
    """Read in all processes in the order of the first.

    Orders of their own would repeat and lose examples.
    """
    assert_same_run(runs.together(case), runs.alone(is_shuffled=True))


@requirement(
    "processes.clip-the-whole-gradient", section=SECTION, source="PyTorch, clip_grad_norm_"
)
@pytest.mark.parametrize("case", ["clipped"])
def test_the_gradient_of_the_whole_batch_is_clipped(runs, case):
    """Clip in processes the gradient of the whole batch.

    No process knows the whole gradient before the exchange.
    """
    assert_same_run(runs.together(case), runs.alone(**CASES[case]))


@requirement("processes.accumulate", section=SECTION, source="contract, Training")
@pytest.mark.parametrize("case", ["accumulated"])
def test_gradients_of_several_batches_make_a_step(runs, case):
    """Make a step from several batches in processes as in one."""
    assert_same_run(runs.together(case), runs.alone(**CASES[case]))


@requirement("processes.take-small-batches", section=SECTION)
@pytest.mark.parametrize("case", ["small"])
def test_a_batch_may_have_fewer_examples_than_there_are_processes(runs, case):
    """Train on a batch with fewer examples than processes.

    A process without an example still takes part in the exchange.
    """
    assert_same_run(runs.together(case), runs.alone(**CASES[case]))


@requirement("processes.weigh-the-whole-batch", section=SECTION)
@pytest.mark.parametrize("case", ["weighted", "half weighted", "unweighted"])
def test_weights_are_those_of_the_whole_batch(runs, case):
    """Weigh examples within the whole batch, and not within each process.

    One process may have no weight at all.
    """
    assert_same_run(runs.together(case), runs.alone(**CASES[case]))


@requirement("processes.leave-out-labels", section=SECTION, source="contract, Labels")
@pytest.mark.parametrize("case", ["without some labels", "sharded without labels"])
def test_the_mean_is_over_the_labels_of_the_whole_batch(runs, case):
    """Take the mean over the labels that count in all processes.

    One process may have no label that counts, or read its own part only.
    """
    assert_same_run(runs.together(case), runs.alone(**CASES[case]))


@requirement("processes.accumulate-by-weight", section=SECTION, source="contract, Training")
@pytest.mark.parametrize("case", ["accumulated without labels"])
def test_batches_count_by_the_labels_of_all_processes(runs, case):
    """Count accumulated batches by the labels that count in all processes."""
    assert_same_run(runs.together(case), runs.alone(**CASES[case]))


@requirement("processes.accumulate-by-weight", section=SECTION, source="contract, Training")
@pytest.mark.needs("train in several processes", _OWN_LOSSES)
@pytest.mark.parametrize("case", WEIGHING)
def test_a_loss_of_the_user_tells_its_weight_to_all_processes(runs, case):
    """Weigh batches and shards by the weight that a loss of the user's returns."""
    assert_same_run(runs.together(case), runs.alone(**WEIGHING[case]))


@requirement(
    "processes.resume-with-another-number", section=SECTION, source="contract, Resuming a run"
)
@needs_float32
@pytest.mark.parametrize("case", ["resumed"])
def test_two_processes_go_on_with_the_run_of_one(runs, case):
    """Continue in two processes the run of one."""
    assert_same_run(runs.together(case), runs.alone(optimizer="adam"))


@requirement(
    "processes.resume-with-another-number", section=SECTION, source="contract, Resuming a run"
)
@needs_float32
@pytest.mark.parametrize("case", ["begun"])
def test_one_process_goes_on_with_the_run_of_two(runs, case):
    """Continue in one process the run of two.

    A checkpoint of a cluster is looked at on a laptop.
    """
    resumed = runs.alone(optimizer="adam", checkpoint=case, resume=True)
    assert_same_run(resumed, runs.alone(optimizer="adam"))


@requirement("processes.stop-together", section=SECTION)
@pytest.mark.parametrize("case", ["stopped"])
def test_processes_stop_after_the_step_that_all_of_them_name(runs, case):
    """Stop processes after the step that all of them name.

    One that goes on would wait for ever.
    """
    alone = runs.alone(stopping=[0], at=4)
    assert [len(column) for column in alone[1].values()] == [1, 1, 1]
    assert_same_run(runs.together(case), alone)


@requirement("processes.stop-together", section=SECTION)
@pytest.mark.parametrize("case", ["stopped by one"])
def test_processes_stop_together_where_one_of_them_stops(runs, case):
    """Stop all processes together if one of them stops.

    A callback may see one process only.
    """
    stopped = runs.together(case)
    assert_same_run(stopped, runs.together(case, rank=1))
    # The other one may have begun the next step, with which an epoch ends.
    assert {len(column) for column in stopped[1].values()} in ({1}, {2})


@requirement("processes.stop-together", section=SECTION, source="Keras, EarlyStopping")
@pytest.mark.parametrize("case", ["stopped early"])
def test_processes_that_no_longer_improve_end_after_one_epoch(runs, case):
    """End all processes after the same epoch without an improvement."""
    for rank in (0, 1):
        history = runs.together(case, rank)[1]
        assert [len(column) for column in history.values()] == [3, 3, 3]


FAILED_AT = 4
"""After this step an error is raised in a callback."""


@pytest.fixture(scope="module")
def failed(backend, num_gpus, tmp_path_factory):
    """What two processes have after an error in a callback of the first or the second one."""
    folder = tmp_path_factory.mktemp("failed")
    cases = {f"{failing}": {"num_gpus": num_gpus, "failing": failing} for failing in (0, 1)}
    found = _Runs(backend, folder, num_gpus)
    found.done, _ = _launch(backend, folder, cases, FAILING)
    return found


@requirement("processes.leave-what-was-learned", section=SECTION)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_callback_keeps_the_parameters_of_all_processes(failed, failing):
    """Keep the trained parameters in all processes after an error in one.

    The others learn of the error only in the exchange.
    """
    found = [failed.together(f"{failing}", rank) for rank in (0, 1)]
    (own, mine), (other, others) = found[failing], found[1 - failing]
    assert mine == {"raised": "HookError", "steps": FAILED_AT + 1}
    assert others["raised"] == "PeerLostError"
    # The other one may have begun the next step.
    assert FAILED_AT + 1 <= others["steps"] <= FAILED_AT + 3
    alone = failed.alone(stopping=[0], at=others["steps"] - 1)[0]
    assert_same_run((own, {}), (alone, {}))
    assert_same_run((other, {}), (alone, {}))


@requirement("processes.say-who-shares-a-gpu", section=SECTION)
@pytest.mark.needs_gpus(1)
def test_all_processes_say_which_of_them_share_a_gpu(runs):
    """Tell all processes which of them share a GPU, if their library forbids it.

    NCCL itself waits, or fails without a name.
    """
    texts = [(runs.folder / f"one-gpu-{rank}.txt").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    for rank in (0, 1):
        assert re.search(rf"gpu:\d of rank {rank} on {re.escape(socket.gethostname())}", texts[0])
    for said in ("one GPU (GPU-0123)", "NCCL", "fix: ", "d2ldev launch --processes"):
        assert said in texts[0]


@pytest.fixture(scope="module")
def beside_a_gpu(backend, tmp_path_factory):
    """What two processes find that see one real GPU: on the CPU, and with the GPU for both."""
    require_processes(backend, 2)
    folder = tmp_path_factory.mktemp("beside-a-gpu")
    found = _Runs(backend, folder, 0)
    variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    one = {name: os.environ.get(name, "0").partition(",")[0] for name in variables}
    found.done, _ = _launch(backend, folder, {}, BESIDE_A_GPU, **one)
    return found


@requirement("processes.train-on-the-cpu-beside-a-gpu", section=SECTION)
@pytest.mark.needs_real_gpu
def test_two_processes_train_on_the_cpu_of_a_machine_with_a_gpu(beside_a_gpu):
    """Train in processes on the CPU of a machine with a GPU.

    A library for GPUs must not be chosen for the CPU.
    """
    assert (beside_a_gpu.folder / "cpu-1.json").exists(), beside_a_gpu.done.stderr
    for rank in (0, 1):
        assert_same_run(read_learned(beside_a_gpu.folder, "cpu", rank), beside_a_gpu.alone())


@requirement("processes.share-a-real-gpu-or-say-so", section=SECTION)
@pytest.mark.needs_real_gpu
def test_two_processes_train_on_one_real_gpu_or_both_say_who_shares_it(beside_a_gpu):
    """Train in two processes on one real GPU, or say in both who shares it.

    Only a card shows what its library allows.
    """
    paths = [beside_a_gpu.folder / f"gpu-{rank}.txt" for rank in (0, 1)]
    assert all(path.exists() for path in paths), beside_a_gpu.done.stderr
    texts = [path.read_text() for path in paths]
    host = socket.gethostname()
    told = f"gpu:0 of rank 0 on {host} and gpu:0 of rank 1 on {host} are one GPU (GPU-"
    assert texts[0] == texts[1]
    assert texts[0] == "" or told in texts[0]


LOST = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
OPTIONS_OF_LOST = {"optimizer": "adam", "checkpoint": "run"}


@pytest.fixture(scope="module")
def lost(backend, num_gpus, tmp_path_factory):
    """Launch two runs that each lose a process; return how each ended, and what it left behind.

    They run at once, because one of them waits for a stopped process. The results of a run are its
    folder, its temporary folder, its output, and the seconds until it ended.
    """
    folders = {how: tmp_path_factory.mktemp(how) for how in LOST}

    def end(how):
        case = {**OPTIONS_OF_LOST, "num_gpus": num_gpus, "ended": [1, 1, int(LOST[how])]}
        temporary = folders[how] / "temporary"
        temporary.mkdir()
        done, seconds = _launch(backend, folders[how], {"lost": case}, TMPDIR=str(temporary))
        return folders[how], temporary, done, seconds

    with ThreadPoolExecutor(len(LOST)) as pool:
        return dict(zip(LOST, pool.map(end, LOST), strict=True))


@requirement("processes.end-with-a-lost-one", section=SECTION)
@needs_float32
@pytest.mark.parametrize(("how", "status"), [("killed", 137), ("stopped", 1)])
def test_a_lost_process_ends_the_run_and_not_its_file(backend, num_gpus, lost, how, status):
    """End a run whose process is lost, keep its file, and resume from it.

    A job that hangs costs all of its machines.
    """
    options = {**OPTIONS_OF_LOST, "num_gpus": num_gpus}
    folder, temporary, done, seconds = lost[how]
    assert done.returncode == status, done.stderr
    assert [*temporary.iterdir()] == []
    assert seconds < SOON
    # One that was only stopped may say the same when it is ended.
    lines = [line for line in done.stderr.splitlines() if line.startswith("[rank 0] ")]
    found = [line for line in lines if "PeerLostError: " in line]
    assert len(found) == 1, done.stderr
    told = found[0]
    host = re.escape(socket.gethostname())
    place = r"(.+ of epoch [01]|the gradients)"  # the other has read ahead
    assert re.search(rf"rank 1 on {host} is lost: .+\. Rank 0 on {host} was at {place}", told), told
    resumed = train(backend, folder, resume=True, **options)
    del options["checkpoint"]
    assert_same_run(resumed, train(backend, folder, **options))


@requirement("processes.refuse-other-batches", section=SECTION)
@pytest.mark.parametrize(("examples", "others"), [(14, 12), (15, 10)], ids=["smaller", "fewer"])
def test_processes_that_read_different_batches_are_refused(
    backend, num_gpus, tmp_path, examples, others
):
    """Refuse processes that read other batches, in all of them.

    They would wait for each other at the end.
    """
    case = {"num_gpus": num_gpus, "examples": examples, "other_examples": others}
    done, seconds = _launch(backend, tmp_path, {"different": case})
    assert done.returncode == 1, done.stderr
    assert seconds < SOON
    told = [line for line in done.stderr.splitlines() if "UnsupportedValueError: " in line]
    assert sorted(line[:9] for line in told) == ["[rank 0] ", "[rank 1] "]
    assert all("batch 2 of epoch 0" in line for line in told)
