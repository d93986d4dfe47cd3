"""Several processes learn what one learns: the same parameters, and the same history."""

import io
import os
from contextlib import redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import rich
from launched import together

import d2ldev
from d2ldev import ArrayLoader, Trainer
from d2ldev.training import progress

EPOCHS = 3
# Processes add up the gradients of the parts of a batch in another order; float32, a dozen steps.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

# With 14 examples in batches of 5 the last one has 4, with 11 it has 1.
CASES = {
    "sgd": {},
    "momentum": {"optimizer": "momentum"},
    "adam": {"optimizer": "adam"},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "optimizer": "adam"},
    "an uneven last batch": {"examples": 14},
    "a batch smaller than the processes": {"examples": 11, "optimizer": "adam"},
    "batches of one example": {"batch_size": 1, "examples": 4},
    "weighted": {"weights": True},
    "weighted and a small last batch": {"weights": True, "examples": 11, "gradient_clip_val": 0.1},
    "shuffled": {"shuffle": True, "examples": 13},
    "regression": {"loss": "mse"},
    "a loader": {"is_loader": True, "examples": 13},
    "a loader that reads its part": {"is_loader": True, "examples": 11, "is_sharded": True},
}


def data(examples=15, batch_size=5, shuffle=False, weights=False, loss="cross_entropy", seed=None):
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(examples, 4)).astype("float32")}
    columns["y"] = random.integers(0, 3, examples).astype("int32")
    if loss == "mse":
        columns["y"] = random.normal(size=(examples, 3)).astype("float32")
    if weights:
        columns["sample_weight"] = random.uniform(0, 2, examples).astype("float32")
        columns["sample_weight"][5:8] = 0
    if seed is not None:
        return ArrayLoader(*columns.values(), batch_size=batch_size, shuffle=True, seed=seed)
    return Batches(columns, batch_size, shuffle)


class Batches:
    """Batches of a dict, whose order is drawn from NumPy's random numbers."""

    def __init__(self, columns, batch_size, shuffle):
        self.columns, self.batch_size, self.shuffle = columns, batch_size, shuffle

    def __iter__(self):
        n = len(self.columns["x"])
        order = np.random.permutation(n) if self.shuffle else np.arange(n)
        for start in range(0, n, self.batch_size):
            rows = order[start : start + self.batch_size]
            yield {name: column[rows] for name, column in self.columns.items()}


def train(
    epochs=EPOCHS, seed=0, of_data=None, accumulate_grad_batches=1, gradient_clip_val=0, **options
):
    backend = d2ldev.get_backend("reference")
    loss = options.setdefault("loss", "cross_entropy")
    np.random.seed(seed)
    trainer = Trainer(
        epochs,
        backend=backend,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
    )
    names = ("examples", "batch_size", "shuffle", "weights")
    chosen = {name: options.pop(name) for name in names if name in options}
    chosen["seed"] = seed if options.pop("is_loader", False) else None
    batches = [data(loss=loss, **chosen), data(loss=loss, **{**chosen, "examples": 7})]
    if options.pop("is_sharded", False):
        batches = map(trainer.shard_data, batches)
    metrics = ["accuracy"] if loss == "cross_entropy" else []
    history = trainer.fit(
        backend.mlp([4, 8, 3], seed=seed),
        *batches,
        metrics=metrics,
        **{"lr": 0.1, **options},
    )
    named = backend.named_tensors(trainer.model)
    return {name: backend.to_numpy(x) for name, x in named.items()}, history


def all_cases(rank):
    # Also those that begin with other parameters, random numbers and seeds have those of rank 0.
    return {name: train(seed=rank, **options) for name, options in CASES.items()}


@pytest.fixture(scope="module", params=[2, 3])
def several(request):
    ended = together(all_cases, request.param)
    assert [each.status for each in ended] == [0] * request.param, ended
    return [each.value for each in ended]


