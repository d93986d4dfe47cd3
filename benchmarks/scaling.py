"""How training in several processes scales, and what ``Trainer`` costs over a hand-written loop.

    python benchmarks/scaling.py [--framework NAME] [--processes 1 2 4] [--gpus]
                                 [--models N] [--epochs N] [--steps N] [--batch N]
                                 [--json FILE] [--plot FILE]

Weak scaling gives each process a batch of one size, strong scaling a part of one batch. In each
process the trainer's epochs and those of the framework's own data-parallel loop take turns: the
hand-written epoch is in the trainer's callback. Both read whole batches, of which each process
takes its part. Where a model lies in memory can make a fifth of the time. So several are made,
elsewhere each time, the trainer's before the other one and after it. The C library keeps what is
freed, so that no side pays for pages of the system. Reported are the medians of rank 0, and of the
ratios of two epochs side by side. On the CPU each process has a core of its own, as far as there
are enough. With ``--gpus`` each has a GPU, and the loop by hand copies its part from pinned memory,
where the framework pins any.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from d2ldev_conformance.lines import format_lines

# Where PYTHONSAFEPATH is set, Python leaves this folder out.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from loops import FRAMEWORKS, LEARNING_RATE
from measure import Result, keep_freed_memory
from natives import COPIES, pin
from overhead import document
from rich.console import Console
from rich.table import Table

import d2ldev
from d2ldev._backend import framework_of
from d2ldev.training.trainer import Trainer

AIM = 1.05
_WARM_UP = 1
_LARGEST_GAP = 2**17  # bytes between models

Batches = Iterable[tuple[Any, Any]]
Epoch = Callable[[Batches], object]


class Sizes(NamedTuple):
    """How much is measured.

    Args:
        models: of each side by hand; the trainer has two beside each.
        epochs: of each side, with each of the trainer's models.
        steps: of an epoch.
        batch: the examples of a batch, of each process in weak scaling.
    """

    models: int = 4
    epochs: int = 2
    steps: int = 50
    batch: int = 256


def torch_loop(model: Any, _native: Any, _batch: int) -> Epoch:
    """Follow https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(model) if distributed.is_initialized() else model
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=LEARNING_RATE)

    def epoch(batches: Batches) -> object:
        parallel.train()
        for x, y in batches:
            loss = loss_fn(parallel(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return epoch


def jax_loop(model: Any, native: Any, batch: int) -> Epoch:
    """Follow https://docs.jax.dev/en/latest/multi_process.html, with Flax's jit of the split."""
    import jax
    import optax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    of_processes = {device.process_index: device for device in reversed(native.client.devices())}
    natives = [of_processes[rank] for rank in sorted(of_processes)]
    mesh = Mesh(np.array(natives), ("batch",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def everywhere(x: Any) -> Any:
        return jax.make_array_from_single_device_arrays(x.shape, whole, [x])

    def spread(x: Any) -> Any:
        return jax.make_array_from_single_device_arrays((batch, *x.shape[1:]), split, [x])

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    state = jax.tree.map(everywhere, state)

    def epoch(batches: Batches) -> object:
        nonlocal state
        for x, y in batches:
            state, loss = step(state, spread(x), spread(y))
        return float(loss)

    return epoch


def tensorflow_loop(model: Any, _native: Any, batch: int) -> Epoch:
    """Follow https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl."""
    import keras
    import tensorflow as tf

    # A process has one: the collective operations of a second one would be taken for the first's.
    joined = framework_of(d2ldev.get_backend("tensorflow")).parallel.strategy
    strategy = joined or tf.distribute.get_strategy()
    with strategy.scope():
        net = keras.models.clone_model(model)
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
        optimizer.build(net.trainable_variables)

    def part(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=batch)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.run(part, (x, y))

    def epoch(batches: Batches) -> object:
        for x, y in batches:
            loss = step(x, y)
        return float(loss)

    return epoch


def mxnet_loop(model: Any, _native: Any, batch: int) -> Epoch:
    """Follow https://mxnet.apache.org/versions/1.9.1/api/faq/distributed_training.html.

    The gradients are summed by the process's one store, as Gluon's own trainer would have it with
    ``update_on_kvstore=False``.
    """
    from d2ldev_mxnet.framework import mx
    from d2ldev_mxnet.servers import servers_of

    group = d2ldev.get_backend("mxnet").join_group()
    servers = None if group is None else servers_of(group)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    loss_function.hybridize()
    parameters = model.collect_params()
    options = {"learning_rate": LEARNING_RATE}
    trainer = mx.gluon.Trainer(parameters, "sgd", options, kvstore=None)
    keys: list[int] = []

    def epoch(batches: Batches) -> object:
        nonlocal keys
        for x, y in batches:
            with mx.autograd.record():
                loss = loss_function(model(x), y)
            loss.backward()
            if servers is not None:
                gradients = [parameter.list_grad()[0] for parameter in parameters.values()]
                keys = keys or servers.keys(gradients)
                servers.add_up(keys, gradients)
            trainer.update(batch)
        return float(loss.mean())

    return epoch


# Each makes an epoch over this process's parts of the batches: of a model on its device, that
# device of the framework's own, and the number of examples in a whole batch. The framework's engine
# is started already, where there are several processes.
LOOPS: dict[str, Callable[[Any, Any, int], Epoch]] = {
    "torch": torch_loop,
    "jax": jax_loop,
    "tensorflow": tensorflow_loop,
    "mxnet": mxnet_loop,
}


# -- in each process ------------------------------------------------------------------------------


def measure(name: str, sizes: Sizes, is_on_gpus: bool) -> list[dict[str, Any]]:
    """Return what this process measures of each model and each kind of scaling."""
    backend, framework = d2ldev.get_backend(name), FRAMEWORKS[name]()
    images = (28, 28, 1) if framework.is_channels_last else (1, 28, 28)
    cases: list[tuple[str, Callable[[], Any], tuple[int, ...]]] = [
        ("MLP 1024x1024x3", lambda: backend.mlp([1024, 1024, 1024, 10]), (1024,)),
        ("LeNet", framework.lenet, images),
    ]
    found = []
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for model, make_model, shape in cases:
        for kind in ("weak", "strong") if processes > 1 else ("both",):
            size = sizes.batch * processes if kind == "weak" else sizes.batch
            of_kind = sizes._replace(batch=size)
            ours, theirs = _epochs(backend, make_model, of_kind, shape, LOOPS[name], is_on_gpus)
            found.append(
                {
                    "model": model,
                    "scaling": kind,
                    "processes": processes,
                    "batch": size,
                    "ours": median(ours) / sizes.steps,
                    "theirs": median(theirs) / sizes.steps,
                    "ratio": median(a / b for a, b in zip(ours, theirs, strict=True)),
                }
            )
    return found


def _epochs(
    backend: d2ldev.Backend,
    make_model: Callable[[], Any],
    sizes: Sizes,
    shape: tuple[int, ...],
    make_loop: Callable[[Any, Any, int], Epoch],
    is_on_gpus: bool,
) -> tuple[list[float], list[float]]:
    """Return the seconds of each epoch of ours, and of the hand-written one after it."""
    draw, size = np.random.default_rng(0), sizes.batch
    inputs, labels = draw.standard_normal((size, *shape), "float32"), draw.integers(0, 10, size)
    batch = backend.asarray(inputs, device="cpu"), backend.asarray(labels, device="cpu")
    rank, processes = (int(os.environ.get(name, value)) for name, value in _ALONE.items())
    rows = slice(rank * size // processes, (rank + 1) * size // processes)

    def part() -> tuple[Any, Any]:
        x, y = batch
        return (x, y) if processes == 1 else (x[rows], y[rows])

    def parts() -> Batches:
        if not is_on_gpus:
            for _ in range(sizes.steps):
                yield part()
            return
        # Pinned once, so that the loop by hand has nothing to do but to copy it.
        own, copied = pin(backend, part()), COPIES[backend.name](backend.native(trainer.device))
        for _ in range(sizes.steps):
            yield copied(own)

    ours: list[float] = []
    theirs: list[float] = []
    began = 0.0
    epoch_of_theirs: Epoch | None = None

    def callback(_epoch: int, _history: object) -> None:
        nonlocal began, epoch_of_theirs
        if epoch_of_theirs is None:  # now the engine is started
            native = backend.native(trainer.device)
            epoch_of_theirs = make_loop(backend.place(make_model(), trainer.device), native, size)
        backend.synchronize()
        between = time.perf_counter()
        ours.append(between - began)
        epoch_of_theirs(parts())
        backend.synchronize()
        began = time.perf_counter()
        theirs.append(began - between)

    epochs = _WARM_UP + sizes.epochs
    between_models = []
    for number in range(2 * sizes.models):
        # So that the next model does not lie where the last one did.
        between_models.append(np.empty(draw.integers(_LARGEST_GAP), "uint8"))
        if number % 2 == 0:  # else the trainer's model is made after that of the other loop
            epoch_of_theirs = None
        trainer = Trainer(epochs, int(is_on_gpus), backend=backend, callbacks=callback)
        trainer.fit(make_model(), [batch] * sizes.steps, loss="cross_entropy", lr=LEARNING_RATE)
    kept = [i for i in range(len(ours)) if i % epochs >= _WARM_UP]
    return [ours[i] for i in kept], [theirs[i] for i in kept]


_ALONE = {"RANK": "0", "WORLD_SIZE": "1"}


# -- in the first process -------------------------------------------------------------------------


def run_launch(arguments: argparse.Namespace, processes: int) -> list[dict[str, Any]]:
    """Return what rank 0 of so many processes measures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_PORT": port}
    command = [sys.executable, __file__, "--framework", arguments.framework, "--measure"]
    for name in Sizes._fields:
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--gpus"] if arguments.gpus else []
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            variables = {**common, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            environment = os.environ | {name: str(value) for name, value in variables.items()}
            environment.setdefault("OMP_NUM_THREADS", "1")
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))  # noqa: S603
        outputs = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise SystemExit(1)
    found: list[dict[str, Any]] = json.loads(outputs[0].decode().splitlines()[-1])
    return found


def _pin() -> None:
    """Let this process compute on one core, which it shares with no other if there are enough."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})


def curves(found: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows of each model and kind of scaling, with the speed against one process."""
    rows = list(found)
    alone = {row["model"]: row for row in rows if row["scaling"] == "both"}
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        first = alone.get(row["model"])
        speed = None
        if first is not None:
            speed = row["batch"] / row["ours"] / (first["batch"] / first["ours"])
        for kind in ("weak", "strong") if row["scaling"] == "both" else (row["scaling"],):
            results.setdefault((row["model"], kind), []).append({**row, "speed": speed})
    return results


def table(title: str, found: Iterable[dict[str, Any]]) -> Table:
    """Return the table of all results."""
    view = Table(title=title)
    for name in ("model", "scaling", "processes", "batch", "a step", "speed", "by hand", "ratio"):
        view.add_column(name, justify="left" if name in ("model", "scaling") else "right")
    for (model, kind), rows in curves(found).items():
        for row in rows:
            speed = "" if row["speed"] is None else f"{row['speed']:.2f}"
            times = (f"{row[name] * 1e3:.2f} ms" for name in ("ours", "theirs"))
            ours, theirs = times
            counts = (str(row["processes"]), str(row["batch"]))
            view.add_row(model, kind, *counts, ours, speed, theirs, f"{row['ratio']:.3f}")
    return view


def results_of(found: Iterable[dict[str, Any]]) -> list[Result]:
    """Return a step of ours against one by hand, in the form of the other benchmarks' results."""
    results = []
    for (model, kind), rows in curves(found).items():
        for row in rows:
            processes = f"{row['processes']} process{'' if row['processes'] == 1 else 'es'}"
            speed = "" if row["speed"] is None else f"{row['speed']:.2f} times as fast as one"
            name = f"{model}, {kind} scaling, {processes}, {row['batch']} examples a batch"
            times = row["ours"], row["theirs"], row["ratio"]
            results.append(Result(name, "Trainer", "the loop by hand", *times, "ratio", AIM, speed))
    return results


def plot(found: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw the speed against one process over the number of processes."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    longest: list[int] = []
    for (model, kind), rows in curves(found).items():
        numbers = [row["processes"] for row in rows]
        longest = max(longest, numbers, key=len)
        axes.plot(numbers, [row["speed"] for row in rows], marker="o", label=f"{model}, {kind}")
    axes.plot(longest, longest, linestyle=":", color="gray", label="as many times as fast")
    axes.set_xlabel("processes")
    axes.set_ylabel("examples per second, against one process")
    axes.legend()
    figure.savefig(path, dpi=70)


def main() -> None:
    """Measure, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=LOOPS, default="torch")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--gpus", action="store_true", help="train each process on a GPU")
    for name, value in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the speeds into FILE")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        keep_freed_memory()
        if not arguments.gpus:
            _pin()
        sizes = Sizes(*(getattr(arguments, name) for name in Sizes._fields))
        print(json.dumps(measure(arguments.framework, sizes, arguments.gpus)))
        return
    # So that its processes are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = [row for number in arguments.processes for row in run_launch(arguments, number)]
    where = "on GPUs" if arguments.gpus else "on the CPU"
    Console().print(table(f"d2ldev and {arguments.framework}'s own loop, {where}", found))
    if arguments.json is not None:
        made = document(results_of(found), arguments.framework) | {"rows": found}
        arguments.json.write_text(format_lines(made), encoding="utf-8")
    if arguments.plot is not None:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
