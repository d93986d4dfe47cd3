"""A run that is killed at any instant, again and again, ends where an unbroken one does.

Each attempt is a process of its own, forked from one that has done little but import. It tells when
an epoch is computed, whose state is then written. After a number of epochs and a time of up to one
epoch, which are drawn, it is killed with SIGKILL: while it reads the checkpoint, in the middle of
an epoch, while it writes. What is asserted holds whenever that is.
"""

import itertools

import pytest
from processes import run_python

KILLS, EPOCHS = 24, 60
PROGRAM = """
    import os, random, signal, sys, time
    import numpy as np
    import d2ldev
    from d2ldev.training.trainer import Trainer

    backend = d2ldev.get_backend("reference")
    X = np.random.default_rng(0).normal(size=(48, 2)).astype("float32")
    y = X @ np.array([[2.0], [-3.4]], "float32")

    def run(folder, seed, tell):
        loader = d2ldev.ArrayLoader(X, y, batch_size=8, shuffle=True, seed=seed)
        trainer = Trainer(EPOCHS, backend=backend, callbacks=lambda epoch, history: tell(epoch))
        history = trainer.fit(
            backend.mlp([2, 4, 1], seed=seed),
            loader,
            loader,
            optimizer="adam",
            checkpoint=f"{folder}/run.safetensors",
            resume=True,
        )
        named = backend.named_tensors(trainer.model)
        return [history, {name: backend.to_numpy(x).tolist() for name, x in named.items()}]

    def attempt(folder, seed, pipe):
        try:
            found = run(folder, seed, lambda epoch: os.write(pipe, bytes([epoch])))
            backend.save(found, f"{folder}.safetensors")
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)

    os.mkdir("unbroken")
    begin = time.perf_counter()
    expected = run("unbroken", 0, lambda epoch: None)
    one_epoch = (time.perf_counter() - begin) / EPOCHS

    draw = random.Random(0)
    statuses, runs, killed_writing = [], [], 0
    while not (statuses and statuses[-1] == 0 and statuses.count(-9) >= KILLS):
        if not statuses or statuses[-1] == 0:
            folder = f"run {len(runs)}"  # the next one: the one before has come to its end
            os.mkdir(folder)
            runs.append([])
        # Where there is a checkpoint, what the model and the loader began with does not matter.
        seed = len(statuses) if os.path.exists(f"{folder}/run.safetensors") else 0
        told, pipe = os.pipe()
        child = os.fork()
        if not child:
            attempt(folder, seed, pipe)
        os.close(pipe)
        epochs = []
        if statuses.count(-9) < KILLS:
            epochs += (epoch for _ in range(draw.randrange(4)) for epoch in os.read(told, 1))
            time.sleep(draw.uniform(0, one_epoch))
            os.kill(child, signal.SIGKILL)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        epochs += os.read(told, EPOCHS)
        os.close(told)
        runs[-1].append(epochs)
        killed_writing += len(os.listdir(folder)) > 1
        assert statuses[-1] in (0, -9), statuses
    show({
        "statuses": statuses,
        "runs": runs,
        "same": [backend.load(f"run {i}.safetensors") == expected for i in range(len(runs))],
        "left": [os.listdir(f"run {i}") for i in range(len(runs))],
        "killed writing": killed_writing,
    })
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the process tells that forks the runs, and kills them."""
    program = PROGRAM.replace("KILLS", str(KILLS)).replace("EPOCHS", str(EPOCHS))
    (told,) = run_python(program, folder=tmp_path_factory.mktemp("killed"))
    return told


def test_it_ends_with_the_parameters_and_the_history_of_an_uninterrupted_run(told):
    assert told["same"] == [True] * len(told["runs"])


def test_it_leaves_the_checkpoint_and_nothing_else(told):
    assert told["left"] == [["run.safetensors"]] * len(told["runs"])


def test_only_the_epoch_is_done_again_that_was_under_way_or_being_written(told):
    """So the last one before a kill, or the one after it, is the first of the next attempt."""
    for attempts in told["runs"]:
        done = [epochs for epochs in attempts if epochs]
        assert (done[0][0], done[-1][-1]) == (0, EPOCHS - 1)
        for before, after in itertools.pairwise(done):
            assert after[0] - before[-1] in (0, 1)


def test_the_run_was_killed_the_planned_number_of_times(told):
    assert told["statuses"].count(-9) == KILLS
    assert told["statuses"].count(0) == len(told["runs"])


TERMINATED = """
import os, random, signal, time
import numpy as np
import d2ldev
from d2ldev import ArrayLoader, Trainer

backend, rng = d2ldev.get_backend("reference"), random.Random(0)
x = np.ones((4, 4), "float32")
path = os.path.abspath("run.safetensors")

def fit(epochs):
    trainer = Trainer(epochs, backend=backend)
    data = ArrayLoader(x, x[:, :1], batch_size=4)
    trainer.fit(backend.mlp([4, 300, 300, 1]), data, checkpoint=path)

fit(1)
statuses, most = [], 0
for _ in range(30):
    child = os.fork()
    if not child:
        fit(10_000)
    time.sleep(rng.uniform(0.05, 0.15))
    os.kill(child, signal.SIGTERM)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    backend.load(path)
    most = max(most, len(os.listdir()))
fit(1)
show([statuses, most, os.listdir()])
"""


def test_a_terminated_run_leaves_a_whole_checkpoint_and_no_temporary_files(
    tmp_path,
):
    statuses, most, left = run_python(TERMINATED, folder=tmp_path)[0]
    assert statuses == [-15] * 30
    assert most <= 2
    assert left == ["run.safetensors"]