@pytest.fixture(scope="module")
def alone():
    return {name: train(**options) for name, options in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_parameters_are_those_of_one_process(several, alone, case):
    for process in several:
        for name, values in alone[case][0].items():
            np.testing.assert_allclose(process[case][0][name], values, **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_the_history_is_that_of_one_process(several, alone, case):
    for process in several:
        assert process[case][1].keys() == alone[case][1].keys()
        for name, values in alone[case][1].items():
            np.testing.assert_allclose(process[case][1][name], values, **TOLERANCE)


def test_all_processes_have_the_same_bits(several):
    for process in several[1:]:
        for case in CASES:
            assert process[case][1] == several[0][case][1]
            for name, values in several[0][case][0].items():
                np.testing.assert_array_equal(process[case][0][name], values)


class StopError(Exception):
    """Ends a run."""


class Stopping:
    """Ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, step, loss):
        if step == self.step:
            raise StopError


def run(path, size, *, stop=None, **options):
    """Train in so many processes, or in this one; the parameters and the history of rank 0."""

    def body(rank):
        backend = d2ldev.get_backend("reference")
        np.random.seed(rank)
        callback = None if stop is None else Stopping(stop)
        trainer = Trainer(4, backend=backend, callbacks=callback)
        try:
            trainer.fit(
                backend.mlp([4, 8, 3], seed=0 if size == 1 else rank),
                data(examples=13, shuffle=True),
                data(examples=7),
                loss="cross_entropy",
                optimizer="adam",
                metrics=["accuracy"],
                checkpoint=path,
                resume=True,
                **options,
            )
        except StopError:
            return None
        named = backend.named_tensors(trainer.model)
        return {name: backend.to_numpy(x) for name, x in named.items()}, read_history(path)

    if size == 1:
        return body(0)
    ended = together(body, size)
    assert stop is not None or all(not each.error for each in ended), ended
    return ended[0].value


def read_history(path):
    return d2ldev.get_backend("reference").load(path)["run"]["history"]


@pytest.mark.parametrize(
    "every", [None, 2], ids=["at the end of an epoch", "in the middle of an epoch"]
)
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, every):
    options = {} if every is None else {"checkpoint_every": every}
    np.random.seed(0)
    expected = run(tmp_path / "alone", 1, **options)
    # Steps 4 and 8 are in the second and the third epoch, of 3 batches each, the last one smaller.
    path = tmp_path / "changing"
    run(path, 2, stop=4, **options)
    run(path, 1, stop=8, **options)
    found = run(path, 3, **options)
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, **TOLERANCE)
    for name, values in expected[1].items():
        np.testing.assert_allclose(found[1][name], values, **TOLERANCE)
    assert sorted(os.listdir(tmp_path)) == ["alone", "changing"]


def test_the_best_epoch_is_kept_by_rank_0_alone(tmp_path):
    def body(rank):
        return train(epochs=6, checkpoint=tmp_path / str(rank), keep="best", lr=3)[1]

    ended = together(body)
    assert os.listdir(tmp_path) == ["0"]
    kept = read_history(tmp_path / "0")["val_loss"]
    assert kept == ended[1].value["val_loss"][: len(kept)]
    # The best one is not the last one.
    assert kept[-1] == min(ended[1].value["val_loss"]) < ended[1].value["val_loss"][-1]


def test_rank_0_alone_shows_the_progress_and_counts_the_examples_of_all():
    def body(rank):
        # A clock that stands counts a billion examples for each.
        progress.time = SimpleNamespace(monotonic=lambda: 0.0)
        rich.reconfigure(width=200)
        backend = d2ldev.get_backend("reference")
        trainer = Trainer(2, backend=backend, enable_progress_bar=True)
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        with redirect_stdout(terminal):
            trainer.fit(backend.mlp([4, 3]), data(examples=15), loss="cross_entropy")
        return terminal.getvalue()

    first, second = together(body)
    assert "2/2" in first.value
    assert "1.5e+10 examples/s" in first.value
    assert second.value == ""
