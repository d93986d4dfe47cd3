"""Processes that share the parameters: what each holds, and what a checkpoint and errors leave."""

import json
import logging
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from launched import run_processes
from several_gpus import CLASSES, FEATURES, flat_batches
from test_jax_parallel import Embedded

import d2ldev
from d2ldev import PeerLostError, Trainer

HERE = Path(__file__).parent
PROGRAM = "import test_jax_shards; test_jax_shards.main()"
OPTIONS = {"loss": "cross_entropy", "optimizer": "momentum", "lr": 0.1}
FAILED_AT = 4
"""The step of an error, in the middle of the second epoch."""


class Unreadable:
    """Data whose second epoch one process cannot read to its end.

    Within it the other process would be ended in the middle of a step.
    """

    def __init__(self, rank):
        self.rank, self.epoch = rank, 0

    def __iter__(self):
        self.epoch += 1
        yield from flat_batches(12, 4)
        if (self.rank, self.epoch) == (1, 2):
            raise ZeroDivisionError


def net(seed=0):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(
        nnx.Linear(FEATURES, 2000, rngs=rngs), nnx.Linear(2000, CLASSES, rngs=rngs)
    )


def values(model):
    return [np.asarray(x).tolist() for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


@contextmanager
def list_compiled():
    """Give the list of what JAX compiles in the block."""
    messages, logger = [], logging.getLogger("jax")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    with jax.log_compiles():
        yield messages
    logger.removeHandler(handler)
    messages[:] = [text for text in messages if text.startswith(("Compiling", "Finished tracing"))]


def main():
    """Train in one of two processes; print what it has seen."""
    backend, rank = d2ldev.get_backend("jax"), int(os.environ["RANK"])
    path, gpu, held = sys.argv[1], backend.native("gpu:0"), []

    def on_step_end(step, loss):
        parts = (part for x in jax.live_arrays() for part in x.addressable_shards)
        held.append(sum(part.data.nbytes for part in parts if part.device == gpu))

    def trainer(epochs, **callbacks):
        callback = SimpleNamespace(**callbacks) if callbacks else None
        return Trainer(epochs, 1, backend=backend, shard="parameters", callbacks=callback)

    model = net(seed=rank)
    trainer(2, on_step_end=on_step_end).fit(model, flat_batches(12, 4), checkpoint=path, **OPTIONS)
    found = {"held": held, "placement": sorted(map(str, backend.placement(model).values()))}
    # Another model goes on from the checkpoint.
    model = net(seed=2 + rank)
    trainer(3).fit(model, flat_batches(12, 4), checkpoint=path, resume=True, **OPTIONS)
    found["resumed"] = values(model)

    spread = set()

    def look(step, loss):
        arrays = [x for x in jax.live_arrays() if x.shape == (10, 8) and not x.is_fully_addressable]
        spread.update(x.sharding.shard_shape(x.shape) for x in arrays)

    several = Trainer(2, 1, backend=backend, shard="parameters", accumulate_grad_batches=2)
    several.callbacks = SimpleNamespace(on_step_end=look)
    several.fit(Embedded(), flat_batches(), loss="cross_entropy", optimizer="adam")
    found["spread"] = sorted(spread)

    model, found["compiled"] = net(), {}
    for fit in ("first", "second", "sharded"):
        with list_compiled() as messages:
            again = Trainer(1, 1, backend=backend, shard="parameters" if fit == "sharded" else None)
            again.fit(model, flat_batches(12, 4), **OPTIONS)
        found["compiled"][fit] = messages

    model, steps = net(), []

    def fail(step, loss):
        steps.append(step)
        if step == FAILED_AT and rank == 1:
            raise ZeroDivisionError

    try:
        trainer(3, on_step_end=fail).fit(model, flat_batches(12, 4), **OPTIONS)
    except (ZeroDivisionError, PeerLostError) as error:
        found["raised"] = type(error).__name__
    found["steps"], found["learned"] = len(steps), values(model)

    # An error that the other process waits for; it is the last, because it ends the group.
    model, epochs = net(), []
    callback = {"on_epoch_end": lambda epoch, history: epochs.append(values(model))}
    with suppress(ZeroDivisionError, PeerLostError):
        trainer(3, **callback).fit(model, Unreadable(rank), **OPTIONS)
    found["gathered"] = len(epochs) == 1 and values(model) == epochs[0]
    print(json.dumps(found))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes has found, and the checkpoint."""
    path = tmp_path_factory.mktemp("two") / "run"
    done = run_processes(
        PROGRAM,
        path,
        timeout=30,
        path=[HERE, HERE.parents[2] / "helpers"],
        environment={"D2LDEV_VIRTUAL_GPUS": "1"},
    )
    assert all(each.stdout for each in done), done[0].stderr + done[1].stderr
    return [json.loads(each.stdout.splitlines()[-1]) for each in done], path


def test_each_process_holds_its_part_of_the_arrays_alone(two, backend):
    # With the array that the optimizer has of each.
    whole = 2 * sum(x.nbytes for x in jax.tree.leaves(nnx.state(net())))
    for found in two[0]:
        assert 0.5 * whole <= min(found["held"])
        assert max(found["held"]) < 0.7 * whole
        assert {*found["placement"]} == {str(backend.cpu())}


def test_arrays_are_spread_after_a_step_as_before_it(two):
    assert [found["spread"] for found in two[0]] == [[[5, 8]]] * 2


def test_a_second_fit_compiles_nothing(two):
    for found in two[0]:
        assert found["compiled"]["first"]
        # The run that was broken off has compiled the programs of sharded parameters.
        assert found["compiled"]["second"] == found["compiled"]["sharded"] == []


def test_a_checkpoint_is_like_any_other(two, backend, tmp_path):
    def fit(epochs, path, **options):
        model = net()
        trainer = Trainer(epochs, 0, backend=backend)
        trainer.fit(model, flat_batches(12, 4), checkpoint=path, **OPTIONS, **options)
        return values(model)

    expected = fit(3, tmp_path / "alone")
    for found in two[0]:
        for value, wanted in zip(found["resumed"], expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    # It holds three epochs, from which one process goes on.
    for value, wanted in zip(fit(4, two[1], resume=True), fit(4, tmp_path / "four"), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)


def test_an_error_in_the_data_of_one_leaves_the_model_as_it_was_gathered_last(two):
    assert [found["gathered"] for found in two[0]] == [True, True]


def test_an_error_in_a_callback_of_one_leaves_the_model_as_trained_so_far(two, backend):
    first, second = two[0]
    assert [first["raised"], second["raised"]] == ["PeerLostError", "ZeroDivisionError"]
    # The other one may be in the next step already.
    assert first["steps"] in (FAILED_AT + 1, FAILED_AT + 2)
    assert first["learned"] == second["learned"]
    model = net()
    batches = (flat_batches(12, 4) * 2)[: first["steps"]]
    Trainer(1, 0, backend=backend).fit(model, batches, **OPTIONS)
    for value, wanted in zip(first["learned"], values(model), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
